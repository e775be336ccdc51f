"""Gradients, where torch's own fully_shard is wrong about them.

Each runs with both libraries: see ``tests.peers.both``.
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

from tests.peers.both import CountOps, compare_gradients, mesh_of
from tests.support.models import MixedDtypeBlock, seeded


class Two(nn.Module):
    """``forward(a, b)`` gives each of two parameters a gradient of that value, or none."""

    def __init__(self, numel_b=64, dtype=torch.float32):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(64, dtype=dtype))
        self.b = nn.Parameter(torch.zeros(numel_b, dtype=dtype))

    def forward(self, a, b=None):
        out = torch.zeros((), dtype=self.a.dtype, requires_grad=True) * 1.0
        if a is not None:
            out = out + (a * self.a).sum()
        return out if b is None else out + (b * self.b).sum()


class Both:
    """One model under both libraries' rules: the calls that both have."""

    def __init__(self, lib, mesh_shape=(2, 2), model=None, policy=None):
        mp_policy = lib.MixedPrecisionPolicy(**(policy or {}))
        self.net = lib.fully_shard(model or Two(), mesh=mesh_of(*mesh_shape), mp_policy=mp_policy)

    def reduce(self, *args, is_last=True, sync=True):
        if sync:
            self.net.set_requires_gradient_sync(True)
            self.net.set_requires_all_reduce(is_last)
        else:
            self.net.set_requires_gradient_sync(False)
        self.net(*args).backward()

    def values(self):
        grads = [param.grad for param in self.net.parameters()]
        return tuple(None if g is None else g.full_tensor()[0].item() for g in grads)


def other_parameter_of_same_size(lib):
    both = Both(lib)
    both.reduce(2.5, None, is_last=False)
    both.reduce(None, 25.0)
    return both.values()


def set_grows(lib):
    both = Both(lib, model=Two(numel_b=32))
    both.reduce(2.5, None, is_last=False)
    both.reduce(2.5, 25.0)
    return both.values()


def set_shrinks(lib):
    both = Both(lib, model=Two(numel_b=32))
    both.reduce(2.5, 25.0, is_last=False)
    both.reduce(2.5, None)
    return both.values()


def nothing_at_the_end(lib):
    both = Both(lib)
    both.reduce(2.5, 1.0, is_last=False)
    both.reduce(None, None)
    first = both.values()
    both.net.zero_grad()
    both.reduce(1.0, 1.0)
    return first, both.values()


def zero_grad_in_window(lib):
    both = Both(lib)
    both.reduce(2.5, is_last=False)
    both.net.zero_grad()
    both.reduce(2.5)
    return both.values()[0]


def many_ones(lib):
    both = Both(lib, policy={"reduce_dtype": torch.bfloat16})
    for k in range(512):
        both.reduce(1.0, 1.0, is_last=k == 511)
    return both.values()[0]


def one_shard_float16(lib):
    both = Both(lib, (4, 1), policy={"reduce_dtype": torch.float16})
    both.net.set_gradient_divide_factor(4.0)
    both.reduce(2.5, 2.5)
    return both.values()[0]


def divide_by_three(lib):
    both = Both(lib)
    both.net.set_gradient_divide_factor(3.0)
    both.reduce(2.5, 2.5)
    return round(both.values()[0], 2)


def first_used_at_the_end(lib):
    policy = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    both = Both(lib, policy=policy)
    both.reduce(1.0, None, sync=False)
    both.reduce(1.0, 3.0)
    return both.values()


def step_in_an_open_window(lib):
    both = Both(lib)
    optimizer = torch.optim.SGD(both.net.parameters(), lr=1.0)
    both.reduce(1.0, 1.0, is_last=False)
    optimizer.step()
    return both.net.a.full_tensor()[0].item()


def factor_of_zero(lib):
    both = Both(lib)
    both.net.set_gradient_divide_factor(0)
    both.reduce(1.0, 1.0)
    return "no error until here"


