"""Tensor subclasses with a custom all-gather: training."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

import meshard
from tests.peers.both import mesh_of
from tests.support.extensions import (
    Bfloat16Whole,
    Int8ForThePeer,
    Int8OnWire,
    RoundingModel,
    with_matrices_as,
)
from tests.support.integer_model import IntegerModel, integer_batch, integer_loss
from tests.support.parity import assert_same, full_grads, full_state, train
from tests.support.ranks import on_ranks, on_threads
from tests.support.spread import slow
from tests.support.strategies import MODES

STEPS = 5
SGD = partial(torch.optim.SGD, lr=2.0**-9)  # so that weights have more bits than travel
DIMS = IntegerModel.in_dim, 5, 13, 4  # whose rows are uneven on 2, 3 or 4 ranks
EVEN_DIMS = IntegerModel.in_dim, 4, 8


def sharded(kind, shape, fully_shard=meshard.fully_shard, dims=DIMS, **kwargs):
    model = with_matrices_as(IntegerModel(dims=dims), kind)
    mesh = mesh_of(*shape)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, **kwargs)
    return model


@pytest.mark.parametrize(
    ("kind", "shape", "schedule", "reshard"),
    [
        slow(Int8OnWire, (2,), "F", None),
        slow(Int8OnWire, (3,), "NNF", False),
        (Int8OnWire, (2, 2), "RF", True),
        (Int8OnWire, (4,), "NF", 2),
        slow(Bfloat16Whole, (2,), "RF", None),
        (Bfloat16Whole, (3,), "F", True),
        (Bfloat16Whole, (2, 2), "NNF", False),
        slow(Bfloat16Whole, (4,), "NF", 2),
    ],
)
def test_training_is_that_of_one_process(kind, shape, schedule, reshard):
    num_ranks = math.prod(shape)

    @on_threads(num_ranks)
    def on_each_rank():
        rank = dist.get_rank()
        model, plain = sharded(kind, shape, reshard_after_forward=reshard), IntegerModel()
        model.set_gradient_divide_factor(1.0)
        optimizers = [SGD(model.parameters()), SGD(plain.parameters())]
        for step in range(STEPS):
            losses = torch.zeros(2)
            for number, mode in enumerate(schedule):
                batches = [integer_batch(10 * step + number, each) for each in range(num_ranks)]
                model.set_gradient_sync(MODES[mode])
                loss = integer_loss(model(batches[rank]))
                expected = integer_loss(RoundingModel(plain, kind)(torch.cat(batches)))
                for each in (loss, expected):
                    each.backward()
                losses += torch.stack([loss.detach(), expected.detach() * (rank == 0)])
            dist.all_reduce(losses)
            assert losses[0] == losses[1], f"step {step}: loss"
            assert_same(full_grads(model), full_grads(plain), bitwise=True, what=f"step {step}")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_same(full_state(model), full_state(plain), bitwise=True, what=f"step {step}")
        assert all(isinstance(param, DTensor) for param in model.parameters())
        assert type(model.blocks[0].linear.weight.to_local()) is kind
        last = plain.blocks[0].linear.weight
        assert not torch.equal(kind.rounded(last), last), "rounding does nothing to these weights"

    on_each_rank()


@pytest.mark.parametrize("kind", [Int8OnWire, Bfloat16Whole])
@on_threads(2)
def test_shards_in_host_memory_train_alike(kind):
    batches = [integer_batch(step, dist.get_rank()) for step in range(STEPS)]
    on_host = meshard.CPUOffloadPolicy(pin_memory=False)
    one, other = (
        train(sharded(kind, (2,), offload_policy=policy), batches, SGD, loss_fn=integer_loss)
        for policy in (None, on_host)
    )
    assert_same(one, other, bitwise=True)


# Of uneven shards torch asks that all which is gathered has the padded shape of the shard, so a
# scale per row is not possible there.
@pytest.mark.slow
@on_ranks(4)
@pytest.mark.parametrize(
    ("dims", "kind", "shape", "reshard_after_forward"),
    [
        (EVEN_DIMS, Int8ForThePeer, (4,), False),
        (EVEN_DIMS, Int8ForThePeer, (2, 2), True),
        (DIMS, Bfloat16Whole, (4,), True),
        (DIMS, Bfloat16Whole, (2, 2), False),
    ],
)
def test_the_peer_gives_the_same(dims, kind, shape, reshard_after_forward):
    batches = [integer_batch(step, dist.get_rank()) for step in range(STEPS)]
    theirs, ours = (
        train(
            sharded(kind, shape, fully_shard, dims, reshard_after_forward=reshard_after_forward),
            batches,
            SGD,
            loss_fn=integer_loss,
        )
        for fully_shard in (torch_fully_shard, meshard.fully_shard)
    )
    assert_same(ours, theirs, bitwise=True)
