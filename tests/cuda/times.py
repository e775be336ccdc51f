"""Time of a step beside torch's fully_shard and DDP, on one rank and on pretended ranks.

All issue their collectives on one rank too, ours because ``group_of_one`` makes it.
"""

import json
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from meshard import CommLedger
from tests.benchmarks import contenders, step_time
from tests.benchmarks.contenders import (
    COMPUTE,
    DDP,
    OURS,
    OURS_WHOLE,
    PEER,
    PEER_WHOLE,
    REPLICATED,
    Configuration,
)
from tests.benchmarks.pretend_network import NOTHING, Network, pretend_group
from tests.benchmarks.rounds import in_turns, medians
from tests.cuda.device import NotRehearsed
from tests.cuda.memory import LARGE, TINY

# Of this one the device takes longer to compute than the host to queue; of LARGE and SMALL not.
WIDE = Configuration("width 2048, batch 16 x 1024, bfloat16", 2048, 16, 1024, narrow=True)
SMALL = Configuration("width 256, batch 1 x 64", 256, 1, 64)
EVERYBODY = (COMPUTE, DDP, REPLICATED, PEER, OURS, PEER_WHOLE, OURS_WHOLE)
PAIRS = ((OURS, PEER), (OURS_WHOLE, PEER_WHOLE), (REPLICATED, DDP), (OURS_WHOLE, DDP))


def ratios(times):
    return ", ".join(
        f"{ours} / {peer} {times[ours] / times[peer]:.2f}"
        for ours, peer in PAIRS
        if ours in times and peer in times
    )


def whole_steps(device, configuration):
    """Time whole steps on one rank; losses are compared."""
    rounds = 15 if device.is_real else 3
    task = step_time.Task(configuration, rounds, 3, EVERYBODY, device=device.kind)
    with device.group_of_one():
        times = {name: median for name, (_, median, _) in step_time.measure(task).items()}
    return f"{ratios(times)}; {PEER} {times[PEER]:.1f} ms"


def host_time(device, ranks):
    """Time the host until a step is queued, where nothing is sent."""
    configuration, rounds = (SMALL, 15) if device.is_real else (TINY, 2)
    batch = configuration.make_batch(0, device.kind)
    device.communicate()
    with pretend_group(ranks, NOTHING):
        steps = {}
        for name in (PEER, OURS, PEER_WHOLE, OURS_WHOLE):
            model = contenders.make(name, configuration, device.mesh(), device.torch_device)
            # Without .item(), which waits for the device.
            steps[name] = contenders.trainer(model, batch, read=lambda _: 0.0)
        seconds, _ = in_turns(steps, rounds=rounds, warm_up=5, before=device.synchronize)
        device.synchronize()
    times = medians(seconds, 1e3)
    return f"{ratios(times)}; {PEER} {times[PEER]:.1f} ms"


def seconds_on(network, device, configuration, ranks):
    """Return seconds of everybody's steps, and those for which one of ours communicates.

    Losses are not compared: what is gathered is garbage.
    """
    with pretend_group(ranks, network):
        batch, steps = configuration.make_batch(0, device.torch_device), {}
        for name in (PEER, OURS, PEER_WHOLE, OURS_WHOLE):
            model = contenders.make(name, configuration, device.mesh(), device.torch_device)
            steps[name] = contenders.trainer(model, batch)
        steps[OURS]()
        with CommLedger() as ledger:
            steps[OURS]()
        wire = sum(network.seconds(each.payload_bytes, each.group_size) for each in ledger.events)

        timed = {name: partial(device.seconds, step) for name, step in steps.items()}
        _, seconds = in_turns(timed, rounds=9 if device.is_real else 2, warm_up=3)
        del steps, timed, model
    return medians(seconds), wire


def hidden(device, configuration, ranks):
    """Return how much of the time of the ranks' communication compute hides."""
    device.communicate()
    free, _ = seconds_on(NOTHING, device, configuration, ranks)
    taken, wire = seconds_on(Network(), device, configuration, ranks)
    # The peer sends as much: see tests/benchmarks/collectives.py.
    shares = [f"{name} {1 - (taken[name] - free[name]) / wire:.0%}" for name in (OURS, PEER)]
    return (
        f"{', '.join(shares)} of {1e3 * wire:.1f} ms; "
        f"step {ratios(taken)}; {PEER} {1e3 * taken[PEER]:.1f} ms"
    )


def kernels_of(step):
    """Return the device's events of a step: name, begin and duration in us, and stream."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return [each for each in events if each.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]


def copying(events):
    """Return the microseconds of kernels that only copy."""
    parts = ("copy", "split", "cat", "memcpy", "memset")
    return sum(e["dur"] for e in events if any(part in e["name"].lower() for part in parts))


def overlapped(events):
    """Return the microseconds during which kernels of at least two streams run."""
    moments = []
    for event in events:
        stream = event["args"]["stream"]
        moments.append((event["ts"], 1, stream))
        moments.append((event["ts"] + event["dur"], -1, stream))
    running, total, since = {}, 0.0, 0.0
    for moment, change, stream in sorted(moments):
        if sum(count > 0 for count in running.values()) > 1:
            total += moment - since
        running[stream] = running.get(stream, 0) + change
        since = moment
    return total


def copies(device, configuration):
    """Return for how long kernels of a step only copy, and kernels of two streams run at once."""
    if not device.is_real:
        raise NotRehearsed
    found = []
    with device.group_of_one():
        for name in (PEER, OURS, PEER_WHOLE, OURS_WHOLE):
            model = contenders.make(name, configuration, device.mesh(), device.torch_device)
            step = contenders.trainer(model, configuration.make_batch(0, device.kind))
            for _ in range(5):
                step()
            events = kernels_of(step)
            found.append(f"{name} {copying(events):.0f} us, {overlapped(events):.0f} us")
    return "; ".join(found)


def checks(device):
    large, wide = (LARGE, WIDE) if device.is_real else (TINY, replace(TINY, narrow=True))
    return {
        "step, float32": lambda: whole_steps(device, large),
        "step, bfloat16": lambda: whole_steps(device, wide),
        "host time of a step, 8 ranks": lambda: host_time(device, 8),
        "host time of a step, 4096 ranks": lambda: host_time(device, 4096),
        "copies and overlap of a step": lambda: copies(device, wide),
        "communication behind compute, 8 ranks": lambda: hidden(device, wide, 8),
        "communication behind compute, 64 ranks": lambda: hidden(device, wide, 64),
    }
