"""Calls that torch's own fully_shard refuses or ignores."""

import copy
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

import meshard
from tests.peers.both import batch, compare_gradients, mesh_of, shard, situation
from tests.support.models import Adapted, MlpStack, seeded
from tests.support.parity import assert_same, full_grads


@situation(True)
def replicas_that_start_apart(lib):
    """Whether they are equal after a step."""
    mesh = mesh_of(2, 1)
    model = seeded(MlpStack(), dist.get_rank())
    if lib is meshard:
        meshard.fully_shard_units(model, mesh, sync_init=True)
    else:
        shard(lib, *model.blocks, model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch()[dist.get_rank()]).sum().backward()
    optimizer.step()
    mine = model.scale.full_tensor().detach()
    total = mine.clone()
    dist.all_reduce(total)
    return torch.equal(mine + mine, total)


@situation("ValueError")
def a_child_after_its_parent(lib):
    model = MlpStack()
    shard(lib, model, model.blocks[0])


@situation("right")
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


@situation("right")
def an_adapter_beside_a_narrow_base_that_trains(lib):
    return an_adapter_beside_a_narrow_base(lib, is_frozen=False)


@situation(2.0)
def a_factor_on_a_root_without_parameters(lib):
    """Told not to divide: the sum over two ranks is 2."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    shard(lib, *model, model)
    for unit in (*model, model):
        unit.set_force_sum_reduction_for_comms(True)
    model.set_gradient_divide_factor(1.0)
    model(torch.ones(1, 2)).sum().backward()
    return model[1].bias.grad.full_tensor()[0].item()


class CountAlive(ReduceScatter):
    """Knows how many of its inputs are in memory at once."""

    def __init__(self):
        self.inputs, self.most_alive = [], 0

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.inputs.append(weakref.ref(input_tensor.untyped_storage()))
        self.most_alive = max(self.most_alive, sum(ref() is not None for ref in self.inputs))
        rows = input_tensor.view(group.size(), -1).clone()
        dist.all_reduce(rows, op, group)
        output_tensor.copy_(rows[group.rank()])


@situation([True, True])
def a_late_limit_of_input_buffers(lib):
    """Whether no more inputs of reductions are there at once: 2 set first, and 1 set later."""
    scatter, model, found = CountAlive(), seeded(MlpStack(depth=6)), []
    shard(lib, *model.blocks, model)
    for block in model.blocks:
        block.set_custom_reduce_scatter(scatter)
        block.set_force_sum_reduction_for_comms(True)
    for limit in (2, 1):
        model.set_reduce_scatter_max_input_buffers(limit)
        scatter.most_alive = 0
        model(batch()[0]).sum().backward()
        found.append(scatter.most_alive <= limit)
    return found


class Generates(nn.Linear):
    """Its method calls the module, and then needs a weight."""

    def generate(self, x):
        return self(x) @ self.weight


@situation("right")
def a_method_that_calls_the_module(lib):
    plain = seeded(nn.Sequential(Generates(4, 4)))
    model = copy.deepcopy(plain)
    shard(lib, model[0], model)
    lib.register_fsdp_forward_method(model[0], "generate")
    x = torch.ones(2, 4)

    def step(each):
        each(x)
        each[0].generate(x).sum().backward()

    return compare_gradients(model, plain, step)


@situation("right")
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
