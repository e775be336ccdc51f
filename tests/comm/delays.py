"""Communication that is delayed, beside compute that leaves the cores alone."""

import statistics
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard._comm.cpu import WorkCommunicator
from tests.support import insides
from tests.support.parity import assert_same, full_grads

DELAY = COMPUTE = 0.020
BLOCKS = 8


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(COMPUTE)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(COMPUTE)
        return grad


class Block(nn.Module):
    """20 ms of compute that leaves the cores alone, and a layer to be gathered."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return _Sleep.apply(torch.tanh(self.layer(x)))


class Late:
    """A collective whose result comes no sooner than ``DELAY`` after its start."""

    def __init__(self, handle):
        self.handle, self.result = handle, handle.result
        self.ready = time.monotonic() + DELAY

    def wait(self):
        time.sleep(max(0.0, self.ready - time.monotonic()))
        self.handle.wait()

    def done(self):
        return time.monotonic() >= self.ready and self.handle.done()

    def release(self):
        self.handle.release()


class DelayedCommunicator(WorkCommunicator):
    """Every all-gather takes 20 ms longer."""

    def _start_all_gather(self, *args):
        return Late(super()._start_all_gather(*args))


class DelayedReductions(WorkCommunicator):
    """Every reduction takes 20 ms longer."""

    def _start_reduce_scatter(self, *args, **kwargs):
        return Late(super()._start_reduce_scatter(*args, **kwargs))

    def _start_all_reduce(self, *args):
        return Late(super()._start_all_reduce(*args))


def build(communicator, mesh):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), *[Block() for _ in range(BLOCKS)])
    with pytest.MonkeyPatch.context() as patch:
        insides.use_communicator(patch, lambda _: communicator())
        for block in model[1:]:
            meshard.fully_shard(block, mesh)
        meshard.fully_shard(model, mesh)
        meshard.describe(model)  # a first use, which makes the communicator
    return model


def step_times(delayed, mesh_shape):
    mesh = init_device_mesh("cpu", mesh_shape)
    models = [build(WorkCommunicator, mesh), build(delayed, mesh)]
    x = torch.ones(2, 8) * (1 + dist.get_rank())
    times = [[], []]
    for round_ in range(6):
        for model, record in zip(models, times, strict=True):
            dist.barrier()
            start = time.monotonic()
            model(x).sum().backward()
            if round_:  # the first has no recorded order
                record.append(time.monotonic() - start)
    assert_same(full_grads(models[0]), full_grads(models[1]), bitwise=True)
    return [statistics.median(record) for record in times]
