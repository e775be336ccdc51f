"""Time of a step of Muon: on DTensors, of either library, and with ``owner_optimizer``.

On DTensors every rank gathers every matrix and repeats the arithmetic. `own share` is the least
that an owner must do: ``torch.optim.Muon`` on its matrices, without any communication. CPU time is
that of all threads of a rank. A run in which parameters end far from one another is void.
"""

import time
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import distribute_tensor

import meshard
from tests.benchmarks.rounds import in_turns, medians, on_ranks, show, slowest

PEER, OURS, OWNERS = "Muon, fully_shard", "Muon, meshard", "owner_optimizer"
SHARE = "own share"
# The matrices of one block, and how many blocks; beside them each block has vectors in "mixed".
SQUARE = [(512, 512)], 24, 0
MIXED = [(1536, 512), (512, 512), (2048, 512), (512, 2048)], 4, 6


def make(shard, mesh, shapes, depth, num_vectors):
    """Return a sharded module with values and gradients, the same for every contender."""
    device, model = mesh.device_type, nn.Module()
    draw = partial(torch.randn, generator=torch.Generator(device).manual_seed(0), device=device)
    model.matrices = nn.ParameterList(nn.Parameter(draw(each) * 0.02) for each in shapes * depth)
    vectors = [nn.Parameter(draw(512)) for _ in range(num_vectors * depth)]
    model.vectors = nn.ParameterList(vectors)
    shard(model, mesh=mesh)
    for param in model.parameters():
        place = param.device_mesh, param.placements
        param.grad = distribute_tensor(draw(param.shape), *place, src_data_rank=None)
    return model


def of_vectors(model):
    return [torch.optim.AdamW([*model.vectors], lr=1e-3)] if len(model.vectors) else []


def together(*optimizers):
    return lambda: [each.step() for each in optimizers]


def on_dtensors(model):
    """Return a step by torch's own Muon, and AdamW for the vectors."""
    return together(torch.optim.Muon([*model.matrices], lr=0.02), *of_vectors(model))


def own_share(shapes):
    """Return a step on ordinary matrices of these shapes."""
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape)
    return torch.optim.Muon(params, lr=0.02).step


def measure(task):
    """Return milliseconds and CPU milliseconds of everybody. All ranks call it."""
    config, rounds = task
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shards = {PEER: torch_fully_shard, OURS: meshard.fully_shard, OWNERS: meshard.fully_shard}
    models = {name: make(shard, mesh, *config) for name, shard in shards.items()}
    owners = meshard.owner_optimizer(
        models[OWNERS], torch.optim.Muon, lr=0.02, select=lambda _, param: param.dim() == 2
    )
    own = [name for name, owner in owners.owners.items() if owner == dist.get_rank()]
    steps = {name: on_dtensors(models[name]) for name in (PEER, OURS)}
    steps |= {OWNERS: together(owners, *of_vectors(models[OWNERS]))}
    steps[SHARE] = own_share([models[OWNERS].get_parameter(name).shape for name in own])
    how = {"rounds": rounds, "warm_up": 2, "before": dist.barrier}
    wall = medians(slowest(in_turns(steps, **how)[0]), 1e3)
    cpu = medians(in_turns(steps, clock=time.process_time, **how)[0], 1e3)
    for peer, ours in zip(models[PEER].parameters(), models[OWNERS].parameters(), strict=True):
        peer, ours = peer.full_tensor(), ours.full_tensor()
        # Muon computes in bfloat16, so other orders of summation differ after two digits.
        if (peer - ours).norm() > 0.05 * peer.norm():
            raise RuntimeError("the parameters differ, so no time counts.")
    return wall, cpu


def run(rounds=7):
    for title, config in {"24 of 512 x 512": SQUARE, "4 blocks of width 512": MIXED}.items():
        for ranks in (2, 4):
            wall, cpu = on_ranks(measure, (config, rounds), ranks)
            rows = {
                name: (
                    f"{wall[name]:.0f}",
                    f"{wall[name] / wall[PEER]:.2f}",
                    f"{cpu[name]:.0f}",
                    f"{cpu[name] / cpu[PEER]:.2f}",
                )
                for name in wall
            }
            heads = ("ms", "/ fully_shard", "CPU ms", "/ fully_shard")
            show(f"a step of Muon, {title}, {ranks} ranks", heads, rows)
