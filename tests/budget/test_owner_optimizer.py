"""What a step of ``owner_optimizer`` sends."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import owner_optimizer
from tests.optim.test_owner_optimizer import MUON, backward, both, make, step_both
from tests.support.ranks import on_ranks


@on_ranks(2)
def test_gradients_may_travel_in_bfloat16():
    model = make([(6, 4)] * 3)
    ours, ordinary = both(model, "Muon", gradient_dtype=torch.bfloat16)
    backward(model, 0)
    for name in ours.owners:
        grad = model.get_parameter(name).grad
        grad.copy_(grad.bfloat16())  # which bfloat16 then holds exactly
    with meshard.CommLedger() as ledger:
        step_both(model, ours, ordinary)
    dtypes = [event.dtype for event in ledger.events]
    assert dtypes == [torch.float32, torch.bfloat16, torch.float32]


@on_ranks(4)
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
def test_bytes_are_those_of_the_formula(mesh_shape):
    """To the owner go a gradient and a value, from it a value to every other rank."""
    model = make([(8, 8)] * 8, mesh=init_device_mesh("cpu", mesh_shape))
    ours = owner_optimizer(model, MUON, lr=0.02)
    backward(model, 0)
    for _ in range(2):
        with meshard.CommLedger() as ledger:
            ours.step()
        assert ledger.counts == {"all_to_all": 2}
        num_shards, num_ranks = mesh_shape[-1], 4
        shard_bytes = 8 * 8 * 8 * 4 // num_shards  # of this rank
        to_owners = 2 * shard_bytes * (num_shards - 1) // num_ranks
        from_owners = shard_bytes * (num_ranks - 1) // num_ranks
        assert ledger.wire_bytes == to_owners + from_owners
