"""Which tensors stand for parameters that say themselves what is gathered of them?

They are a group of their own beside the ordinary parameters of a unit, with one all-gather for all
of them, so that a unit without any does not know that there could be. Every shard is a tensor
subclass, which a flat buffer cannot hold; so shards have memory of their own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch

from meshard._comm.all_gather import GatherInFlight
from meshard._comm.communicator import Communicator, Lane, Rows
from meshard._comm.packed_gather import Form, PackedGather, agree_on_forms
from meshard._geometry.layout import FlatLayout
from meshard._geometry.mesh_roles import shard_mesh_of
from meshard._params.dtensors import local_of, set_local
from meshard._params.extension import Surroundings, is_extension
from meshard._params.home import Home
from meshard._params.marks import Mark, mark_as
from meshard._params.sharded_param import ShardedParam, version_unless_replaced
from meshard._runtime.extended_face import ExtendedFace
from meshard._runtime.group_tensors import GradientHook, Place
from meshard._runtime.replacements import check_not_meta, take_replacements
from meshard.policies import MixedPrecisionPolicy


class ExtendedTensors:
    """The two faces of parameters that are tensor subclasses with methods for their gather.

    Args:
        params: In the order of the module; their faces are made here.
        shards: This rank's shard of each, of any device; kept.
        requires_grad: One flag per parameter.
        place: Mesh and device.
        mp_policy: As the user gave it; what it says of parameters is left to them.
        gradient_hook: Makes the hook that hears of a whole gradient of parameter ``index``.
    """

    def __init__(
        self,
        params: list[ShardedParam],
        shards: Sequence[torch.Tensor],
        requires_grad: Sequence[bool],
        *,
        place: Place,
        mp_policy: MixedPrecisionPolicy,
        gradient_hook: Callable[[int], GradientHook],
    ) -> None:
        assert place.host is None
        self.params = params
        self.place = place
        self.label = ""  # the unit's name; known once its root is sharded
        self.link = None  # shards are not in host memory
        self.is_away = False
        self._mp_policy = mp_policy
        self._shard_mesh = shard_mesh_of(place.roles)
        self._gradient_hook = gradient_hook
        self._gather: PackedGather | None = None  # once something has been gathered
        self._own_forms: list[Form] = []  # of what this rank sends, where it owns fewer rows
        for param, shard, flag in zip(params, shards, requires_grad, strict=True):
            local = shard if shard.is_meta else shard.to(place.device)
            param.make_sharded(local, place.roles, requires_grad=flag)
        self._adopt_shards()

    def _adopt_shards(self) -> None:
        self.locals = [local_of(param.sharded) for param in self.params]
        self._faces = [
            ExtendedFace(param, local, self._around(param), self._param_dtype(local))
            for param, local in zip(self.params, self.locals, strict=True)
        ]
        self._gather = None
        self.is_partly_meta = len({local.is_meta for local in self.locals}) > 1

    def _param_dtype(self, local: torch.Tensor) -> torch.dtype:
        chosen = self._mp_policy.param_dtype
        return chosen if chosen and local.dtype.is_floating_point else local.dtype

    def _around(self, param: ShardedParam) -> Surroundings:
        shape = param.layout.shape
        return Surroundings(
            mesh=self._shard_mesh,
            outer_size=shape,
            outer_stride=torch.empty(shape, device="meta").stride(),
            mp_policy=self._mp_policy,
        )

    # --- whole -----------------------------------------------------------------------------

    @property
    def compute_dtypes(self) -> list[torch.dtype]:
        """See ``Faces.compute_dtypes``; known for sure after the first gather."""
        return [face.dtype for face in self._faces]

    @property
    def is_one_dtype(self) -> bool:
        """See ``Faces.is_one_dtype``."""
        return len(set(self.compute_dtypes)) == 1

    @torch.no_grad()
    def start_gather(self, comm: Communicator) -> GatherInFlight:
        """See ``Faces.start_gather``."""
        group = self.place.roles.shard_group
        # What is made here may become part of a whole parameter, and be saved by autograd.
        with torch.inference_mode(False), comm.lane(Lane.GATHER):
            inputs = [each for face in self._faces for each in face.make_inputs(self.label)]
            gather = self._plan([Form.of(each) for each in inputs])
            return gather.start(inputs, comm=comm, group=group, label=self.label)

    def _plan(self, forms: list[Form]) -> PackedGather:
        if self._gather is not None:
            if forms != self._own_forms:
                raise RuntimeError(
                    f"fsdp_pre_all_gather of unit {self.label!r} returned {forms} to gather, and "
                    f"{self._own_forms} before; a parameter must send the same dtypes and shapes "
                    "each time."
                )
            return self._gather
        roles, device = self.place.roles, self.place.device
        self._own_forms = agreed = forms
        if any(param.layout.rows % roles.shard_count for param in self.params):
            agreed = agree_on_forms(forms, roles.shard_group, device=device, label=self.label)
        self._gather = PackedGather(agreed, roles.shard_count, device)
        return self._gather

    def fill_whole(self, gathered: Rows, *, comes_again: bool) -> None:
        """See ``Faces.fill_whole``."""
        assert self._gather is not None and isinstance(gathered, torch.Tensor)
        with torch.inference_mode(False), torch.no_grad():
            self._gather.allocate()
            self._gather.copy_out(gathered)
            try:
                self._fill_faces(self._gather, comes_again)
            except BaseException:
                self.free_whole()
                raise

    def _fill_faces(self, gather: PackedGather, comes_again: bool) -> None:
        first = 0
        for index, face in enumerate(self._faces):
            own = range(first, first + face.num_inputs)
            first = own.stop
            if face.fill(gather.outputs[own.start : own.stop], self.label):
                self._watch(index)
            if face.leaves_outputs:
                gather.free(own)
            if not comes_again:
                face.forget_metadata()

    def _watch(self, index: int) -> None:
        """Have the hook hear of the gradients of a whole face that is new."""
        param = self.params[index]
        if not param.unsharded.is_floating_point():
            return
        param.unsharded.requires_grad_(True)  # a hook can only be put on one that requires grad
        param.unsharded.register_post_accumulate_grad_hook(self._gradient_hook(index))
        param.unsharded.requires_grad_(param.sharded.requires_grad)

    def free_whole(self) -> None:
        """See ``Faces.free_whole``."""
        if self._gather is not None:
            self._gather.free()
        for face in self._faces:
            face.free()

    @property
    def can_leave(self) -> bool:
        """See ``Faces.can_leave``: who holds what is under a subclass cannot be seen."""
        return False

    def leave_whole(self, joining_hook: Callable[[int], GradientHook], *, stays: bool) -> None:
        """See ``Faces.leave_whole``."""
        raise AssertionError("whole parameters that say themselves what they are made of stay")

    # --- shards ----------------------------------------------------------------------------

    @property
    def layout(self) -> FlatLayout:
        """See ``Faces.layout``: of the dtypes that the shards say they have."""
        layouts = [param.layout for param in self.params]
        return FlatLayout.build(layouts, [local.dtype for local in self.locals])

    def version_unless_replaced(self) -> int | None:
        """See ``Faces.version_unless_replaced``."""
        return version_unless_replaced(self.params, self.locals)

    @property
    def version(self) -> int:
        """See ``Faces.version``."""
        shards = [param.sharded for param in self.params]
        return sum(shard._version + local_of(shard)._version for shard in shards)

    def take_replacements(self) -> bool:
        """See ``Faces.take_replacements``."""
        return take_replacements(self.params, self.locals, self.label, None)

    def rebuild(self) -> None:
        """See ``Faces.rebuild``.

        Raises:
            RuntimeError: A shard is not what it was any more, or on another device.
        """
        device = self.place.device
        for param in self.params:
            local, name = local_of(param.sharded), f"{param.fqn!r} of unit {self.label!r}"
            if not is_extension(local):
                raise RuntimeError(
                    f"parameter {name} was replaced by one whose shard is a plain tensor, without "
                    "the fsdp_pre_all_gather that it had; assign a tensor of the class that it "
                    "was of, or edit it in place."
                )
            if local.device.type not in ("meta", device.type):
                raise RuntimeError(
                    f"parameter {name} was moved to {local.device}, but its mesh is on "
                    f"{device.type!r}; move it back before use."
                )
        self._adopt_shards()
        for param, local in zip(self.params, self.locals, strict=True):
            set_local(param.sharded, local)
            mark_as(param.sharded, Mark.SHARD, param.fqn)
            param.show(param.sharded)

    def for_copy(
        self, params: list[ShardedParam], gradient_hook: Callable[[int], GradientHook]
    ) -> ExtendedTensors:
        """See ``Faces.for_copy``."""
        copied = copy.copy(self)
        copied.params = params
        copied._gradient_hook = gradient_hook
        copied.rebuild()
        return copied

    def move(self, home: Home | None) -> torch.Tensor:
        """See ``Faces.move``; ``meshard.offload`` refuses these before it moves anything."""
        raise AssertionError("shards that say themselves what is gathered of them stay in place")

    def check_materialised(self) -> None:
        """See ``Faces.check_materialised``."""
        check_not_meta(self.params, self.label, self.place.device)


def check_not_extended(tensors: object, what: str) -> None:
    """Raise if the parameters of a group say themselves what is gathered of them.

    Args:
        tensors: Of a group.
        what: Cannot be done with it.
    """
    if isinstance(tensors, ExtendedTensors):
        raise NotImplementedError(
            f"{what} is not built yet for parameter {tensors.params[0].fqn!r} of unit "
            f"{tensors.label!r}, because it has fsdp_pre_all_gather."
        )
