"""Plans beside runs of the same jobs on a device: collectives exactly, and the peak of tensors.

Other ranks are pretended. The peak is that of what tensors have asked the allocator for, without
what libraries keep for good, such as cuBLAS's workspaces: a job runs once before it is measured.
"""

import gc
import math
from dataclasses import replace
from functools import partial
from unittest import mock

import torch

from meshard import CommLedger
from meshard.planning import Link, measure, measuring, plan
from tests.benchmarks import contenders
from tests.benchmarks.contenders import OURS, OURS_WHOLE, PLAIN
from tests.benchmarks.pretend_network import NOTHING, Network, pretend_group
from tests.cuda.device import NotRehearsed
from tests.cuda.memory import LARGE, TINY
from tests.cuda.times import WIDE
from tests.planning.jobs import make_job

LIMIT, TIME_LIMIT = 0.03, 0.1
# cuDNN takes a workspace of 4.9 MB for the backward of a convolution, and the plan knows of none.
WITH_WORKSPACE = {"convolutions": 0.1}
RANKS = 8
JOBS = {
    "gpt": {"name": "gpt"},
    "gpt, not resharding": {"name": "gpt", "reshard": False},
    "gpt, summed at the end": {"name": "gpt", "mode": "NONE", "num_microbatches": 3},
    "gpt, optimizer in backward": {"name": "gpt", "how": "overlap"},
    "gpt, flat optimizer": {"name": "gpt", "how": "local"},
    "gpt, owners": {"name": "gpt", "how": "owners"},
    "gpt, offload": {"name": "gpt", "how": "offload"},
    "llama": {"name": "llama"},
    "llama, HSDP": {"name": "llama", "mesh_shape": (2, 2)},
    "convolutions": {"name": "convolutions"},
    "adapters": {"name": "adapters"},
    "checkpointed": {"name": "checkpointed"},
}


def contend(name, configuration, *, kind):
    """Return a step of a benchmark, the same one that is timed."""
    device = torch.device(kind)
    mesh = torch.distributed.init_device_mesh(kind, (torch.distributed.get_world_size(),))
    model = contenders.make(name, configuration, mesh, device)
    optimizer = contenders.make_optimizer(model, PLAIN)
    batch = configuration.make_batch(0, device)
    return contenders.trainer(model, batch, optimizer, read=lambda _: 0.0)


def requested(which):
    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]


def run(make_step):
    """Return the ledger of a second step, and its peak in bytes."""
    make_step()()  # libraries make their workspaces
    gc.collect()
    before = requested("current")
    step = make_step()
    step()
    with CommLedger() as ledger:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
    return ledger, requested("peak") - before


def compare(device, make_step, ranks, limit=LIMIT):
    """Plan a job on this device, then run it."""
    gc.collect()
    before = device.allocated()
    planned = plan(make_step, world_size=ranks, device_type=device.kind)
    gc.collect()
    assert device.allocated() == before  # a plan takes nothing of the device
    if not device.is_real:
        raise NotRehearsed
    device.communicate()
    with pretend_group(ranks, NOTHING):
        ledger, peak = run(make_step)
    compared = planned.compare(ledger)
    ratio = planned.peaks[-1] / peak
    figure = f"planned {ratio:.3f} of {peak / 2**20:.1f} MiB; {compared}"
    assert compared.first_difference is None, figure
    assert abs(ratio - 1) <= limit, figure
    return figure


def predicted(device):
    """Measure one setting, and predict the time of others."""
    config = WIDE if device.is_real else TINY
    network, step_of = Network(), partial(contend, kind=device.kind)
    device.communicate()
    with (
        pretend_group(RANKS, network),
        mock.patch.object(measuring, "all_ranks", return_value=None),
    ):
        profile = measure(step_of(OURS, config), steps=6)
    gc.collect()
    # The pretended network has another rule for latency, so it is stated for these ranks.
    hop = network.latency * math.log2(64) / 63
    profile = replace(profile, between_nodes=Link(network.across, hop))
    found = []
    for ranks, name, settings in (
        (RANKS, OURS, {}),
        (RANKS, OURS_WHOLE, {}),
        (RANKS, OURS, {"batch": config.batch // 2}),
        (RANKS, OURS, {"depth": config.depth // 2}),
        (64, OURS, {}),
        (64, OURS_WHOLE, {}),
    ):
        make_step = partial(step_of, name, replace(config, **settings))
        planned = plan(make_step, world_size=ranks, device_type=device.kind, profile=profile)
        with pretend_group(ranks, network):
            step, count = make_step(), 5
            for _ in range(3):
                step()
            seconds = device.seconds(lambda step=step, count=count: [step() for _ in range(count)])
        del step
        gc.collect()
        took, time = seconds / count, planned.time
        found.append((time.seconds / took, ranks, name, settings, time, took))
    figure = "; ".join(
        f"{name} on {ranks}{settings or ''}: {ratio:.3f} of {1e3 * took:.1f} ms, "
        f"exposed {1e3 * time.exposed:.1f}"
        for ratio, ranks, name, settings, time, took in found
    )
    if not device.is_real:
        raise NotRehearsed
    # With half the work the host may take longer than the device, and no profile knows of that.
    held = [ratio for ratio, _, _, settings, *_ in found if "batch" not in settings]
    assert all(abs(ratio - 1) < TIME_LIMIT for ratio in held), figure
    return figure


def checks(device):
    found = {"time of a step": partial(predicted, device)}
    for title, options in JOBS.items():
        ranks = 4 if "mesh_shape" in options else 2
        job = partial(make_job, device=device.kind, **options)
        limit = WITH_WORKSPACE.get(title, LIMIT)
        found[title] = partial(compare, device, job, ranks, limit)
    large, wide = (LARGE, WIDE) if device.is_real else (TINY, TINY)
    for name in (OURS, OURS_WHOLE):
        for configuration in (large, wide):
            job = partial(contend, name, configuration, kind=device.kind)
            found[f"{name}, {configuration.name}"] = partial(compare, device, job, RANKS)
    return found
