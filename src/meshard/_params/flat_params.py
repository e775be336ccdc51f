"""Parameters of a unit in one flat shard.

The local tensor of each sharded parameter is a view of the unit's flat buffer. ``to_empty``, ``to``
and ``load_state_dict(assign=True)`` replace local tensors, or parameters in the modules; the next
use detects that by identity and moves the values into a flat buffer again.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from meshard._comm.all_gather import GatherPlan
from meshard._comm.communicator import Communicator, GatherInFlight, Rows
from meshard._comm.host_copies import HostCopies
from meshard._mesh.layout import FlatLayout
from meshard._params.sharded_param import (
    ShardedParam,
    TensorTag,
    UnitParam,
    tag_tensor,
    version_of_shards,
    version_unless_replaced,
)
from meshard._params.storage import META, FlatShard, MemoryLocation, UnshardedMemoryPool
from meshard._params.subclass_params import (
    CustomGather,
    compute_dtype,
    has_own_methods,
    warn_of_lost_methods,
)
from meshard._params.unit_params import (
    GradientHookMaker,
    GroupSpec,
    UnitParams,
    check_not_meta,
    register_gradient_hook,
    take_replaced_shards,
)
from meshard._torch.dtensor import local_of, move_local, set_local
from meshard.policies import MixedPrecisionPolicy


class FlatParams(UnitParams):
    """Parameters whose shards are views of one flat buffer.

    Args:
        params: In the order of the module; their sharded and unsharded tensors are made here.
        shards: This rank's shard of each, on any device; copied.
        requires_grad: One flag per parameter.
        layout: How the shards lie in the flat buffer.
        spec: Mesh, device and memory.
        mp_policy: ``param_dtype`` is that of unsharded floating-point parameters.
        gradient_hook: Makes the hook for the gradient of parameter ``index``.
    """

    def __init__(
        self,
        params: list[ShardedParam],
        shards: Sequence[torch.Tensor],
        requires_grad: Sequence[bool],
        *,
        layout: FlatLayout,
        spec: GroupSpec,
        mp_policy: MixedPrecisionPolicy,
        gradient_hook: GradientHookMaker,
    ) -> None:
        self.params: list[ShardedParam] = params
        self.spec = spec
        self._set_custom(None, 0)
        self.host_copies = HostCopies(spec.device) if spec.host is not None else None
        self._own_location = self._location = spec.location
        self._mp_policy = mp_policy
        self._gradient_hook = gradient_hook
        self._make_storage(shards, layout)
        for param, local, flag in zip(params, self.flat_shard.locals, requires_grad, strict=True):
            param.make_sharded(local, spec.mesh_info, requires_grad=flag)
        self._make_unsharded()

    def _make_storage(self, shards: Sequence[torch.Tensor], layout: FlatLayout) -> None:
        location = META if any(shard.is_meta for shard in shards) else self._location
        self.layout = layout
        self.flat_shard = FlatShard(layout, self.spec.mesh_info.shard_rank, location)
        self.flat_shard.fill(shards)

    def _make_unsharded(self) -> None:
        num_methods = self._count_methods()
        if num_methods:
            custom = CustomGather(
                self.params,
                self.flat_shard.locals,
                spec=self.spec,
                mp_policy=self._mp_policy,
                gradient_hook=self._gradient_hook,
            )
            self._set_custom(custom, num_methods)
            self._take_dtypes(custom.compute_dtypes)
            return
        self._set_custom(None, 0)
        self._take_dtypes(
            [compute_dtype(self._mp_policy, own.dtype) for own in self.flat_shard.locals]
        )
        on_wire = FlatLayout.build(self.layout.params, self.compute_dtypes, self.layout.order)
        self.plan = GatherPlan(self.layout, on_wire)
        flags = [param.sharded.requires_grad for param in self.params]
        # A module first run under inference_mode must be able to train later.
        with torch.inference_mode(False), torch.no_grad():
            device = META.device if self.flat_shard.buffer.is_meta else self.spec.device
            self.unsharded = UnshardedMemoryPool(on_wire, device)
            unsharded_params = self.unsharded.as_parameters(flags)
        self.plan.bind(self.unsharded.views, self.unsharded.allocate)
        for index, (param, plain) in enumerate(zip(self.params, unsharded_params, strict=True)):
            param.unsharded = param.as_used(plain)
            tag_tensor(param.unsharded, TensorTag.UNSHARDED, param.fqn)
            register_gradient_hook(param.unsharded, self._gradient_hook(index))

    def _set_custom(self, custom: CustomGather | None, num_methods: int) -> None:
        self._custom, self._num_methods = custom, num_methods
        self.has_custom_gather = custom is not None

    # --- gather ----------------------------------------------------------------------------

    def start_gather(self, comm: Communicator) -> GatherInFlight:
        if self._custom is not None:
            return self._custom.start(comm, self.label)
        buffer, segments = self.flat_shard.buffer, self.flat_shard.segments
        if self.host_copies is not None:
            buffer = self.host_copies.fetch(buffer, comm)
            segments = self.layout.split(buffer)
        return self.plan.start(
            buffer, segments, comm=comm, group=self.spec.mesh_info.shard_group, label=self.label
        )

    def fill_unsharded(self, gathered: Rows, *, comes_again: bool) -> None:
        if self._custom is not None:
            self._custom.fill(gathered, comes_again=comes_again, label=self.label)
            self._take_dtypes(self._custom.compute_dtypes)
            return
        self.unsharded.allocate()
        self.plan.copy_out(gathered)

    def free_unsharded(self) -> None:
        if self._custom is not None:
            self._custom.free()
        else:
            self.unsharded.free()

    # --- edits by users --------------------------------------------------------------------

    @property
    def version(self) -> int:
        return version_of_shards(self.params)

    def version_unless_replaced(self) -> int | None:
        if self._count_methods() != self._num_methods:
            return None
        return version_unless_replaced(self.params, self.flat_shard.locals)

    def take_replacements(self) -> bool:
        replaced = take_replaced_shards(
            self.params, self.flat_shard.locals, self.label, nn.Parameter
        )
        return replaced or self._count_methods() != self._num_methods

    def _count_methods(self) -> int:
        """Return on how many local tensors users have set ``fsdp_pre_all_gather``."""
        if not any(self.flat_shard.attributes):
            return 0
        return sum(map(has_own_methods, self.flat_shard.locals))

    def rebuild(self) -> None:
        locals_ = [local_of(param.sharded) for param in self.params]
        for param, local in zip(self.params, locals_, strict=True):
            if local.device.type not in ("meta", self._location.device.type):
                raise RuntimeError(
                    f"parameter {param.fqn!r} of unit {self.label!r} was moved to {local.device}, "
                    f"but {self._why_at_location}; move it back before use."
                )
        # Shards with values must not be dropped because others are on the meta device.
        self.is_partly_meta = len({local.is_meta for local in locals_}) > 1
        if self.is_partly_meta:
            return
        if any(map(operator.is_not, locals_, self.flat_shard.locals)):
            self._move_into_storage(locals_)
        self._make_unsharded()
        for param in self.params:
            tag_tensor(param.sharded, TensorTag.SHARD, param.fqn)
            param.install(param.sharded)

    def _move_into_storage(self, locals_: Sequence[torch.Tensor]) -> None:
        if self.host_copies is not None:
            self.host_copies.wait()  # the old buffer may still be read
        had_methods = [*map(has_own_methods, self.flat_shard.locals)]
        layouts = [param.layout for param in self.params]
        self._make_storage(locals_, FlatLayout.build(layouts, [each.dtype for each in locals_]))
        for index, (param, own) in enumerate(zip(self.params, self.flat_shard.locals, strict=True)):
            set_local(param.sharded, own)
            if had_methods[index] or has_own_methods(locals_[index]):
                warn_of_lost_methods(param.fqn, self.label)

    def for_copy(self, params: Sequence[UnitParam], gradient_hook: GradientHookMaker) -> UnitParams:
        copied = copy.copy(self)
        copied.params = cast("list[ShardedParam]", params)
        copied._gradient_hook = gradient_hook
        copied.host_copies = None if self.host_copies is None else HostCopies(self.spec.device)
        copied.rebuild()
        return copied

    # --- location --------------------------------------------------------------------------

    @property
    def _why_at_location(self) -> str:
        kind = self._location.device.type
        if self.is_offloaded:
            return f"meshard.offload has put it on {kind!r} until meshard.onload(module)"
        if self.host_copies is not None:
            return f"its CPUOffloadPolicy keeps it on {kind!r}, as in to_empty(device={kind!r})"
        return f"its mesh is on {kind!r} (meshard.offload moves a whole model to the host and back)"

    def move(self, location: MemoryLocation | None) -> torch.Tensor:
        old, self._location = self.flat_shard, self._own_location if location is None else location
        self.is_offloaded = self._location is not self._own_location
        if old.buffer.is_meta:
            return old.buffer
        self.flat_shard = FlatShard(self.layout, self.spec.mesh_info.shard_rank, self._location)
        self.flat_shard.buffer.copy_(old.buffer, non_blocking=True)
        for param, own in zip(self.params, self.flat_shard.locals, strict=True):
            move_local(param.sharded, own)
        return old.buffer

    def check_materialised(self) -> None:
        if self.is_offloaded:
            raise RuntimeError(
                f"unit {self.label!r} is on the host since meshard.offload(module); call "
                "meshard.onload(module) before the next forward or unshard."
            )
        if self.is_partly_meta or self.flat_shard.buffer.is_meta:
            check_not_meta(self.params, self.label, self._location.device)
