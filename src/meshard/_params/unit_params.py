"""The interface through which the engine uses the parameters of one unit."""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import is_not
from typing import cast

import torch
from torch import nn

from meshard._comm.communicator import Communicator, Handle
from meshard._comm.host_copies import HostCopies
from meshard._mesh.layout import FlatLayout
from meshard._mesh.mesh_info import MeshInfo
from meshard._params.sharded_param import (
    GradientHook,
    ShardedParam,
    TensorTag,
    UnitParam,
    tag_tensor,
)
from meshard._params.storage import MemoryLocation
from meshard._torch.dtensor import (
    is_placed_like,
    is_plain,
    keep_gradient_dtype,
    local_of,
    set_local,
)
from meshard._torch.private import version_of, without_torch_function

GradientHookMaker = Callable[[int], GradientHook]  # returns the hook of the parameter at an index


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Mesh, device and memory of the parameters of one unit."""

    mesh_info: MeshInfo
    device: torch.device
    # Where shards, gradients and optimizer state live under a CPUOffloadPolicy; None without it.
    host: MemoryLocation | None = None

    @property
    def location(self) -> MemoryLocation:
        return self.host if self.host is not None else MemoryLocation(self.device)


class UnitParams(abc.ABC):
    """Sharded and unsharded parameters of one unit, with the memory behind them."""

    params: Sequence[UnitParam]  # in the order of the module, or of a bucket of ``replicate``
    spec: GroupSpec
    label: str = ""  # the name of the unit, for errors and logs; ``Root`` sets it
    # The communicator of the root, or a variant with the user's collectives. It is set when a unit
    # of the root is first used. Before that it is this placeholder: a trace may read its ``clock``.
    comm: Communicator = Communicator()
    layout: FlatLayout  # how the shards lie in one buffer, or would lie if they were in one
    compute_dtypes: list[torch.dtype]  # of the unsharded parameters, and of their gradients
    host_copies: HostCopies | None = None  # None if shards live on the device
    is_offloaded: bool = False  # meshard.offload has moved the shards away
    has_custom_gather: bool = False  # some shards have fsdp_pre_all_gather

    def _read_dtypes(self) -> None:
        self.compute_dtypes = [param.unsharded.dtype for param in self.params]

    @abc.abstractmethod
    def start_gather(self, comm: Communicator) -> Handle:
        """Start gathering the shards. The result is ``[ranks, n]``.

        **Collective:** the shard group. **Stream:** the comm stream for gathers.
        **Lifetime:** the shards must not be edited until the handle is released.
        """

    @abc.abstractmethod
    def all_gather_copy_out(self, gathered: torch.Tensor) -> None:
        """Allocate the unsharded parameters and fill them from ``gathered [ranks, n]``."""

    @abc.abstractmethod
    def free_unsharded(self) -> None:
        """Free the memory of the unsharded parameters."""

    @property
    @abc.abstractmethod
    def version(self) -> int:
        """A number that grows with each edit that raises a version counter, until ``rebuild``.

        Under ``replicate`` only parameters with a cast copy count: only a copy can be out of date.
        """

    @abc.abstractmethod
    def version_unless_replaced(self) -> int | None:
        """Return ``version``; None if users may have replaced a parameter or a local tensor."""

    @abc.abstractmethod
    def take_replacements(self) -> bool:
        """Adopt tensors that users have put in place of ours. Return whether to ``rebuild``."""

    @abc.abstractmethod
    def rebuild(self) -> None:
        """Build storage and hooks anew for the adopted parameters. The unit must be resharded."""

    @abc.abstractmethod
    def for_copy(self, params: Sequence[UnitParam], gradient_hook: GradientHookMaker) -> UnitParams:
        """Return a copy of this object for a copied unit. ``params`` are the copied parameters."""

    @abc.abstractmethod
    def check_materialised(self) -> None:
        """Raise a RuntimeError if shards are on meta, or ``meshard.offload`` has moved them."""


def is_alias(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two plain tensors are the same memory in the same shape, dtype and strides."""
    return (
        is_plain(one)
        and is_plain(other)
        and one.data_ptr() == other.data_ptr()
        and (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape)
        and one.stride() == other.stride()
    )


