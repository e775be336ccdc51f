"""Parameters of a unit in one flat shard.

Every parameter has two faces: a shard at rest, which is a view of the unit's flat buffer, and a
whole tensor in use. ``to_empty``, ``to`` and ``load_state_dict(assign=True)`` put other tensors
under the shards, or other parameters into the modules; that is noticed by identity at the next use.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from meshard._comm.all_gather import GatherInFlight, GatherPlan
from meshard._comm.communicator import Communicator, Rows
from meshard._comm.host_copies import HostCopies
from meshard._mesh.layout import FlatLayout
from meshard._mesh.mesh_info import MeshInfo
from meshard._params.sharded_param import (
    ShardedParam,
    TensorTag,
    tag_tensor,
    version_unless_replaced,
)
from meshard._params.storage import META, FlatShard, MemoryLocation, UnshardedMemoryPool
from meshard._torch.dtensor import is_placed_like, local_of, move_local, set_local


def take_replacements(
    params: Sequence[ShardedParam],
    locals_: Sequence[torch.Tensor],
    unit: str,
    unsharded_type: type[torch.Tensor] | None,
) -> bool:
    """Make what owners hold instead of a parameter its shard.

    Args:
        params: Of one group.
        locals_: The local tensor that each was made over.
        unit: Its name, for errors.
        unsharded_type: Of which class a whole parameter must be to be cut into shards; None: that
            of its shard.

    Returns:
        Whether there was anything, or a local tensor is another one.

    Raises:
        RuntimeError: A parameter was replaced by something that is not its shard.
    """
    replaced = False
    for param, own in zip(params, locals_, strict=True):
        replacements = param.replacements()
        if replacements:
            # Of a tied parameter each owner may hold another one: the first stands for all.
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
    """Return ``new`` itself, or its shard if it is a whole tensor."""
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


def check_not_meta(params: Sequence[ShardedParam], unit: str, location: torch.device) -> None:
    """Raise if a shard has no memory yet. Shards of this group live on ``location``."""
    for param in params:
        if local_of(param.sharded).device.type == "meta":
            raise RuntimeError(
                f"parameter {param.fqn!r} of unit {unit!r} is still on the meta device; "
                f"call to_empty(device={location.type!r}) on the root module (shards "
                f"live on {location.type!r}) and initialise its parameters "
                "(reset_parameters, or load_state_dict) before the first forward."
            )


GradientHook = Callable[[torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Where a group lives."""

    mesh_info: MeshInfo
    device: torch.device
    host: MemoryLocation | None = None  # shards, gradients and optimizer state live there, if given

    @property
    def location(self) -> MemoryLocation:
        """Where shards live."""
        return self.host if self.host is not None else MemoryLocation(self.device)


