"""Parameters of a unit in one flat shard.

The local tensor of each sharded parameter is a view of the unit's flat buffer. ``to_empty``, ``to``
and ``load_state_dict(assign=True)`` put other local tensors into the parameters, or other
parameters into the modules. At the end of such a call the unit checks whether all are still the
same objects. It checks again at its next use, because the call may have been on a module inside. If
some are other objects, it copies all values into a new flat buffer.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import nn

from meshard._comm.all_gather import GatherPlan
from meshard._comm.communicator import Communicator, Handle
from meshard._comm.host_copies import HostCopies
from meshard._mesh.layout import FlatLayout
from meshard._params.sharded_param import ShardedParam
from meshard._params.storage import META, FlatShard, MemoryLocation, UnshardedMemoryPool
from meshard._params.subclass_params import PRE, SubclassParams, has_own_methods
from meshard._params.unit_params import GradientHookMaker, GroupSpec, ShardedUnitParams
from meshard._torch.dtensor import move_local
from meshard._torch.user_line import warn_user
from meshard.policies import MixedPrecisionPolicy


class FlatParams(ShardedUnitParams):
    """Parameters whose shards are views of one flat buffer."""

    def __init__(
        self,
        params: list[ShardedParam],  # ``__init__`` makes their sharded and unsharded tensors
        shards: Sequence[torch.Tensor],  # this rank's shard of each, on any device; it is copied
        requires_grad: Sequence[bool],
        *,
        layout: FlatLayout,
        spec: GroupSpec,
        mp_policy: MixedPrecisionPolicy,
        gradient_hook: GradientHookMaker,
    ) -> None:
        self.params = params
        self.spec = spec
        self.host_copies = HostCopies(spec.device) if spec.host is not None else None
        self._location = spec.location
        self._mp_policy = mp_policy
        self._gradient_hook = gradient_hook
        self._make_storage(shards, layout)
        for param, local, flag in zip(params, self.locals, requires_grad, strict=True):
            param.make_sharded(local, spec.mesh_info, requires_grad=flag)
        self._make_unsharded()

    def _make_storage(self, shards: Sequence[torch.Tensor], layout: FlatLayout) -> None:
        location = META if any(shard.is_meta for shard in shards) else self._location
        self.layout = layout
        self.flat_shard = FlatShard(layout, self.spec.mesh_info.shard_rank, location)
        self.locals = self.flat_shard.locals
        if location is META and not all(shard.is_meta for shard in shards):
            # The buffer is on meta as long as any shard is. Meanwhile, shards that have memory are
            # tensors outside of the buffer.
            self.locals = [
                own if shard.is_meta else self._location.empty_like(own).copy_(shard)
                for own, shard in zip(self.locals, shards, strict=True)
            ]
        self.flat_shard.fill(shards)

    def _make_unsharded(self) -> None:
        num_methods = self._count_methods()
        custom = None
        if num_methods:
            custom = SubclassParams(
                self.params,
                spec=self.spec,
                mp_policy=self._mp_policy,
                gradient_hook=self._gradient_hook,
            )
        else:
            self._make_pool()
        # Set last. If SubclassParams raises, ``_num_methods`` keeps the old number, so the next use
        # tries again.
        self._custom, self._num_methods, self.has_custom_gather = custom, num_methods, bool(custom)
        self._read_dtypes()

    def _make_pool(self) -> None:
        dtypes = [
            param.compute_dtype(own.dtype, self._mp_policy.param_dtype)
            for param, own in zip(self.params, self.locals, strict=True)
        ]
        on_wire = self.layout
        if dtypes != [own.dtype for own in self.locals]:
            on_wire = FlatLayout.build(on_wire.params, dtypes, on_wire.order)
        # ``fully_shard`` may be called under inference_mode. The module may train later, so its
        # parameters must not be inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            device = META.device if self.flat_shard.buffer.is_meta else self.spec.device
            self.unsharded = UnshardedMemoryPool(on_wire, device)
            self.plan = GatherPlan(self.layout, on_wire, self.unsharded.views)
            for index, param in enumerate(self.params):
                # `.data`, unlike `.detach()`, has a version counter of its own. So the parameter's
                # version does not grow when ``unsharded.views`` are filled.
                view = self.unsharded.views[index].data
                plain = nn.Parameter(view, requires_grad=param.sharded.requires_grad)
                param.make_unsharded(plain, self._gradient_hook(index))

    # --- gather ----------------------------------------------------------------------------

    def start_gather(self, comm: Communicator) -> Handle:
        if self._custom is not None:
            self._custom.label = self.label
            return self._custom.start_gather(comm)
        buffer, segments = self.flat_shard.buffer, self.flat_shard.segments
        if self.host_copies is not None:
            buffer = self.host_copies.fetch(buffer, comm, label=self.label)
            segments = self.layout.split(buffer)
        return self.plan.start(
            buffer, segments, comm=comm, group=self.spec.mesh_info.shard_group, label=self.label
        )

    def all_gather_copy_out(self, gathered: torch.Tensor) -> None:
        if self._custom is not None:
            self._custom.all_gather_copy_out(gathered)
            self._read_dtypes()
            return
        self.unsharded.allocate()
        self.plan.copy_out(gathered)

    def free_unsharded(self) -> None:
        if self._custom is not None:
            self._custom.free_unsharded()
        else:
            self.unsharded.free()

    # --- edits by users --------------------------------------------------------------------

    def version_unless_replaced(self) -> int | None:
        if self._count_methods() != self._num_methods:
            return None
        return super().version_unless_replaced()

    def take_replacements(self) -> bool:
        return super().take_replacements() or self._count_methods() != self._num_methods

    def _count_methods(self) -> int:
        """Return the number of local tensors on which users have set all-gather methods."""
        if not any(self.flat_shard.attributes):
            return 0
        return sum(map(has_own_methods, self.locals))

    def rebuild(self) -> None:
        locals_ = self._adopted_locals(self._location.device.type, self._why_at_location)
        if any(map(operator.is_not, locals_, self.locals)):
            self._move_into_storage(locals_)
        self._make_unsharded()
        self._install_adopted()

    def _move_into_storage(self, locals_: Sequence[torch.Tensor]) -> None:
        if self.host_copies is not None:
            self.host_copies.wait()  # copies may still read the old buffer
        lost = [any(map(has_own_methods, pair)) for pair in zip(self.locals, locals_, strict=True)]
        layouts = [param.layout for param in self.params]
        self._make_storage(locals_, FlatLayout.build(layouts, [each.dtype for each in locals_]))
        for param, has_lost in zip(self.params, lost, strict=True):
            if has_lost:
                warn_user(
                    f"{PRE} was set on the local tensor of parameter {param.fqn!r} of unit "
                    f"{self.label!r}, which has another local tensor now; set the methods again on "
                    "the new one, or this parameter is gathered like any other.",
                )

    # --- location --------------------------------------------------------------------------

    @property
    def _why_at_location(self) -> str:
        kind = self._location.device.type
        if self.is_offloaded:
            return f"meshard.offload has put it on {kind!r} until meshard.onload(module)"
        if self.host_copies is not None:
            return f"its CPUOffloadPolicy keeps it on {kind!r}, as in to_empty(device={kind!r})"
        return f"its mesh is on {kind!r} (meshard.offload moves a whole model to the host and back)"

    def move(self, location: MemoryLocation | None) -> list[torch.Tensor]:
        """Start copying the shards to ``location``; None: to ``spec.location``. Return the sources.

        **Lifetime:** the caller keeps the sources, the old memory, until the copies are over.
        """
        old, self._location = self.flat_shard, location or self.spec.location
        self.is_offloaded = location is not None
        if old.buffer.is_meta:  # shards with values are tensors outside of the buffer
            sources = [own for own in self.locals if not own.is_meta]
            targets = [self._location.empty_like(own) for own in sources]
            moved = iter(targets)
            self.locals = [own if own.is_meta else next(moved) for own in self.locals]
        else:
            self.flat_shard = FlatShard(self.layout, self.spec.mesh_info.shard_rank, self._location)
            sources, targets = [old.buffer], [self.flat_shard.buffer]
            self.locals = self.flat_shard.locals
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
        for param, own in zip(self.params, self.locals, strict=True):
            move_local(param.sharded, own)
        return sources

    def check_materialised(self) -> None:
        if self.is_offloaded:
            raise RuntimeError(
                f"unit {self.label!r} is on the host since meshard.offload(module); call "
                "meshard.onload(module) before the next forward or unshard."
            )
        if self.flat_shard.buffer.is_meta:  # as long as any shard is
            self._check_not_meta(self._location.device)
