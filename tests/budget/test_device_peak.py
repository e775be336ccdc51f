"""The peak of a step on a device, beside FSDP2's, on a fake device and a pretended network."""

import gc
import itertools
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.profiler import ProfilerActivity, profile

import meshard
from tests.benchmarks.pretend_network import NOTHING, pretend_group
from tests.support import insides
from tests.support.fake_device import FakeDevice

WIDTH, DEPTH = 256, 6  # weights of 256 KiB, beside which all else that a step allocates is small


def rise(shard, mesh_shape, reshards):
    """Return the bytes by which live memory rises in a step, at most."""
    gc.collect()
    with pretend_group(8, NOTHING):
        mesh = init_device_mesh(
            "cpu", mesh_shape, mesh_dim_names=("outer", "inner")[-len(mesh_shape) :]
        )
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
        for module in (*model, model):
            shard(module, mesh=mesh, reshard_after_forward=reshards)

        def step():
            model(torch.ones(2, WIDTH)).sum().backward()
            model.zero_grad()

        for _ in range(2):
            step()
        activities = [ProfilerActivity.CPU]
        with profile(activities=activities, profile_memory=True, acc_events=True) as seen:
            step()
    events = seen.profiler.kineto_results.events()
    return max(itertools.accumulate(e.nbytes() for e in events if e.name() == "[memory]"))


@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("mesh_shape", [(8,), (2, 4)])
def test_the_peak_of_a_step_is_at_most_that_of_fsdp2(monkeypatch, mesh_shape, reshards):
    insides.use_communicator(monkeypatch, lambda _: insides.StreamCommunicator(FakeDevice()))
    ours, theirs = map(
        partial(rise, mesh_shape=mesh_shape, reshards=reshards),
        (meshard.fully_shard, torch_fully_shard),
    )
    assert ours <= 1.005 * theirs, (ours, theirs)
