"""What can parameters that communicate together do?

They are gathered (``start_unshard``, ``finish_unshard``) and let go (``reshard``). When that
happens is decided elsewhere. Gradients are in ``gradient_state``.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from meshard._comm.all_gather import GatherInFlight, GatherPlan, start_all_gather
from meshard._comm.communicator import Communicator, Lane
from meshard._geometry.layout import FlatLayout
from meshard._geometry.mesh_roles import MeshRoles
from meshard._params.dtensors import local_of, set_local
from meshard._params.shard_storage import ShardStorage
from meshard._params.sharded_param import ShardedParam
from meshard._params.unsharded_storage import UnshardedStorage
from meshard._runtime.optimizer_steps import watch_optimizers

GradientHook = Callable[[torch.Tensor], None]


class Residence(enum.Enum):
    """Where the values of a group are at present."""

    SHARDED = enum.auto()
    GATHERING = enum.auto()
    UNSHARDED = enum.auto()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a group lives."""

    roles: MeshRoles
    device: torch.device


class Accumulated(Protocol):
    """Gradients on their way into ``.grad``: see ``gradient_state``."""

    @property
    def pending(self) -> str:
        """What has not been done to them yet, in words; empty if nothing is pending."""

    def clear(self, indices: frozenset[int]) -> None:
        """Forget those of some parameters."""


@dataclass(slots=True)
class _Kept:
    """The rows of the gathered unit that this rank keeps between forward and backward."""

    rows: torch.Tensor
    group: dist.ProcessGroup


