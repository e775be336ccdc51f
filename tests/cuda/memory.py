"""Peak memory by the caching allocator, and shards in host memory."""

import gc

import torch

import meshard
from meshard import CPUOffloadPolicy
from tests.benchmarks import contenders
from tests.benchmarks.contenders import OURS, OURS_WHOLE, PEER, PEER_WHOLE, Configuration
from tests.benchmarks.memory import formula
from tests.benchmarks.pretend_network import NOTHING, pretend_group
from tests.support.parity import assert_same, full_state
from tests.support.sharding import shard_blocks

RANKS = 8  # of which seven are pretended: memory is that of a shard of an eighth
LIMIT = 1.25  # of the peer's peak
TINY = Configuration("width 64", 64, 1, 16, depth=2)  # for rehearsals
LARGE = Configuration("width 1024, batch 2 x 512", 1024, 2, 512)


def configuration_on(device):
    return LARGE if device.is_real else TINY


def peak_of(device, name):
    """Return the peak of a contender's step, in bytes."""
    gc.collect()  # the contender before
    configuration, before = configuration_on(device), device.allocated()
    with pretend_group(RANKS, NOTHING):
        model = contenders.make(name, configuration, device.mesh(), device.torch_device)
        step = contenders.trainer(model, configuration.make_batch(0, device.kind))
        for _ in range(3):
            step()
        return device.peak(step) - before


def compare(device, ours, peer, *, reshards):
    """Compare peaks, and with the formula, which is that for gloo."""
    device.communicate()
    mine, theirs = peak_of(device, ours), peak_of(device, peer)
    where = {"configuration": configuration_on(device), "device": device.torch_device}
    expected = formula(RANKS, reshards=reshards, **where)
    figure = (
        f"{mine / 2**20:.0f} MiB: {mine / theirs:.3f} of fully_shard's, "
        f"{mine / expected:.3f} of the formula for gloo"
    )
    assert mine <= LIMIT * theirs, figure
    return figure


def offloaded(device):
    """AdamW on pinned host memory, beside AdamW on the device; to rounding."""
    configuration, losses, seconds = configuration_on(device), [], []
    with device.group_of_one():
        for policy in (meshard.OffloadPolicy(), CPUOffloadPolicy(pin_memory=device.is_real)):
            model = configuration.make_model(device.torch_device)
            shard_blocks(model, device.mesh(), offload_policy=policy)
            step = contenders.trainer(model, configuration.make_batch(0, device.kind))
            losses.append(torch.tensor([step() for _ in range(6)]))
            seconds.append(device.seconds(step))
        model(configuration.make_batch(0, device.kind)[0]).float().square().mean().backward()
        for param in model.parameters():
            for local in (param.to_local(), param.grad.to_local()):
                assert local.device.type == "cpu"
                assert local.is_pinned() is device.is_real
    assert losses[0][-1] < losses[0][0]
    torch.testing.assert_close(*losses, rtol=1e-4, atol=0.0)
    return f"{seconds[1] / seconds[0]:.1f} times the step on the device"


def moved(device):
    """A model that leaves the device and comes back."""
    configuration = configuration_on(device)
    batch, before = configuration.make_batch(0, device.kind), device.allocated()
    with device.group_of_one():
        model = shard_blocks(configuration.make_model(device.torch_device), device.mesh())
        optimizer = contenders.make_optimizer(model)
        step = contenders.trainer(model, batch, optimizer)
        step()
        state = {name: value.cpu() for name, value in full_state(model).items()}
        here = device.allocated()
        with meshard.offload(model, optimizer):
            away = device.allocated()
        found = {name: value.cpu() for name, value in full_state(model).items()}
        assert_same(found, state, bitwise=True)
        step()
    left = (away - before) / max(1, here - before)
    assert left < 0.05, f"{left:.0%} of the memory is still taken"
    return f"{left:.1%} of the memory stays taken"


def checks(device):
    return {
        "peak, resharding": lambda: compare(device, OURS, PEER, reshards=True),
        "peak, not resharding": lambda: compare(device, OURS_WHOLE, PEER_WHOLE, reshards=False),
        "AdamW on the host": lambda: offloaded(device),
        "offload and onload": lambda: moved(device),
    }
