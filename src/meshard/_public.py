"""What ``import meshard`` offers. It is imported at the first use of a name: that needs torch."""

from meshard.accumulation import (
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
    GradientReductionHandle,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from meshard.grad_scaler import ShardedGradScaler
from meshard.initialization import materialize
from meshard.offloading import offload, onload
from meshard.optim.local import local_optimizer
from meshard.optim.overlap import OverlappedOptimizer, overlap_optimizer
from meshard.optim.owner import OwnerOptimizer, owner_optimizer
from meshard.policies import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    GradientSync,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacementResult,
)
from meshard.reduce_hooks import register_reduce_hook
from meshard.replication import ReplicateModule, replicate
from meshard.weights import unsharded_params

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
