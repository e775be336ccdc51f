"""One rank of one run: runs the script, and writes its record also if the script fails.

The arguments are the name of the run, the folder for records, the number of steps, ``module`` or
``file``, and the script with its own arguments.
"""

import inspect
import os
import pickle
import random
import resource
import runpy
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

import meshard
from meshard._compare.record import Record, Recorder, has_device
from meshard._optimizer_hooks import watch_optimizers
from meshard.compat import patch_torch

_SIGNATURE = inspect.signature(DistributedDataParallel.__init__)


class ReplicatedDDP(DistributedDataParallel):
    """A module around a replicated one that answers what trainers ask of a DDP."""

    find_unused_parameters, static_graph = False, True  # so trainers set nothing up
    require_backward_grad_sync = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        nn.Module.__init__(self)
        given = _SIGNATURE.bind(self, *args, **kwargs).arguments
        module, mesh, group = given["module"], given.get("device_mesh"), given.get("process_group")
        if mesh is None and group is not None:
            mesh = DeviceMesh.from_group(group, next(module.parameters()).device.type)
        dtypes = given.get("mixed_precision") or meshard.MixedPrecisionPolicy()
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        self.module = meshard.replicate(
            module,
            mesh,
            bucket_cap_mb=given.get("bucket_cap_mb") or 25.0,
            gradient_as_bucket_view=given.get("gradient_as_bucket_view", False),
            mp_policy=meshard.MixedPrecisionPolicy(dtypes.param_dtype, dtypes.reduce_dtype),
            ignored_params={param for name, param in module.named_parameters() if name in ignored},
            broadcast_buffers=given.get("forward_sync_buffers", given.get("broadcast_buffers"))
            is not False,
            init_sync=given.get("init_sync", True),
        )
        self.__dict__["no_sync"] = self.module.no_sync
        self.__dict__["register_comm_hook"] = self.module.register_comm_hook

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def train(self, mode: bool = True) -> Any:
        return nn.Module.train(self, mode)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; scripts set this one instead of entering ``no_sync``."""
        if name == "require_backward_grad_sync":
            self.module.set_requires_gradient_sync(value)
        super().__setattr__(name, value)


def _constant(value: Any) -> property:
    """Return a property that keeps its value, whatever is assigned."""
    return property(lambda _: value, lambda *_: None)


def _compute_in(dtype: torch.dtype) -> None:
    """Let units of torch's fully_shard compute and reduce in a dtype, whatever the script says."""
    for name, value in (("param_dtype", dtype), ("reduce_dtype", dtype), ("output_dtype", None)):
        setattr(MixedPrecisionPolicy, name, _constant(value))


def _run_script(kind: str, script: str) -> None:
    random.seed(0)
    torch.manual_seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if kind == "module":
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(script).resolve().parent)
        runpy.run_path(script, run_name="__main__")


def _traceback(error: BaseException) -> str:
    """Return a traceback without the frames that lead to the script."""
    trace = traceback.TracebackException.from_exception(error)
    own = (__file__, runpy.__file__, "<frozen runpy>")
    trace.stack[:] = [each for each in trace.stack if each.filename not in own]
    return "".join(trace.format()).rstrip()


def main() -> None:
    """Run the script as one rank of one run."""
    run, folder, num_steps, kind, *sys.argv[:] = sys.argv[1:]
    os.dup2(2, 1)  # the report alone goes to stdout
    unit_classes: tuple[type, ...] = (FSDPModule, DistributedDataParallel)
    if run == "meshard":
        unit_classes = (meshard.FSDPModule, ReplicatedDDP)
        patch_torch()
        for module in (nn.parallel, nn.parallel.distributed):
            setattr(module, "DistributedDataParallel", ReplicatedDDP)  # noqa: B010  # mypy
        watch_optimizers()  # its hooks come before ours, and complete gradients
    elif run == "float64":
        unit_classes = (FSDPModule,)  # DDP has no such policy
        _compute_in(torch.float64)
    record = Record(run, int(os.environ["RANK"]))
    Recorder(record, int(num_steps), unit_classes)
    try:
        _run_script(kind, sys.argv[0])
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            record.error, record.failed_at = _traceback(error), time.time()
            raise
    finally:
        if not has_device():
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            record.peak_bytes = peak * (1 if sys.platform == "darwin" else 1024)
        Path(folder, f"{record.rank}.pickle").write_bytes(pickle.dumps(record))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
