"""What replicated modules reduce."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import CommLedger
from tests.accumulation.test_uneven_batches import LONGEST, loss_of, net, own_batches, replicated
from tests.replication.test_replicate_windows import WHOLE
from tests.replication.test_replicated_params import replicate_vectors
from tests.support.ranks import on_ranks
from tests.support.replicated import Pair, bucket_sizes


@on_ranks(2)
@pytest.mark.parametrize(
    ("schedule", "expected"), [("F", 1), ("NNF", 1), ("RRF", 1), ("FFF", 3), ("NRF", 1)]
)
def test_one_all_reduce_per_bucket_and_full_of_exactly_the_bytes_of_gradients(schedule, expected):
    pair = Pair()
    num_buckets = len(bucket_sizes(pair.ours))
    assert num_buckets > 2
    with CommLedger() as ledger:
        pair.step(0)
    assert ledger.counts == {"all_reduce": num_buckets}
    assert ledger.bytes == {"all_reduce": WHOLE}
    with CommLedger() as ledger:
        pair.backward(0)
        assert ledger.counts == {"broadcast": 1, "all_reduce": num_buckets}  # the order
        pair.ours.zero_grad()
    buckets = {name for name, size in bucket_sizes(pair.ours).items() if size}
    for _ in range(2):
        with CommLedger(pair.ours) as ledger:
            pair.window(schedule)
        assert ledger.counts == {"all_reduce": expected * len(buckets)}
        assert ledger.bytes == {"all_reduce": expected * WHOLE}
        assert {event.unit for event in ledger.events} == buckets
        pair.ours.zero_grad()


@on_ranks(4)
def test_a_frozen_bucket_is_not_reduced_with_uneven_batches_either():
    model = net()
    model[2].requires_grad_(False)
    replicated(model)
    with meshard.CommLedger() as ledger:
        for batch, weight in meshard.uneven_batches(model, own_batches()):
            (weight * loss_of(model, batch)).backward()
            model.zero_grad()
    assert ledger.counts["all_reduce"] == 2 * LONGEST  # the first weight and bias are a bucket each


@on_ranks(2)
def test_of_replicated_parameters_the_gradient_is_all_reduced():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    layer = meshard.fully_shard(nn.Linear(5, 3), mesh, shard_placement_fn=replicate_vectors)
    with CommLedger(layer) as ledger:
        layer(torch.ones(2, 5)).sum().backward()
    told = [(e.op, e.payload_bytes) for e in ledger.events if "replicated" in e.unit]
    assert told == [("all_reduce", (3 + 1) * 4)]  # and a count
