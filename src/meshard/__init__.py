"""meshard: shard a PyTorch model over a device mesh, one call per layer."""

import importlib
from typing import TYPE_CHECKING, Any

# fmt: off
__all__ = [
    "CPUOffloadPolicy", "CommLedger", "DataParallelMeshDims", "FSDPModule",
    "GradientReductionHandle", "GradientSync", "MixedPrecisionPolicy", "OffloadPolicy",
    "OverlappedOptimizer", "OwnerOptimizer", "ReplicateModule", "ShardPlacementResult",
    "ShardedGradScaler", "UnshardHandle", "clip_grad_norm_", "describe",
    "finalize_gradients", "fully_shard", "fully_shard_units", "get_total_norm", "gradient_sync",
    "local_optimizer", "materialize", "microbatches", "no_sync", "offload", "onload",
    "overlap_optimizer", "owner_optimizer", "pending_gradients", "register_fsdp_forward_method",
    "register_reduce_hook", "replicate", "share_comm_ctx", "uneven_batches",
    "unsharded_params",
]
# fmt: on

_SUBPACKAGES = ("checkpoint", "planning")  # imported at their first use

if TYPE_CHECKING:
    from meshard._public import *

    __version__: str
else:  # mypy would take a __getattr__ for the type of every name

    def __getattr__(name: str) -> Any:
        """Import what takes time: all that needs torch, a subpackage, or the metadata.

        So ``python -m meshard.checkpoint list``, which reads JSON alone, need not wait for torch.
        """
        if name in __all__:
            public = importlib.import_module("meshard._public")
            globals().update({each: getattr(public, each) for each in __all__})
            return globals()[name]
        if name in _SUBPACKAGES:
            return importlib.import_module(f"meshard.{name}")
        if name != "__version__":
            raise AttributeError(f"module 'meshard' has no attribute {name!r}")
        from importlib import metadata  # noqa: PLC0415  # it takes time, and few ask for the version

        try:
            return metadata.version("meshard")
        except metadata.PackageNotFoundError:  # run from its sources
            return "0+unknown"


def __dir__() -> list[str]:
    """List what users use, and not the modules that hold it."""
    shown = ["__all__", "__doc__", "__file__", "__name__", "__path__", "__version__"]
    return [*__all__, *_SUBPACKAGES, *shown]
