"""Replicated modules against DistributedDataParallel."""

import contextlib
import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import meshard
from tests.support.against_plain import check_gradients, inputs_of
from tests.support.models import Made, MlpBlock, seeded
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import on_threads
from tests.support.replicated import bucket_sizes


class Net(nn.Module):
    """Nested blocks, a batch norm, a tie, a parameter of the root, and one that is never used."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(MlpBlock(6, 7) for _ in range(3))
        self.norm = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.empty(6))
        self.head = nn.Linear(6, 6, bias=False)
        self.second_head = nn.Linear(6, 6, bias=False)
        self.second_head.weight = self.head.weight
        self.unused = nn.Parameter(torch.empty(5))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.second_head(self.head(self.norm(x) * self.scale))


def batches(step, count=1):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return [torch.randn(4, 6, generator=generator) for _ in range(count)]


def parity(cap_mb, microbatches):
    model, peer = seeded(Net()), seeded(Net())
    meshard.replicate(model, bucket_cap_mb=cap_mb, broadcast_buffers=True)
    peer = DistributedDataParallel(
        peer, find_unused_parameters=True, gradient_as_bucket_view=True, bucket_cap_mb=cap_mb
    )
    assert len(bucket_sizes(model)) > (cap_mb != 25)
    # Not Adam, which makes a step of rounding alone: a bias before a batch norm has no effect.
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9) for m in (model, peer)]
    has_one_order_of_sums = dist.get_world_size() == 2 and microbatches == 1
    for step in range(10):
        for number, batch in enumerate(batches(step, microbatches)):
            is_last = number == microbatches - 1
            for each in (model, peer):
                with contextlib.nullcontext() if is_last else each.no_sync():
                    each(batch).square().sum().backward()
        ours, theirs = full_grads(model), full_grads(peer.module)
        assert ours.pop("unused") is theirs.pop("unused") is None
        torch.testing.assert_close(ours, theirs)
        if has_one_order_of_sums:
            assert_same(ours, theirs, bitwise=True)
        for each in optimizers:
            each.step()
            each.zero_grad()
    torch.testing.assert_close([*model.parameters()], [*peer.parameters()])
    if dist.get_rank() == 0:  # DDP sends these buffers, but not before each microbatch
        torch.testing.assert_close([*model.buffers()], [*peer.buffers()])


@pytest.mark.parametrize(
    ("world", "microbatches", "cap_mb"), [(2, 1, 0.0004), (3, 3, 0.0004), (2, 3, 25)]
)
def test_ten_steps_are_those_of_ddp(run_ranks, world, microbatches, cap_mb):
    run_ranks(parity, world, cap_mb, microbatches)


@on_threads(3)
def test_ranks_may_use_different_parameters():
    """Also one that uses none: the ranks that use some must not wait for ever."""

    def forward(m, x, used):
        for index in used:
            x = m.branches[index](x)
        return x.sum()

    def step(uses, module, rank):
        module(inputs_of(rank, shape=(2, 3)).requires_grad_(), uses[rank % 2]).backward()

    plain = seeded(Made(forward, branches=[nn.Linear(3, 3, bias=False) for _ in range(4)]))
    model = meshard.replicate(copy.deepcopy(plain), bucket_cap_mb=3e-5)
    assert len(bucket_sizes(model)) == 4
    for uses in [[0, 2], [1]], [[], [3]], [[1], [1, 0]], [[3, 2, 1, 0], [0]]:
        check_gradients(model, plain, partial(step, uses), times=1)


@on_threads(2)
def test_what_a_bucket_holds_after_zero_grad_never_shows():
    model = meshard.replicate(seeded(Net()))
    for step in range(4):
        model(batches(step)[0]).sum().backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        assert not any(grad.isnan().any() for grad in grads)
        model.zero_grad()
        for grad in grads:
            grad.fill_(float("nan"))
