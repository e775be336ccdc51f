"""Use ``on_threads`` or ``run_threads`` for numerics: ranks that are threads of this process."""

import gc
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

from tests.support.rank_pool import said_by
from tests.support.thread_group import (
    BACKEND,
    RankStoppedError,
    Rendezvous,
    create,
    enter_thread,
)

# In the place of that of torch's module. The name of the backend matters: meshes of two threads are
# different only if it is called that.
dist.Backend._plugins["THREADED"] = dist.Backend._BackendPlugin(create, True)

if torch.__version__ < "2.12":
    ThreadLocalWorld.comms = []  # asked for, and forgotten here
    # Two threads inside it at the same time end the process (measured); DTensor calls it often.
    torch._C._ensureCUDADeviceGuardSet()
    torch._C._ensureCUDADeviceGuardSet = lambda: None


class ThreadRankError(RuntimeError):
    """A rank failed; its own exception is the cause."""


def run_threads(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout: float = 60,
    may_leave_unwaited: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on ``num_ranks`` threads and return the results by rank.

    Every thread has its own default process group, so ``dist.get_rank()``, collectives, subgroups
    and ``init_device_mesh("cpu", ...)`` work as in a process. Arguments are shared by all ranks:
    copy what a rank changes. So is torch's random state: draw from a ``torch.Generator``.

    Args:
        fn: Runs on every rank; may be a closure.
        num_ranks: World size.
        timeout: Seconds until a rank that still waits raises ``TimeoutError``.
        may_leave_unwaited: Accept collectives that were started and never waited for.

    Raises:
        ThreadRankError: A rank raised, the ranks are in a deadlock, or a rank has not waited for
            a collective that it started. The first exception is the cause.
    """
    __tracebackhide__ = True
    rendezvous = Rendezvous(num_ranks, timeout)
    store = dist.HashStore()
    results: list[Any] = [None] * num_ranks
    failures: list[tuple[int, BaseException]] = []  # in the order in which they happened
    is_done = [threading.Event() for _ in range(num_ranks)]
    may_end = [threading.Event() for _ in range(num_ranks)]

    def run_rank(rank: int) -> None:
        torch.set_num_threads(1)  # a setting of the thread under OpenMP
        enter_thread(rendezvous, rank)
        try:
            dist.init_process_group(BACKEND, rank=rank, world_size=num_ranks, store=store)
            results[rank] = fn(*args, **kwargs)
            rendezvous.finish(rank)
        except RankStoppedError:
            pass
        except BaseException as error:
            failures.append((rank, error))
            rendezvous.stop()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            is_done[rank].set()
            may_end[rank].wait()

    threads = [
        threading.Thread(target=run_rank, args=(rank,), name=f"rank{rank}", daemon=True)
        for rank in range(num_ranks)
    ]
    # No garbage collection meanwhile: in a rank's thread it may free a hook of torch, which waits
    # for the GIL. If torch holds a mutex there that another rank waits for, all threads hang.
    was_collecting = gc.isenabled()
    with _one_world_per_thread():
        try:
            gc.disable()
            for thread in threads:
                thread.start()
            for event in is_done:
                event.wait(timeout + 10)
        finally:
            rendezvous.stop()
            # One after the other: torch may hang if two threads that used DTensors end at once.
            for thread, event in zip(threads, may_end, strict=True):
                event.set()
                thread.join(5)
            if was_collecting:
                gc.enable()
    if failures:
        told = [f"rank {r} of {num_ranks}: {said_by(e)}" for r, e in failures]
        raise ThreadRankError("\nalso ".join(told)) from failures[0][1]
    if any(thread.is_alive() for thread in threads):
        raise ThreadRankError(f"ranks still run after {timeout:g} s, outside of a collective.")
    left = {rank: labels for rank, labels in rendezvous.not_waited.items() if labels}
    if left and not may_leave_unwaited:
        text = "; ".join(f"rank {rank}: {', '.join(labels)}" for rank, labels in left.items())
        raise ThreadRankError(f"started and never waited for: {text}.")
    return results


class _Threading:
    """The threading module, but for idents that no two threads share, not even one by one.

    A mesh holds its thread's ident, which Python gives again to later threads. DTensor's caches
    would then answer with the mesh of an earlier rank, with its coordinates and groups.
    """

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
def _one_world_per_thread() -> Iterator[None]:
    # Without this all threads share one registry of groups by name, which functional collectives
    # (DTensor) look their group up in. There is no public name for it.
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        with (
            # torch's own table: its fields differ between versions.
            mock.patch("torch.distributed.distributed_c10d._world", ThreadLocalWorld()),
            mock.patch.object(device_mesh, "threading", _threading),
            # init_process_group installs one that prints the rank, one on top of the other.
            mock.patch.object(sys, "excepthook", sys.excepthook),
        ):
            yield
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
