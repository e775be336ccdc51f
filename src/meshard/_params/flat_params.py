"""The sharded parameters of a unit.

The local tensors of ordinary parameters are views of one flat buffer. A shard with a custom
all-gather (see ``custom_gather``) has memory of its own, if it is of a tensor subclass. One
collective gathers both kinds. It sends the buffer itself, or a copy if shards live in host memory,
or if modules compute in another dtype.

``to_empty``, ``to`` and ``load_state_dict(assign=True)`` put other local tensors into the
parameters, or other parameters into the modules. At the end of such a call the unit checks whether
all are still the same objects. It checks again before it is gathered, because the call may have
been on a module inside. If some are other objects, it copies all values into a new flat buffer.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from operator import is_not
from typing import cast

import torch
from torch import nn

from meshard._comm.all_gather import GatherPlan
from meshard._comm.communicator import CommStream, Communicator, Handle
from meshard._comm.host_copies import HostCopies
from meshard._mesh.layout import FlatLayout, ParamLayout
from meshard._mesh.mesh_info import shard_mesh_of
from meshard._params.custom_gather import (
    PRE,
    CustomGather,
    Form,
    agree_on_forms,
    check_placement,
    has_class_methods,
    has_gather_methods,
    has_own_methods,
)
from meshard._params.unit_params import (
    META,
    GradientHookMaker,
    GroupSpec,
    MemoryLocation,
    ShardedParam,
    Storages,
    TensorTag,
    UnitParam,
    UnitParams,
    resize,
    tag_tensor,
)
from meshard._torch.dtensor import (
    is_alias,
    is_placed_like,
    is_plain,
    keep_gradient_dtype,
    local_of,
    move_local,
    set_local,
    with_own_storage,
)
from meshard._torch.private import version_of, without_torch_function
from meshard._torch.user_line import warn_user
from meshard.policies import MixedPrecisionPolicy


class FlatShard:
    """This rank's flat shard of a unit, with a view for every parameter."""

    def __init__(self, layout: FlatLayout, shard_rank: int, location: MemoryLocation) -> None:
        self.buffer = location.buffer_for(layout)
        self.layout = layout
        self.segments = layout.split(self.buffer)
        self.locals = [self.buffer] * len(layout.params)  # replaced below by views
        for segment, flat in zip(layout.segments, self.segments, strict=True):
            for param_range in segment.ranges:
                shape = layout.params[param_range.index].local_shape(shard_rank)
                owned = flat.narrow(0, param_range.offset, shape.numel())
                self.locals[param_range.index] = with_own_storage(owned).view(shape)

        # The ``__dict__`` of each view. It is empty until a user sets ``fsdp_pre_all_gather`` on
        # the view. Each forward looks here for that.
        self.attributes = [vars(local) for local in self.locals]

    @torch.no_grad()
    def fill(self, sources: Sequence[torch.Tensor], *, non_blocking: bool = False) -> None:
        """Copy each parameter's shard into the buffer. Padding becomes zero, so it has no NaN."""
        if self.buffer.is_meta:
            return
        self.buffer.zero_()
        for index in self.layout.order:
            self.locals[index].copy_(sources[index], non_blocking=non_blocking)


_ALIGNMENT = 64  # bytes: a cache line


