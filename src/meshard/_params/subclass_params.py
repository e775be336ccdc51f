"""Parameters with a custom all-gather (float8, int8).

The contract is that of torch's ``fully_shard``. ``fsdp_pre_all_gather`` turns a shard into tensors
to gather, and ``fsdp_post_all_gather`` turns what was gathered into the unsharded parameter. Tensor
subclasses have the two methods; users may also set them on the local tensor of any parameter.

The first gather creates the unsharded parameter from what ``fsdp_post_all_gather`` returns; later
gathers fill it again. ``fsdp_post_all_gather`` also returns the plain tensors that hold the memory
of the unsharded parameter. ``free_unsharded`` resizes their storages to zero.

Parameters of a tensor subclass are in a unit of their own (a sibling unit, if the module has
ordinary parameters too), and each shard has memory of its own. If instead users set the methods on
local tensors, all shards stay in the flat buffer of ``FlatParams``. ``_OrdinaryGather`` then has
the two methods for the other parameters of the unit.
"""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshard._comm.blocking import gather_from_all
from meshard._comm.communicator import CommStream, Communicator, Handle
from meshard._comm.host_copies import HostCopies
from meshard._mesh.layout import ROW_BYTES, FlatLayout, padded
from meshard._mesh.mesh_info import MeshInfo, shard_mesh_of
from meshard._params.sharded_param import GradientHook, ShardedParam
from meshard._params.unit_params import GradientHookMaker, GroupSpec, ShardedUnitParams, UnitParams
from meshard._torch.dtensor import is_plain, plain_of
from meshard._torch.private import keeping_version
from meshard.policies import MixedPrecisionPolicy, check_bool

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
RELEASE = "fsdp_should_release_all_gather_outputs_after_post_all_gather"  # optional
_SHORT, _LONG = 1, 5  # how many arguments fsdp_pre_all_gather takes: it has two signatures

# --- the contract --------------------------------------------------------------------------


def has_own_methods(tensor: torch.Tensor) -> bool:
    """Whether a user has set one of the methods on ``tensor`` itself, not on its class."""
    return PRE in tensor.__dict__ or POST in tensor.__dict__


