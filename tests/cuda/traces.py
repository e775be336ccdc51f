"""A trace of steps: it makes the host wait for nothing, and finds all that ran."""

import statistics
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch

import meshard
from meshard import CommLedger, CPUOffloadPolicy
from tests.benchmarks import contenders
from tests.cuda.memory import configuration_on
from tests.support.sharding import shard_blocks

STEPS = 5


def traced(device, **kwargs):
    """Trace steps on one rank that issues its collectives; say what tracing adds to a step."""
    configuration = configuration_on(device)
    with device.group_of_one(), tempfile.TemporaryDirectory() as folder:
        model = configuration.make_model(device.torch_device)
        shard_blocks(model, device.mesh(), **kwargs)
        # Without .item(), which waits for the device.
        batch = configuration.make_batch(0, device.kind)
        step = contenders.trainer(model, batch, read=lambda _: 0.0)
        for _ in range(3):
            step()
        path = Path(folder) / "trace.json"
        # Steps on shards in host memory wait for their copies.
        refused = nullcontext() if kwargs else device.refused_waits()
        with meshard.trace(path) as trace, CommLedger() as ledger, refused:
            for _ in range(STEPS):
                step()
        seconds = {"off": [], "on": []}
        for _ in range(STEPS):
            seconds["off"].append(device.seconds(step))
            with meshard.trace(path):
                seconds["on"].append(device.seconds(step))
    summary = trace.summary
    counts = {name.replace("-", "_"): kind.num_collectives for name, kind in summary.kinds.items()}
    assert counts == ledger.counts
    assert {"forward", "backward", "optimizer"} <= set(summary.phases)
    assert all(each > 0 for each in summary.phases.values())
    assert 0 <= summary.exposed <= sum(kind.seconds for kind in summary.kinds.values())
    if device.is_real:
        assert 0 < summary.peak_bytes <= torch.cuda.max_memory_allocated()
    off, on = (1e3 * statistics.median(each) for each in seconds.values())
    return f"{summary.hidden_share:.0%} hidden; a step takes {off:.2f} ms, traced {on:.2f} ms"


def checks(device):
    return {
        "trace": lambda: traced(device),
        "trace with offload": lambda: traced(
            device, offload_policy=CPUOffloadPolicy(pin_memory=device.is_real)
        ),
    }
