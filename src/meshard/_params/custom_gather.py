"""Shards with a custom all-gather (float8, int8).

The contract is that of torch's ``fully_shard``. ``fsdp_pre_all_gather`` turns a shard into tensors
to gather, and ``fsdp_post_all_gather`` turns what was gathered into the unsharded parameter. Tensor
subclasses have the two methods; users may also set them on the local tensor of any parameter.

The first gather creates the unsharded parameter from what ``fsdp_post_all_gather`` returns; later
gathers fill it again. ``fsdp_post_all_gather`` also returns the plain tensors that hold the memory
of the unsharded parameter. ``CustomGather.free`` resizes their storages to zero.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshard._comm.blocking import gather_from_all
from meshard._mesh.mesh_info import MeshInfo
from meshard._params.unit_params import GradientHook, ShardedParam, Storages, resize
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


def has_class_methods(tensor: torch.Tensor) -> bool:
    """Whether the class of ``tensor`` has the methods: it cannot lie in a flat buffer."""
    return hasattr(type(tensor), PRE)


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


def check_placement(fqn: str, local: torch.Tensor, mesh_info: MeshInfo, shard_dim: int) -> None:
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


# --- what is sent --------------------------------------------------------------------------


class Form(NamedTuple):
    """The dtype and shape of one of the tensors that a rank sends."""

    dtype: torch.dtype
    rows: int
    row_shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        return cls(tensor.dtype, tensor.shape[0] if tensor.dim() else 1, tuple(tensor.shape[1:]))

    def of_all(self, count: int, device: torch.device) -> torch.Tensor:
        """Return uninitialised memory for what ``count`` ranks send, with their rows on dim 0."""
        return torch.empty((count * self.rows, *self.row_shape), dtype=self.dtype, device=device)


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


# --- one parameter -------------------------------------------------------------------------


class CustomGather:
    """What one parameter sends and receives, and the memory of its unsharded tensor."""

    def __init__(
        self,
        param: ShardedParam,
        shard: torch.Tensor,  # has the two methods
        *,
        mesh: DeviceMesh,  # of the shard axis
        device: torch.device,  # of the unsharded parameter
        mp_policy: MixedPrecisionPolicy,  # as the user gave it
        hook: GradientHook,
    ) -> None:
        self.param = param
        self.shard = shard
        self._mesh = mesh
        self._device = device
        self._hook = hook
        self._stride = torch.empty(param.layout.shape, device="meta").stride()
        self._param_dtype = param.compute_dtype(shard.dtype, mp_policy.param_dtype)
        self._mp_policy = mp_policy
        if mp_policy.param_dtype_override_fn is not None:
            own = self._param_dtype if param.keeps_dtype else mp_policy.param_dtype
            self._mp_policy = replace(mp_policy, param_dtype=own, param_dtype_override_fn=None)
        self._takes_mesh_only = _num_arguments(shard) == _SHORT
        self._num_inputs = 0  # how many tensors are gathered for this parameter
        self._metadata: Any = None
        self._outputs: list[torch.Tensor] = []  # the gathered tensors
        self._gathered: Storages = []  # their memory
        self._may_free_outputs = False  # whether that may be freed after ``fill``
        self._inner: Storages = []  # of the unsharded parameter
        self._is_made = False
        placeholder = torch.empty(
            0, dtype=self._param_dtype, device=shard.device if shard.is_meta else device
        )
        param.unsharded = nn.Parameter(placeholder, requires_grad=param.sharded.requires_grad)

    def make_inputs(self, shard: torch.Tensor, unit: str) -> Sequence[torch.Tensor]:
        """Return the tensors to gather. ``shard`` may be a copy of the shard, on the device."""
        # Looked up each time, because users may replace the methods.
        pre = getattr(shard, PRE)
        if self._takes_mesh_only:
            returned = pre(self._mesh)
        else:
            module = next((module for module, _ in self.param.owners), None)
            size = self.param.layout.shape
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
        self._num_inputs = len(inputs)
        return inputs

    def take_outputs(self, outputs: list[torch.Tensor]) -> None:
        """Take the memory for what is gathered from the front of ``outputs``, and free it."""
        own, outputs[:] = outputs[: self._num_inputs], outputs[self._num_inputs :]
        # `.data` has a version counter of its own, so that autograd does not see the next filling
        # as an in-place change of a saved tensor.
        self._outputs, self._gathered = [each.data for each in own], _memory_of(own)
        resize(self._gathered, to_zero=True)

    def allocate(self) -> None:
        """Allocate the memory that a gather fills."""
        resize(self._gathered)

    def fill(self, unit: str) -> None:
        """Fill the unsharded parameter from what was gathered."""
        if self._is_made:
            resize(self._inner)
            unsharded = self.param.unsharded
            # Keep the version, or autograd would take the filling for a change of a saved tensor.
            with keeping_version(unsharded, plain_of(unsharded)):
                self._post(out=unsharded)
            if unsharded.shape != self.param.sharded.shape:
                raise self._wrong_shape("left out", unsharded.shape, unit)
        else:
            self._create(self._post(), unit)
        if self._may_free_outputs:
            resize(self._gathered, to_zero=True)

    def _post(self, **out: torch.Tensor) -> Any:
        post = getattr(self.shard, POST)
        return post(tuple(self._outputs), self._metadata, self._param_dtype, **out)

    def _create(self, returned: Any, unit: str) -> None:
        is_pair = isinstance(returned, tuple) and len(returned) == 2
        if not (is_pair and isinstance(returned[0], torch.Tensor) and _are_plain(returned[1])):
            raise TypeError(
                f"{POST} of {self._name(unit)} must return (unsharded tensor, tuple of the plain "
                f"tensors that hold its memory) where out is None, got {_described(returned)}."
            )
        unsharded, inner = returned
        self._inner = _memory_of(inner)
        layout = self.param.layout
        if unsharded.shape != layout.shape:
            rows = layout.chunk_rows * layout.shard_count
            if unsharded.shape != (rows, *layout.shape[1:]):
                raise self._wrong_shape("returned a tensor", unsharded.shape, unit)
            # This cuts off the last rows, which are padding. FSDP2 requires that subclasses support
            # as_strided, but does not require narrow.
            unsharded = unsharded.as_strided(layout.shape, self._stride, 0)
        if hasattr(self.shard, RELEASE):
            self._may_free_outputs = getattr(self.shard, RELEASE)()
            check_bool(f"what {RELEASE} of {self._name(unit)} returns", self._may_free_outputs)
        elif type(unsharded) is torch.Tensor:
            taken = {storage.data_ptr() for storage, _ in (*self._inner, *_memory_of([unsharded]))}
            self._may_free_outputs = all(
                storage.data_ptr() not in taken for storage, _ in self._gathered
            )
        flag = self.param.sharded.requires_grad
        self.param.make_unsharded(nn.Parameter(unsharded, requires_grad=flag), self._hook)
        self._is_made = True

    def free(self) -> None:
        resize([*self._gathered, *self._inner], to_zero=True)

    def _name(self, unit: str) -> str:
        return f"parameter {self.param.fqn!r} of unit {unit!r}"

    def _wrong_shape(self, did: str, shape: torch.Size, unit: str) -> RuntimeError:
        return RuntimeError(
            f"{POST} of {self._name(unit)}, a {type(self.shard).__name__}, {did} of shape "
            f"{tuple(shape)}; it must be {tuple(self.param.layout.shape)}, which may be followed "
            "by the rows of padding."
        )


def _memory_of(tensors: Iterable[torch.Tensor]) -> Storages:
    """Return each storage of plain ``tensors`` once, with its number of bytes."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return [(storage, storage.nbytes()) for storage in storages.values()]