class ParamGroup:
    """The parameters of one unit.

    Args:
        params: In the order of the module; their faces are made here.
        shards: This rank's shard of each, of any device; copied.
        requires_grad: One flag per parameter.
        place: Mesh and device.
        param_dtype: dtype of the whole floating-point parameters; None: as they are.
        gradient_hook: Makes the hook that hears of a whole gradient of parameter ``index``.
    """

    def __init__(
        self,
        params: list[ShardedParam],
        shards: Sequence[torch.Tensor],
        requires_grad: Sequence[bool],
        *,
        place: Place,
        param_dtype: torch.dtype | None,
        gradient_hook: Callable[[int], GradientHook],
    ) -> None:
        self.params = params
        self.place = place
        self.label = ""  # the unit's name; known once its root is sharded
        self.comm: Communicator  # shared by all units of a root
        self.accumulated: weakref.ref[Accumulated] | None = None  # gradients of these parameters
        self.residence = Residence.SHARDED
        self.num_trainable = 0
        self.is_leftover = False  # whole since an earlier forward
        self.num_steps = 0  # that optimizers have taken: see optimizer_steps
        self._param_dtype = param_dtype
        self._gradient_hook = gradient_hook
        self._in_flight: GatherInFlight | None = None
        self._kept: _Kept | None = None
        self._whole_version = -1
        self._is_showing_unsharded = False
        self._make_storage(shards)
        for param, local, flag in zip(params, self.storage.locals, requires_grad, strict=True):
            param.make_sharded(local, place.roles, requires_grad=flag)
        self._make_unsharded()

    def _make_storage(self, shards: Sequence[torch.Tensor]) -> None:
        layouts = [param.layout for param in self.params]
        devices = {shard.device.type for shard in shards}
        device = torch.device("meta") if "meta" in devices else self.place.device
        layout = FlatLayout.build(layouts, [shard.dtype for shard in shards])
        self.storage = ShardStorage(layout, self.place.roles.shard_rank, device)
        self.storage.fill(shards)

    def _make_unsharded(self) -> None:
        at_rest = self.storage.layout
        self.compute_dtypes = [
            self._param_dtype if self._param_dtype and own.dtype.is_floating_point else own.dtype
            for own in self.storage.locals
        ]
        on_wire = FlatLayout.build(at_rest.params, self.compute_dtypes, at_rest.order)
        self._plan = GatherPlan(at_rest, on_wire)
        # A module first run under inference_mode must be able to train later.
        with torch.inference_mode(False), torch.no_grad():
            self._whole = UnshardedStorage(on_wire, self.storage.buffer.device)
            flags = [param.sharded.requires_grad for param in self.params]
            faces = self._whole.as_parameters(flags)
        self._plan.bind(self._whole.views)
        for index, (param, face) in enumerate(zip(self.params, faces, strict=True)):
            param.unsharded = face
            if face.is_floating_point():
                face.requires_grad_(True)  # a hook can only be put on a tensor that requires grad
                face.register_post_accumulate_grad_hook(self._gradient_hook(index))
                face.requires_grad_(flags[index])
        self._whole_version = -1
        watch_optimizers(self, [param.sharded for param in self.params])

    # --- edits made from outside -----------------------------------------------------------

    def adopt_edits(self) -> None:
        """Take over parameters and storage that were replaced since the last use.

        ``to_empty``, ``to``, ``load_state_dict(assign=True)`` put other tensors under our
        parameters, or other parameters into the module; both are noticed by identity.

        Raises:
            RuntimeError: A parameter was replaced by something that is not its shard.
        """
        replaced = False
        for param, own in zip(self.params, self.storage.locals, strict=True):
            stranger = param.stranger()
            if stranger is not None:
                self._check_replacement(param, stranger)
                param.sharded = stranger
                replaced = True
            elif local_of(param.sharded) is not own:
                replaced = True
        if replaced:
            self._rebuild()

    def _check_replacement(self, param: ShardedParam, new: nn.Parameter) -> None:
        expected = param.sharded
        if (
            isinstance(new, DTensor)
            and isinstance(expected, DTensor)
            and new.shape == expected.shape
            and new.device_mesh == expected.device_mesh
            and new.placements == expected.placements
        ):
            return
        raise RuntimeError(
            f"parameter {param.fqn!r} of unit {self.label!r} was replaced after fully_shard by a "
            f"{type(new).__name__} of shape {tuple(new.shape)}; assign a DTensor with its mesh and "
            "placements (torch.distributed.tensor.distribute_tensor makes one), copy into the "
            "existing parameter, or replace it before fully_shard."
        )

    def _rebuild(self) -> None:
        self.reshard()
        locals_ = [local_of(param.sharded) for param in self.params]
        for param, local in zip(self.params, locals_, strict=True):
            if local.device.type not in ("meta", self.place.device.type):
                raise RuntimeError(
                    f"parameter {param.fqn!r} of unit {self.label!r} was moved to {local.device}, "
                    f"but its mesh is on {self.place.device.type!r}; move it back before use."
                )
        self._make_storage(locals_)
        for param, own in zip(self.params, self.storage.locals, strict=True):
            set_local(param.sharded, own)
        self._make_unsharded()
        for param in self.params:
            param.show(param.sharded)

    @property
    def version(self) -> int:
        """Grows with every edit of a shard, and with every step of an optimizer."""
        return self.num_steps + sum(param.version for param in self.params)

    def _check_materialised(self) -> None:
        if self.storage.buffer.device.type != "meta":
            return
        for param in self.params:
            if local_of(param.sharded).device.type == "meta":
                raise RuntimeError(
                    f"parameter {param.fqn!r} of unit {self.label!r} is still on the meta device; "
                    "call to_empty(device=...) on the root module and initialise its parameters "
                    "(reset_parameters, or load_state_dict) before the first forward."
                )

    def owns(self, param: torch.Tensor) -> bool:
        """Whether ``param`` is one of the sharded parameters: see ``optimizer_steps``."""
        return any(own.sharded is param for own in self.params)

    def check_may_step(self) -> None:
        """Raise if an optimizer would miss gradients: see ``optimizer_steps``."""
        accumulated = self.accumulated() if self.accumulated is not None else None
        if accumulated is not None and accumulated.pending:
            raise RuntimeError(
                f"unit {self.label!r} holds gradients that are {accumulated.pending}, so they "
                "would be missed; end the window with a backward under GradientSync.FULL (the last "
                "one, set_is_last_backward(True)), call meshard.finalize_gradients(module), or "
                "drop them with zero_grad()."
            )

    def clear_pending(self, ids: set[int]) -> None:
        """Forget pending gradients of the sharded parameters with these ids."""
        accumulated = self.accumulated() if self.accumulated is not None else None
        if accumulated is not None:
            cleared = (i for i, param in enumerate(self.params) if id(param.sharded) in ids)
            accumulated.clear(frozenset(cleared))

    # --- gather and let go -----------------------------------------------------------------

    def start_unshard(self) -> None:
        """Start gathering, unless that has been done.

        **Collective:** the shard group (or, in backward after ``keep_rows``, its neighbours).
        **Stream:** the gather lane.
        """
        if self.residence is not Residence.SHARDED:
            return
        self.adopt_edits()
        self._check_materialised()
        comm, roles = self.comm, self.place.roles
        if self._kept is not None:
            kept, self._kept = self._kept, None
            with comm.lane(Lane.GATHER):
                self._in_flight = start_all_gather(
                    kept.rows.view(-1),
                    kept.group.size(),
                    comm=comm,
                    group=kept.group,
                    label=self.label,
                )
        else:
            self._whole_version = self.version
            self._in_flight = self._plan.start(
                self.storage.buffer,
                self.storage.segments,
                comm=comm,
                group=roles.shard_group,
                label=self.label,
            )
        self.residence = Residence.GATHERING

    def finish_unshard(self, keep_in: dist.ProcessGroup | None = None) -> None:
        """Have the whole parameters, on the current stream.

        Args:
            keep_in: Also keep this rank's part of them, so that the next gather can be among
                these neighbours instead of all ranks.
        """
        self.start_unshard()
        if self._in_flight is None:
            return
        self._in_flight.pending.wait()
        gathered = self._in_flight.gathered.view(self.place.roles.shard_count, -1)
        with torch.no_grad():
            self._whole.allocate()
            self._plan.copy_out(gathered)
            if keep_in is not None:
                count = self.place.roles.shard_count // keep_in.size()
                first = keep_in.rank() * count
                self._kept = _Kept(gathered[first : first + count].clone(), keep_in)
        self._in_flight = None
        self.is_leftover = False
        self.residence = Residence.UNSHARDED

    def forget_stale(self, *, leftover: bool) -> None:
        """Reshard if the whole copy (or what was kept of it) is older than the shards.

        Args:
            leftover: Also if it only was left whole by an earlier forward for its backward. Edits
                by ``.data`` or torch's foreach kernels raise no version, so a copy that nobody
                asked to keep is not trusted.
        """
        self._kept = None
        if self.residence is Residence.SHARDED:
            return
        if leftover and self.is_leftover:
            self.reshard()
            return
        self.adopt_edits()
        if self._whole_version != self.version:
            self.reshard()

    def reshard(self, *, keep: bool = False) -> None:
        """Give the whole parameters back.

        Args:
            keep: Leave what ``finish_unshard`` kept for the next gather.
        """
        if self._in_flight is not None:
            self._in_flight.pending.wait()
            self._in_flight = None
        self.show_sharded()
        if not keep:
            self._kept = None
        if self.residence is Residence.UNSHARDED:
            self._whole.free()
        self.residence = Residence.SHARDED

    # --- faces -----------------------------------------------------------------------------

    def show_unsharded(self) -> None:
        """Let the module see whole parameters, with the flags that the sharded ones have."""
        num_trainable = 0
        for param in self.params:
            flag = param.sharded.requires_grad
            num_trainable += flag
            if param.unsharded.requires_grad is not flag:
                param.unsharded.requires_grad_(flag)
            param.show(param.unsharded)
        self.num_trainable = num_trainable
        self._is_showing_unsharded = True

    def show_sharded(self) -> None:
        """Let the module see its sharded parameters, as it does outside its own forward."""
        if self._is_showing_unsharded:
            for param in self.params:
                param.show(param.sharded)
            self._is_showing_unsharded = False
