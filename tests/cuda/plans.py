"""Plans beside runs of the same jobs on a device: collectives exactly, and the peak of tensors.

Other ranks are pretended. The peak is that of what tensors have asked the allocator for, without
what libraries keep for good, such as cuBLAS's workspaces: a job runs once before it is measured.
"""

import gc
from functools import partial

import torch

from meshard import CommLedger
from meshard.planning import plan
from tests.benchmarks import contenders
from tests.benchmarks.contenders import OURS, OURS_WHOLE, PLAIN
from tests.benchmarks.pretend_network import NOTHING, pretend_group
from tests.cuda.device import NotRehearsed
from tests.cuda.memory import LARGE, TINY
from tests.cuda.times import WIDE
from tests.planning.jobs import make_job

LIMIT = 0.03
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


def checks(device):
    found = {}
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