class UnshardedMemoryPool:
    """One allocation per dtype for the unsharded parameters of a unit.

    ``free`` resizes the storages to zero, and ``allocate`` resizes them back. They stay the same
    objects until the parameters are rebuilt. So a view that autograd has saved is valid again once
    its storage is filled. Storages are filled through ``views``, whose version counters are not
    those of the parameters, so that autograd does not see a saved tensor change. ``layout`` has the
    dtypes of the unsharded parameters.
    """

    def __init__(self, layout: FlatLayout, device: torch.device) -> None:
        self.views: list[torch.Tensor] = [torch.empty(0, device="cpu")] * len(layout.params)
        self._storages: Storages = []
        for segment in layout.segments:
            step = max(1, _ALIGNMENT // segment.dtype.itemsize)
            params = {each.index: layout.params[each.index] for each in segment.ranges}
            sizes = [-(-param.numel // step) * step for param in params.values()]
            flat = torch.empty(sum(sizes), dtype=segment.dtype, device=device)
            for (index, param), part in zip(params.items(), flat.split(sizes), strict=True):
                self.views[index] = part[: param.numel].view(param.shape)
            self._storages.append((flat.untyped_storage(), flat.untyped_storage().nbytes()))
        self.free()

    def allocate(self) -> None:
        resize(self._storages)

    def free(self) -> None:
        # Resized and not replaced, because autograd may have saved views of these storages.
        for storage, _ in self._storages:
            storage.resize_(0)


class FlatParams(UnitParams):
    """The parameters of a unit that are DTensors while sharded."""

    params: list[ShardedParam]
    locals: list[torch.Tensor]  # the local tensors of ``params``, as they were last adopted

    def __init__(
        self,
        params: list[ShardedParam],  # ``__init__`` makes their sharded and unsharded tensors
        # This rank's shard of each, on any device. Those with a custom all-gather are taken
        # themselves, the others are copied.
        shards: Sequence[torch.Tensor],
        requires_grad: Sequence[bool],
        *,
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
        self._make_storage(shards)
        for param, local, flag in zip(params, self.locals, requires_grad, strict=True):
            param.make_sharded(local, spec.mesh_info, requires_grad=flag)
        self._make_unsharded()

    def _make_storage(self, shards: Sequence[torch.Tensor], *, non_blocking: bool = False) -> None:
        layouts, dtypes = [param.layout for param in self.params], [each.dtype for each in shards]
        flat = [index for index, each in enumerate(shards) if not has_class_methods(each)]
        self.layout = FlatLayout.build(layouts, dtypes)
        at_rest = self.layout
        if len(flat) < len(shards):
            at_rest = FlatLayout.build(layouts, dtypes, flat)
        # The buffer is on meta as long as one of its shards is. Meanwhile, those that have memory
        # are tensors outside of the buffer.
        location = META if any(shards[index].is_meta for index in flat) else self._location
        self.flat_shard = FlatShard(at_rest, self.spec.mesh_info.shard_rank, location)
        self.locals = list(shards)
        for index in flat:
            own, shard = self.flat_shard.locals[index], shards[index]
            if location is META and not shard.is_meta:
                own = self._location.empty_like(own).copy_(shard, non_blocking=non_blocking)
            self.locals[index] = own
        self.flat_shard.fill(shards, non_blocking=non_blocking)
        self._has_meta = any(own.is_meta for own in self.locals)

    def _make_unsharded(self) -> None:
        # Read first and kept last. If a check raises, the next use tries again.
        num_methods = self._count_methods()
        custom = []
        for index, (param, own) in enumerate(zip(self.params, self.locals, strict=True)):
            if has_gather_methods(param.fqn, own):
                check_placement(param.fqn, own, self.spec.mesh_info, param.layout.shard_dim)
                if self.spec.host is not None and has_own_methods(own):
                    raise NotImplementedError(
                        f"under CPUOffloadPolicy, {PRE} of parameter {param.fqn!r} must be of a "
                        "tensor subclass, because a copy of the shard is gathered, which has no "
                        "methods that were set on the shard itself."
                    )
                custom.append(index)
        dtypes = [
            param.compute_dtype(own.dtype, self._mp_policy.param_dtype)
            for param, own in zip(self.params, self.locals, strict=True)
        ]
        at_rest = self.flat_shard.layout
        flat = [index for index in at_rest.order if index not in custom]
        on_wire = FlatLayout.build(at_rest.params, dtypes, flat)
        # ``fully_shard`` may be called under inference_mode. The module may train later, so its
        # parameters must not be inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            device = META.device if self.flat_shard.buffer.is_meta else self.spec.device
            self.unsharded = UnshardedMemoryPool(on_wire, device)
            # If some are custom, the first gather replaces this plan.
            self._plan = GatherPlan(at_rest, on_wire, self.unsharded.views)
            for index in flat:
                param = self.params[index]
                # `.data`, unlike `.detach()`, has a version counter of its own. So the parameter's
                # version does not grow when ``unsharded.views`` are filled.
                view = self.unsharded.views[index].data
                plain = nn.Parameter(view, requires_grad=param.sharded.requires_grad)
                param.make_unsharded(plain, self._gradient_hook(index))
            mesh = shard_mesh_of(self.spec.mesh_info) if custom else self.spec.mesh_info.mesh
            self._custom = [
                CustomGather(
                    self.params[index],
                    self.locals[index],
                    mesh=mesh,
                    device=self.spec.device,
                    mp_policy=self._mp_policy,
                    hook=self._gradient_hook(index),
                )
                for index in custom
            ]
        self._in_pool, self._dtypes_on_wire = flat, dtypes
        self._forms: list[Form] = []  # of what this rank has sent for custom ones; none so far
        self.custom_name = self.params[custom[0]].fqn if custom else None
        self._num_methods = num_methods
        self._read_dtypes()

    # --- gather ----------------------------------------------------------------------------

    def start_gather(self, comm: Communicator) -> Handle:
        group = self.spec.mesh_info.shard_group
        with comm.on_stream(CommStream.GATHER):  # only once, so that ``gather_after`` holds
            buffer, segments = self.flat_shard.buffer, self.flat_shard.segments
            if self.host_copies is not None:
                buffer = self.host_copies.fetch(buffer, comm, label=self.label)
                segments = self.flat_shard.layout.split(buffer)
            inputs = self._custom_inputs(comm) if self._custom else ()
            return self._plan.start(
                buffer, segments, inputs=inputs, comm=comm, group=group, label=self.label
            )

    @torch.no_grad()
    def _custom_inputs(self, comm: Communicator) -> list[torch.Tensor]:
        # What is made here may become part of a parameter, which autograd saves. So it must not be
        # an inference tensor.
        with torch.inference_mode(False):
            inputs: list[torch.Tensor] = []
            for each in self._custom:
                shard = each.shard
                if self.host_copies is not None:
                    shard = self.host_copies.fetch(shard, comm, label=self.label)
                inputs += each.make_inputs(shard, self.label)
            forms = list(map(Form.of, inputs))
            if not self._forms:
                self._plan, self._forms = self._plan_with(forms), forms
            elif forms != self._forms:
                raise RuntimeError(
                    f"{PRE} of unit {self.label!r} returned {forms} to gather, and {self._forms} "
                    "before; a parameter must send the same dtypes and shapes each time."
                )
            return inputs

    def _plan_with(self, forms: list[Form]) -> GatherPlan:
        """Return the plan of a gather that sends tensors of ``forms`` for custom ones.

        In the layout each of them is one parameter more, with as many rows on every rank.
        """
        count, at_rest = self.spec.mesh_info.shard_count, self.flat_shard.layout
        if any(each.param.layout.rows % count for each in self._custom):
            group = self.spec.mesh_info.shard_group
            forms = agree_on_forms(forms, group, device=self.spec.device, label=self.label)
        outputs = [form.of_all(count, self.spec.device) for form in forms]
        layouts = [*at_rest.params, *(ParamLayout(each.shape, 0, count) for each in outputs)]
        dtypes = [*self._dtypes_on_wire, *(form.dtype for form in forms)]
        order = [*self._in_pool, *range(len(self.params), len(layouts))]
        on_wire = FlatLayout.build(layouts, dtypes, order)
        plan = GatherPlan(at_rest, on_wire, [*self.unsharded.views, *outputs])
        for each in self._custom:
            each.take_outputs(outputs)
        return plan

    def all_gather_copy_out(self, gathered: torch.Tensor) -> None:
        self.unsharded.allocate()
        if not self._custom:
            self._plan.copy_out(gathered)
            return
        with torch.inference_mode(False), torch.no_grad():
            for each in self._custom:
                each.allocate()
            self._plan.copy_out(gathered)
            try:
                for each in self._custom:
                    each.fill(self.label)
            except BaseException:
                self.free_unsharded()
                raise
        self._read_dtypes()

    def free_unsharded(self) -> None:
        self.unsharded.free()
        for each in self._custom:
            each.free()

    # --- edits by users --------------------------------------------------------------------

    @property
    def version(self) -> int:
        shards = [param.sharded for param in self.params]
        with without_torch_function():
            return sum(map(version_of, shards)) + sum(map(version_of, self.locals))

    @property
    def has_replacements(self) -> bool:
        shards = [param.sharded for param in self.params]
        return (
            any(map(is_not, map(local_of, shards), self.locals))
            or self._count_methods() != self._num_methods
            or super().has_replacements
        )

    def _count_methods(self) -> int:
        """Return the number of local tensors on which users have set all-gather methods."""
        if not any(self.flat_shard.attributes):
            return 0
        return sum(map(has_own_methods, self.locals))

    def take_replacements(self) -> bool:
        replaced = self._count_methods() != self._num_methods
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

    def rebuild(self) -> None:
        locals_ = [local_of(param.sharded) for param in self.params]
        for param, local, own in zip(self.params, locals_, self.locals, strict=True):
            self._check_adopted(param, local, own)
        if any(map(is_not, locals_, self.locals)):
            self._move_into_storage(locals_)
        self._make_unsharded()
        for param, own in zip(self.params, self.locals, strict=True):
            set_local(param.sharded, own)
            param.install(param.sharded)

    def _check_adopted(self, param: ShardedParam, local: torch.Tensor, own: torch.Tensor) -> None:
        """Raise a RuntimeError unless ``local`` may become the shard in the place of ``own``."""
        name, kind = f"parameter {param.fqn!r} of unit {self.label!r}", self._location.device.type
        if local.device.type not in ("meta", kind):
            if self.is_offloaded:
                why = f"meshard.offload has put it on {kind!r} until meshard.onload(module)"
            elif self.host_copies is not None:
                why = f"its CPUOffloadPolicy keeps it on {kind!r}, as in to_empty(device={kind!r})"
            else:
                why = f"its mesh is on {kind!r} (meshard.offload moves a whole model)"
            raise RuntimeError(
                f"{name} was moved to {local.device}, but {why}; move it back before use."
            )
        if has_class_methods(own) and not has_class_methods(local):
            raise RuntimeError(
                f"{name} was replaced by one whose shard is a plain tensor, without the {PRE} that "
                "it had; assign a tensor of the same class, or edit it in place."
            )

    def _move_into_storage(self, locals_: Sequence[torch.Tensor]) -> None:
        if self.host_copies is not None:
            self.host_copies.wait()  # copies may still read the old buffer
        lost = [any(map(has_own_methods, pair)) for pair in zip(self.locals, locals_, strict=True)]
        self._make_storage(locals_)
        for param, own, has_lost in zip(self.params, self.locals, lost, strict=True):
            if has_lost and not has_class_methods(own):
                warn_user(
                    f"{PRE} was set on the local tensor of parameter {param.fqn!r} of unit "
                    f"{self.label!r}, which has another local tensor now; set the methods again on "
                    "the new one, or this parameter is gathered like any other.",
                )

    def for_copy(self, params: Sequence[UnitParam], gradient_hook: GradientHookMaker) -> UnitParams:
        copied = copy.copy(self)
        copied.params = cast("list[ShardedParam]", params)
        copied._gradient_hook = gradient_hook
        copied.host_copies = None if self.host_copies is None else HostCopies(self.spec.device)
        copied.rebuild()
        return copied

    # --- location --------------------------------------------------------------------------

    def move(self, location: MemoryLocation | None) -> list[torch.Tensor]:
        """Start copying the shards to ``location``; None: to ``spec.location``. Return the sources.

        **Lifetime:** the caller keeps the sources, the old memory, until the copies are over.
        """
        sources = [self.flat_shard.buffer, *self.locals]
        self._location = location or self.spec.location
        self.is_offloaded = location is not None
        self._make_storage(self.locals, non_blocking=True)
        for param, own in zip(self.params, self.locals, strict=True):
            move_local(param.sharded, own)
        return sources

    def check_materialised(self) -> None:
        if self.is_offloaded:
            raise RuntimeError(
                f"unit {self.label!r} is on the host since meshard.offload(module); call "
                "meshard.onload(module) before the next forward or unshard."
            )
        if self._has_meta:
            pairs = zip(self.params, self.locals, strict=True)
            on_meta = [param for param, own in pairs if own.is_meta]
            # If only some shards are on meta, to_empty on the root would drop the values of the
            # others.
            are_all = len(on_meta) == len(self.params)
            which = "the root module" if are_all else "the module that holds it"
            kind = self._location.device.type
            raise RuntimeError(
                f"parameter {on_meta[0].fqn!r} of unit {self.label!r} is still on the meta device; "
                f"call to_empty(device={kind!r}) on {which} (shards live on {kind!r}) and "
                "initialise its parameters (reset_parameters, or load_state_dict) before the "
                "first forward."
            )


def check_not_custom(storage: UnitParams, what: str) -> None:
    """Raise a NotImplementedError for the feature ``what`` if shards have a custom all-gather."""
    if storage.custom_name is not None:
        raise NotImplementedError(
            f"{what} is not built yet for parameter {storage.custom_name!r} of unit "
            f"{storage.label!r}, because it has {PRE}."
        )