def factor_of_nan(lib):
    both = Both(lib, (4, 1))
    both.net.set_force_sum_reduction_for_comms(True)
    both.net.set_gradient_divide_factor(float("nan"))
    both.reduce(1.0, 1.0)
    return str(both.values()[0])


def different_parameters_of_the_same_size(lib, numel_b=64, sends_zeros=False):
    both = Both(lib, model=Two(numel_b=numel_b))
    if sends_zeros:
        both.net.set_reduce_scatter_unused_params(True)
    both.reduce(*((4.0, None) if dist.get_rank() % 2 else (None, 8.0)))
    return both.values()


def different_parameters_of_other_sizes(lib):
    return different_parameters_of_the_same_size(lib, numel_b=32)


def different_parameters_with_zeros_for_others(lib):
    return different_parameters_of_the_same_size(lib, numel_b=32, sends_zeros=True)


class TwoHeads(nn.Module):
    """A trunk, and an auxiliary head beside the main one."""

    def __init__(self):
        super().__init__()
        self.trunk, self.main, self.auxiliary = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        x = self.trunk(x)
        return self.main(x), self.auxiliary(x)


def a_head_in_the_loss_of_some_ranks(lib):
    net, mesh = TwoHeads(), mesh_of(4)
    for unit in (net.trunk, net.main, net.auxiliary, net):
        lib.fully_shard(unit, mesh=mesh)
    main, auxiliary = net(torch.ones(1, 4))
    loss = main.sum() + (auxiliary.sum() if dist.get_rank() % 2 else 0)
    loss.backward()
    return tuple(head.bias.grad.full_tensor()[0].item() for head in (net.main, net.auxiliary))


def gathers_after_a_forward_alone(lib):
    """How many gathers a step has more, because a forward without backward came before it."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = mesh_of(2, 2)
    for unit in (net[0], net[1], net):
        lib.fully_shard(unit, mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    counts = []
    for alone in (False, False, True):
        if alone:
            net(torch.ones(1, 4))
            optimizer.step()
        with CountOps("allgather") as mode:
            net(torch.ones(1, 4)).sum().backward()
        counts.append(mode.count)
        optimizer.step()
    return counts[2] - counts[1]


def mixed_dtypes_in_a_unit(lib):
    plain, x = seeded(MixedDtypeBlock(8)), torch.ones(2, 8)
    unit = lib.fully_shard(copy.deepcopy(plain), mesh=mesh_of(4))
    return compare_gradients(unit, plain, lambda each: each(x).sum().backward())


def uneven_on_dim_one(lib):
    def last_dim(param):
        return Shard(param.dim() - 1)

    plain, x = seeded(nn.Linear(7, 8)), torch.ones(2, 7)
    unit = lib.fully_shard(copy.deepcopy(plain), mesh=mesh_of(4), shard_placement_fn=last_dim)
    return compare_gradients(unit, plain, lambda each: each(x).sum().backward())


NUM_RANKS = 4
# What is done with a library, and what every rank has then with ours: of an exception, its class.
FLUSHED = ((2.5, 1.0), (1.0, 1.0))
SITUATIONS = [
    (other_parameter_of_same_size, (2.5, 25.0)),
    (set_grows, (5.0, 25.0)),
    (set_shrinks, (5.0, 25.0)),
    (nothing_at_the_end, FLUSHED),
    (zero_grad_in_window, 2.5),
    (many_ones, 512.0),
    (one_shard_float16, 2.5),
    (divide_by_three, 3.33),
    (first_used_at_the_end, (2.0, 3.0)),
    (step_in_an_open_window, "RuntimeError"),
    (factor_of_zero, "ValueError"),
    (factor_of_nan, "ValueError"),
    (different_parameters_with_zeros_for_others, (2.0, 4.0)),
    (gathers_after_a_forward_alone, 0),
    (mixed_dtypes_in_a_unit, "right"),
    (uneven_on_dim_one, "right"),
    (different_parameters_of_the_same_size, (2.0, 4.0)),
    (different_parameters_of_other_sizes, (2.0, 4.0)),
    (a_head_in_the_loss_of_some_ranks, (1.0, 0.5)),
]
