"""Private attributes of DTensor, read and written without the dispatcher.

``DTensor.from_local`` costs 24 us, and ``to_local`` enters autograd. A step wraps every sharded
gradient once, so both are avoided: ``DTensor(local, spec, requires_grad=False)`` costs 2.5 us.
"""

from __future__ import annotations

import atexit
import copy
import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement


def make_dtensor(
    local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size
) -> DTensor:
    """Return a DTensor of global ``shape`` (contiguous) over this rank's ``local`` shard."""
    key = (id(mesh), placements, shape, local.dtype)
    spec = _specs.get(key)
    if spec is None:
        # The spec is taken from a DTensor over a meta tensor. Given a shard in host memory,
        # from_local would copy it to the device of the mesh.
        meta = DTensor.from_local(
            torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="meta"),
            mesh,
            placements,
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )
        spec = _specs[key] = meta._spec
    return _made_over(local, spec)


# The specs of DTensors that are alive. A key contains the id of the mesh, not the mesh, because
# equal meshes may have different process groups. While an entry exists, its spec keeps the mesh
# alive, so no other mesh gets the same id.
_specs: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
# Cleared at exit. Otherwise, when a spec is freed later, the dictionary hashes its key. A
# _StridedShard in the key cannot be hashed while the interpreter clears its modules.
atexit.register(_specs.clear)


def as_parameter(made: DTensor, *, requires_grad: bool) -> nn.Parameter:
    """Turn ``made``, a new DTensor, into a parameter. ``nn.Parameter(made)`` would copy it."""
    made.requires_grad_(requires_grad)
    made._is_param = True  # isinstance(made, nn.Parameter) is true from now on
    return cast("nn.Parameter", made)


# Returns the local tensor object itself, without a copy and without autograd. It runs in C.
local_of: Callable[[torch.Tensor], torch.Tensor] = attrgetter("_local_tensor")


def plain_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, and any other tensor itself."""
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def set_local(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Make ``local`` the local tensor of a DTensor. The DTensor stays the same object."""
    tensor._local_tensor = local  # type: ignore[attr-defined]  # private


def with_own_storage(view: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the memory of ``view``, with a storage that covers only this memory.

    ``torch.save`` and ``copy.deepcopy`` of a DTensor fail if its local tensor has a storage offset,
    and they copy all of the local tensor's storage. So a local tensor must not use the storage of
    the flat buffer, which has the shards of all parameters.
    """
    if view.is_meta or not view.numel():
        return view.clone()
    start = view.storage_offset() * view.itemsize
    part = view.untyped_storage()[start : start + view.numel() * view.itemsize]
    return view.new_empty(0).set_(part, 0, view.shape, view.stride())


def is_placed_like(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are DTensors on the same mesh with the same placements."""
    spec = getattr(tensor, "_spec", None)  # the same object in most cases
    if spec is not None and spec is getattr(other, "_spec", None):
        return True
    return (
        isinstance(tensor, DTensor)
        and isinstance(other, DTensor)
        and tensor.device_mesh == other.device_mesh
        and tensor.placements == other.placements
    )


def place_like(tensor: torch.Tensor, local: torch.Tensor) -> DTensor:
    """Return ``local`` as a DTensor with the mesh, placements and shape of ``tensor``.

    A DTensor has the storage offset, dtype and device of the tensor that it is made over, and torch
    can neither pickle nor copy a DTensor with an offset. ``local`` may have an offset. So the
    result is made over the local tensor of ``tensor``, if that has none, and then gets ``local``.
    """
    assert isinstance(tensor, DTensor)
    own = local_of(tensor)
    if local.dtype != own.dtype or local.device != own.device or own.storage_offset():
        return make_dtensor(local, tensor.device_mesh, tensor.placements, tensor.shape)
    # Not DTensor(), whose __init__ does nothing but has three wrappers that double the time.
    made = DTensor.__new__(DTensor, own, tensor._spec, requires_grad=False)
    made._local_tensor = local
    return made


def move_local(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Make ``local`` the local tensor of a DTensor, also if it is on another device.

    The DTensor stays the same object, with its hooks, gradient and version.
    """
    if local.device != tensor.device:
        # This sets the device that the DTensor reports.
        tensor.data = _made_over(local, tensor._spec)  # type: ignore[attr-defined]  # private
    set_local(tensor, local)


def _made_over(local: torch.Tensor, spec: Any) -> DTensor:
    # Without a storage offset, as in ``place_like``. If ``local`` has none it is taken itself,
    # because tensor subclasses may not implement new_empty.
    over = local.new_empty(0) if local.storage_offset() else local
    made = DTensor(over, spec, requires_grad=False)
    made._local_tensor = local
    return made


def copy_dtensor(tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
    """Return a deep copy of ``tensor`` on its mesh, without ``.grad``, as for a Parameter."""
    spec = tensor._spec  # type: ignore[attr-defined]  # private
    memo[id(spec)] = spec
    memo[id(spec.mesh)] = spec.mesh
    gradient, tensor.grad = tensor.grad, None  # torch would copy it
    try:
        copied = copy.deepcopy(tensor, memo)
    finally:
        tensor.grad = gradient
    keep_gradient_dtype(tensor, copied)  # deepcopy of torch drops it
    return copied


def gradient_dtype(param: torch.Tensor) -> torch.dtype:
    """Return the dtype of ``.grad``: the user's ``grad_dtype``, or else the parameter's dtype."""
    return param.grad_dtype or param.dtype


def keep_gradient_dtype(old: torch.Tensor, new: torch.Tensor) -> None:
    """Copy the ``grad_dtype`` that the user has set on ``old`` to ``new``, if ``new`` has none."""
    if gradient_dtype(old) is not old.dtype and gradient_dtype(new) is new.dtype:
        new.grad_dtype = old.grad_dtype


def plain_tensors_in(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the ordinary tensors that hold the values of ``tensor``."""
    if is_plain(tensor):
        return [tensor]
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        raise TypeError(
            f"{type(tensor).__name__} has no __tensor_flatten__, so its values cannot be read."
        )
    return [plain for name in flatten()[0] for plain in plain_tensors_in(getattr(tensor, name))]


def is_plain(value: object) -> bool:
    """Whether ``value`` is an ordinary tensor, not of a subclass."""
    return type(value) in (torch.Tensor, nn.Parameter)


def is_alias(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two plain tensors are the same memory in the same shape, dtype and strides."""
    return (
        is_plain(one)
        and is_plain(other)
        and one.data_ptr() == other.data_ptr()
        and (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape)
        and one.stride() == other.stride()
    )
