"""meshard: shard a PyTorch model over a device mesh, one call per layer."""

from meshard.accumulation import (
    PendingGradients,
    finalize_gradients,
    gradient_sync,
    microbatches,
    no_sync,
    pending_gradients,
    uneven_batches,
)
from meshard.api import fully_shard
from meshard.auto_wrap import fully_shard_units
from meshard.clipping import clip_grad_norm_, get_total_norm
from meshard.diagnostics import CommLedger, describe
from meshard.fsdp_module import (
    FSDPModule,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from meshard.grad_scaler import ShardedGradScaler
from meshard.initialization import materialize
from meshard.offloading import Offloaded, offload, onload
from meshard.optim.flat import FlatOptimizer, flat_optimizer
from meshard.optim.overlap import OverlappedOptimizer, overlap_optimizer
from meshard.policies import (
    AllGather,
    Comm,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    GradientSync,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ReduceScatter,
    ShardPlacementResult,
)
from meshard.reduce_hooks import WireCompression, register_reduce_hook
from meshard.replication import ReplicateModule, replicate
from meshard.weights import unsharded_params

# fmt: off
__all__ = [
    "AllGather", "CPUOffloadPolicy", "Comm", "CommLedger", "DataParallelMeshDims", "FSDPModule",
    "FlatOptimizer", "GradientSync", "MixedPrecisionPolicy", "OffloadPolicy", "Offloaded",
    "OverlappedOptimizer", "PendingGradients", "ReduceScatter", "ReplicateModule",
    "ShardPlacementResult", "ShardedGradScaler", "UnshardHandle", "WireCompression",
    "clip_grad_norm_", "describe", "finalize_gradients", "flat_optimizer", "fully_shard",
    "fully_shard_units", "get_total_norm", "gradient_sync", "materialize", "microbatches",
    "no_sync", "offload", "onload", "overlap_optimizer", "pending_gradients",
    "register_fsdp_forward_method", "register_reduce_hook", "replicate", "share_comm_ctx",
    "uneven_batches", "unsharded_params",
]
# fmt: on
