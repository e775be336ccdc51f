"""Peak memory of a step, and state per rank at scale, against docs/explanation/memory.md.

At scale the modules, units and optimizer are real; their tensors are on the meta device, and the
ranks are those of a group that only pretends to communicate.
"""

import os
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshard
from meshard._comm import cpu
from tests import ROOT
from tests.benchmarks.memory import resident
from tests.benchmarks.rounds import on_ranks
from tests.support.memory_formula import Sizes, peaks
from tests.support.models import Made, Transformer, TransformerBlock
from tests.support.ranks import fake_group
from tests.support.spread import mostly_slow

ROWS, LAYERS = 2, 4  # so few rows that activations are nothing beside weights
PHASES = ("forward", "backward", "optimizer")


def block(width):
    def forward(module, x):
        for layer in module.layers:
            x = x + torch.tanh(layer(x))
        return x

    return Made(forward, layers=[nn.Linear(width, width, bias=False) for _ in range(LAYERS)])


def sharded(width, units, reshards):
    """Return units of four weights, and one weight in the root."""
    torch.manual_seed(0)
    blocks = [block(width) for _ in range(units)]
    model = nn.Sequential(*blocks, nn.Linear(width, width, bias=False))
    for unit in (*blocks, model):
        meshard.fully_shard(unit, reshard_after_forward=reshards)
    return model


def batch(width, rank):
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(rank))


def high_water(before):
    """Return the most bytes that were resident since the last call."""
    most = resident("VmHWM") - before
    Path("/proc/self/clear_refs").write_text("5")
    return most


def one_step(model, optimizer, x, before):
    """Return the peak of each phase."""
    high_water(before)
    loss = model(x).square().mean()
    forward = high_water(before)
    loss.backward()
    del loss
    backward = high_water(before)
    optimizer.step()
    found = (forward, backward, high_water(before))
    optimizer.zero_grad()
    return found


def step_at_once(argument):
    """Measure where a collective is over as soon as it is waited for, whatever else runs here."""
    width, units, reshards = argument
    start = cpu.start_all_gather_on

    def start_and_wait(*args):
        work = start(*args)
        work.wait()
        return work

    with mock.patch.object(cpu, "start_all_gather_on", start_and_wait):
        small = sharded(16, 2, reshards)  # what loads with the first step is nobody's
        one_step(small, adamw(small), batch(16, 0), 0)
        del small
        before = resident("VmRSS")
        model = sharded(width, units, reshards)
        optimizer, x = adamw(model), batch(width, dist.get_rank())
        one_step(model, optimizer, x, before)  # makes the state of the optimizer
        found = [one_step(model, optimizer, x, before) for _ in range(3)]
    # The least of each phase: a thread of gloo may keep a buffer for a moment after its work.
    return [min(of_phase) for of_phase in zip(*found, strict=True)]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)


@pytest.mark.slow
@pytest.mark.parametrize("reshards", [True, False])
def test_peaks_are_those_of_the_formula(reshards):
    width, units, ranks = 768, 8, 2
    settings = {
        # glibc would keep what is freed, by a rule that adapts.
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "MESHARD_SHARED_MEMORY": "0",
    }
    with mock.patch.dict(os.environ, settings):
        # Whether gloo has sent a gradient when the next one comes is a matter of time.
        runs = [on_ranks(step_at_once, (width, units, reshards), ranks) for _ in range(2)]
    found = [min(peaks) for peaks in zip(*runs, strict=True)]
    weight = 4 * width * width
    sizes = Sizes(
        units=[LAYERS * weight] * units,
        largest=[weight] * units,
        activations=[0] * units,
        root=weight,
        shards=ranks,
        reshards=reshards,
    )
    expected = peaks(sizes)
    beside = {
        phase: (ours - theirs) / 2**20
        for phase, ours, theirs in zip(PHASES, found, expected, strict=True)
    }
    assert max(found) == pytest.approx(max(expected), rel=0.03), beside
    # Of each phase, too: what Python takes, some 2 MiB, is more of a small peak.
    assert all(abs(mib) < 5 for mib in beside.values()), beside


ROW = re.compile(r"^\| (\d+ blocks of width \d+, \d+ tokens) \| (.+) \|$", re.MULTILINE)


@pytest.mark.parametrize(
    ("row", "num_ranks", "offloads"),
    mostly_slow([(0, 8, False), (1, 128, False), (2, 256, True)], (0, 8, False)),
)
def test_the_table_of_states_at_scale_is_what_the_modules_take(row, num_ranks, offloads):
    rows = ROW.findall((ROOT / "docs" / "explanation" / "memory.md").read_text())
    assert len(rows) == 3
    shape, cells = rows[row]
    depth, dim, vocab = map(int, re.findall(r"\d+", shape))
    options = {"mp_policy": meshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    if offloads:
        options["offload_policy"] = meshard.CPUOffloadPolicy(pin_memory=False)
    with fake_group(num_ranks):
        with torch.device("meta"):
            model = Transformer(vocab=vocab, dim=dim, heads=dim // 128, depth=depth, tied=True)
        numel = sum(param.numel() for param in model.parameters())
        units = meshard.fully_shard_units(model, units=TransformerBlock, **options)
        assert len(units) == depth + 1
        params = list(model.parameters())
        optimizer = meshard.local_optimizer(model, torch.optim.AdamW)
        for param in params:
            param.grad = torch.zeros_like(param)
        optimizer.step()
        moments = [
            each[name] for each in optimizer.state.values() for name in each if "exp" in name
        ]
        tensors = [*params, *(param.grad for param in params), *moments]
        state = sum(tensor.to_local().nbytes for tensor in tensors)
        unsharded = 2 * sum(param.numel() for param in model.blocks[0].parameters())
    assert abs(state - 16 * numel / num_ranks) < 1e-3 * state  # 4 of weight, gradient, moments
    how = ", [offloaded](../how-to/offload.md)" if offloads else ""
    found = [f"{each / 1e9:.1f}" for each in (numel, state, unsharded)]
    assert [found[0], f"{num_ranks}{how}", *found[1:]] == cells.split(" | ")
