"""meshard: shard a PyTorch model over a device mesh, one call per layer."""

from meshard.accumulation import PendingGradients as PendingGradients
from meshard.accumulation import finalize_gradients as finalize_gradients
from meshard.accumulation import gradient_sync as gradient_sync
from meshard.accumulation import microbatches as microbatches
from meshard.accumulation import no_sync as no_sync
from meshard.accumulation import pending_gradients as pending_gradients
from meshard.accumulation import uneven_batches as uneven_batches
from meshard.api import fully_shard as fully_shard
from meshard.auto_wrap import fully_shard_units as fully_shard_units
from meshard.clipping import clip_grad_norm_ as clip_grad_norm_
from meshard.clipping import get_total_norm as get_total_norm
from meshard.diagnostics import CommLedger as CommLedger
from meshard.diagnostics import describe as describe
from meshard.fsdp_module import FSDPModule as FSDPModule
from meshard.fsdp_module import UnshardHandle as UnshardHandle
from meshard.fsdp_module import register_fsdp_forward_method as register_fsdp_forward_method
from meshard.fsdp_module import share_comm_ctx as share_comm_ctx
from meshard.grad_scaler import ShardedGradScaler as ShardedGradScaler
from meshard.initialization import materialize as materialize
from meshard.offloading import Offloaded as Offloaded
from meshard.offloading import offload as offload
from meshard.offloading import onload as onload
from meshard.optim.flat import FlatOptimizer as FlatOptimizer
from meshard.optim.flat import flat_optimizer as flat_optimizer
from meshard.optim.overlap import OverlappedOptimizer as OverlappedOptimizer
from meshard.optim.overlap import overlap_optimizer as overlap_optimizer
from meshard.policies import AllGather as AllGather
from meshard.policies import Comm as Comm
from meshard.policies import CPUOffloadPolicy as CPUOffloadPolicy
from meshard.policies import DataParallelMeshDims as DataParallelMeshDims
from meshard.policies import GradientSync as GradientSync
from meshard.policies import MixedPrecisionPolicy as MixedPrecisionPolicy
from meshard.policies import OffloadPolicy as OffloadPolicy
from meshard.policies import ReduceScatter as ReduceScatter
from meshard.policies import ShardPlacementResult as ShardPlacementResult
from meshard.reduce_hooks import WireCompression as WireCompression
from meshard.reduce_hooks import register_reduce_hook as register_reduce_hook
from meshard.replication import ReplicateModule as ReplicateModule
from meshard.replication import replicate as replicate
from meshard.weights import unsharded_params as unsharded_params

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "Comm",
    "CommLedger",
    "DataParallelMeshDims",
    "FSDPModule",
    "FlatOptimizer",
    "GradientSync",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Offloaded",
    "OverlappedOptimizer",
    "PendingGradients",
    "ReduceScatter",
    "ReplicateModule",
    "ShardPlacementResult",
    "ShardedGradScaler",
    "UnshardHandle",
    "WireCompression",
    "clip_grad_norm_",
    "describe",
    "finalize_gradients",
    "flat_optimizer",
    "fully_shard",
    "fully_shard_units",
    "get_total_norm",
    "gradient_sync",
    "materialize",
    "microbatches",
    "no_sync",
    "offload",
    "onload",
    "overlap_optimizer",
    "pending_gradients",
    "register_fsdp_forward_method",
    "register_reduce_hook",
    "replicate",
    "share_comm_ctx",
    "uneven_batches",
    "unsharded_params",
]
