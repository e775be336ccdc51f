"""What the checks run on: a CUDA device, or the CPU in its place.

On the CPU every check is rehearsed, so that wrong arguments show where there is no device: streams
are those of a recording device, collectives go through gloo.
"""

import atexit
import functools
import time
import warnings
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from meshard import _communicators
from meshard._comm.streams import StreamCommunicator
from meshard._torch.private import backend_name
from tests.support.fake_device import FakeDevice
from tests.support.rank_pool import RankPool, leave_group


class NotRehearsed(Exception):
    """Raised by a check that says nothing without a device."""


class Issuing(StreamCommunicator):
    """Issues collectives in groups of one rank too, which otherwise have nothing to send."""

    def __init__(self, device_module):
        super().__init__(device_module)
        self._are_alone = {}  # by group

    def is_alone(self, group):
        if group not in self._are_alone:
            # The shard group of ``replicate`` has no backend, because nothing is ever sent in it.
            self._are_alone[group] = not backend_name(group, torch.device("cpu"))
        return self._are_alone[group]


class Device:
    """A CUDA device (``"cuda"``), or a rehearsal (``"cpu"``)."""

    def __init__(self, kind):
        self.kind = kind
        self.is_real = kind == "cuda"
        self.streams = torch.cuda if self.is_real else FakeDevice()
        self.torch_device = torch.device(kind, 0) if self.is_real else torch.device(kind)
        if self.is_real:
            torch.cuda.set_device(0)
        self.synchronize = torch.cuda.synchronize if self.is_real else lambda: None

    def communicate(self, make=StreamCommunicator):
        """Let the models of this process communicate on streams."""
        # A plan puts its own in this place while it runs.
        _communicators._instead = lambda _: make(self.streams)

    def mesh(self, *shape):
        """Return a mesh; without a shape, one axis of all ranks."""
        return init_device_mesh(self.kind, shape or (dist.get_world_size(),))

    @contextmanager
    def group_of_one(self, make=Issuing):
        """Make this process the only rank of a group: NCCL on a device, beside gloo."""
        self.communicate(make)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        backend = "cpu:gloo,cuda:nccl" if self.is_real else "gloo"
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            leave_group()

    @contextmanager
    def refused_waits(self):
        """Raise where the host waits for the device."""
        if self.is_real:
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            if self.is_real:
                torch.cuda.set_sync_debug_mode("default")

    def seconds(self, step):
        """Return how long ``step`` takes, with all that it queues."""
        self.synchronize()
        start = time.perf_counter()
        step()
        self.synchronize()
        return time.perf_counter() - start

    def allocated(self):
        """Return the bytes of all tensors."""
        return torch.cuda.memory_allocated() if self.is_real else 1

    def peak(self, step):
        """Return the most bytes that tensors have while ``step`` runs."""
        if self.is_real:
            torch.cuda.reset_peak_memory_stats()
        step()
        self.synchronize()
        return torch.cuda.max_memory_allocated() if self.is_real else 2


@functools.cache
def pool():
    made = RankPool()
    atexit.register(made.close)
    return made


def on_ranks(device, function, num_ranks, *args):
    """Call ``function(device, *args)`` on gloo ranks that share the device; return the results."""
    timeout = 80 if device.is_real else 290
    return pool().run(_run, num_ranks, function, device.kind, args, timeout=timeout)


def _run(function, kind, args):
    warnings.simplefilter("default")  # the first use of a device has some
    device = Device(kind)
    device.communicate()
    return function(device, *args)
