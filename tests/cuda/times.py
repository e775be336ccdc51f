"""Time of a step beside torch's fully_shard and DDP, on one rank and on pretended ranks.

All issue their collectives on one rank too, ours because ``group_of_one`` makes it.
"""

from dataclasses import replace

from tests.benchmarks import contenders, network, step_time
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
from tests.benchmarks.device import host_times
from tests.benchmarks.network import NOTHING
from tests.cuda.memory import LARGE, TINY, batch_on
from tests.support.pretend_network import Network, pretend_group

WIDE = Configuration("width 2048, batch 4 x 1024, bfloat16", 2048, 4, 1024, narrow=True)
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
        times = step_time.measure(task).times
    medians = {name: each.median for name, each in times.items()}
    return f"{ratios(medians)}; {PEER} {medians[PEER]:.1f} ms"


def host_time(device, ranks):
    """Time the host until a step is queued, where nothing is sent."""
    configuration = SMALL if device.is_real else TINY
    device.communicate()
    with pretend_group(ranks, NOTHING):
        steps = {}
        for name in (PEER, OURS, PEER_WHOLE, OURS_WHOLE):
            model = contenders.make(name, configuration, device.mesh(), device.torch_device)
            # Without .item(), which waits for the device.
            batch = batch_on(device, configuration)
            steps[name] = contenders.trainer(model, batch, read=lambda _: 0.0)
        times = host_times(steps, 15 if device.is_real else 2, device.synchronize)
    return f"{ratios(times)}; {PEER} {times[PEER]:.1f} ms"


def hidden(device, configuration):
    """Return how much of the time of 8 ranks' communication compute hides."""
    device.communicate()
    rounds = 9 if device.is_real else 2
    free, taken = (
        network.measure(8, each, device.torch_device, rounds, configuration)
        for each in (NOTHING, Network())
    )
    shares = []
    for name in (OURS, PEER):
        exposed = taken["seconds"][name] - free["seconds"][name]
        shares.append(f"{name} {1 - exposed / taken['wire'][name]:.0%}")
    return f"{', '.join(shares)} of {1e3 * taken['wire'][OURS]:.1f} ms"


def checks(device):
    large, wide = (LARGE, WIDE) if device.is_real else (TINY, replace(TINY, narrow=True))
    return {
        "step, float32": lambda: whole_steps(device, large),
        "step, bfloat16": lambda: whole_steps(device, wide),
        "host time of a step, 8 ranks": lambda: host_time(device, 8),
        "host time of a step, 4096 ranks": lambda: host_time(device, 4096),
        "communication behind compute": lambda: hidden(device, wide),
    }
