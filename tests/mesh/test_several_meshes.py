"""Parameters of one unit on several meshes: each is reduced over its own."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common as torch_common
from torch.distributed.tensor import Shard

import meshard
from meshard import GradientSync, ShardPlacementResult
from tests.mesh.expert_meshes import (
    SGD,
    batch_of,
    build,
    is_expert,
    loss_of,
    meshes,
    shard,
)
from tests.support.parity import (
    assert_same,
    full_grads,
    full_state,
)
from tests.support.ranks import on_threads
from tests.support.spread import spread
from tests.support.threads import run_threads

STEPS = 3
SCHEDULES = [
    [GradientSync.FULL],
    [GradientSync.NONE, GradientSync.REDUCE_SCATTER, GradientSync.FULL],
]


def train_experts(kind, schedule, divide_factor=None, **kwargs):
    model = shard(build(), kind, **kwargs)
    if divide_factor is not None:
        model.set_gradient_divide_factor(divide_factor)
    optimizer = SGD(model.parameters())
    records = []
    for step in range(STEPS):
        for number, mode in enumerate(schedule):
            model.set_gradient_sync(mode)
            loss_of(model(batch_of(10 * step + number, dist.get_rank(), width=5))).backward()
        norm = meshard.clip_grad_norm_(model, 1e6)
        grads = full_grads(model)
        optimizer.step()
        optimizer.zero_grad()
        records.append((grads, full_state(model), norm))
    return records


def simulate(num_ranks, schedule, divide_factor=None):
    """Return what every rank should see: each half of the ranks trains experts of its own."""
    halves = [build() for _ in range(2)]
    optimizers = [SGD(model.parameters()) for model in halves]
    records = []
    for step in range(STEPS):
        sums = [None, None]
        for rank in range(num_ranks):
            half = rank // (num_ranks // 2)
            model = copy.deepcopy(halves[half])
            for number in range(len(schedule)):
                loss_of(model(batch_of(10 * step + number, rank, width=5))).backward()
            grads = full_grads(model)
            sums[half] = (
                grads if sums[half] is None else {n: g + grads[n] for n, g in sums[half].items()}
            )
        own = divide_factor or num_ranks / 2
        everywhere = divide_factor or num_ranks
        for half, model in enumerate(halves):
            for name, param in model.named_parameters():
                if is_expert(name):
                    param.grad = sums[half][name] / own
                else:
                    param.grad = (sums[0][name] + sums[1][name]) / everywhere
        norms = [nn.utils.get_total_norm([p.grad for p in m.parameters()]) for m in halves]
        grads = [full_grads(model) for model in halves]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        records.append([(grads[h], full_state(halves[h]), norms[h]) for h in range(2)])
    return records


def assert_simulated(runs, expected):
    for rank, run in enumerate(runs):
        for step, record in enumerate(run):
            wanted = expected[step][rank // (len(runs) // 2)]
            for what, one, other in zip(("grad", "param", "norm"), record, wanted, strict=True):
                assert_same(one, other, what=f"rank {rank}, step {step}, {what}")


@spread(reshard_after_forward=[None, True, False], schedule=SCHEDULES)
def test_each_parameter_is_reduced_over_its_own_mesh(schedule, reshard_after_forward):
    runs = run_threads(
        train_experts, 4, "flat", schedule, reshard_after_forward=reshard_after_forward
    )
    assert_simulated(runs, simulate(4, schedule))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_replicas_of_several_meshes(schedule):
    runs = run_threads(train_experts, 8, "hybrid", schedule, reshard_after_forward=2)
    assert_simulated(runs, simulate(8, schedule))


@on_threads(4)
def test_meshes_that_share_an_axis():
    """Two meshes of two axes that share the inner one reduce over different ranks."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
    for axis in "ab":
        plane = mesh[axis, "c"]
        layer = meshard.replicate(nn.Linear(1, 1, bias=False), plane)
        layer(torch.full((1, 1), float(dist.get_rank()))).sum().backward()
        assert layer.weight.grad.item() == plane.mesh.float().mean()


def test_one_divide_factor_holds_for_all_meshes():
    runs = run_threads(train_experts, 4, "flat", SCHEDULES[0], divide_factor=8.0)
    assert_simulated(runs, simulate(4, SCHEDULES[0], divide_factor=8.0))


def test_real_processes_agree(run_ranks):
    runs = run_ranks(train_experts, 4, "flat", SCHEDULES[1], timeout=200)
    assert_simulated(runs, simulate(4, SCHEDULES[1]))


def train_peer(shard_with, result_of, divide_factor):
    most, of_experts = meshes("flat")
    model = build()
    experts = {param for name, param in model.named_parameters() if is_expert(name)}

    # Of dim 0 for all: torch shards other dims evenly only. Made once: it asks for the same object.
    own, others = result_of(Shard(0), of_experts), result_of(Shard(0), most)

    def placement_fn(param):
        return own if param in experts else others

    for module in (*model.blocks, model):
        shard_with(module, mesh=most, shard_placement_fn=placement_fn)
    for module in (*model.blocks, model):
        if divide_factor is not None:
            module.set_gradient_divide_factor(divide_factor)
        module.set_force_sum_reduction_for_comms(True)  # torch has no PREMUL_SUM on gloo
    loss_of(model(batch_of(0, dist.get_rank(), width=5))).backward()
    return full_grads(model)


def torch_result(placement, mesh):
    return torch_common.ShardPlacementResult(placement, torch_common.FSDPMeshInfo(mesh, 0))


@pytest.mark.slow
@pytest.mark.parametrize("divide_factor", [None, 1.0])
def test_torch_divides_by_the_same(run_ranks, divide_factor):
    """By the ranks of each parameter's own mesh; and its results for a placement fit here."""
    theirs = run_ranks(train_peer, 4, torch_fully_shard, torch_result, divide_factor, timeout=200)
    ours = run_ranks(train_peer, 4, meshard.fully_shard, ShardPlacementResult, divide_factor)
    moved = run_ranks(train_peer, 4, meshard.fully_shard, torch_result, divide_factor)
    for one, other, third in zip(ours, theirs, moved, strict=True):
        assert_same(one, other)
        assert_same(third, other)
