"""How many collectives it takes to give ranks their first values."""

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from meshard import CommLedger, fully_shard_units, materialize
from tests.initialization.test_materialize import everything, meta
from tests.initialization.test_same_start import build
from tests.support.parity import full_state
from tests.support.ranks import on_ranks


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
@on_ranks(4)
def test_materialize_takes_one_broadcast_for_each_axis(mesh_shape):
    model = meta(everything)
    fully_shard_units(model, init_device_mesh("cpu", mesh_shape))
    with CommLedger() as ledger:
        materialize(model)
    assert ledger.counts == {"broadcast": len(mesh_shape)}  # nothing is gathered


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
@on_ranks(4)
def test_sync_init_sends_one_tensor_at_a_time(mesh_shape):
    mesh = init_device_mesh("cpu", mesh_shape)
    model, expected = build(seed=dist.get_rank() + 1), full_state(build(seed=1))
    with CommLedger() as ledger:
        fully_shard_units(model, mesh, sync_init=True)
    # One tensor at a time, so none needs more memory than the largest.
    axes = len(mesh_shape)
    assert ledger.counts == {"broadcast": len(expected) * axes}
    largest = max(tensor.nbytes for tensor in expected.values())
    assert max(event.payload_bytes for event in ledger.events) == largest
    assert {event.unit for event in ledger.events} == {"(sync_init)"}
