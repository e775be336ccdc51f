"""Policies: validated values that a user passes to ``fully_shard`` and its setters.

They subclass the policies of ``torch.distributed.fsdp`` where torch has them, so that
``isinstance(policy, torch.distributed.fsdp.MixedPrecisionPolicy)`` holds. Torch's own policy
objects are accepted wherever these are.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy as TorchCPUOffloadPolicy
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import OffloadPolicy as TorchOffloadPolicy
from torch.distributed.tensor import Replicate, Shard

# --- checks of arguments ---------------------------------------------------------------------

Item = TypeVar("Item")


def check_bool(name: str, value: object) -> None:
    """Raise a TypeError unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {value!r}.")


def check_positive(name: str, value: object) -> None:
    """Raise unless ``value`` is a number above zero."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    if not value > 0:
        raise ValueError(f"{name} must be positive, got {value!r}.")


def list_of(
    name: str, values: Iterable[Item], allowed: type[Any] | tuple[type[Any], ...], what: str
) -> list[Item]:
    """Return ``values`` as a list; raise a TypeError unless they are all ``allowed``."""
    if not isinstance(values, Iterable) or isinstance(values, torch.Tensor):
        raise TypeError(f"{name} must be {what}, got {type(values).__name__}.")
    listed = list(values)
    for each in listed:
        if not isinstance(each, allowed):
            raise TypeError(f"{name} must be {what}, got one with a {type(each).__name__} in it.")
    return listed


# --- policies --------------------------------------------------------------------------------


class GradientSync(enum.Enum):
    """How far the gradients of one backward are reduced.

    In every schedule, a backward with ``FULL`` leaves in ``.grad`` the sum over all microbatches
    and ranks, divided by the divide factor.
    """

    NONE = "none"
    """No collective: unsharded gradients are added up on each rank."""

    REDUCE_SCATTER = "reduce_scatter"
    """Reduce inside the shard group only.

    On a 1D mesh of shards there are no replicas, so this sets ``.grad``. But only ``FULL`` ends the
    window, and so lets ``overlap_optimizer`` step.
    """

    FULL = "full"
    """Reduce inside the shard group and across the replicas; ``.grad`` is set."""

    def __init__(self, how: str) -> None:
        #: Whether gradients are reduced; if not, they are added up on each rank.
        self.reduces = how != "none"
        #: Whether gradients are reduced across the replicas too, after the shard group.
        self.over_replicas = how == "full"
        #: Whether the last backward ends the window: nothing is pending then, optimizers step.
        self.ends_window = how == "full"


@dataclass(frozen=True)
class MixedPrecisionPolicy(TorchMixedPrecisionPolicy):
    """The dtypes in which a unit computes, reduces and accumulates.

    Args:
        param_dtype: The dtype of the unsharded parameters in forward and backward, and of the
            all-gather. None: the dtype of each parameter. Integer parameters are never cast.
        reduce_dtype: The dtype in which gradients are sent. None: the dtype of the unsharded
            gradients (the widest one where they differ).
        output_dtype: The dtype to which floating-point outputs of forward are cast. None: no cast.
        cast_forward_inputs: Cast floating-point inputs of forward to ``param_dtype``.
        accumulate_dtype: The dtype in which gradients are added up across ranks, where the backend
            allows it, and across microbatches before they are put into ``.grad``, which has the
            dtype of the shard. None: the wider of float32 and the dtypes of those parameters that
            are not frozen. float16 may overflow: gradients are added up in it before they are
            divided by the number of ranks.
        buffer_dtype: The dtype in which floating-point buffers are kept, updated and saved from now
            on. None: the dtype that they have. Integer and complex buffers are never cast.
        param_dtype_override_fn: Called once with each parameter when its unit is made. If it
            returns the parameter's own dtype, modules compute with the parameter in that dtype; if
            None or ``param_dtype``, the parameter is cast as usual. The function must return
            the same on every rank. Inputs are cast to ``param_dtype`` in any case, so the module
            must cast what it multiplies by the parameter.

    >>> MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32).param_dtype
    torch.bfloat16
    """

    accumulate_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    # FSDP2's policy has this field from torch 2.15 on, with this name, and by keyword only.
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(
        default=None, kw_only=True
    )

    def __post_init__(self) -> None:
        for name, dtype in vars(self).items():
            if not name.endswith("_dtype") or dtype is None:
                continue
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"{name} must be a torch.dtype or None, got {dtype!r}.")
            if not dtype.is_floating_point:
                raise ValueError(f"{name} must be a floating-point dtype, got {dtype}.")
        for name in ("reduce_dtype", "accumulate_dtype"):
            check_can_be_added(name, getattr(self, name))
        check_bool("cast_forward_inputs", self.cast_forward_inputs)
        override = self.param_dtype_override_fn
        if override is not None and not callable(override):
            raise TypeError(f"param_dtype_override_fn must be callable or None, got {override!r}.")

    def keeps_dtype(self, fqn: str, param: nn.Parameter) -> bool:
        """Return whether ``param_dtype_override_fn`` leaves a parameter in its own dtype."""
        override = self.param_dtype_override_fn
        chosen = None if override is None else override(param)
        if chosen is None or chosen is self.param_dtype:
            return False
        if chosen is not param.dtype:
            raise ValueError(
                f"param_dtype_override_fn returned {chosen!r} for parameter {fqn!r}; return its "
                f"own dtype, {param.dtype}, to leave it in that, or None or param_dtype, "
                f"{self.param_dtype}, to compute in that."
            )
        return True


def check_can_be_added(name: str, dtype: torch.dtype | None) -> None:
    """Raise unless gradients can be added up in ``dtype``, which torch does not do in 8 bits."""
    if dtype is not None and (not dtype.is_floating_point or dtype.itemsize < 2):
        raise ValueError(
            f"{name} must be a floating-point dtype of at least 16 bits, got {dtype}: torch "
            "does not add narrower ones."
        )


@dataclass  # torch's is not frozen, and a frozen dataclass cannot inherit from it
class OffloadPolicy(TorchOffloadPolicy):
    """No offload: shards stay on the device of the mesh."""


@dataclass
class CPUOffloadPolicy(TorchCPUOffloadPolicy, OffloadPolicy):
    """Offload of shards, their gradients and optimizer state to host memory.

    ``pin_memory``: page-lock the host shards, so that copies to the device are asynchronous.
    """


@dataclass(frozen=True)
class ShardPlacementResult:
    """A result of ``shard_placement_fn`` that places one parameter on a mesh of its own.

    Its gradient is divided by the number of ranks of that mesh, unless
    ``set_gradient_divide_factor`` says otherwise.
    """

    placement: Shard | Replicate
    mesh: DeviceMesh


@dataclass(frozen=True)
class DataParallelMeshDims:
    """The names of the data-parallel axes of a larger mesh.

    Args:
        shard: Axis name, or names that are flattened into one, over which parameters are sharded.
            None: parameters are not sharded, and gradients are all-reduced.
        replicate: Axis name, or names, over which parameters are replicated.

    >>> DataParallelMeshDims(shard=("dp", "cp"), replicate="nodes").shard
    ('dp', 'cp')
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        named: list[str] = []
        for names in (self.shard, self.replicate):
            named += [names] if isinstance(names, str) else names or ()
        if not named or len(set(named)) < len(named):
            raise ValueError(f"{self} must name one axis or more, and none of them twice.")


class Comm(Protocol):
    """The allocator of the memory that a collective reads and writes."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised tensor. **Stream:** called on the stream that fills it."""


class AllGather(Comm, Protocol):
    """A custom all-gather: see ``FSDPModule.set_custom_all_gather``."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        async_op: bool = False,
    ) -> Work | None:
        """Fill ``output_tensor [ranks * n]`` with every rank's ``input_tensor [n]``, in order.

        With ``async_op`` (on CPU tensors) it may return a Work that completes later.
        """


class ReduceScatter(Comm, Protocol):
    """A custom reduce-scatter: see ``FSDPModule.set_custom_reduce_scatter``."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Work | None:
        """Sum part ``r`` of all ``input_tensor [ranks * n]`` into ``output_tensor [n]`` of rank r.

        ``op`` is always SUM: meshard divides by itself. It may round what it sends: it gets
        gradients only. Which parameters were used goes beside them, in a small all-reduce.
        """
