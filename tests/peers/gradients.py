"""Gradients, where torch's own fully_shard is wrong about them."""

import copy
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

import meshard
from tests.peers import both
from tests.peers.both import batch, compare_gradients, mesh_of, shard
from tests.support.models import Adapted, Made, MixedDtypeBlock, MlpStack, Ones, seeded
from tests.support.parity import assert_same, full_grads

situation = partial(both.situation, num_ranks=4)


def two(lib, mesh_shape=(2, 2), numel_b=64, **policy):
    """Return a unit: ``unit(a, b)`` gives each of two parameters a gradient of that value."""
    model, mp_policy = Ones(64), lib.MixedPrecisionPolicy(**policy)
    model.b = nn.Parameter(torch.zeros(numel_b))
    return lib.fully_shard(model, mesh=mesh_of(*mesh_shape), mp_policy=mp_policy)


def run(unit, *microbatches):
    """Run each in the mode of its letter: N and R reduce nothing, and over no replicas."""
    for mode, *args in microbatches:
        unit.set_requires_gradient_sync(mode != "N")
        if mode != "N":
            unit.set_requires_all_reduce(mode == "F")
        unit(*args).backward()


def values_after(unit, *microbatches):
    run(unit, *microbatches)
    grads = [param.grad for param in unit.parameters()]
    return tuple(None if g is None else g.full_tensor()[0].item() for g in grads)


@situation((2.5, 25.0))
def other_parameter_of_same_size(lib):
    return values_after(two(lib), ("R", 2.5), ("F", None, 25.0))


@situation((5.0, 25.0))
def set_grows(lib):
    return values_after(two(lib, numel_b=32), ("R", 2.5), ("F", 2.5, 25.0))


@situation((5.0, 25.0))
def set_shrinks(lib):
    return values_after(two(lib, numel_b=32), ("R", 2.5, 25.0), ("F", 2.5))


@situation(((2.5, 1.0), (1.0, 1.0)))
def nothing_at_the_end(lib):
    unit = two(lib)
    first = values_after(unit, ("R", 2.5, 1.0), ("F", None))
    unit.zero_grad()
    return first, values_after(unit, ("F", 1.0, 1.0))


@situation(2.5)
def zero_grad_in_window(lib):
    unit = two(lib)
    run(unit, ("R", 2.5))
    unit.zero_grad()
    return values_after(unit, ("F", 2.5))[0]


@situation(512.0)
def many_ones(lib):
    unit = two(lib, reduce_dtype=torch.bfloat16)
    return values_after(unit, *[("R", 1.0, 1.0)] * 511, ("F", 1.0, 1.0))[0]


@situation(3.33)
def divide_by_three(lib):
    unit = two(lib)
    unit.set_gradient_divide_factor(3.0)
    return round(values_after(unit, ("F", 2.5, 2.5))[0], 2)


@situation("RuntimeError")
def step_in_an_open_window(lib):
    unit = two(lib)
    optimizer = torch.optim.SGD(unit.parameters(), lr=1.0)
    run(unit, ("R", 1.0, 1.0))
    optimizer.step()
    return unit.a.full_tensor()[0].item()


@situation("right")
def mixed_dtypes_in_a_unit(lib):
    plain, x = seeded(MixedDtypeBlock(8)), torch.ones(2, 8)
    unit = shard(lib, copy.deepcopy(plain))
    return compare_gradients(unit, plain, lambda each: each(x).sum().backward())


@situation("right")
def uneven_on_dim_one(lib):
    def last_dim(param):
        return Shard(param.dim() - 1)

    plain, x = seeded(nn.Linear(7, 8)), torch.ones(2, 7)
    unit = shard(lib, copy.deepcopy(plain), shard_placement_fn=last_dim)
    return compare_gradients(unit, plain, lambda each: each(x).sum().backward())


@situation((2.0, 4.0))
def different_parameters_of_the_same_size(lib, numel_b=64):
    unit = two(lib, numel_b=numel_b)
    return values_after(unit, ("F", 4.0, None) if dist.get_rank() % 2 else ("F", None, 8.0))


@situation((2.0, 4.0))
def different_parameters_of_other_sizes(lib):
    return different_parameters_of_the_same_size(lib, numel_b=32)


@situation((1.0, 0.5))
def a_head_in_the_loss_of_some_ranks(lib):
    """A trunk, and an auxiliary head beside the main one."""

    def forward(net, x):
        x = net.trunk(x)
        return net.main(x), net.auxiliary(x)

    layers = {name: nn.Linear(4, 4) for name in ("trunk", "main", "auxiliary")}
    net = shard(lib, *layers.values(), Made(forward, **layers))
    main, auxiliary = net(torch.ones(1, 4))
    loss = main.sum() + (auxiliary.sum() if dist.get_rank() % 2 else 0)
    loss.backward()
    return tuple(head.bias.grad.full_tensor()[0].item() for head in (net.main, net.auxiliary))


@both.situation("right")
def an_adapter_beside_a_narrow_base(lib, is_frozen=True):
    """float32 beside a bfloat16 base, in one unit, computed in bfloat16."""
    plain, policy = seeded(Adapted(6)), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    plain.base.bfloat16().requires_grad_(not is_frozen)
    unit = shard(lib, copy.deepcopy(plain), mp_policy=policy)
    for each in (unit, plain.bfloat16()):
        each(torch.ones(2, 6, dtype=torch.bfloat16)).sum().backward()
    found, expected = (
        {name: None if grad is None else grad.float() for name, grad in full_grads(each).items()}
        for each in (unit, plain)
    )
    assert_same(found, expected, torch.bfloat16)
    return "right"


@both.situation("right")
def an_adapter_beside_a_narrow_base_that_trains(lib):
    return an_adapter_beside_a_narrow_base(lib, is_frozen=False)


@both.situation(2.0)
def a_factor_on_a_root_without_parameters(lib):
    """Told not to divide: the sum over two ranks is 2."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    shard(lib, *model, model)
    for unit in (*model, model):
        unit.set_force_sum_reduction_for_comms(True)
    model.set_gradient_divide_factor(1.0)
    model(torch.ones(1, 2)).sum().backward()
    return model[1].bias.grad.full_tensor()[0].item()


@both.situation("right")
def norms_over_meshes(lib):
    """Over two meshes, and a parameter that is on none."""
    plain = seeded(MlpStack())
    model = copy.deepcopy(plain)
    shard(lib, model.blocks[0], mesh=mesh_of(1, 2))
    shard(lib, model, ignored_params={model.shift})
    for each in (model, plain):
        each(batch()[0]).sum().backward()
    clip = meshard.clip_grad_norm_ if lib is meshard else torch.nn.utils.clip_grad_norm_
    norm = clip(model.parameters(), 0.1)
    assert_same(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
    assert_same(full_grads(model), full_grads(plain))
    return "right"
