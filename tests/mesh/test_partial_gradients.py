"""Gradients that are partial over another axis, as those of norms in sequence parallelism."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import meshard
from meshard import GradientSync, MixedPrecisionPolicy
from tests.support.models import Made
from tests.support.ranks import on_ranks, on_threads
from tests.support.spread import spread

NONE, SCATTER, FULL = GradientSync.NONE, GradientSync.REDUCE_SCATTER, GradientSync.FULL


def sharded(shape, names, **kwargs):
    """Shard two weights by which rows are multiplied; the first lies on every rank of ``tp``.

    The gradient of ``weight`` is partial if the ranks of ``tp`` share the rows, as ``Shard(0)``.
    """
    world = init_device_mesh("cpu", shape, mesh_dim_names=names)

    def forward(model, rows, placement):
        if placement is None:
            return rows.clone()  # no parameter is used
        shared = DTensor.from_local(rows, world["tp"], [placement], run_check=False)
        return (shared * model.weight).to_local() * model.plain

    weight = nn.Parameter(distribute_tensor(torch.ones(5), world["tp"], [Replicate()]))
    model = Made(forward, weight=weight, plain=nn.Parameter(torch.ones(5)))
    return meshard.fully_shard(model, world[names[:-1]], **kwargs), world


@on_ranks(4)
@pytest.mark.parametrize("num_microbatches", [1, 16])
def test_a_window_is_sent_once_over_the_other_axis_and_in_the_wide_dtype(num_microbatches):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, world = sharded((2, 2), ("dp", "tp"), mp_policy=policy)
    own = (255.0, 2.0)[world["tp"].get_local_rank()]  # in bfloat16 they add up to 256
    rows = torch.full((1, 5), own)
    with mock.patch.object(collectives, "all_reduce", wraps=collectives.all_reduce) as sent:
        for number in range(num_microbatches):
            model.set_gradient_sync(FULL if number == num_microbatches - 1 else NONE)
            model(rows, Shard(0)).sum().backward()
    assert sent.call_count == 1
    found = model.weight.grad.full_tensor()
    expected = 256.0 if num_microbatches == 1 else 257.0 * num_microbatches
    assert torch.equal(found, torch.full((5,), expected))
    assert torch.equal(model.plain.grad.full_tensor(), torch.full((5,), own * num_microbatches))


WINDOWS = [
    [(NONE, Shard(0)), (NONE, Shard(0)), (FULL, Shard(0))],
    [(NONE, Shard(0)), (NONE, Replicate()), (NONE, Shard(0)), (FULL, Shard(0))],
    [(NONE, Replicate()), (NONE, Shard(0)), (FULL, Replicate())],
    [(NONE, Shard(0)), (FULL, Replicate())],
    [(NONE, Shard(0)), (FULL, None)],  # on the last one nobody uses the parameters
    [(NONE, None), (FULL, Shard(0))],
    [(NONE, Shard(0)), (SCATTER, Shard(0)), (NONE, Shard(0)), (FULL, Shard(0))],
    [(NONE, Shard(0)), (SCATTER, Replicate()), (FULL, Shard(0))],
]


@on_threads(8)
@spread(unused_by=[None, 0], window=WINDOWS)
def test_microbatches_with_other_placements_add_up_to_the_gradient_of_all(window, unused_by):
    """Replica 0 may use the parameters in the first microbatch only."""
    model, world = sharded((2, 2, 2), ("replicate", "shard", "tp"))
    replica, shard, part = (world[name].get_local_rank() for name in world.mesh_dim_names)
    model.set_gradient_sync(NONE)
    model(torch.full((1, 5), 7.0), Shard(0)).sum().backward()
    model.zero_grad()  # drops what is not added up yet
    for number, (sync, placement) in enumerate(window):
        model.set_gradient_sync(sync)
        rows = rows_of(number, 2 * replica + shard)
        if placement == Shard(0):
            rows = rows.chunk(2)[part]
        is_used = number == 0 or replica != unused_by
        model(rows.requires_grad_(), placement if is_used else None).sum().backward()
    expected = sum(
        rows_of(number, rank).sum(0)
        for number, (_, placement) in enumerate(window)
        for rank in range(4)
        if placement is not None and (number == 0 or rank // 2 != unused_by)
    )
    assert torch.equal(model.weight.grad.full_tensor(), expected / 4)


def rows_of(number, data_rank):
    return torch.full((2, 5), 2.0**number) + torch.arange(2.0)[:, None] + data_rank


@on_threads(2)
def test_reduce_hooks_see_sums():
    """What a hook sees as a backward's gradients is added up over the other axis, as it was."""
    model, world = sharded((1, 2), ("dp", "tp"))
    sums = []
    hook = SimpleNamespace(arrived=lambda unsharded: sums.append(unsharded.sum().item()))
    meshard.register_reduce_hook(model, hook)
    own = 1.0 + world["tp"].get_local_rank()
    for sync in (NONE, FULL):
        model.set_gradient_sync(sync)
        model(torch.full((1, 5), own), Shard(0)).sum().backward()
    assert sums == [15 + 5 * own] * 2
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((5,), 6.0))
