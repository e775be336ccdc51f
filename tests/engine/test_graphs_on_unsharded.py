"""Does a graph that is built on whole parameters outside of forward keep what it reads?"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import meshard
from meshard import CommLedger, GradientSync
from tests.support.by_hand import (
    BATCHES,
    both,
    loss_of,
    penalty_of,
    reshard,
    units_of,
    unshard,
    with_methods,
)
from tests.support.models import MlpStack, seeded
from tests.support.parity import assert_same, full_grads, whole


def resharded(model, x):
    unshard(model)
    penalty = penalty_of(model)
    reshard(model)
    penalty.backward()


def beside_a_loss(model, x):
    unshard(model)
    penalty = penalty_of(model)
    reshard(model)
    (loss_of(model, x) + penalty).backward()


def before_a_forward(model, x):
    unshard(model)
    penalty = penalty_of(model)
    (loss_of(model, x) + penalty).backward()


def between_two_forwards(model, x):
    first = loss_of(model, x)
    unshard(model)
    penalty = penalty_of(model)
    (first + loss_of(model, x) + penalty).backward()


def after_a_forward(model, x):
    loss = loss_of(model, x)
    unshard(model)
    penalty = penalty_of(model)
    reshard(model)
    (loss + penalty).backward()


def in_backwards_of_their_own(model, x):
    loss = loss_of(model, x)
    unshard(model)
    penalty = penalty_of(model)
    loss.backward()
    reshard(model)
    penalty.backward()


def in_two_backwards(model, x):
    unshard(model)
    penalty = penalty_of(model)
    penalty.backward(retain_graph=True)
    reshard(model)
    loss_of(model, x).backward()
    penalty.backward()


def unsharded_again(model, x):
    unshard(model)
    penalty = penalty_of(model)
    unshard(model)
    penalty = penalty + penalty_of(model)
    reshard(model)
    (penalty + loss_of(model, x)).backward()


def recomputed(model, x):
    loss = checkpoint(loss_of, model, x, use_reentrant=False)
    unshard(model)
    penalty = penalty_of(model)
    (loss + penalty).backward()


def to_chosen_parameters(model, x):
    unshard(model)
    penalty = penalty_of(model)
    reshard(model)
    (loss_of(model, x) + penalty).backward(inputs=[model.scale, model.blocks[1].up.weight])


def second_order(model, x):
    unshard(model)
    x = x.clone().requires_grad_()
    penalty = penalty_of(model) * x.sum()
    reshard(model)
    (slope,) = torch.autograd.grad(penalty, x, create_graph=True)
    slope.square().sum().backward()


WAYS = {
    way.__name__: way
    for way in (
        resharded,
        beside_a_loss,
        before_a_forward,
        between_two_forwards,
        after_a_forward,
        in_backwards_of_their_own,
        in_two_backwards,
        unsharded_again,
        recomputed,
        to_chosen_parameters,
        second_order,
    )
}


def train(way, mesh_shape=None, **kwargs):
    model, plain = both(mesh_shape, **kwargs)
    with_methods(plain)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    count = dist.get_world_size()
    for _ in range(3):
        WAYS[way](model, BATCHES[dist.get_rank()])
        for x in BATCHES[:count]:
            WAYS[way](plain, x)
        for param in plain.parameters():
            if param.grad is not None:
                param.grad /= count
        assert_same(full_grads(model), full_grads(plain))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("way", WAYS)
def test_a_penalty_on_whole_parameters(run_ranks, way):
    run_ranks(train, 2, way)


CHOICES = {
    "resharded always": {"reshard_after_forward": True},
    "kept whole": {"reshard_after_forward": False},
    "offloaded": {"offload_policy": meshard.CPUOffloadPolicy(pin_memory=False)},
}


@pytest.mark.parametrize("choice", CHOICES)
def test_where_units_live_otherwise(run_ranks, choice):
    for way in ("before_a_forward", "after_a_forward", "in_two_backwards"):
        run_ranks(train, 2, way, **CHOICES[choice])


def test_over_replicas_and_neighbours(run_ranks):
    run_ranks(train, 4, "before_a_forward", (2, 2))
    run_ranks(train, 4, "beside_a_loss", reshard_after_forward=2)


def train_narrow():
    """In the dtype that the unit computes in, within a window."""
    policy = meshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model, plain = both(mp_policy=policy)
    for number in range(2):
        model.set_gradient_sync(GradientSync.FULL if number else GradientSync.NONE)
        unshard(model)
        assert model.scale.dtype is torch.bfloat16
        penalty = sum(param.square().sum() for param in model.parameters())
        reshard(model)
        penalty.backward()
        sum(param.square().sum() for param in plain.parameters()).backward()
    assert_same(full_grads(model), full_grads(plain), torch.bfloat16)


def test_in_a_narrow_dtype_and_in_a_window(run_ranks):
    run_ranks(train_narrow, 2)


def train_cut():
    """Beside tensor parallelism, where whole parameters are DTensors."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain = seeded(MlpStack())
    model = copy.deepcopy(plain)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for unit in units_of(model):
        meshard.fully_shard(unit, mesh["dp"])
    for way in (False, True):
        unshard(model)
        squares = [block.up.weight.square().sum().full_tensor() for block in model.blocks]
        if way:
            reshard(model)
        (loss_of(model, BATCHES[mesh.get_local_rank("dp")]) + sum(squares)).backward()
        squares = [block.up.weight.square().sum() for block in plain.blocks]
        (loss_of(plain, BATCHES[:2].flatten(0, 1)) + sum(squares)).backward()
    assert_same({name: whole(grad) for name, grad in full_grads(model).items()}, full_grads(plain))


def test_beside_tensor_parallelism(run_ranks):
    run_ranks(train_cut, 4)


class Reader(nn.Module):
    """Reads a weight of a unit inside, which it has gathered by hand."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 4, bias=False)

    def forward(self, x):
        self.head.unshard()
        y = nn.functional.linear(self.body(x), self.head.weight)
        self.head.reshard()
        return y


def read_by_a_parent():
    plain = seeded(Reader())
    model = copy.deepcopy(plain)
    for unit in (model.head, model):
        meshard.fully_shard(unit)
    plain.head.unshard = plain.head.reshard = lambda: None
    for _ in range(2):
        model(BATCHES[dist.get_rank()]).square().mean().backward()
        plain(BATCHES[:2].flatten(0, 1)).square().mean().backward()
    assert_same(full_grads(model), full_grads(plain))


def test_a_parent_that_reads_what_it_has_gathered_by_hand(run_ranks):
    run_ranks(read_by_a_parent, 2)


def build_on_one_rank():
    """A graph that no backward comes to: ranks do the same with and without it."""
    model, plain = both()
    with CommLedger(model) as ledger:
        for _ in range(2):
            unshard(model)
            penalty = penalty_of(model) if dist.get_rank() == 0 else None
            loss_of(model, BATCHES[dist.get_rank()]).backward()
            loss_of(plain, BATCHES[:2].flatten(0, 1)).backward()
    assert_same(full_grads(model), full_grads(plain))
    assert (penalty is None) is (dist.get_rank() > 0)
    return ledger.counts


def test_a_graph_on_one_rank_changes_nothing_that_is_sent(run_ranks):
    first, second = run_ranks(build_on_one_rank, 2)
    assert first == second
