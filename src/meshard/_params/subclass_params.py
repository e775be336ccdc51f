"""Parameters with a custom all-gather (float8, int8).

This is torch's contract for ``fully_shard``: ``fsdp_pre_all_gather`` turns a shard into tensors to
gather, and ``fsdp_post_all_gather`` turns what was gathered into the unsharded parameter. Tensor
subclasses have the two methods; users may also set them on the local tensor of any parameter.

The first gather creates the unsharded parameter from what ``fsdp_post_all_gather`` returns; later
ones fill it again. In between, the memory that the method named is freed by resizing its storage.

Tensor subclasses form a sibling unit beside the ordinary parameters of their module, because they
cannot lie in a flat buffer: their shards have memory of their own. Where users set the methods on
local tensors, the shards stay in the flat buffer, and the ordinary parameters of the unit are
gathered in the same way, by methods of ours.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshard._comm.all_gather import Form, PackedGather, agree_on_forms
from meshard._comm.communicator import CommStream, Communicator, GatherInFlight, Rows
from meshard._mesh.layout import FlatLayout
from meshard._mesh.mesh_info import MeshInfo, shard_mesh_of
from meshard._params.sharded_param import (
    ShardedParam,
    TensorTag,
    UnitParam,
    tag_tensor,
    version_of_shards,
    version_unless_replaced,
)
from meshard._params.storage import MemoryLocation
from meshard._params.unit_params import (
    GradientHookMaker,
    GroupSpec,
    UnitParams,
    check_not_meta,
    register_gradient_hook,
    take_replaced_shards,
)
from meshard._torch.dtensor import is_plain, local_of, set_local
from meshard._torch.private import keeping_version
from meshard.policies import MixedPrecisionPolicy

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
_SHORT, _LONG = 1, 5  # arguments of the two signatures of fsdp_pre_all_gather

# --- the contract --------------------------------------------------------------------------


def has_own_methods(tensor: torch.Tensor) -> bool:
    """Whether a method was set on ``tensor`` itself rather than on its class."""
    return PRE in tensor.__dict__ or POST in tensor.__dict__


def has_gather_methods(fqn: str, tensor: torch.Tensor) -> bool:
    """Return whether ``tensor``, of parameter ``fqn``, has both methods.

    Raises:
        ValueError: It has one only, or one whose arguments are not those of the contract.
    """
    has_pre, has_post = hasattr(tensor, PRE), hasattr(tensor, POST)
    if not has_pre and not has_post:
        return False
    kind = type(tensor).__name__
    if has_pre is not has_post:
        have, lack = (PRE, POST) if has_pre else (POST, PRE)
        raise ValueError(
            f"parameter {fqn!r} is a {kind}, which defines {have} but not {lack}; define both, or "
            "neither."
        )
    if _num_arguments(tensor) not in (_SHORT, _LONG):
        raise ValueError(
            f"parameter {fqn!r} is a {kind}, whose {PRE} takes "
            f"{inspect.signature(getattr(tensor, PRE))}; it must take (mesh), or (mesh, "
            "outer_size, outer_stride, module, mp_policy)."
        )
    return True


def _num_arguments(holder: object) -> int:
    return len(inspect.signature(getattr(holder, PRE)).parameters)


def check_subclass_placement(
    fqn: str, local: torch.Tensor, mesh_info: MeshInfo, shard_dim: int
) -> None:
    """Check where a parameter with the two methods is to be sharded.

    Raises:
        NotImplementedError: The mesh has no shard axis, or ``shard_dim`` is not the first.
    """
    name = f"parameter {fqn!r} is a {type(local).__name__} with {PRE}"
    if mesh_info.shard_axis is None:
        raise NotImplementedError(
            f"{name}, and there is no axis to shard it over; leave it out (ignored_params), or "
            "name a shard axis."
        )
    if shard_dim:
        raise NotImplementedError(
            f"{name}, which can be sharded on dim 0 only; shard_placement_fn chose dim {shard_dim}."
        )


def warn_of_lost_methods(fqn: str, unit: str) -> None:
    """Warn that a parameter got another local tensor, without the methods set on the old one."""
    warnings.warn(
        f"{PRE} was set on the local tensor of parameter {fqn!r} of unit {unit!r}, which has "
        "another local tensor now; set the methods again on the new one, or this parameter is "
        "gathered like any other.",
        stacklevel=2,
    )


def compute_dtype(mp_policy: MixedPrecisionPolicy, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the unsharded parameter of a shard of ``dtype``."""
    chosen = mp_policy.param_dtype
    return chosen if chosen and dtype.is_floating_point else dtype


