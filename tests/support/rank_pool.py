"""Use ``on_ranks``, or the fixture ``run_ranks``, to run a function on processes with gloo."""

import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import reprlib
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, _collective_utils, _redistribute

NUM_WORKERS = 4
START_SECONDS = 120.0
PRELOADED = [
    "torch.distributed.tensor.parallel",
    "torch.distributed.optim",
    "torch._dynamo",
    "hypothesis",
    "pytest",
    "meshard.checkpoint",
    "meshard.planning",
]
GRACE_SECONDS = 3.0  # after the first failure, for the other ranks to report theirs

# torch 2.11 and 2.12 keep every mesh, and so the threads of its gloo groups: thousands (measured).
RENEWED_AFTER = 50 if torch.__version__ < "2.13" else sys.maxsize  # calls


class RankError(AssertionError):
    """A rank failed or did not answer in time; the text names it and holds its traceback."""


class Reply(NamedTuple):
    """What came of a call on one rank."""

    result: Any = None
    error: str = ""
    trace: str = ""


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
        self, fn: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 60, **kwargs: Any
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on ranks 0 to ``num_ranks - 1`` and return the results.

        gloo is initialised as the default group, warnings are errors, random numbers are seeded
        alike, and environment variables that start with ``MESHARD_`` are passed on.

        Args:
            fn: A function at the top of a module. Like ``args`` and the results, it is pickled.
            num_ranks: World size, 1 to ``NUM_WORKERS``.
            timeout: Seconds for the call.

        Raises:
            RankError: A rank raised, died, or did not answer in time.
        """
        __tracebackhide__ = True
        if not 1 <= num_ranks <= NUM_WORKERS:
            raise ValueError(f"num_ranks must be in [1, {NUM_WORKERS}], got {num_ranks}.")
        environ = {k: v for k, v in os.environ.items() if k.startswith("MESHARD_")}
        number = self._num_calls + 1
        payload = pickle.dumps((fn, args, kwargs))  # to be loaded when the path is in place
        call = pickle.dumps((number, num_ranks, timeout, environ, sys.path, payload))
        try:
            if self._num_calls % RENEWED_AFTER == 0:
                self.kill()
            self._start()
            self._num_calls = number
            for connection in self._connections[:num_ranks]:
                connection.send_bytes(call)
            replies = self._receive(num_ranks, timeout)
        except BaseException:  # an interrupt leaves ranks in the middle of a call
            self.kill()
            raise
        failed = [(rank, reply) for rank, reply in sorted(replies.items()) if reply.error]
        if not failed:
            return [replies[rank].result for rank in range(num_ranks)]
        # The ranks that fail first have the longest story; a lost connection is an echo of it.
        echoes = ("Connection", "still ran", "no answer")
        failed.sort(key=lambda item: any(each in item[1].error for each in echoes))
        text = "; ".join(f"rank {rank} of {num_ranks}: {r.error[:400]}" for rank, r in failed)
        raise RankError("\n".join([text, *(f"---- rank {r} ----\n{e.trace}" for r, e in failed)]))

    def close(self) -> None:
        """Let the processes end; kill the ones that do not."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(5)
        self.kill()
        self._dumps.cleanup()

    def kill(self) -> None:
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
        # Forked from one process that has imported these: new ranks start at once after a failure.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        for rank in range(NUM_WORKERS):
            ours, theirs = context.Pipe()
            arguments = (rank, theirs, self._store.port, str(self._dump_path(rank)))
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        for rank, connection in enumerate(self._connections):
            if not connection.poll(START_SECONDS):
                raise RankError(f"rank {rank} did not start within {START_SECONDS:g} s.")
            connection.recv_bytes()

    def _receive(self, num_ranks: int, timeout: float) -> dict[int, Reply]:
        """Return the replies by rank; kill the pool if a rank does not tell that it is clean."""
        replies: dict[int, Reply] = {}
        pending = {self._connections[rank]: rank for rank in range(num_ranks)}
        deadline = time.monotonic() + timeout
        while pending and (ready := wait(list(pending), max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                rank = pending[connection]
                try:
                    message = connection.recv_bytes()
                except (EOFError, OSError):  # it says no more
                    self._processes[rank].join(1)
                    error = f"the process died with exit code {self._processes[rank].exitcode}"
                    replies.setdefault(rank, Reply(error=error, trace=self._stack_of(rank)))
                if rank in replies:
                    del pending[connection]
                else:
                    replies[rank] = pickle.loads(message)
                if replies[rank].error:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if pending:
            silent = [rank for rank in range(num_ranks) if rank not in replies]
            for process in (self._processes[rank] for rank in silent):
                if process.is_alive():
                    os.kill(process.pid, signal.SIGUSR1)  # it writes where it is
            time.sleep(0.5)
            failed = any(reply.error for reply in replies.values())
            error = (
                "still ran when another rank failed" if failed else f"no answer in {timeout:g} s"
            )
            for rank in silent:
                replies[rank] = Reply(error=error, trace=f"It was here:\n{self._stack_of(rank)}")
            self.kill()
        return replies

    def _dump_path(self, rank: int) -> Path:
        return Path(self._dumps.name) / f"rank{rank}.txt"

    def _stack_of(self, rank: int) -> str:
        return self._dump_path(rank).read_text()


@functools.cache
def shared_pool() -> RankPool:
    """Return the pool of this test run, which conftest closes."""
    return RankPool()


# --- in the processes -----------------------------------------------------------------------------


def _serve(rank: int, connection: Connection, store_port: int, dump_path: str) -> None:
    """Run calls that come through ``connection`` until it is closed."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dump = open(dump_path, "w")  # noqa: SIM115 (lives as long as the process)
    faulthandler.enable(file=dump)  # a crash too says where it was
    faulthandler.register(signal.SIGUSR1, file=dump, all_threads=True)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
    gc.freeze()  # what is imported now is not walked by every collection below
    num_modules = len(sys.modules)
    connection.send_bytes(b"ready")
    while True:
        try:
            call = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_answer(rank, call, store))
        if not dist.is_initialized():
            # The group was not made, and torch has counted it here only: names of later groups
            # would differ from those of the other ranks, which would wait. The pool starts anew.
            return
        # Only now: where a rank failed, leaving the group may block on the ranks that did not.
        leave_group()
        del call
        _save_coverage()
        gc.collect()
        if len(sys.modules) != num_modules:
            # Modules stay: walking theirs again would be most of what an empty call costs.
            gc.freeze()
            num_modules = len(sys.modules)
        connection.send_bytes(b"clean")


def _save_coverage() -> None:
    """Write what ``coverage`` has measured, if it runs: the pool may be killed at the next call."""
    module = sys.modules.get("coverage")
    running = module.Coverage.current() if module else None
    if running is not None:
        running.save()


def _answer(rank: int, call: bytes, store: dist.Store) -> bytes:
    number, world_size, timeout, environ, sys.path[:], payload = pickle.loads(call)
    for name in [name for name in os.environ if name.startswith("MESHARD_")]:
        del os.environ[name]
    os.environ.update(environ)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    try:
        fn, args, kwargs = pickle.loads(payload)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"call{number}", store),
            rank=rank,
            world_size=world_size,
            # Later than the pool gives up: its stacks say more than a collective that timed out.
            timeout=timedelta(seconds=timeout + 30),
        )
        # Connected together too: a rank that fails at once would close what others still open.
        dist.barrier()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # Plain pickle, not multiprocessing's: it shares no file descriptors of tensors.
            reply = pickle.dumps(Reply(fn(*args, **kwargs)))
        # Leave together: who goes early breaks connections that others still use.
        dist.barrier()
        return reply
    except BaseException as error:
        trace = "".join(traceback.format_exception(error)) + _locals_of_test_frame(error)
        return pickle.dumps(Reply(error=said_by(error), trace=trace))


def said_by(error: BaseException) -> str:
    """Return type and text of ``error``, or the line that raised it if it has no text."""
    text = str(error)
    if not text:
        *_, last = traceback.extract_tb(error.__traceback__)
        text = f"{Path(last.filename).name}:{last.lineno}: {last.line}"
    return f"{type(error).__name__}: {text}"


def leave_group() -> None:
    """Destroy the process group, and drop the meshes that DTensor's caches keep.

    A mesh of the next call may equal one of this call, but its groups have other names: DTensor
    would answer with the mesh that it has seen first. And the threads of gloo of a group that is
    kept go on polling: with some dozens of them, tests take several times as long.
    """
    dist.destroy_process_group()
    propagator = DTensor._op_dispatcher.sharding_propagator
    # torch.distributed.tensor.debug has a function for some of them, and needs numpy.
    for cached in (
        propagator.propagate_op_sharding,
        getattr(propagator, "_propagate_tensor_meta_cached", None),
        _collective_utils.MeshTopoInfo.build_from_mesh,
        _redistribute._gen_transform_infos,
    ):
        if cached is not None:
            cached.cache_clear()
    if hasattr(_redistribute, "clear_redistribute_planner_cache"):
        _redistribute.clear_redistribute_planner_cache()
    torch._C._clear_DTensor_sharding_propagator_cache()


def _locals_of_test_frame(error: BaseException) -> str:
    """Describe the variables of the innermost frame that is not library code."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    *_, ours = [each for each in frames if "site-packages" not in each.f_code.co_filename]
    shown = reprlib.Repr()  # which does not raise
    shown.maxother = shown.maxstring = 160
    lines = [f"    {name} = {shown.repr(value)}" for name, value in ours.f_locals.items()]
    return "\n".join([f"Variables in {ours.f_code.co_name}:", *lines, ""])
