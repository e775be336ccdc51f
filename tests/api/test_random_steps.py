"""Random mixtures of units, meshes, checkpoints, modes and interruptions.

``test_user_scripts`` plays windows on tables of parameters; this plays whole steps of a model on
real processes: units inside units, called twice, recomputed; ranks that use different layers;
evaluations, copies and gathers by hand between forward and backward. HYPOTHESIS_PROFILE=thorough
plays more of them.
"""

import copy
import os
import random
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import meshard
from meshard import CPUOffloadPolicy, FSDPModule, GradientSync
from tests.support.models import MlpBlock, seeded
from tests.support.parity import assert_same, full_grads

MESHES = [(4,), (2, 2), (1, 4), (4, 1)]
BETWEEN = ["nothing", "evaluation", "inference", "unused forward", "part", "unshard", "copy"]
SEEDS_PER_TEST = 8
SEEDS = range(0, 160 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 16, SEEDS_PER_TEST)


class Block(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.mlp, self.norm = MlpBlock(6, 7), nn.LayerNorm(6)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.reentrant = reentrant  # None: nothing is recomputed

    def forward(self, x, side, *, used):
        if self.reentrant is None or not torch.is_grad_enabled():
            x = self.mlp(x)
        else:
            x = checkpoint(self.mlp, x, use_reentrant=self.reentrant)
        for expert, is_used in zip(self.experts, used, strict=True):
            x = x + torch.tanh(expert(x)) if is_used else x
        x = x if side is None else x + side.mean()
        return self.norm(x), x


class Net(nn.Module):
    """Its first and last layer are tied."""

    def __init__(self, reentrants):
        super().__init__()
        self.inlet, self.outlet = nn.Linear(6, 6), nn.Linear(6, 6)
        self.outlet.weight = self.inlet.weight
        self.blocks = nn.ModuleList(Block(each) for each in reentrants)

    def forward(self, x, used=(True,) * 3, twice=False):
        x, side = self.inlet(x), None
        for block in self.blocks:
            x, side = block(x, side, used=used)
            if twice:
                x, _ = block(x, side, used=used)
        return self.outlet(x)


def build(draw):
    plain = seeded(Net([draw.choice([None, True, False]) for _ in range(3)]))
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", draw.choice(MESHES))
    reshard = [None, True, False] + ([2] if mesh.shape[-1] == 4 else [])
    kwargs = {"shard_placement_fn": draw.choice([None, lambda param: Shard(param.dim() - 1)])}
    if draw.random() < 0.2:
        kwargs["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for block in model.blocks:
        for unit, likelihood in ((block.mlp, 0.4), (block, 0.7)):
            if draw.random() < likelihood:
                chosen = draw.choice(reshard)
                meshard.fully_shard(unit, mesh, reshard_after_forward=chosen, **kwargs)
                if draw.random() < 0.2:
                    unit.set_reduce_scatter_max_input_buffers(draw.choice([1, 2]))
    meshard.fully_shard(model, mesh, reshard_after_forward=draw.choice(reshard), **kwargs)
    if draw.random() < 0.2:
        model.set_reshard_after_backward(False)
    return model, plain


def interrupt(draw, what, model, x):
    """Do something between a forward and its backward; return what is to be done after it."""
    if what == "evaluation":
        with torch.no_grad():
            model(x, (True, False, True), twice=True)
    elif what == "inference":
        with torch.inference_mode():
            model(x)
    elif what == "unused forward":
        model(x)
    elif what == "part" and isinstance(model.blocks[1], FSDPModule):
        with torch.no_grad():
            model.blocks[1](x, None, used=(True, True, True))
    elif what == "copy":
        [copy.deepcopy(param.detach()) for param in model.parameters()]
    elif what == "unshard":
        handle = model.unshard(async_op=True)
        for act, likelihood in ((handle.wait, 0.5), (model.reshard, 0.5)):
            if draw.random() < likelihood:
                act()
        return lambda: (handle.wait(), model.reshard())
    return lambda: None


def microbatch(draw, model, plain, is_last):
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    modes = list(GradientSync)
    model.set_gradient_sync(GradientSync.FULL if is_last else draw.choice(modes))
    if not is_last and isinstance(model.blocks[0], FSDPModule):
        model.blocks[0].set_gradient_sync(draw.choice(modes))
    model.set_is_last_backward(is_last)
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    xs = torch.randn(num_ranks, 3, 6, generator=generator)
    used = [tuple(draw.random() < 0.5 for _ in range(3)) for _ in range(num_ranks)]
    twice, what = draw.random() < 0.3, draw.choice(BETWEEN)
    loss = model(xs[rank], used[rank], twice).square().mean()
    after = interrupt(draw, what, model, xs[rank])
    loss.backward()
    after()
    losses = [plain(x, use, twice).square().mean() for x, use in zip(xs, used, strict=True)]
    (sum(losses) / num_ranks).backward()


def play(seeds):
    warnings.simplefilter("ignore")  # of a late edit, or of a checkpoint whose input needs none
    for seed in seeds:
        draw = random.Random(seed)
        model, plain = build(draw)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, plain)]
        for step in range(3):
            last = draw.randrange(3)
            for number in range(last + 1):
                microbatch(draw, model, plain, number == last)
            what = f"seed {seed}, step {step}"
            if draw.random() < 0.5:
                norms = [
                    meshard.clip_grad_norm_(model, 0.5),
                    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5),
                ]
                assert_same(*norms, what=what)
            assert_same(full_grads(model), full_grads(plain), what=what)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.full
@pytest.mark.parametrize("first", SEEDS)
def test_any_mixture_trains_like_one_process(run_ranks, first):
    run_ranks(play, 4, range(first, first + SEEDS_PER_TEST), timeout=200)
