"""The parameters of one unit, as the engine sees them."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from meshard._comm.communicator import Communicator, GatherInFlight, Rows
from meshard._comm.host_copies import HostCopies
from meshard._mesh.layout import FlatLayout
from meshard._mesh.mesh_info import MeshInfo
from meshard._params.sharded_param import ShardedParam, TensorTag, UnitParam, tag_tensor
from meshard._params.storage import MemoryLocation
from meshard._torch.dtensor import is_placed_like, local_of

GradientHook = Callable[[torch.Tensor], None]
GradientHookMaker = Callable[[int], GradientHook]  # for the parameter with this index


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Mesh, device and memory of the parameters of one unit."""

    mesh_info: MeshInfo
    device: torch.device
    host: MemoryLocation | None = None  # for shards, gradients and optimizer state, if offloaded

    @property
    def location(self) -> MemoryLocation:
        """The memory that shards live in."""
        return self.host if self.host is not None else MemoryLocation(self.device)


class UnitParams(abc.ABC):
    """Sharded and unsharded parameters of one unit, with the memory behind them.

    Attributes:
        params: In the order of the module.
        spec: Mesh and device.
        label: Name of the unit for errors; known once its root is sharded.
        comm: Shared by all units of a root; known once that is sharded.
        layout: How the shards lie, or would lie, in one buffer.
        compute_dtypes: Of the unsharded parameters, and of their gradients.
        is_one_dtype: Whether ``compute_dtypes`` are all the same.
        host_copies: Copies between host and device; None unless shards live in host memory.
        is_partly_meta: Whether some shards have memory and others are on the meta device.
        is_offloaded: Whether ``meshard.offload`` has moved the shards away.
        has_custom_gather: Whether some shards have ``fsdp_pre_all_gather``.
    """

    params: Sequence[UnitParam]
    spec: GroupSpec
    label: str = ""
    comm: Communicator
    layout: FlatLayout
    compute_dtypes: list[torch.dtype]
    is_one_dtype: bool
    host_copies: HostCopies | None = None
    is_partly_meta: bool = False
    is_offloaded: bool = False
    has_custom_gather: bool = False

    def _take_dtypes(self, compute_dtypes: list[torch.dtype]) -> None:
        self.compute_dtypes = compute_dtypes
        self.is_one_dtype = len(set(compute_dtypes)) == 1

    @abc.abstractmethod
    def start_gather(self, comm: Communicator) -> GatherInFlight:
        """Start gathering the shards.

        **Collective:** the shard group. **Stream:** the comm stream for gathers.
        **Lifetime:** the shards must not be edited until the gather is waited for.
        """

    @abc.abstractmethod
    def fill_unsharded(self, gathered: Rows, *, comes_again: bool) -> None:
        """Allocate the unsharded parameters and fill them.

        Args:
            gathered: ``[shard_count, ...]``, as a tensor or as a list of rows.
            comes_again: Whether the same may be gathered again without ``start_gather``.
        """

    @abc.abstractmethod
    def free_unsharded(self) -> None:
        """Free the memory of the unsharded parameters."""

    @property
    @abc.abstractmethod
    def version(self) -> int:
        """A number that grows with every edit of a shard, direct or through its local tensor."""

    @abc.abstractmethod
    def version_unless_replaced(self) -> int | None:
        """Return ``version``, or None if ``take_replacements`` may have something to do."""

    @abc.abstractmethod
    def take_replacements(self) -> bool:
        """Adopt parameters and local tensors that users have put in the place of ours.

        Returns:
            Whether ``rebuild`` must be called.

        Raises:
            RuntimeError: A parameter was replaced by something that cannot be its shard.
        """

    @abc.abstractmethod
    def rebuild(self) -> None:
        """Build storage and hooks anew for the adopted parameters, which must be resharded."""

    @abc.abstractmethod
    def for_copy(self, params: Sequence[UnitParam], gradient_hook: GradientHookMaker) -> UnitParams:
        """Return storage for ``params``, deep copies of these parameters in a copied module."""

    @abc.abstractmethod
    def move(self, location: MemoryLocation | None) -> torch.Tensor:
        """Start moving the shards, which are resharded; parameters stay the same objects.

        Args:
            location: None: back to where they are gathered from.

        Returns:
            The old flat shard. **Lifetime:** keep it until the copy is over.
        """

    @abc.abstractmethod
    def check_materialised(self) -> None:
        """Raise a RuntimeError if shards are on the meta device, or not where they are gathered."""


