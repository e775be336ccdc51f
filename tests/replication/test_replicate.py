"""Replicated modules against DistributedDataParallel."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import meshard
from tests.support.models import MlpBlock, seeded
from tests.support.ranks import on_ranks, on_threads


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
    """This rank's microbatches."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return [torch.randn(4, 6, generator=generator) for _ in range(count)]


def parity(cap_mb, microbatches):
    model, peer = seeded(Net(), 0), seeded(Net(), 0)
    meshard.replicate(model, bucket_cap_mb=cap_mb, broadcast_buffers=True)
    peer = DistributedDataParallel(
        peer, find_unused_parameters=True, gradient_as_bucket_view=True, bucket_cap_mb=cap_mb
    )
    assert len(model._meshard_buckets.units) > (cap_mb != 25)
    # Not Adam, which makes a step of rounding alone: a bias before a batch norm has no effect.
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9) for m in (model, peer)]
    for step in range(10):
        for number, batch in enumerate(batches(step, microbatches)):
            is_last = number == microbatches - 1
            for each in (model, peer):
                with contextlib.nullcontext() if is_last else each.no_sync():
                    each(batch).square().sum().backward()
        for (name, ours), theirs in zip(
            model.named_parameters(), peer.module.parameters(), strict=True
        ):
            assert (ours.grad is None) == (theirs.grad is None) == (name == "unused")
            if ours.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad)
                if dist.get_world_size() == 2:  # where there is one order of summation
                    assert microbatches > 1 or torch.equal(ours.grad, theirs.grad)
        for each in optimizers:
            each.step()
            each.zero_grad()
    for ours, theirs in zip(model.parameters(), peer.module.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    if dist.get_rank():
        return  # DDP sends the first rank's buffers, but not before each microbatch
    for ours, theirs in zip(model.buffers(), peer.module.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("world", "microbatches", "cap_mb"), [(2, 1, 0.0004), (3, 3, 0.0004), (2, 3, 25)]
)
def test_ten_steps_are_those_of_ddp(run_ranks, world, microbatches, cap_mb):
    run_ranks(parity, world, cap_mb, microbatches)


class Branches(nn.Module):
    """Each rank may use another branch."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(4))

    def forward(self, x, used):
        for index in used:
            x = self.branches[index](x)
        return x.sum()


@on_threads(3)
def test_ranks_may_use_different_parameters():
    rank, size = dist.get_rank(), dist.get_world_size()
    model = seeded(Branches(), 0)
    plain = copy.deepcopy(model)
    meshard.replicate(model, bucket_cap_mb=3e-5)
    assert len(model._meshard_buckets.units) == 4
    uses = [[[0, 2], [1]], [[], [3]], [[1], [1, 0]], [[3, 2, 1, 0], [0]]]
    for step, chosen in enumerate(uses):
        of_ranks = [chosen[r % 2] for r in range(size)]
        x = torch.arange(6.0).view(2, 3) + step
        for used in of_ranks:
            loss = plain(x, used) if used else None
            if loss is not None:
                (loss / size).backward()
        if of_ranks[rank]:
            model(x, of_ranks[rank]).backward()
        else:
            # A graph that no parameter is in: the ranks that have one must not wait for ever.
            model(x.clone().requires_grad_(), []).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if ours.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad)
        model.zero_grad()
        plain.zero_grad()


@on_ranks(2)
def test_gradients_are_views_of_buckets_at_stable_addresses():
    model = seeded(Net(), 0)
    meshard.replicate(model)
    assert all(param.grad is None for param in model.parameters())
    addresses = []
    for step in range(4):
        model(batches(step)[0]).sum().backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        storages = {grad.untyped_storage().data_ptr() for grad in grads}
        assert len(storages) == 1
        addresses.append([grad.data_ptr() for grad in grads])
        model.zero_grad()
    assert addresses[1] == addresses[2] == addresses[3]  # after the buckets were made anew


@on_threads(2)
def test_what_a_bucket_holds_after_zero_grad_never_shows():
    model = seeded(Net(), 0)
    meshard.replicate(model)
    for step in range(4):
        model(batches(step)[0]).sum().backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        assert not any(grad.isnan().any() for grad in grads)
        model.zero_grad()
        for grad in grads:
            grad.fill_(float("nan"))
