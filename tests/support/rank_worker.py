"""One spawned rank, from its start to the end of the test run."""

import faulthandler
import gc
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

LOCALS_WIDTH = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One function to run; sent to every rank that takes part."""

    payload: bytes  # pickled (fn, args, kwargs); unpickled when `sys_path` is in place
    number: int
    world_size: int
    timeout: float
    seed: int
    sys_path: list[str]
    environ: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came of a call on one rank."""

    result: bytes | None  # pickled; None where the call failed
    error: str = ""
    trace: str = ""


def serve(rank: int, connection: Connection, store_port: int, dump_path: str) -> None:
    """Run calls that come through ``connection`` until it is closed."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch  # here, not at the top: after the variables that it reads
    import torch.distributed as dist
    import torch.distributed.tensor

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
            call: Call = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        reply = _answer(rank, call, store)
        connection.send_bytes(pickle.dumps(reply))
        if not dist.is_initialized():
            # The group was not made, and torch has counted it here only: names of later groups
            # would differ from those of the other ranks, which would wait. The pool starts anew.
            return
        # Only now: where a rank failed, leaving the group may block on the ranks that did not.
        leave_group()
        del call, reply
        gc.collect()
        if len(sys.modules) != num_modules:
            # Modules stay: walking theirs again would be most of what an empty call costs.
            gc.freeze()
            num_modules = len(sys.modules)
        connection.send_bytes(b"clean")


def _answer(rank: int, call: Call, store: Any) -> Reply:
    import torch
    import torch.distributed as dist

    sys.path[:] = call.sys_path
    for name in [name for name in os.environ if name.startswith("MESHARD_")]:
        del os.environ[name]
    os.environ.update(call.environ)
    torch.manual_seed(call.seed)
    torch.set_default_dtype(torch.float32)
    try:
        fn, args, kwargs = pickle.loads(call.payload)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"call{call.number}", store),
            rank=rank,
            world_size=call.world_size,
            # Later than the pool gives up: its stacks say more than a collective that timed out.
            timeout=timedelta(seconds=call.timeout + 30),
        )
        # Connected together too: a rank that fails at once would close what others still open.
        dist.barrier()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = _run(fn, args, kwargs)
        # Leave together: who goes early breaks connections that others still use.
        dist.barrier()
        return Reply(result=result)
    except BaseException as error:
        return Reply(
            result=None,
            error=f"{type(error).__name__}: {error}",
            trace="".join(traceback.format_exception(error)) + _locals_of_test_frame(error),
        )


def _run(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    # Plain pickle, not multiprocessing's: tensors go as bytes, no file descriptors are shared.
    return pickle.dumps(fn(*args, **kwargs))


def leave_group() -> None:
    """Destroy the process group, and drop the meshes that DTensor's caches keep.

    A mesh of the next call may equal one of this call, but its groups have other names: DTensor
    would answer with the mesh that it has seen first. And the threads of gloo of a group that is
    kept go on polling: with some dozens of them, tests take several times as long.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, _collective_utils, _redistribute

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
    ours = [f for f in frames if "site-packages" not in f.f_code.co_filename]
    if not ours:
        return ""
    lines = [f"Variables in {ours[-1].f_code.co_name}:"]
    for name, value in ours[-1].f_locals.items():
        try:
            text = " ".join(repr(value).split())
        except Exception as failure:
            text = f"<repr failed: {failure}>"
        lines.append(f"    {name} = {text[:LOCALS_WIDTH]}")
    return "\n".join(lines) + "\n"
