"""Functions on ranks that are threads of this process."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from tests.support.rendezvous import RankStoppedError, Rendezvous
from tests.support.thread_group import BACKEND, enter_thread
from tests.support.torch_testing import (
    ThreadLocalWorld,
    meshes_of_other_threads_differ,
    swap_world,
)


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
    rendezvous = Rendezvous(num_ranks, timeout)
    store = dist.HashStore()
    results: list[Any] = [None] * num_ranks
    failures: list[tuple[int, BaseException]] = []  # in the order in which they happened

    def run_rank(rank: int) -> None:
        torch.set_num_threads(1)  # a setting of the thread under OpenMP
        enter_thread(rendezvous, rank)
        try:
            dist.init_process_group(BACKEND, rank=rank, world_size=num_ranks, store=store)
            results[rank] = fn(*args, **kwargs)
            rendezvous.finish(rank)
        except BaseException as error:
            failures.append((rank, error))
            rendezvous.stop()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    threads = [
        threading.Thread(target=run_rank, args=(rank,), name=f"rank{rank}", daemon=True)
        for rank in range(num_ranks)
    ]
    with _one_world_per_thread():
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(timeout + 10)
        finally:
            rendezvous.stop()
            for thread in threads:
                thread.join(5)
    _raise_first(failures, num_ranks)
    if any(thread.is_alive() for thread in threads):
        raise ThreadRankError(f"ranks still run after {timeout:g} s, outside of a collective.")
    left = rendezvous.not_waited()
    if left and not may_leave_unwaited:
        text = "; ".join(f"rank {rank}: {', '.join(labels)}" for rank, labels in left.items())
        raise ThreadRankError(f"started and never waited for: {text}.")
    return results


def _raise_first(failures: list[tuple[int, BaseException]], num_ranks: int) -> None:
    own = [(r, error) for r, error in failures if not isinstance(error, RankStoppedError)]
    if not own:
        return
    rank, first = own[0]
    text = f"rank {rank} of {num_ranks}: {type(first).__name__}: {first}"
    for other, error in own[1:]:
        text += f"\nalso rank {other}: {type(error).__name__}: {str(error)[:200]}"
    raise ThreadRankError(text) from first


@contextmanager
def _one_world_per_thread() -> Iterator[None]:
    old_world = swap_world(ThreadLocalWorld())
    # init_process_group installs an excepthook that prints the rank, one on top of the other.
    old_hook = sys.excepthook
    # Without this all threads share one registry of groups by name, which functional collectives
    # (DTensor) look their group up in. There is no public name for it.
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        with meshes_of_other_threads_differ():
            yield
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        sys.excepthook = old_hook
        swap_world(old_world)