class FlatParams:
    """The two faces of a unit's parameters, with the memory behind them.

    Args:
        params: In the order of the module; their faces are made here.
        shards: This rank's shard of each, of any device; copied.
        requires_grad: One flag per parameter.
        spec: Mesh and device.
        param_dtype: dtype of the whole floating-point parameters; None: as they are.
        gradient_hook: Makes the hook that hears of a whole gradient of parameter ``index``.
    """

    def __init__(
        self,
        params: list[ShardedParam],
        shards: Sequence[torch.Tensor],
        requires_grad: Sequence[bool],
        *,
        spec: GroupSpec,
        param_dtype: torch.dtype | None,
        gradient_hook: Callable[[int], GradientHook],
    ) -> None:
        self.params = params
        self.spec = spec
        self.label = ""  # the unit's name; known once its root is sharded
        self.comm: Communicator  # shared by all units of a root
        self.host_copies = HostCopies(spec.device) if spec.host is not None else None
        self._own_location = self._location = spec.location
        self._param_dtype = param_dtype
        self._gradient_hook = gradient_hook
        self._is_partly_meta = False
        self._make_storage(shards)
        for param, local, flag in zip(params, self.storage.locals, requires_grad, strict=True):
            param.make_sharded(local, spec.mesh_info, requires_grad=flag)
        self._make_unsharded()

    def _make_storage(self, shards: Sequence[torch.Tensor]) -> None:
        layouts = [param.layout for param in self.params]
        devices = {shard.device.type for shard in shards}
        location = META if "meta" in devices else self._location
        layout = FlatLayout.build(layouts, [shard.dtype for shard in shards])
        self.storage = FlatShard(layout, self.spec.mesh_info.shard_rank, location)
        self.storage.fill(shards)
        self._is_meta = self.storage.buffer.is_meta

    def _make_unsharded(self) -> None:
        sharded_of_all = self.storage.layout
        self.compute_dtypes = [
            self._param_dtype if self._param_dtype and own.dtype.is_floating_point else own.dtype
            for own in self.storage.locals
        ]
        self.is_one_dtype = len(set(self.compute_dtypes)) == 1
        on_wire = FlatLayout.build(sharded_of_all.params, self.compute_dtypes, sharded_of_all.order)
        self.plan = GatherPlan(sharded_of_all, on_wire)
        unsharded_params = self._make_unsharded_params(
            [param.sharded.requires_grad for param in self.params]
        )
        for param, unsharded_param in zip(self.params, unsharded_params, strict=True):
            param.unsharded = unsharded_param

    def _make_unsharded_params(self, flags: Sequence[bool]) -> list[nn.Parameter]:
        """Return whole faces, and have them filled from now on."""
        # A module first run under inference_mode must be able to train later.
        with torch.inference_mode(False), torch.no_grad():
            is_meta = self.storage.buffer.is_meta
            device = META.device if is_meta else self.spec.device
            self.unsharded = UnshardedMemoryPool(self.plan.on_wire, device)
            unsharded_params = self.unsharded.as_parameters(flags)
        self.plan.bind(self.unsharded.views, self.unsharded)
        unsharded_params = [
            param.as_used(unsharded_param)
            for param, unsharded_param in zip(self.params, unsharded_params, strict=True)
        ]
        for param, unsharded_param in zip(self.params, unsharded_params, strict=True):
            tag_tensor(unsharded_param, TensorTag.UNSHARDED, param.fqn)
        self._hooks = _hook(unsharded_params, self._gradient_hook)
        return unsharded_params

    def take_replacements(self) -> bool:
        """Note what stands in the place of our tensors; whether that calls for ``rebuild``.

        Raises:
            RuntimeError: A parameter was replaced by something that is not its shard.
        """
        return take_replacements(self.params, self.storage.locals, self.label, nn.Parameter)

    def rebuild(self) -> None:
        """Move what ``take_replacements`` found into a flat buffer. Nothing may be whole."""
        locals_ = [local_of(param.sharded) for param in self.params]
        for param, local in zip(self.params, locals_, strict=True):
            if local.device.type not in ("meta", self._location.device.type):
                raise RuntimeError(
                    f"parameter {param.fqn!r} of unit {self.label!r} was moved to {local.device}, "
                    f"but {self._why_at_location}; move it back before use."
                )
        # What has memory already must not be dropped because the rest has none yet.
        self._is_partly_meta = len({local.is_meta for local in locals_}) > 1
        if self._is_partly_meta:
            return
        if self.host_copies is not None:
            self.host_copies.wait()  # the old buffer may still be read
        self._make_storage(locals_)
        for param, own in zip(self.params, self.storage.locals, strict=True):
            set_local(param.sharded, own)
            tag_tensor(param.sharded, TensorTag.SHARD, param.fqn)
        self._make_unsharded()
        for param in self.params:
            param.install(param.sharded)

    def for_copy(
        self, params: list[ShardedParam], gradient_hook: Callable[[int], GradientHook]
    ) -> FlatParams:
        """Return tensors of their own for ``params``, whose sharded faces have been copied."""
        copied = copy.copy(self)
        copied.params = params
        copied._gradient_hook = gradient_hook
        copied.host_copies = None if self.host_copies is None else HostCopies(self.spec.device)
        copied.rebuild()
        return copied

    @property
    def _why_at_location(self) -> str:
        kind = self._location.device.type
        if self.is_offloaded:
            return f"meshard.offload has put it on {kind!r} until meshard.onload(module)"
        if self.host_copies is not None:
            return f"its CPUOffloadPolicy keeps it on {kind!r}, as in to_empty(device={kind!r})"
        return f"its mesh is on {kind!r} (meshard.offload moves a whole model to the host and back)"

    @property
    def is_offloaded(self) -> bool:
        """Whether the shards are not where the unit gathers them from."""
        return self._location is not self._own_location

    def move(self, location: MemoryLocation | None) -> torch.Tensor:
        """Start moving the flat shard to ``location``; parameters stay the same objects.

        Nothing may be whole.

        Args:
            home: None: back to where it is gathered from.

        Returns:
            The old flat shard, to be kept until the copy is over.
        """
        old, self._location = self.storage, self._own_location if location is None else location
        if old.buffer.is_meta:
            return old.buffer
        self.storage = FlatShard(old.layout, self.spec.mesh_info.shard_rank, self._location)
        self.storage.buffer.copy_(old.buffer, non_blocking=True)
        for param, own in zip(self.params, self.storage.locals, strict=True):
            move_local(param.sharded, own)
        return old.buffer

    # --- on the way to whole and back ------------------------------------------------------

    def start_gather(self, comm: Communicator) -> GatherInFlight:
        """See ``UnitParams.start_gather``."""
        buffer, segments = self.storage.buffer, self.storage.segments
        if self.host_copies is not None:
            buffer = self.host_copies.fetch(buffer, comm)
            segments = self.storage.layout.split(buffer)
        return self.plan.start(
            buffer, segments, comm=comm, group=self.spec.mesh_info.shard_group, label=self.label
        )

    def fill_unsharded(self, gathered: Rows, *, comes_again: bool) -> None:
        """See ``UnitParams.fill_unsharded``."""
        self.unsharded.allocate()
        self.plan.copy_out(gathered)

    def free_unsharded(self) -> None:
        """See ``UnitParams.free_unsharded``."""
        self.unsharded.free()

    @property
    def can_leave(self) -> bool:
        """See ``UnitParams.can_leave``."""
        return True

    def leave_whole(self, joining_hook: Callable[[int], GradientHook], *, stays: bool) -> None:
        """See ``UnitParams.leave_whole``."""
        views = self.unsharded.views
        for handle in self._hooks:
            handle.remove()
        unsharded_params = self._make_unsharded_params(
            [param.unsharded.requires_grad for param in self.params]
        )
        left = [
            param.leave(unsharded_param)
            for param, unsharded_param in zip(self.params, unsharded_params, strict=True)
        ]
        _hook(left, joining_hook)
        if stays:
            self.unsharded.allocate()
            with torch.inference_mode(False), torch.no_grad():
                for view, before in zip(self.unsharded.views, views, strict=True):
                    view.copy_(before)

    @property
    def layout(self) -> FlatLayout:
        """See ``UnitParams.layout``."""
        return self.storage.layout

    # --- shards ----------------------------------------------------------------------------

    def version_unless_replaced(self) -> int | None:
        """See ``UnitParams.version_unless_replaced``."""
        return version_unless_replaced(self.params, self.storage.locals)

    @property
    def version(self) -> int:
        """Grows with every edit of a shard, as a DTensor or through its local tensor."""
        version = 0
        for param in self.params:
            version += param.sharded._version + local_of(param.sharded)._version
        return version

    @property
    def is_partly_meta(self) -> bool:
        """Whether some shards have memory and others have none."""
        return self._is_partly_meta

    def check_materialised(self) -> None:
        """Raise if a shard has no memory yet, or not where it is gathered from."""
        if self.is_offloaded:
            raise RuntimeError(
                f"unit {self.label!r} is on the host since meshard.offload(module); call "
                "meshard.onload(module) before the next forward or unshard."
            )
        if self._is_meta or self._is_partly_meta:
            check_not_meta(self.params, self.label, self._location.device)


