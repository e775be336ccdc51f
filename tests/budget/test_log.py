"""The logger ``meshard``: a line for each event of a unit, with its rank, and nothing while off."""

import contextlib
import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import GradientSync
from tests.support.ranks import fake_group, on_fake_ranks, on_ranks

LOGGER = logging.getLogger("meshard")


@contextlib.contextmanager
def logged(level=logging.DEBUG):
    lines = []
    handler, before = logging.Handler(), LOGGER.level
    handler.emit = lambda record: lines.append(record.getMessage())
    LOGGER.addHandler(handler)
    LOGGER.setLevel(level)
    try:
        yield lines
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(before)


def model_of(*mesh_shape):
    mesh = init_device_mesh("cpu", mesh_shape)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for module in (*model, model):
        meshard.fully_shard(module, mesh)
    return model


def backward(model):
    model(torch.ones(1, 2)).sum().backward()


@on_ranks(2)
def test_a_step_logs_every_event_of_every_unit():
    model = model_of(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with logged() as lines:
        backward(model)
        optimizer.step()
    prefix = f"rank {dist.get_rank()}: "
    events = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
    assert len(events) == len(lines)
    assert [event for event in events if event.endswith(" 1")] == [
        "unshard 1", "unsharded 1", "reshard 1",
        "unshard 1", "unsharded 1", "reduce 1", "reshard 1", "reduced 1", "step 1",
    ]  # fmt: skip
    assert [event for event in events if "shard" not in event] == [
        "reduce 1", "reduced 1", "reduce 0", "reduced 0", "step 0", "step 1",
    ]  # fmt: skip


@on_fake_ranks(4, rank=3)
def test_a_window_logs_its_reductions_and_not_what_is_only_accumulated():
    model = model_of(2, 2)
    with logged() as lines:
        for mode in GradientSync:
            model.set_gradient_sync(mode)
            backward(model)
    assert lines.count("rank 3: reduce 0") == lines.count("rank 3: reduced 0") == 2


@pytest.mark.parametrize("level", [logging.INFO, logging.NOTSET])
def test_nothing_is_logged_at_a_higher_level(level):
    with fake_group(2), logged(level) as lines:
        backward(model_of(2))
    assert lines == []


@on_fake_ranks(2)
def test_a_step_in_backward_is_logged():
    layer = meshard.fully_shard(nn.Linear(2, 2))
    meshard.overlap_optimizer(layer, torch.optim.SGD, lr=0.1)
    with logged() as lines:
        backward(layer)
    assert lines[-1] == "rank 0: step (root)"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # read by dynamo
@on_fake_ranks(2)
def test_compiled_modules_log_the_same():
    plain, compiled = model_of(2), model_of(2)
    for layer in compiled:
        layer.compile(backend="eager")
    whole = torch.compile(model_of(2), backend="eager")
    with logged() as expected:
        backward(plain)
    for model in (compiled, whole):
        with logged() as lines:
            backward(model)
        assert lines == expected


def test_after_the_group_was_destroyed_there_is_no_rank():
    with fake_group(2):
        layer = meshard.fully_shard(nn.Linear(2, 2))
        layer.unshard()
    with logged() as lines:
        layer.reshard()
    assert lines == ["rank -1: reshard (root)"]
