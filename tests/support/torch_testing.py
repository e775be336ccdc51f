"""Parts of torch's own test support.

``fake``: importing torch's module registers the backend that pretends to communicate.
``ThreadLocalWorld``: torch keeps the table of process groups in one global; ranks that are threads
need one table each. The fields of that table differ between torch versions, and this class always
has the fields of the torch that is installed, which a class of ours would not.
"""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.distributed.multi_threaded_pg import (
    ThreadLocalWorld,
)

if torch.__version__ < "2.12":
    ThreadLocalWorld.comms = []  # asked for, and forgotten here
    # Two threads inside it at the same time end the process (measured); DTensor calls it often.
    torch._C._ensureCUDADeviceGuardSet()
    torch._C._ensureCUDADeviceGuardSet = lambda: None

__all__ = [
    "FakeStore",
    "LocalGroup",
    "ThreadLocalWorld",
    "meshes_of_other_threads_differ",
    "swap_world",
    "take_threaded_backend",
]


class LocalGroup(dist.ProcessGroup):
    """A process group without a network: what torch asks of a group that is made in Python."""

    backend = ""

    def __init__(self, name: str, group_rank: int, size: int) -> None:
        super().__init__(group_rank, size)
        self._name, self._group_rank, self._size = name, group_rank, size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._group_rank

    def getBackendName(self) -> str:
        return self.backend

    @property
    def pg_name(self) -> str:
        return self._name

    @property
    def group_name(self) -> str:
        return self._name

    def shutdown(self) -> None:
        """Nothing to give back."""

    def abort(self) -> None:
        """Nothing to give back."""


def swap_world(world: object) -> object:
    """Make ``world`` torch's table of process groups and return the one that was in place."""
    old = distributed_c10d._world
    distributed_c10d._world = world
    return old


def take_threaded_backend(create: Callable[..., dist.ProcessGroup]) -> None:
    """Let ``create`` make the groups of the backend ``threaded``, which torch's module registered.

    The name matters: meshes of two threads are different only if the backend is called that.
    """
    dist.Backend._plugins["THREADED"] = dist.Backend._BackendPlugin(create, True)


class _Threading:
    """The threading module, but for idents that no two threads share, not even one by one."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._mine = threading.local()

    def get_ident(self) -> int:
        if not hasattr(self._mine, "number"):
            self._mine.number = next(self._numbers)
        return self._mine.number

    def __getattr__(self, name: str) -> object:
        return getattr(threading, name)


_threading = _Threading()


@contextmanager
def meshes_of_other_threads_differ() -> Iterator[None]:
    """Keep meshes of threads that have ended from being equal to new ones.

    A mesh holds its thread's ident, which Python gives again to later threads. DTensor's caches
    would then answer with the mesh of an earlier rank, with its coordinates and groups.
    """
    with mock.patch.object(device_mesh, "threading", _threading):
        yield