def _hook(
    unsharded_params: Sequence[nn.Parameter], hook_of: Callable[[int], GradientHook]
) -> list[RemovableHandle]:
    """Have hooks hear of the gradients of ``unsharded_params``, by their places."""
    handles = []
    for index, unsharded_param in enumerate(unsharded_params):
        if unsharded_param.is_floating_point():
            flag = unsharded_param.requires_grad
            unsharded_param.requires_grad_(
                True
            )  # a hook can only be put on a tensor that requires grad
            handles.append(unsharded_param.register_post_accumulate_grad_hook(hook_of(index)))
            unsharded_param.requires_grad_(flag)
    return handles


class UnitParams(Protocol):
    """The two faces of a group's parameters: ``FlatParams`` or ``SubclassParams``."""

    params: list[ShardedParam]
    spec: GroupSpec
    label: str
    comm: Communicator

    @property
    def host_copies(self) -> HostCopies | None:
        """How shards travel that live in host memory."""

    @property
    def compute_dtypes(self) -> list[torch.dtype]:
        """Of the whole parameters, and of their gradients."""

    @property
    def is_one_dtype(self) -> bool:
        """Whether these are all the same."""

    @property
    def layout(self) -> FlatLayout:
        """How the shards would lie, or do lie, in one buffer."""

    @property
    def version(self) -> int:
        """Grows with every edit of a shard."""

    def version_unless_replaced(self) -> int | None:
        """Return ``version``; None if there may be something to ``take_replacements``."""

    @property
    def is_partly_meta(self) -> bool:
        """Whether some shards have memory and others have none."""

    @property
    def is_offloaded(self) -> bool:
        """Whether the shards are not where they are gathered from."""

    def start_gather(self, comm: Communicator) -> GatherInFlight:
        """Start gathering the shards.

        **Collective:** the shard group. **Stream:** the gather lane.
        **Lifetime:** the shards must not be edited until the gather is waited for.
        """

    def fill_unsharded(self, gathered: Rows, *, comes_again: bool) -> None:
        """Have the whole parameters in memory of their own.

        Args:
            gathered: ``[shard_count, ...]``, as a tensor or as a list of rows.
            comes_again: The same may be gathered again without ``start_gather``.
        """

    def free_unsharded(self) -> None:
        """Give that memory back."""

    @property
    def can_leave(self) -> bool:
        """Whether ``leave_whole`` is possible."""

    def leave_whole(self, joining_hook: Callable[[int], GradientHook], *, stays: bool) -> None:
        """Let the whole parameters belong to those who hold them, and have others from now on.

        Args:
            joining_hook: Makes the hook for the gradients that the old ones of index ``i`` get.
            stays: The others have memory and values, as the old ones do.
        """

    def take_replacements(self) -> bool:
        """Note what stands in the place of our tensors; whether that calls for ``rebuild``.

        Raises:
            RuntimeError: A parameter was replaced by something that is not its shard.
        """

    def rebuild(self) -> None:
        """Take over what ``take_replacements`` found. Nothing may be whole."""

    def for_copy(
        self, params: list[ShardedParam], gradient_hook: Callable[[int], GradientHook]
    ) -> UnitParams:
        """Return tensors of their own for ``params``, whose sharded faces have been copied."""

    def move(self, location: MemoryLocation | None) -> torch.Tensor:
        """Start moving the shards; None: back to where they are gathered from."""

    def check_materialised(self) -> None:
        """Raise if a shard has no memory yet, or not where it is gathered from."""
