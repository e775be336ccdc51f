"""What the backends do with tensors on a device: collectives, negative zeros, memory of NCCL."""

import math
import os
import time
from unittest import mock

import torch
import torch.distributed as dist

from meshard._comm import blocking
from meshard._comm.communicator import can_allocate
from meshard._torch.private import backend_of, start_all_to_all_on
from tests.cuda.device import Issuing, NotRehearsed, on_ranks
from tests.cuda.parity import trained
from tests.support.integer_model import IntegerModel, integer_batch
from tests.support.parity import assert_same
from tests.support.sharding import shard_blocks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUMEL = 1024


def unsupported(device):
    """Return which of the collectives that meshard issues raise, or give a wrong number."""
    group, ranks, comm = dist.group.WORLD, dist.get_world_size(), Issuing(device.streams)

    def all_gather(source, rows, output):
        handle = comm.all_gather(source, group=group, label="")
        handle.wait()
        return handle.result.sum(0)

    def reduce_scatter(source, rows, output):
        handle = comm.reduce_scatter(rows, rows.dtype, group=group, label="")
        handle.wait()
        return handle.result

    def all_reduce(source, rows, output):
        comm.all_reduce(source, group=group, label="").wait()
        return source

    def broadcast(source, rows, output):
        source += dist.get_rank()
        blocking.broadcast(source, group, label="")
        return source * ranks

    def all_to_all(source, rows, output):
        received = torch.zeros_like(rows)
        start_all_to_all_on(group, received, rows, []).wait()
        return received.sum(0)

    def gather_and_scatter(source, rows, output):
        gathered = blocking.gather_to(source, group, "")
        blocking.scatter_from_first(output, gathered, group, "")
        return output * ranks

    found = []
    for function in (
        all_gather, reduce_scatter, all_reduce, broadcast, all_to_all, gather_and_scatter
    ):  # fmt: skip
        for dtype in DTYPES:
            rows = torch.ones(ranks, NUMEL, dtype=dtype, device=device.kind)
            try:
                result = function(rows[0].clone(), rows, torch.zeros_like(rows[0]))
                assert bool((result == ranks).all()), "a wrong number"
            except (RuntimeError, AssertionError) as error:
                found.append(f"{function.__name__} of {dtype}: {str(error)[:80]}")
    return found


def told(found):
    assert not found, "; ".join(found)
    return "all of float32, bfloat16, float16"


class FromGroup(Issuing):
    """Takes memory of the group in groups of one rank too."""

    def _allocate(self, shape, dtype, device, group, custom):
        backend = backend_of(group, device)
        flat = backend.allocate_tensor(math.prod(shape), dtype=dtype, device=device)
        return flat.view(shape)


def memory_of_the_group(device):
    """Train with memory that NCCL allocates."""
    results = []
    for make in (Issuing, FromGroup if device.is_real else Issuing):
        with device.group_of_one(make):
            if device.is_real and not can_allocate(dist.group.WORLD, device.torch_device):
                return f"NCCL {torch.cuda.nccl.version()} allocates none here"
            results.append(trained(shard_blocks(IntegerModel(), device.mesh()), device))
    assert_same(*results, bitwise=True)
    return "the same bits"


def cuda_graph(device):
    """Capture an evaluation, and replay it after a step of training.

    The capture takes longer than it takes until somebody looks for waits that are too long.
    """
    if not device.is_real:
        raise NotRehearsed
    with (
        mock.patch.dict(os.environ, MESHARD_STALL_SECONDS="0.4"),
        device.group_of_one(),
        torch.no_grad(),
    ):
        model = shard_blocks(IntegerModel(), device.mesh())
        x, graph = integer_batch(0, 0).cuda(), torch.cuda.CUDAGraph()
        model(x)
        with torch.cuda.graph(graph):
            output = model(x)
            time.sleep(1.5)
        with torch.enable_grad():
            trained(model, device)
        graph.replay()
        assert_same(output, model(x), bitwise=True)
    return "the same bits"


def checks(device):
    def on_one(function):
        with device.group_of_one():
            return function(device)

    found = {
        "collectives, NCCL": lambda: told(on_one(unsupported)),
        "collectives, 2 gloo ranks": lambda: told(on_ranks(device, unsupported, 2)[0]),
    }
    found["memory of the process group"] = lambda: memory_of_the_group(device)
    found["CUDA graph of an evaluation"] = lambda: cuda_graph(device)  # last: it may break CUDA
    return found
