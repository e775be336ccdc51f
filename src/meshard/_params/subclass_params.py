"""Tensor subclasses with a custom all-gather (float8, int8).

torch's contract for tensor subclasses under ``fully_shard``, used for weights that travel or
compute in float8 and the like: ``fsdp_pre_all_gather`` turns a shard into tensors to gather, and
``fsdp_post_all_gather`` turns what was gathered into the whole parameter.

The first gather makes its whole face out of what ``fsdp_post_all_gather`` returns; later ones have
it filled again. In between, the memory that it names is given back by resizing it.

They are a group of their own beside the ordinary parameters of a unit, with one all-gather for all
of them, so that a unit without any does not know that there could be. Every shard is a tensor
subclass, which a flat buffer cannot hold; so shards have memory of their own.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshard._comm.all_gather import Form, GatherInFlight, PackedGather, agree_on_forms
from meshard._comm.communicator import CommStream, Communicator, Rows
from meshard._mesh.layout import FlatLayout
from meshard._mesh.mesh_info import shard_mesh_of
from meshard._params.flat_params import GradientHook, GroupSpec, check_not_meta, take_replacements
from meshard._params.sharded_param import (
    ShardedParam,
    TensorTag,
    tag_tensor,
    version_unless_replaced,
)
from meshard._params.storage import MemoryLocation
from meshard._torch.dtensor import is_plain, local_of, set_local
from meshard._torch.private import keeping_version
from meshard.policies import MixedPrecisionPolicy

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
_SHORT, _LONG = 1, 5  # arguments of the two signatures of fsdp_pre_all_gather


def has_gather_methods(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has both methods."""
    return hasattr(tensor, PRE) and hasattr(tensor, POST)


def check_gather_methods(fqn: str, tensor: torch.Tensor) -> bool:
    """Return whether ``tensor``, of parameter ``fqn``, has both methods.

    Raises:
        ValueError: It has one only, or one whose arguments are not those of the contract.
    """
    has_pre, has_post = hasattr(tensor, PRE), hasattr(tensor, POST)
    kind = type(tensor).__name__
    if has_pre is not has_post:
        have, lack = (PRE, POST) if has_pre else (POST, PRE)
        raise ValueError(
            f"parameter {fqn!r} is a {kind}, which defines {have} but not {lack}; define both, or "
            "neither."
        )
    if has_pre and _num_arguments(tensor) not in (_SHORT, _LONG):
        raise ValueError(
            f"parameter {fqn!r} is a {kind}, whose {PRE} takes "
            f"{inspect.signature(getattr(tensor, PRE))}; it must take (mesh), or (mesh, "
            "outer_size, outer_stride, module, mp_policy)."
        )
    return has_pre


def _num_arguments(tensor: torch.Tensor) -> int:
    return len(inspect.signature(getattr(tensor, PRE)).parameters)


@dataclass(frozen=True, slots=True)
class GatherContext:
    """What ``fsdp_pre_all_gather`` is told, beside the shard."""

    mesh: DeviceMesh  # the shard axis
    outer_size: torch.Size
    outer_stride: tuple[int, ...]
    mp_policy: Any  # as the user gave it


class GatherInputs(NamedTuple):
    """What ``fsdp_pre_all_gather`` returned."""

    tensors: tuple[torch.Tensor, ...]
    metadata: Any


def takes_mesh_only(tensor: torch.Tensor) -> bool:
    """Whether ``fsdp_pre_all_gather`` of ``tensor`` has the short signature."""
    return _num_arguments(tensor) == _SHORT


def call_pre_all_gather(
    name: str,
    shard: torch.Tensor,
    context: GatherContext,
    *,
    module: nn.Module | None,
    mesh_only: bool,
) -> GatherInputs:
    """Call ``fsdp_pre_all_gather``.

    Args:
        name: Of parameter and unit, for errors.
        shard: The local tensor.
        around: What else it is told.
        module: The first one that holds the parameter.
        mesh_only: See ``takes_mesh_only``.

    Raises:
        TypeError: It returned something else than a tuple of plain tensors, at least one, and
            metadata.
    """
    pre: Any = shard.fsdp_pre_all_gather  # type: ignore[attr-defined]
    if mesh_only:
        returned = pre(context.mesh)
    else:
        returned = pre(
            context.mesh, context.outer_size, context.outer_stride, module, context.mp_policy
        )
    if isinstance(returned, tuple) and len(returned) == 2:
        tensors, metadata = returned
        if isinstance(tensors, (tuple, list)) and tensors and all(map(is_plain, tensors)):
            return GatherInputs(tuple(tensors), metadata)
    raise TypeError(
        f"{PRE} of {name} must return (a tuple of plain tensors to gather, metadata), got "
        f"{_described(returned)}."
    )