class ShardedUnitParams(UnitParams):
    """The common base of ``FlatParams`` and ``SubclassParams``. Sharded parameters are DTensors."""

    params: list[ShardedParam]
    locals: list[torch.Tensor]  # the local tensors of ``params``, as they were last adopted
    _gradient_hook: GradientHookMaker

    @property
    def version(self) -> int:
        shards = [param.sharded for param in self.params]
        return sum(version_of(shard) + version_of(local_of(shard)) for shard in shards)

    def version_unless_replaced(self) -> int | None:
        # Forwards call this often, so it calls no Python function for each parameter.
        shards, locals_ = [param.sharded for param in self.params], self.locals
        for param, sharded in zip(self.params, shards, strict=True):
            for parameters, name in param.owner_dicts:
                installed = parameters.get(name)
                if installed is not sharded and installed is not param.unsharded:
                    return None
        with without_torch_function():
            if any(map(is_not, map(local_of, shards), locals_)):
                return None
            return sum(map(version_of, shards)) + sum(map(version_of, locals_))

    def take_replacements(self) -> bool:
        replaced = False
        for param, own in zip(self.params, self.locals, strict=True):
            replacements = param.replacements()
            if replacements:
                self._refuse_late_tie(param, replacements)
                # Owners of a tied parameter may hold different replacements. The first one counts.
                new = self._as_shard(param, replacements[0], own)
                keep_gradient_dtype(param.sharded, new)
                for old in (param.sharded, *replacements):
                    if old is not new:
                        tag_tensor(old, TensorTag.REPLACED_LATER, param.fqn)
                param.sharded = new
                replaced = True
            elif (local := local_of(param.sharded)) is not own:
                if is_alias(local, own):  # as after module.float() of a float32 parameter
                    set_local(param.sharded, own)
                    tag_tensor(param.sharded, TensorTag.SHARD, param.fqn)
                else:
                    replaced = True
        return replaced

    def _refuse_late_tie(self, param: ShardedParam, replacements: Sequence[nn.Parameter]) -> None:
        """Raise a RuntimeError if ``param`` was replaced by another parameter of the unit.

        Both would be one tensor with one ``.grad``, but be gathered and reduced separately.
        """
        new = {id(each) for each in replacements}
        for other in self.params:
            if other is not param and not new.isdisjoint(map(id, other.installed())):
                raise RuntimeError(
                    f"parameter {param.fqn!r} of unit {self.label!r} was tied to {other.fqn!r} "
                    "after fully_shard; tie weights before fully_shard, as by the model's "
                    "tie_weights()."
                )

    def _as_shard(self, param: ShardedParam, new: nn.Parameter, own: torch.Tensor) -> nn.Parameter:
        """Return the assigned parameter ``new`` or, if it is unsharded, this rank's shard of it."""
        expected = param.sharded
        if not isinstance(new, nn.Parameter):
            raise RuntimeError(
                f"parameter {param.fqn!r} of unit {self.label!r} was replaced by a "
                f"{type(new).__name__} that is no nn.Parameter, as torch.func.functional_call does "
                "for one call; a sharded module would not compute with it. Make that call inside "
                "meshard.unsharded_params(module), where the module is an ordinary one."
            )
        if new.shape == expected.shape:
            if type(new) is (nn.Parameter if is_plain(own) else type(own)):
                device = self.spec.location.device if own.is_meta else own.device
                shard = param.shard_of(new, copied_to=device)
                return nn.Parameter(shard, requires_grad=new.requires_grad)
            if is_placed_like(new, expected):
                return new
        raise RuntimeError(
            f"parameter {param.fqn!r} of unit {self.label!r} was replaced after fully_shard by a "
            f"{type(new).__name__} of shape {tuple(new.shape)}; assign an nn.Parameter of shape "
            f"{tuple(expected.shape)} with the same values on every rank, or a DTensor with its "
            "mesh and placements, or replace it before fully_shard."
        )

    def _adopted_locals(self, device_type: str, why: str) -> list[torch.Tensor]:
        """Return the current local tensors.

        Raises a RuntimeError, which states ``why``, if one is neither on ``device_type`` nor meta.
        """
        locals_ = [local_of(param.sharded) for param in self.params]
        for param, local in zip(self.params, locals_, strict=True):
            if local.device.type not in ("meta", device_type):
                raise RuntimeError(
                    f"parameter {param.fqn!r} of unit {self.label!r} was moved to {local.device}, "
                    f"but {why}; move it back before use."
                )
        return locals_

    def _install_adopted(self) -> None:
        for param, own in zip(self.params, self.locals, strict=True):
            set_local(param.sharded, own)
            tag_tensor(param.sharded, TensorTag.SHARD, param.fqn)
            param.install(param.sharded)

    def for_copy(self, params: Sequence[UnitParam], gradient_hook: GradientHookMaker) -> UnitParams:
        copied = copy.copy(self)
        copied.params = cast("list[ShardedParam]", params)
        copied._gradient_hook = gradient_hook
        copied.host_copies = None if self.host_copies is None else HostCopies(self.spec.device)
        copied.rebuild()
        return copied

    def _check_not_meta(self, device: torch.device) -> None:
        for param in self.params:
            if local_of(param.sharded).is_meta:
                # If only some shards are on meta, to_empty on the root would drop the values of the
                # others.
                are_all = all(local_of(each.sharded).is_meta for each in self.params)
                which = "the root module" if are_all else "the module that holds it"
                raise RuntimeError(
                    f"parameter {param.fqn!r} of unit {self.label!r} is still on the meta device; "
                    f"call to_empty(device={device.type!r}) on {which} (shards "
                    f"live on {device.type!r}) and initialise its parameters "
                    "(reset_parameters, or load_state_dict) before the first forward."
                )