def has_gather_methods(fqn: str, tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` has both methods.

    Raises a ValueError if it has only one, or if ``fsdp_pre_all_gather`` takes other arguments than
    in torch.
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
    """Raise a NotImplementedError unless a parameter with the two methods is sharded on dim 0."""
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


def _are_plain(values: object) -> bool:
    return isinstance(values, (tuple, list)) and all(map(is_plain, values))


def _described(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_described(each) for each in value)})"
    return type(value).__name__


class _OrdinaryGather:
    """The two methods for a parameter without them, in a unit where other parameters have them."""

    def __init__(self, param: ShardedParam, shard: torch.Tensor, dtype: torch.dtype) -> None:
        self._layout = param.layout
        self._shard = shard
        self._dtype = dtype  # of the unsharded parameter

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
        rows = all_gather_outputs[0][: self._layout.rows].movedim(0, self._layout.shard_dim)
        if out is None:
            unsharded = rows.clone(memory_format=torch.contiguous_format)
            return unsharded, (unsharded,)
        plain_of(out).detach().copy_(rows)
        return None


class CustomParam:
    """The inputs and outputs of one parameter's gather, and the memory of its unsharded tensor."""

    def __init__(
        self,
        param: ShardedParam,
        shard: torch.Tensor,
        mesh: DeviceMesh,  # of the shard axis
        device: torch.device,  # of the unsharded parameter
        mp_policy: MixedPrecisionPolicy,
        hook: GradientHook,
    ) -> None:
        self.num_inputs = 0  # how many tensors are gathered for this parameter
        self.may_free_outputs = False  # whether the gathered tensors may be freed after ``fill``
        self._param = param
        self._shard = shard
        self._mesh = mesh
        self._device = device
        self._hook = hook
        self._stride = torch.empty(param.layout.shape, device="meta").stride()
        self._param_dtype = param.compute_dtype(shard.dtype, mp_policy.param_dtype)
        self._mp_policy = mp_policy
        if mp_policy.param_dtype_override_fn is not None:
            own = self._param_dtype if param.keeps_dtype else mp_policy.param_dtype
            self._mp_policy = replace(mp_policy, param_dtype=own, param_dtype_override_fn=None)
        # The object that has the methods. Each call looks them up, because users may replace them.
        self._methods: Any = shard
        if not has_gather_methods(param.fqn, shard):
            self._methods = _OrdinaryGather(param, shard, self._param_dtype)
        self._takes_mesh_only = _num_arguments(self._methods) == _SHORT
        self._metadata: Any = None
        self._is_made = False
        self._inner: list[tuple[torch.UntypedStorage, int]] = []
        placeholder = torch.empty(0, dtype=self._param_dtype, device=device)
        param.unsharded = nn.Parameter(placeholder, requires_grad=param.sharded.requires_grad)

    def make_inputs(self, unit: str, fetched: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Return the tensors to gather. ``fetched`` is a copy of the shard, if that is on the host.

        The user's methods then run on the copy.
        """
        methods = self._methods if fetched is None else fetched
        pre = getattr(methods, PRE)
        if self._takes_mesh_only:
            returned = pre(self._mesh)
        else:
            module = next((module for module, _ in self._param.owners), None)
            size = self._param.layout.shape
            returned = pre(self._mesh, size, self._stride, module, self._mp_policy)
        is_pair = isinstance(returned, tuple) and len(returned) == 2
        if not (is_pair and _are_plain(returned[0]) and returned[0]):
            raise TypeError(
                f"{PRE} of {self._name(unit)} must return (a tuple of plain tensors to gather, "
                f"metadata), got {_described(returned)}."
            )
        inputs, self._metadata = tuple(returned[0]), returned[1]
        if any(tensor.device != self._device for tensor in inputs):
            raise RuntimeError(
                f"{PRE} of {self._name(unit)} returned tensors on "
                f"{[str(tensor.device) for tensor in inputs]}; all must be on {self._device}."
            )
        self.num_inputs = len(inputs)
        return inputs

    def fill(self, outputs: Sequence[torch.Tensor], unit: str) -> None:
        """Fill the unsharded parameter from ``outputs``, the gathered tensors."""
        post = self._methods.fsdp_post_all_gather
        if not self._is_made:
            returned = post(tuple(outputs), self._metadata, self._param_dtype)
            self._create(returned, outputs, unit)
            return
        for storage, num_bytes in self._inner:
            if storage.nbytes() != num_bytes:
                storage.resize_(num_bytes)
        unsharded = self._param.unsharded
        # Keep the version, or autograd would take the filling for a change of a saved tensor.
        with keeping_version(unsharded, plain_of(unsharded)):
            post(tuple(outputs), self._metadata, self._param_dtype, out=unsharded)
        if unsharded.shape != self._param.sharded.shape:
            raise self._wrong_shape("left out", unsharded.shape, unit)

    def _create(self, returned: Any, outputs: Sequence[torch.Tensor], unit: str) -> None:
        is_pair = isinstance(returned, tuple) and len(returned) == 2
        if not (is_pair and isinstance(returned[0], torch.Tensor) and _are_plain(returned[1])):
            raise TypeError(
                f"{POST} of {self._name(unit)} must return (unsharded tensor, tuple of the plain "
                f"tensors that hold its memory) where out is None, got {_described(returned)}."
            )
        unsharded, inner = returned
        self._inner = _memory_of(inner)
        layout = self._param.layout
        if unsharded.shape != layout.shape:
            rows = layout.chunk_rows * layout.shard_count
            if unsharded.shape != (rows, *layout.shape[1:]):
                raise self._wrong_shape("returned a tensor", unsharded.shape, unit)
            # This cuts off the last rows, which are padding. FSDP2 requires that subclasses support
            # as_strided, but does not require narrow.
            unsharded = unsharded.as_strided(layout.shape, self._stride, 0)
        if hasattr(self._methods, RELEASE):
            self.may_free_outputs = getattr(self._methods, RELEASE)()
            check_bool(f"what {RELEASE} of {self._name(unit)} returns", self.may_free_outputs)
        elif type(unsharded) is torch.Tensor:
            taken = {storage.data_ptr() for storage, _ in (*self._inner, *_memory_of([unsharded]))}
            self.may_free_outputs = all(
                storage.data_ptr() not in taken for storage, _ in _memory_of(outputs)
            )
        flag = self._param.sharded.requires_grad
        self._param.make_unsharded(nn.Parameter(unsharded, requires_grad=flag), self._hook)
        self._is_made = True

    def free(self) -> None:
        for storage, _ in self._inner:
            storage.resize_(0)

    def _name(self, unit: str) -> str:
        return f"parameter {self._param.fqn!r} of unit {unit!r}"

    def _wrong_shape(self, did: str, shape: torch.Size, unit: str) -> RuntimeError:
        return RuntimeError(
            f"{POST} of {self._name(unit)}, a {type(self._shard).__name__}, {did} of shape "
            f"{tuple(shape)}; it must be {tuple(self._param.layout.shape)}, which may be followed "
            "by the rows of padding."
        )


def _memory_of(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.UntypedStorage, int]]:
    """Return each storage of plain ``tensors`` once, with its number of bytes."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return [(storage, storage.nbytes()) for storage in storages.values()]


class Form(NamedTuple):
    """The dtype and shape of one of the tensors that a rank sends."""

    dtype: torch.dtype
    rows: int
    row_shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        return cls(tensor.dtype, tensor.shape[0] if tensor.dim() else 1, tuple(tensor.shape[1:]))

    @property
    def num_bytes(self) -> int:
        return self.rows * math.prod(self.row_shape) * self.dtype.itemsize


def agree_on_forms(
    own: Sequence[Form], group: dist.ProcessGroup, *, device: torch.device, label: str
) -> list[Form]:
    """Return the forms in ``own``, each with the largest number of rows that any rank has.

    **Collective:** all ranks of ``group``; two small all-gathers, which block. All ranks raise a
    RuntimeError if their forms differ in more than the number of rows.
    """
    text = "\n".join(f"{form.dtype} {form.row_shape}" for form in own)
    outline = torch.tensor([len(own), zlib.crc32(text.encode())], device=device)
    outlines = gather_from_all(outline, group, label=label)
    if not bool((outlines == outlines[0]).all()):
        raise RuntimeError(
            f"unit {label!r} cannot be gathered: {PRE} returned {own} on this rank, and "
            "other dtypes, row shapes or numbers of tensors on another. Only the size of dim 0 "
            "may be smaller on ranks that own fewer rows."
        )
    if not own:
        return []
    rows = torch.tensor([form.rows for form in own], device=device)
    most = gather_from_all(rows, group, label=label).amax(dim=0).tolist()
    return [form._replace(rows=int(rows)) for form, rows in zip(own, most, strict=True)]


class PackedGather:
    """A gather of several tensors as bytes, packed one behind the other.

    ``outputs`` has one tensor for each, with the rows of all ranks along dim 0. ``free`` resizes
    their storages to zero. An unsharded parameter may use the memory of these tensors, because the
    next gather fills the same storages again.
    """

    def __init__(self, forms: Sequence[Form], count: int, device: torch.device) -> None:
        self._sizes = [form.num_bytes for form in forms]
        if padding := padded(sum(self._sizes), ROW_BYTES) - sum(self._sizes):
            self._sizes.append(padding)
        self._bytes = [
            torch.empty((count, size), dtype=torch.uint8, device=device) for size in self._sizes
        ]
        # `.data` has a version counter of its own, so that autograd does not see the next filling
        # as an in-place change of a saved tensor.
        self.outputs = [
            flat.view(-1).view(form.dtype).view(count * form.rows, *form.row_shape).data
            for flat, form in zip(self._bytes, forms, strict=False)
        ]
        self.free()

    def pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the bytes that this rank sends, padded with zeros if it has fewer rows."""
        parts = [each.detach().contiguous().view(-1).view(torch.uint8) for each in tensors]
        if len(parts) == len(self._sizes) == 1 and parts[0].numel() == self._sizes[0]:
            return parts[0]
        source = parts[0].new_empty(sum(self._sizes))
        for target, part in zip(source.split(self._sizes), parts, strict=False):
            target[: part.numel()].copy_(part)
            target[part.numel() :].zero_()
        return source

    def copy_out(self, gathered: torch.Tensor) -> None:
        """Fill the outputs, which must be allocated, from the bytes of all ranks."""
        torch.split_with_sizes_copy(gathered, self._sizes, dim=1, out=self._bytes)

    def allocate(self) -> None:
        for flat in self._bytes:
            if flat.untyped_storage().nbytes() != flat.numel():
                # resize_ is skipped if the size is right, because it would copy the memory.
                flat.untyped_storage().resize_(flat.numel())

    def free(self, indices: Iterable[int] | None = None) -> None:
        """Free the memory of the outputs at ``indices``; None: of all."""
        for index in range(len(self._bytes)) if indices is None else indices:
            self._bytes[index].untyped_storage().resize_(0)


class SubclassParams(ShardedUnitParams):
    """The parameters of a unit in which some parameters have the two methods.

    In a sibling unit for tensor subclasses, all parameters have them. ``FlatParams`` also makes a
    ``SubclassParams``, if users have set the methods on some of its local tensors.
    """

    has_custom_gather = True

    def __init__(
        self,
        params: list[ShardedParam],  # sharded already
        *,
        spec: GroupSpec,
        mp_policy: MixedPrecisionPolicy,  # as the user gave it
        gradient_hook: GradientHookMaker,
    ) -> None:
        self.params = params
        self.spec = spec
        self._mp_policy = mp_policy
        self._gradient_hook = gradient_hook
        self.host_copies = None if spec.host is None else HostCopies(spec.device)
        self._adopt_shards()

    def _adopt_shards(self) -> None:
        mesh_info, kind = self.spec.mesh_info, self.spec.location.device.type
        self.locals = self._adopted_locals(kind, f"its mesh is on {kind!r}")
        for param, local in zip(self.params, self.locals, strict=True):
            if has_gather_methods(param.fqn, local):
                check_subclass_placement(param.fqn, local, mesh_info, param.layout.shard_dim)
                if self.spec.host is not None and has_own_methods(local):
                    raise NotImplementedError(
                        f"under CPUOffloadPolicy, {PRE} of parameter {param.fqn!r} must be of a "
                        "tensor subclass, because a copy of the shard is gathered, which has no "
                        "methods that were set on the shard itself."
                    )
        mesh, device = shard_mesh_of(mesh_info), self.spec.device
        self._unsharded = [
            CustomParam(
                param,
                local,
                mesh,
                local.device if local.is_meta else device,
                self._mp_policy,
                self._gradient_hook(index),
            )
            for index, (param, local) in enumerate(zip(self.params, self.locals, strict=True))
        ]
        self._gather: PackedGather | None = None  # made by the first gather
        self._own_forms: list[Form] = []  # of what this rank sent in the first gather
        self._read_dtypes()
        layouts = [param.layout for param in self.params]
        self.layout = FlatLayout.build(layouts, [local.dtype for local in self.locals])

    @torch.no_grad()
    def start_gather(self, comm: Communicator) -> Handle:
        # What is made here may become part of a parameter, which autograd saves. So it must not be
        # an inference tensor.
        with torch.inference_mode(False), comm.on_stream(CommStream.GATHER):
            fetched: list[torch.Tensor | None] = [None] * len(self.locals)
            if (copies := self.host_copies) is not None:
                fetched = [copies.fetch(each, comm, label=self.label) for each in self.locals]
            inputs = [
                each
                for param, copy in zip(self._unsharded, fetched, strict=True)
                for each in param.make_inputs(self.label, copy)
            ]
            source = self._plan([Form.of(each) for each in inputs]).pack(inputs)
            group = self.spec.mesh_info.shard_group
            return comm.all_gather(source, group=group, label=self.label)

    def _plan(self, forms: list[Form]) -> PackedGather:
        if self._gather is not None:
            if forms != self._own_forms:
                raise RuntimeError(
                    f"{PRE} of unit {self.label!r} returned {forms} to gather, and "
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

    def all_gather_copy_out(self, gathered: torch.Tensor) -> None:
        assert self._gather is not None
        with torch.inference_mode(False), torch.no_grad():
            self._gather.allocate()
            self._gather.copy_out(gathered)
            try:
                self._fill_each(self._gather)
            except BaseException:
                self.free_unsharded()
                raise
        self._read_dtypes()

    def _fill_each(self, gather: PackedGather) -> None:
        first = 0
        for each in self._unsharded:
            own = range(first, first + each.num_inputs)
            first = own.stop
            each.fill(gather.outputs[own.start : own.stop], self.label)
            if each.may_free_outputs:
                gather.free(own)

    def free_unsharded(self) -> None:
        if self._gather is not None:
            self._gather.free()
        for each in self._unsharded:
            each.free()

    def rebuild(self) -> None:
        for param in self.params:
            if not has_gather_methods(param.fqn, plain_of(param.sharded)):
                raise RuntimeError(
                    f"parameter {param.fqn!r} of unit {self.label!r} was replaced by one whose "
                    f"shard is a plain tensor, without the {PRE} that it had; assign a tensor of "
                    "the same class, or edit it in place."
                )
        self._adopt_shards()
        self._install_adopted()

    def check_materialised(self) -> None:
        self._check_not_meta(self.spec.device)


def check_not_subclass(storage: UnitParams, what: str) -> None:
    """Raise a NotImplementedError for the feature ``what`` if shards have a custom all-gather."""
    if storage.has_custom_gather:
        raise NotImplementedError(
            f"{what} is not built yet for parameter {storage.params[0].fqn!r} of unit "
            f"{storage.label!r}, because it has {PRE}."
        )
