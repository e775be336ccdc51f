"""Timelines of steps: torch.profiler's file has every collective, and the times of the device."""

import tempfile
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import torch

from meshard import CommLedger, CPUOffloadPolicy
from meshard.timeline import read, summary_of
from tests.benchmarks import contenders
from tests.benchmarks.pretend_network import Network, pretend_group
from tests.cuda.memory import configuration_on
from tests.support.sharding import shard_blocks

STEPS, RANKS = 5, 8


def timeline(device, **kwargs):
    """Profile steps among pretended ranks, and summarize them."""
    configuration = configuration_on(device)
    device.communicate()
    with pretend_group(RANKS, Network()), tempfile.TemporaryDirectory() as folder:
        model = configuration.make_model(device.torch_device)
        shard_blocks(model, device.mesh(), **kwargs)
        # Without .item(), which waits for the device.
        batch = configuration.make_batch(0, device.kind)
        step = contenders.trainer(model, batch, read=lambda _: 0.0)
        for _ in range(3):
            step()
        # Steps on shards in host memory wait for their copies.
        refused = nullcontext() if kwargs else device.refused_waits()
        with torch.profiler.profile() as profiler:
            with CommLedger() as ledger, refused:
                for _ in range(STEPS):
                    step()
            device.synchronize()
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        (found,) = read([path])
    assert Counter(each.lane.replace("-", "_") for each in found.collectives) == ledger.counts
    assert {"forward", "backward", "optimizer"} <= {each.category for each in found.spans}
    assert all(each.exposed <= 1.01 * each.length for each in found.collectives)
    return summary_of(found).splitlines()[0]


def checks(device):
    return {
        "timeline": lambda: timeline(device),
        "timeline with offload": lambda: timeline(
            device, offload_policy=CPUOffloadPolicy(pin_memory=device.is_real)
        ),
    }