def check_post_all_gather(
    name: str, returned: Any
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return the whole parameter and the tensors with its memory, which a first call returned.

    Raises:
        TypeError: It is something else.
    """
    if isinstance(returned, tuple) and len(returned) == 2:
        unsharded, inner = returned
        is_inner = isinstance(inner, (tuple, list)) and all(map(is_plain, inner))
        if isinstance(unsharded, torch.Tensor) and is_inner:
            return unsharded, tuple(inner)
    raise TypeError(
        f"{POST} of {name} must return (whole tensor, tuple of the plain tensors that hold its "
        f"memory) where out is None, got {_described(returned)}."
    )


def _described(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_described(each) for each in value)})"
    return type(value).__name__


class SubclassParam:
    """The whole face of one parameter, and the memory under it.

    Args:
        param: Its sharded face is there.
        shard: The local tensor.
        around: What ``fsdp_pre_all_gather`` is told.
        param_dtype: What ``fsdp_post_all_gather`` is told to compute in.
    """

    def __init__(
        self,
        param: ShardedParam,
        shard: torch.Tensor,
        context: GatherContext,
        param_dtype: torch.dtype,
    ) -> None:
        self.dtype = param_dtype  # of the whole parameter, and of its gradient
        self.num_inputs = 0  # tensors that are gathered
        self._param = param
        self._shard = shard
        self._context = context
        self._param_dtype = param_dtype
        self._mesh_only = takes_mesh_only(shard)
        self._metadata: Any = None
        self._is_made = False
        self._inner: list[tuple[torch.UntypedStorage, int]] = []
        self._has_own_memory = False
        placeholder = torch.empty(0, dtype=param_dtype, device=shard.device)
        flag = param.sharded.requires_grad
        param.unsharded = nn.Parameter(placeholder, requires_grad=flag)

    def make_inputs(self, unit: str) -> tuple[torch.Tensor, ...]:
        """Return what is to be gathered, anew."""
        inputs, self._metadata = call_pre_all_gather(
            self._name(unit),
            self._shard,
            self._context,
            module=self._param.owners[0][0](),
            mesh_only=self._mesh_only,
        )
        device = self._shard.device
        if any(tensor.device != device for tensor in inputs):
            raise RuntimeError(
                f"fsdp_pre_all_gather of {self._name(unit)} returned tensors on "
                f"{[str(tensor.device) for tensor in inputs]}; all must be on {device}."
            )
        self.num_inputs = len(inputs)
        return inputs

    def fill(self, outputs: Sequence[torch.Tensor], unit: str) -> bool:
        """Have the whole parameter in ``param.unsharded``.

        Args:
            outputs: What was gathered.
            unit: Its name, for errors.

        Returns:
            Whether the face was made anew.

        Raises:
            RuntimeError: ``fsdp_post_all_gather`` returned, or left, a tensor of another shape.
            TypeError: It returned something else than a tensor and its memory.
        """
        post: Any = self._shard.fsdp_post_all_gather  # type: ignore[attr-defined]
        if not self._is_made:
            returned = post(tuple(outputs), self._metadata, self._param_dtype)
            self._make(*check_post_all_gather(self._name(unit), returned), outputs, unit)
            return True
        for storage, num_bytes in self._inner:
            if storage.nbytes() != num_bytes:
                storage.resize_(num_bytes)
        unsharded_param = self._param.unsharded
        is_placed = self._param.dtensor_placement is not None
        with keeping_version(unsharded_param, *([local_of(unsharded_param)] if is_placed else [])):
            post(tuple(outputs), self._metadata, self._param_dtype, out=unsharded_param)
        if unsharded_param.shape != self._param.sharded.shape:
            raise self._wrong_shape("left out", unsharded_param.shape, unit)
        return False

    def _make(
        self,
        unsharded: torch.Tensor,
        inner: tuple[torch.Tensor, ...],
        outputs: Sequence[torch.Tensor],
        unit: str,
    ) -> None:
        self._inner = _memory_of(inner)
        layout, flag = self._param.layout, self._param.sharded.requires_grad
        if unsharded.shape != layout.shape:
            rows = layout.chunk_rows * layout.shard_count
            if unsharded.shape != (rows, *layout.shape[1:]):
                raise self._wrong_shape("returned a tensor", unsharded.shape, unit)
            # Padding is behind the rows of the last rank that owns any. Not narrow: this is what
            # torch's fully_shard asks of tensor subclasses.
            unsharded = unsharded.as_strided(layout.shape, self._context.outer_stride, 0)
        if type(unsharded) is torch.Tensor:
            taken = {storage.data_ptr() for storage, _ in (*self._inner, *_memory_of([unsharded]))}
            self._has_own_memory = all(
                storage.data_ptr() not in taken for storage, _ in _memory_of(outputs)
            )
        unsharded_param = self._param.as_used(nn.Parameter(unsharded, requires_grad=flag))
        tag_tensor(unsharded_param, TensorTag.UNSHARDED, self._param.fqn)
        self._param.unsharded = unsharded_param
        self.dtype = unsharded_param.dtype
        self._is_made = True

    @property
    def leaves_outputs(self) -> bool:
        """Whether nothing refers to what was gathered once the face is filled."""
        return self._has_own_memory

    def free(self) -> None:
        """Give the memory under the face back."""
        for storage, _ in self._inner:
            storage.resize_(0)

    def forget_metadata(self) -> None:
        """Drop what belongs to one gather."""
        self._metadata = None

    def _name(self, unit: str) -> str:
        return f"parameter {self._param.fqn!r} of unit {unit!r}"

    def _wrong_shape(self, did: str, shape: torch.Size, unit: str) -> RuntimeError:
        return RuntimeError(
            f"{POST} of {self._name(unit)}, a {type(self._shard).__name__}, {did} of shape "
            f"{tuple(shape)}; it must be {tuple(self._param.layout.shape)}, which may be followed "
            "by the rows of padding."
        )


def _memory_of(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.UntypedStorage, int]]:
    """Return the storages of plain tensors, with their bytes."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return [(storage, storage.nbytes()) for storage in storages.values()]


class SubclassParams:
    """The two faces of parameters that are tensor subclasses with methods for their gather.

    Args:
        params: In the order of the module; their faces are made here.
        shards: This rank's shard of each, of any device; kept.
        requires_grad: One flag per parameter.
        spec: Mesh and device.
        mp_policy: As the user gave it; what it says of parameters is left to them.
        gradient_hook: Makes the hook that hears of a whole gradient of parameter ``index``.
    """

    def __init__(
        self,
        params: list[ShardedParam],
        shards: Sequence[torch.Tensor],
        requires_grad: Sequence[bool],
        *,
        spec: GroupSpec,
        mp_policy: MixedPrecisionPolicy,
        gradient_hook: Callable[[int], GradientHook],
    ) -> None:
        assert spec.host is None
        self.params = params
        self.spec = spec
        self.label = ""  # the unit's name; known once its root is sharded
        self.comm: Communicator  # shared by all units of a root
        self.host_copies = None  # shards are not in host memory
        self.is_offloaded = False
        self._mp_policy = mp_policy
        self._shard_mesh = shard_mesh_of(spec.mesh_info)
        self._gradient_hook = gradient_hook
        self._gather: PackedGather | None = None  # once something has been gathered
        self._own_forms: list[Form] = []  # of what this rank sends, where it owns fewer rows
        for param, shard, flag in zip(params, shards, requires_grad, strict=True):
            local = shard if shard.is_meta else shard.to(spec.device)
            param.make_sharded(local, spec.mesh_info, requires_grad=flag)
        self._adopt_shards()

    def _adopt_shards(self) -> None:
        self.locals = [local_of(param.sharded) for param in self.params]
        self._unsharded_params = [
            SubclassParam(param, local, self._context(param), self._param_dtype(local))
            for param, local in zip(self.params, self.locals, strict=True)
        ]
        self._gather = None
        self.is_partly_meta = len({local.is_meta for local in self.locals}) > 1

    def _param_dtype(self, local: torch.Tensor) -> torch.dtype:
        chosen = self._mp_policy.param_dtype
        return chosen if chosen and local.dtype.is_floating_point else local.dtype

    def _context(self, param: ShardedParam) -> GatherContext:
        shape = param.layout.shape
        return GatherContext(
            mesh=self._shard_mesh,
            outer_size=shape,
            outer_stride=torch.empty(shape, device="meta").stride(),
            mp_policy=self._mp_policy,
        )

    # --- whole -----------------------------------------------------------------------------

    @property
    def compute_dtypes(self) -> list[torch.dtype]:
        """See ``UnitParams.compute_dtypes``; known for sure after the first gather."""
        return [unsharded_param.dtype for unsharded_param in self._unsharded_params]

    @property
    def is_one_dtype(self) -> bool:
        """See ``UnitParams.is_one_dtype``."""
        return len(set(self.compute_dtypes)) == 1

    @torch.no_grad()
    def start_gather(self, comm: Communicator) -> GatherInFlight:
        """See ``UnitParams.start_gather``."""
        group = self.spec.mesh_info.shard_group
        # What is made here may become part of a whole parameter, and be saved by autograd.
        with torch.inference_mode(False), comm.on_stream(CommStream.GATHER):
            inputs = [
                each
                for unsharded_param in self._unsharded_params
                for each in unsharded_param.make_inputs(self.label)
            ]
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
        mesh_info, device = self.spec.mesh_info, self.spec.device
        self._own_forms = agreed = forms
        if any(param.layout.rows % mesh_info.shard_count for param in self.params):
            agreed = agree_on_forms(forms, mesh_info.shard_group, device=device, label=self.label)
        self._gather = PackedGather(agreed, mesh_info.shard_count, device)
        return self._gather

    def fill_unsharded(self, gathered: Rows, *, comes_again: bool) -> None:
        """See ``UnitParams.fill_unsharded``."""
        assert self._gather is not None and isinstance(gathered, torch.Tensor)
        with torch.inference_mode(False), torch.no_grad():
            self._gather.allocate()
            self._gather.copy_out(gathered)
            try:
                self._fill_faces(self._gather, comes_again)
            except BaseException:
                self.free_unsharded()
                raise

    def _fill_faces(self, gather: PackedGather, comes_again: bool) -> None:
        first = 0
        for index, unsharded_param in enumerate(self._unsharded_params):
            own = range(first, first + unsharded_param.num_inputs)
            first = own.stop
            if unsharded_param.fill(gather.outputs[own.start : own.stop], self.label):
                self._watch(index)
            if unsharded_param.leaves_outputs:
                gather.free(own)
            if not comes_again:
                unsharded_param.forget_metadata()

    def _watch(self, index: int) -> None:
        """Have the hook hear of the gradients of a whole face that is new."""
        param = self.params[index]
        if not param.unsharded.is_floating_point():
            return
        param.unsharded.requires_grad_(True)  # a hook can only be put on one that requires grad
        param.unsharded.register_post_accumulate_grad_hook(self._gradient_hook(index))
        param.unsharded.requires_grad_(param.sharded.requires_grad)

    def free_unsharded(self) -> None:
        """See ``UnitParams.free_unsharded``."""
        if self._gather is not None:
            self._gather.free()
        for unsharded_param in self._unsharded_params:
            unsharded_param.free()

    @property
    def can_leave(self) -> bool:
        """See ``UnitParams.can_leave``: who holds what is under a subclass cannot be seen."""
        return False

    def leave_whole(self, joining_hook: Callable[[int], GradientHook], *, stays: bool) -> None:
        """See ``UnitParams.leave_whole``."""
        raise AssertionError("whole parameters that say themselves what they are made of stay")

    # --- shards ----------------------------------------------------------------------------

    @property
    def layout(self) -> FlatLayout:
        """See ``UnitParams.layout``: of the dtypes that the shards say they have."""
        layouts = [param.layout for param in self.params]
        return FlatLayout.build(layouts, [local.dtype for local in self.locals])

    def version_unless_replaced(self) -> int | None:
        """See ``UnitParams.version_unless_replaced``."""
        return version_unless_replaced(self.params, self.locals)

    @property
    def version(self) -> int:
        """See ``UnitParams.version``."""
        shards = [param.sharded for param in self.params]
        return sum(shard._version + local_of(shard)._version for shard in shards)

    def take_replacements(self) -> bool:
        """See ``UnitParams.take_replacements``."""
        return take_replacements(self.params, self.locals, self.label, None)

    def rebuild(self) -> None:
        """See ``UnitParams.rebuild``.

        Raises:
            RuntimeError: A shard is not what it was any more, or on another device.
        """
        device = self.spec.device
        for param in self.params:
            local, name = local_of(param.sharded), f"{param.fqn!r} of unit {self.label!r}"
            if not has_gather_methods(local):
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
            tag_tensor(param.sharded, TensorTag.SHARD, param.fqn)
            param.install(param.sharded)

    def for_copy(
        self, params: list[ShardedParam], gradient_hook: Callable[[int], GradientHook]
    ) -> SubclassParams:
        """See ``UnitParams.for_copy``."""
        copied = copy.copy(self)
        copied.params = params
        copied._gradient_hook = gradient_hook
        copied.rebuild()
        return copied

    def move(self, location: MemoryLocation | None) -> torch.Tensor:
        """See ``UnitParams.move``; ``meshard.offload`` refuses these before it moves anything."""
        raise AssertionError("shards that say themselves what is gathered of them stay in place")

    def check_materialised(self) -> None:
        """See ``UnitParams.check_materialised``."""
        check_not_meta(self.params, self.label, self.spec.device)


def check_not_subclass(tensors: object, what: str) -> None:
    """Raise if the parameters of a group say themselves what is gathered of them.

    Args:
        tensors: Of a group.
        what: Cannot be done with it.
    """
    if isinstance(tensors, SubclassParams):
        raise NotImplementedError(
            f"{what} is not built yet for parameter {tensors.params[0].fqn!r} of unit "
            f"{tensors.label!r}, because it has fsdp_pre_all_gather."
        )