def take_replaced_shards(
    params: Sequence[ShardedParam],
    locals_: Sequence[torch.Tensor],
    unit: str,
    unsharded_type: type[torch.Tensor] | None,
) -> bool:
    """Adopt what owners hold instead of a sharded parameter as its shard.

    Args:
        params: Of one unit.
        locals_: The local tensor that each was made over.
        unit: Label of the unit, for errors.
        unsharded_type: Class of the unsharded tensors to accept and shard; None: that of the shard.

    Returns:
        Whether a parameter or a local tensor was replaced.

    Raises:
        RuntimeError: A parameter was replaced by something that is not its shard.
    """
    replaced = False
    for param, own in zip(params, locals_, strict=True):
        replacements = param.replacements()
        if replacements:
            # Owners of a tied parameter may hold different ones: the first stands for all.
            new = _as_shard(param, replacements[0], unit, unsharded_type or type(own))
            for old in (param.sharded, *replacements):
                if old is not new:
                    tag_tensor(old, TensorTag.REPLACED_LATER, param.fqn)
            param.sharded = new
            replaced = True
        elif local_of(param.sharded) is not own:
            replaced = True
    return replaced


def _as_shard(
    param: ShardedParam, new: nn.Parameter, unit: str, unsharded_type: type[torch.Tensor]
) -> nn.Parameter:
    """Return ``new`` itself, or its shard if it is an unsharded tensor."""
    expected = param.sharded
    if not isinstance(new, nn.Parameter):
        raise RuntimeError(
            f"parameter {param.fqn!r} of unit {unit!r} was replaced by a "
            f"{type(new).__name__} that is no nn.Parameter, as torch.func.functional_call does "
            "for one call; a sharded module would not compute with it. Make that call inside "
            "meshard.unsharded_params(module), where the module is an ordinary one."
        )
    if new.shape == expected.shape:
        if type(new) is unsharded_type:
            shard = param.shard_of(new).clone()
            return nn.Parameter(shard, requires_grad=new.requires_grad)
        if is_placed_like(new, expected):
            return new
    raise RuntimeError(
        f"parameter {param.fqn!r} of unit {unit!r} was replaced after fully_shard by a "
        f"{type(new).__name__} of shape {tuple(new.shape)}; assign an nn.Parameter of shape "
        f"{tuple(expected.shape)} with the same values on every rank, or a DTensor with its "
        "mesh and placements, or replace it before fully_shard."
    )


def check_not_meta(params: Sequence[ShardedParam], unit: str, device: torch.device) -> None:
    """Raise a RuntimeError if a shard, which should live on ``device``, is on the meta device."""
    for param in params:
        if local_of(param.sharded).is_meta:
            raise RuntimeError(
                f"parameter {param.fqn!r} of unit {unit!r} is still on the meta device; "
                f"call to_empty(device={device.type!r}) on the root module (shards "
                f"live on {device.type!r}) and initialise its parameters "
                "(reset_parameters, or load_state_dict) before the first forward."
            )


def register_gradient_hook(unsharded_param: torch.Tensor, hook: GradientHook) -> None:
    """Call ``hook`` once the gradient of an unsharded parameter is complete."""
    if unsharded_param.is_floating_point():
        flag = unsharded_param.requires_grad
        unsharded_param.requires_grad_(True)  # torch accepts a hook on such tensors only
        unsharded_param.register_post_accumulate_grad_hook(hook)
        unsharded_param.requires_grad_(flag)