def _check_inputs(name: str, returned: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
    """Return the tensors and the metadata that ``fsdp_pre_all_gather`` returned.

    Raises:
        TypeError: It returned something else.
    """
    if isinstance(returned, tuple) and len(returned) == 2:
        tensors, metadata = returned
        if isinstance(tensors, (tuple, list)) and tensors and all(map(is_plain, tensors)):
            return tuple(tensors), metadata
    raise TypeError(
        f"{PRE} of {name} must return (a tuple of plain tensors to gather, metadata), got "
        f"{_described(returned)}."
    )


def _check_result(name: str, returned: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return the unsharded tensor and its memory, which ``fsdp_post_all_gather`` returned first.

    Raises:
        TypeError: It returned something else.
    """
    if isinstance(returned, tuple) and len(returned) == 2:
        unsharded, inner = returned
        is_inner = isinstance(inner, (tuple, list)) and all(map(is_plain, inner))
        if isinstance(unsharded, torch.Tensor) and is_inner:
            return unsharded, tuple(inner)
    raise TypeError(
        f"{POST} of {name} must return (unsharded tensor, tuple of the plain tensors that hold "
        f"its memory) where out is None, got {_described(returned)}."
    )


def _described(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_described(each) for each in value)})"
    return type(value).__name__


class _OrdinaryGather:
    """The two methods for an ordinary parameter of a unit that is gathered by them.

    Args:
        param: How it is sharded.
        shard: Its local tensor.
        dtype: Of the unsharded parameter.
    """

    def __init__(self, param: ShardedParam, shard: torch.Tensor, dtype: torch.dtype) -> None:
        self._layout = param.layout
        self._shard = shard
        self._dtype = dtype

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], None]:
        rows_first = self._shard.detach().movedim(self._layout.shard_dim, 0)
        return (rows_first.to(self._dtype),), None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        (gathered,) = all_gather_outputs
        dim = self._layout.shard_dim
        if dim == 0:
            return (gathered, (gathered,)) if out is None else None
        rows = gathered[: self._layout.rows].movedim(0, dim)
        if out is None:
            unsharded = rows.contiguous()
            return unsharded, (unsharded,)
        target = out if is_plain(out) else local_of(out)
        target.detach().copy_(rows)
        return None


class CustomParam:
    """The unsharded tensor of one parameter, and the memory under it.

    Args:
        param: Its sharded parameter exists.
        shard: The local tensor.
        mesh: The shard axis.
        mp_policy: As the user gave it.

    Attributes:
        dtype: Of the unsharded parameter and its gradient; certain after the first gather.
        num_inputs: How many tensors are gathered.
    """

    def __init__(
        self,
        param: ShardedParam,
        shard: torch.Tensor,
        mesh: DeviceMesh,
        mp_policy: MixedPrecisionPolicy,
    ) -> None:
        param_dtype = compute_dtype(mp_policy, shard.dtype)
        self.dtype = param_dtype
        self.num_inputs = 0
        self._param = param
        self._shard = shard
        self._mesh = mesh
        self._mp_policy = mp_policy
        self._stride = torch.empty(param.layout.shape, device="meta").stride()
        self._param_dtype = param_dtype
        # The methods are looked up at each call, because users may replace them.
        self._methods: Any = shard
        if not has_gather_methods(param.fqn, shard):
            self._methods = _OrdinaryGather(param, shard, param_dtype)
        self._takes_mesh_only = _num_arguments(self._methods) == _SHORT
        self._metadata: Any = None
        self._is_made = False
        self._inner: list[tuple[torch.UntypedStorage, int]] = []
        self._has_own_memory = False
        placeholder = torch.empty(0, dtype=param_dtype, device=shard.device)
        flag = param.sharded.requires_grad
        param.unsharded = nn.Parameter(placeholder, requires_grad=flag)

    def make_inputs(self, unit: str) -> tuple[torch.Tensor, ...]:
        """Return what is to be gathered now.

        Raises:
            RuntimeError: ``fsdp_pre_all_gather`` returned tensors on another device.
            TypeError: It did not return a tuple of plain tensors, and metadata.
        """
        name, pre = self._name(unit), self._methods.fsdp_pre_all_gather
        if self._takes_mesh_only:
            returned = pre(self._mesh)
        else:
            module = next((module for module, _ in self._param.owners), None)
            size = self._param.layout.shape
            returned = pre(self._mesh, size, self._stride, module, self._mp_policy)
        inputs, self._metadata = _check_inputs(name, returned)
        device = self._shard.device
        if any(tensor.device != device for tensor in inputs):
            raise RuntimeError(
                f"{PRE} of {name} returned tensors on "
                f"{[str(tensor.device) for tensor in inputs]}; all must be on {device}."
            )
        self.num_inputs = len(inputs)
        return inputs

    def fill(self, outputs: Sequence[torch.Tensor], unit: str) -> bool:
        """Fill the unsharded parameter from ``outputs``, what was gathered.

        Returns:
            Whether the unsharded parameter was created.

        Raises:
            RuntimeError: ``fsdp_post_all_gather`` returned, or left, a tensor of another shape.
            TypeError: It did not return a tensor and its memory.
        """
        post = self._methods.fsdp_post_all_gather
        if not self._is_made:
            returned = post(tuple(outputs), self._metadata, self._param_dtype)
            self._create(returned, outputs, unit)
            return True
        for storage, num_bytes in self._inner:
            if storage.nbytes() != num_bytes:
                storage.resize_(num_bytes)
        unsharded_param = self._param.unsharded
        is_dtensor = self._param.dtensor_placement is not None
        # To autograd, filling a parameter again is no in-place change of what it has saved.
        with keeping_version(unsharded_param, *([local_of(unsharded_param)] if is_dtensor else [])):
            post(tuple(outputs), self._metadata, self._param_dtype, out=unsharded_param)
        if unsharded_param.shape != self._param.sharded.shape:
            raise self._wrong_shape("left out", unsharded_param.shape, unit)
        return False

    def _create(self, returned: Any, outputs: Sequence[torch.Tensor], unit: str) -> None:
        unsharded, inner = _check_result(self._name(unit), returned)
        self._inner = _memory_of(inner)
        layout, flag = self._param.layout, self._param.sharded.requires_grad
        if unsharded.shape != layout.shape:
            rows = layout.chunk_rows * layout.shard_count
            if unsharded.shape != (rows, *layout.shape[1:]):
                raise self._wrong_shape("returned a tensor", unsharded.shape, unit)
            # Padding is behind the rows of the last rank that owns any. Not narrow: torch's
            # fully_shard requires as_strided of tensor subclasses.
            unsharded = unsharded.as_strided(layout.shape, self._stride, 0)
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
    def may_free_outputs(self) -> bool:
        """Whether nothing refers to what was gathered once the unsharded parameter is filled."""
        return self._has_own_memory

    def free(self) -> None:
        """Free the memory of the unsharded parameter."""
        for storage, _ in self._inner:
            storage.resize_(0)

    def forget_metadata(self) -> None:
        """Drop the metadata of the last gather."""
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


class CustomGather:
    """The gather of a unit in which shards have methods of their own.

    Args:
        params: In the order of the module; their sharded parameters exist.
        locals_: The local tensor of each.
        spec: Mesh and device.
        mp_policy: As the user gave it; passed to the methods.
        gradient_hook: Makes the hook for the gradient of parameter ``index``.

    Raises:
        NotImplementedError: A shard with such methods is to live in host memory, or is sharded on
            another dim than the first.
        ValueError: A shard has one of the methods only.
    """

    def __init__(
        self,
        params: Sequence[ShardedParam],
        locals_: Sequence[torch.Tensor],
        *,
        spec: GroupSpec,
        mp_policy: MixedPrecisionPolicy,
        gradient_hook: GradientHookMaker,
    ) -> None:
        for param, local in zip(params, locals_, strict=True):
            if has_gather_methods(param.fqn, local):
                dim = param.layout.shard_dim
                check_subclass_placement(param.fqn, local, spec.mesh_info, dim)
                if spec.host is not None:
                    raise NotImplementedError(
                        f"CPUOffloadPolicy is not built yet for parameter {param.fqn!r}, because "
                        f"it has {PRE}."
                    )
        self._params = params
        self._mesh_info = spec.mesh_info
        self._device = spec.device
        self._gradient_hook = gradient_hook
        mesh = shard_mesh_of(spec.mesh_info)
        self._unsharded = [
            CustomParam(param, local, mesh, mp_policy)
            for param, local in zip(params, locals_, strict=True)
        ]
        self._gather: PackedGather | None = None  # made by the first gather
        self._own_forms: list[Form] = []  # of what this rank sends, where it owns fewer rows

    @property
    def compute_dtypes(self) -> list[torch.dtype]:
        """dtypes of the unsharded parameters; certain after the first gather."""
        return [each.dtype for each in self._unsharded]

    @torch.no_grad()
    def start(self, comm: Communicator, label: str) -> GatherInFlight:
        """Start the gather: see ``UnitParams.start_gather``."""
        # What is made here may become part of an unsharded parameter, and be saved by autograd.
        with torch.inference_mode(False), comm.on_stream(CommStream.GATHER):
            inputs = [tensor for each in self._unsharded for tensor in each.make_inputs(label)]
            gather = self._plan([Form.of(each) for each in inputs], label)
            return gather.start(inputs, comm=comm, group=self._mesh_info.shard_group, label=label)

    def _plan(self, forms: list[Form], label: str) -> PackedGather:
        if self._gather is not None:
            if forms != self._own_forms:
                raise RuntimeError(
                    f"{PRE} of unit {label!r} returned {forms} to gather, and "
                    f"{self._own_forms} before; a parameter must send the same dtypes and shapes "
                    "each time."
                )
            return self._gather
        count, device = self._mesh_info.shard_count, self._device
        self._own_forms = agreed = forms
        if any(param.layout.rows % count for param in self._params):
            group = self._mesh_info.shard_group
            agreed = agree_on_forms(forms, group, device=device, label=label)
        self._gather = PackedGather(agreed, count, device)
        return self._gather

    def fill(self, gathered: Rows, *, comes_again: bool, label: str) -> None:
        """Fill the unsharded parameters: see ``UnitParams.fill_unsharded``."""
        assert self._gather is not None and isinstance(gathered, torch.Tensor)
        with torch.inference_mode(False), torch.no_grad():
            self._gather.allocate()
            self._gather.copy_out(gathered)
            try:
                self._fill_each(self._gather, label)
            except BaseException:
                self.free()
                raise
        if not comes_again:
            for each in self._unsharded:
                each.forget_metadata()

    def _fill_each(self, gather: PackedGather, label: str) -> None:
        first = 0
        for index, each in enumerate(self._unsharded):
            own = range(first, first + each.num_inputs)
            first = own.stop
            if each.fill(gather.outputs[own.start : own.stop], label):
                register_gradient_hook(self._params[index].unsharded, self._gradient_hook(index))
            if each.may_free_outputs:
                gather.free(own)

    def free(self) -> None:
        """Free the memory of the unsharded parameters."""
        if self._gather is not None:
            self._gather.free()
        for each in self._unsharded:
            each.free()


class SubclassParams(UnitParams):
    """Parameters that are tensor subclasses; each shard has memory of its own.

    Args:
        params: In the order of the module; their sharded parameters exist.
        spec: Mesh and device.
        mp_policy: As the user gave it.
        gradient_hook: Makes the hook for the gradient of parameter ``index``.
    """

    has_custom_gather = True

    def __init__(
        self,
        params: list[ShardedParam],
        *,
        spec: GroupSpec,
        mp_policy: MixedPrecisionPolicy,
        gradient_hook: GradientHookMaker,
    ) -> None:
        self.params: list[ShardedParam] = params
        self.spec = spec
        self._mp_policy = mp_policy
        self._gradient_hook = gradient_hook
        self._adopt_shards()

    def _adopt_shards(self) -> None:
        self.locals = [local_of(param.sharded) for param in self.params]
        self._gather = CustomGather(
            self.params,
            self.locals,
            spec=self.spec,
            mp_policy=self._mp_policy,
            gradient_hook=self._gradient_hook,
        )
        self._take_dtypes(self._gather.compute_dtypes)
        self.is_partly_meta = len({local.is_meta for local in self.locals}) > 1
        layouts = [param.layout for param in self.params]
        self.layout = FlatLayout.build(layouts, [local.dtype for local in self.locals])

    # --- gather ----------------------------------------------------------------------------

    def start_gather(self, comm: Communicator) -> GatherInFlight:
        return self._gather.start(comm, self.label)

    def fill_unsharded(self, gathered: Rows, *, comes_again: bool) -> None:
        self._gather.fill(gathered, comes_again=comes_again, label=self.label)
        self._take_dtypes(self._gather.compute_dtypes)

    def free_unsharded(self) -> None:
        self._gather.free()

    # --- edits by users --------------------------------------------------------------------

    @property
    def version(self) -> int:
        return version_of_shards(self.params)

    def version_unless_replaced(self) -> int | None:
        return version_unless_replaced(self.params, self.locals)

    def take_replacements(self) -> bool:
        return take_replaced_shards(self.params, self.locals, self.label, None)

    def rebuild(self) -> None:
        """Adopt the shards as they are now.

        Raises:
            RuntimeError: A shard has no methods, or is on another device.
        """
        device = self.spec.device
        for param in self.params:
            local = local_of(param.sharded)
            if not has_gather_methods(param.fqn, local):
                raise RuntimeError(
                    f"parameter {param.fqn!r} of unit {self.label!r} was replaced by one whose "
                    f"shard is a plain tensor, without the {PRE} that it had; assign a tensor of "
                    "the same class, or edit it in place."
                )
            if local.device.type not in ("meta", device.type):
                raise RuntimeError(
                    f"parameter {param.fqn!r} of unit {self.label!r} was moved to {local.device}, "
                    f"but its mesh is on {device.type!r}; move it back before use."
                )
        self._adopt_shards()
        for param, local in zip(self.params, self.locals, strict=True):
            set_local(param.sharded, local)
            tag_tensor(param.sharded, TensorTag.SHARD, param.fqn)
            param.install(param.sharded)

    def for_copy(self, params: Sequence[UnitParam], gradient_hook: GradientHookMaker) -> UnitParams:
        copied = copy.copy(self)
        copied.params = cast("list[ShardedParam]", params)
        copied._gradient_hook = gradient_hook
        copied.rebuild()
        return copied

    # --- location --------------------------------------------------------------------------

    def move(self, location: MemoryLocation | None) -> torch.Tensor:
        raise AssertionError("meshard.offload has refused: see check_not_subclass")

    def check_materialised(self) -> None:
        check_not_meta(self.params, self.label, self.spec.device)


def check_not_subclass(storage: UnitParams, what: str) -> None:
    """Raise a NotImplementedError if shards have a custom all-gather, so that ``what`` fails."""
    if storage.has_custom_gather:
        raise NotImplementedError(
            f"{what} is not built yet for parameter {storage.params[0].fqn!r} of unit "
            f"{storage.label!r}, because it has {PRE}."
        )
