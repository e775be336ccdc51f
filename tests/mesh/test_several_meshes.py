"""Parameters of one unit on several meshes: each is reduced over its own."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common as torch_common
from torch.distributed.tensor import Shard

import meshard
from meshard import GradientSync
from tests.mesh.expert_meshes import batch_of, build, shard
from tests.support.against_plain import SGD
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.ranks import on_fake_ranks, on_ranks, on_threads
from tests.support.spread import spread

NONE, SCATTER, FULL = GradientSync.NONE, GradientSync.REDUCE_SCATTER, GradientSync.FULL
SCHEDULES = [[FULL], [NONE, SCATTER, FULL]]


def check_experts(schedule, kind="flat", divide_factor=None, **kwargs):
    """Train beside two plain models: each half of the ranks has experts of its own."""
    model, halves = shard(build(), kind, **kwargs), [build(), build()]
    if divide_factor is not None:
        model.set_gradient_divide_factor(divide_factor)
    optimizers = [SGD(each.parameters()) for each in (model, *halves)]
    num_ranks = dist.get_world_size()
    mine = halves[2 * dist.get_rank() // num_ranks]
    for step in range(3):
        for number, mode in enumerate(schedule, 10 * step):
            model.set_gradient_sync(mode)
            model(batch_of(dist.get_rank(), number)).square().mean().backward()
            for rank in range(num_ranks):
                half = halves[2 * rank // num_ranks]
                half(batch_of(rank, number)).square().mean().backward()
        for (name, one), other in zip(
            halves[0].named_parameters(), halves[1].parameters(), strict=True
        ):
            if "expert" in name:
                for param in (one, other):
                    param.grad /= divide_factor or num_ranks / 2
            else:
                one.grad = (one.grad + other.grad) / (divide_factor or num_ranks)
                other.grad = one.grad.clone()
        norm = meshard.clip_grad_norm_(model, 1e6)
        assert_same(norm, nn.utils.get_total_norm([p.grad for p in mine.parameters()]))
        assert_same(full_grads(model), full_grads(mine), what=f"step {step}: gradient")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same(full_state(model), full_state(mine), what=f"step {step}: parameter")


@on_threads(4)
@spread(
    schedule=SCHEDULES,
    kwargs=[{}, *({"reshard_after_forward": each} for each in (True, False)), {"divide_factor": 8}],
)
def test_each_parameter_is_reduced_over_its_own_mesh(schedule, kwargs):
    check_experts(schedule, **kwargs)


@pytest.mark.slow
@on_threads(8)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_replicas_of_several_meshes(schedule):
    check_experts(schedule, "hybrid", reshard_after_forward=2)


@on_ranks(4, timeout=200)
def test_real_processes_agree():
    check_experts(SCHEDULES[1])


@on_threads(4)
def test_meshes_that_share_an_axis():
    """Two meshes of two axes that share the inner one reduce over different ranks."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
    for axis in "ab":
        plane = mesh[axis, "c"]
        layer = meshard.replicate(nn.Linear(1, 1, bias=False), plane)
        layer(torch.full((1, 1), float(dist.get_rank()))).sum().backward()
        assert layer.weight.grad.item() == plane.mesh.float().mean()


@pytest.mark.skipif(
    not hasattr(torch_common, "ShardPlacementResult"), reason="torch 2.11 has no such class"
)
@on_fake_ranks(4)
def test_placements_in_the_form_of_torch_are_taken():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "edp"))["edp"]
    given = torch_common.ShardPlacementResult(Shard(1), torch_common.FSDPMeshInfo(mesh, 0))
    layer = nn.Linear(4, 4, bias=False)
    meshard.fully_shard(layer, shard_placement_fn=lambda _: given)
    assert (layer.weight.placements, layer.weight.device_mesh) == ((Shard(1),), mesh)
