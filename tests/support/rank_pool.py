"""A pool of processes, on which tests run functions as ranks."""

import functools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.rank_worker import Call, Reply, serve

NUM_WORKERS = 4
START_SECONDS = 120.0
GRACE_SECONDS = 3.0  # after the first failure, for the other ranks to report theirs

# torch 2.11 and 2.12 keep every mesh, and so the threads of its gloo groups: thousands (measured).
RENEWED_AFTER = 50 if torch.__version__ < "2.13" else sys.maxsize  # calls


class RankError(AssertionError):
    """A rank failed or did not answer in time; the text names it and holds its traceback."""


class RankPool:
    """Processes that are started at the first call and take part in every later one.

    A process group of the wanted size is made for each call and destroyed after it. Where a rank
    fails so that others hang, all processes are killed, and the next call starts new ones.
    """

    def __init__(self) -> None:
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._store: dist.TCPStore | None = None
        self._num_calls = 0
        self._dumps = tempfile.TemporaryDirectory(prefix="ranks")

    def run(
        self,
        fn: Callable[..., Any],
        num_ranks: int,
        *args: Any,
        timeout: float = 60,
        seed: int = 0,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on ranks 0 to ``num_ranks - 1`` and return the results.

        gloo is initialised as the default group, warnings are errors, random numbers are seeded
        alike, and environment variables that start with ``MESHARD_`` are passed on.

        Args:
            fn: A function at the top of a module. Like ``args`` and the results, it is pickled.
            num_ranks: World size, 1 to ``NUM_WORKERS``.
            timeout: Seconds for the call.
            seed: For torch's default generator.

        Raises:
            RankError: A rank raised, died, or did not answer in time.
        """
        if not 1 <= num_ranks <= NUM_WORKERS:
            raise ValueError(f"num_ranks must be in [1, {NUM_WORKERS}], got {num_ranks}.")
        payload = pickle.dumps((fn, args, kwargs))
        try:
            if self._num_calls % RENEWED_AFTER == 0:
                self.kill()
            self._start()
            self._num_calls += 1
            call = Call(
                payload=payload,
                number=self._num_calls,
                world_size=num_ranks,
                timeout=timeout,
                seed=seed,
                sys_path=list(sys.path),
                environ={k: v for k, v in os.environ.items() if k.startswith("MESHARD_")},
            )
            for connection in self._connections[:num_ranks]:
                connection.send_bytes(pickle.dumps(call))
            replies = self._receive(num_ranks, timeout)
        except BaseException:  # an interrupt leaves ranks in the middle of a call
            self.kill()
            raise
        return _results(replies)

    def close(self) -> None:
        """Let the processes end; kill the ones that do not."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(5)
        self.kill()
        self._dumps.cleanup()

    def kill(self) -> None:
        """Kill the pool's own processes."""
        for process in self._processes:
            process.kill()
            process.join()
            process.close()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections, self._store = [], [], None

    def _start(self) -> None:
        if self._processes and all(process.is_alive() for process in self._processes):
            return
        self.kill()
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=True
        )
        # Forked from one process that has imported torch: new ranks start at once after a failure.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed.tensor"])
        for rank in range(NUM_WORKERS):
            ours, theirs = context.Pipe()
            arguments = (rank, theirs, self._store.port, str(self._dump_path(rank)))
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        for rank, connection in enumerate(self._connections):
            if not connection.poll(START_SECONDS):
                raise RankError(f"rank {rank} did not start within {START_SECONDS:g} s.")
            connection.recv_bytes()

    def _receive(self, num_ranks: int, timeout: float) -> list[Reply | None]:
        """Return the replies by rank, None where none came; kill the pool if it is not whole."""
        replies: list[Reply | None] = [None] * num_ranks
        is_clean = [False] * num_ranks
        deadline = time.monotonic() + timeout
        while not all(is_clean):
            pending = [c for c, done in zip(self._connections, is_clean, strict=False) if not done]
            ready = wait(pending, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = self._connections.index(connection)
                try:
                    message = connection.recv_bytes()
                except (EOFError, OSError):
                    is_clean[rank] = True  # it died and says no more
                    self._processes[rank].join(1)
                    code = self._processes[rank].exitcode
                    error = f"the process died with exit code {code}"
                    stack = self._dump_path(rank).read_text()
                    reply = Reply(result=None, error=error, trace=stack)
                    replies[rank] = replies[rank] or reply
                else:
                    if replies[rank] is None:
                        replies[rank] = pickle.loads(message)
                    else:
                        is_clean[rank] = True
                reply_now = replies[rank]
                if reply_now is not None and reply_now.error:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if not all(is_clean):
            replies = self._with_stacks(replies, timeout)
            self.kill()
        return replies

    def _with_stacks(self, replies: Sequence[Reply | None], timeout: float) -> list[Reply | None]:
        """Ask the ranks that did not answer where they are."""
        silent = [rank for rank, reply in enumerate(replies) if reply is None]
        for rank in silent:
            pid = self._processes[rank].pid
            if pid is not None and self._processes[rank].is_alive():
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)
        failed = any(reply is not None and reply.error for reply in replies)
        error = "still ran when another rank failed" if failed else f"no answer in {timeout:g} s"
        filled = list(replies)
        for rank in silent:
            stack = self._dump_path(rank).read_text()
            filled[rank] = Reply(result=None, error=error, trace=f"It was here:\n{stack}")
        return filled

    def _dump_path(self, rank: int) -> Path:
        return Path(self._dumps.name) / f"rank{rank}.txt"


@functools.cache
def shared_pool() -> RankPool:
    """Return the pool of this test run, which conftest closes."""
    return RankPool()


def _results(replies: Sequence[Reply | None]) -> list[Any]:
    failed = [(r, reply) for r, reply in enumerate(replies) if reply is not None and reply.error]
    if failed:
        # The ranks that fail first have the longest story; a lost connection is an echo of it.
        failed.sort(key=lambda item: _is_echo(item[1]))
        text = "; ".join(f"rank {rank} of {len(replies)}: {r.error[:400]}" for rank, r in failed)
        traces = "\n".join(f"---- rank {rank} ----\n{reply.trace}" for rank, reply in failed)
        raise RankError(f"{text}\n{traces}")
    results = []
    for reply in replies:
        assert reply is not None
        assert reply.result is not None
        results.append(pickle.loads(reply.result))
    return results


def _is_echo(reply: Reply) -> bool:
    text = reply.error
    return "Connection" in text or "still ran" in text or "no answer" in text
