"""Private attributes of DTensor, read and written without the dispatcher.

``DTensor.from_local`` costs 24 us, and ``to_local`` enters autograd. A step wraps every sharded
gradient once, so both are avoided: ``DTensor(local, spec, requires_grad=False)`` costs 2.5 us.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, is_not
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from meshard._torch.private import num_running_steps


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


def are_placed_like(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether ``is_placed_like`` holds for each pair of DTensors. Most pairs share one spec."""
    specs = [[getattr(each, "_spec", None) for each in every] for every in (tensors, others)]
    if None not in specs[0] and not any(map(is_not, *specs)):
        return True
    return all(map(is_placed_like, tensors, others))


def is_placed_like(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are DTensors on the same mesh with the same placements."""
    return (
        isinstance(tensor, DTensor)
        and isinstance(other, DTensor)
        and tensor.device_mesh == other.device_mesh
        and tensor.placements == other.placements
    )


def place_like(tensor: torch.Tensor, local: torch.Tensor) -> DTensor:
    """Return ``local``, of any dtype, as a DTensor with the placements and shape of ``tensor``."""
    assert isinstance(tensor, DTensor)
    return make_dtensor(local, tensor.device_mesh, tensor.placements, tensor.shape)


def move_local(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Make ``local`` the local tensor of a DTensor, also if it is on another device.

    The DTensor stays the same object, with its hooks, gradient and version.
    """
    if local.device != tensor.device:
        # This sets the device that the DTensor reports.
        tensor.data = _made_over(local, tensor._spec)  # type: ignore[attr-defined]  # private
    set_local(tensor, local)


def _made_over(local: torch.Tensor, spec: Any) -> DTensor:
    # The DTensor must be made over a tensor without a storage offset: see wrap_like. If ``local``
    # has none it is taken itself, because tensor subclasses may not implement new_empty.
    over = local.new_empty(0) if local.storage_offset() else local
    made = DTensor(over, spec, requires_grad=False)
    made._local_tensor = local
    return made


def wrap_like(tensor: torch.Tensor, local: torch.Tensor) -> DTensor:
    """Return ``local`` as a DTensor with the mesh, placements and shape of ``tensor``.

    A DTensor has the storage offset and the dtype of the tensor that it is made over, and torch can
    neither pickle nor copy a DTensor with an offset. ``local`` may have an offset. So the result is
    made over the local tensor of ``tensor``, which has none, and gets ``local`` afterwards.
    """
    own = local_of(tensor)
    if local.dtype != own.dtype:
        return place_like(tensor, local)
    spec = tensor._spec  # type: ignore[attr-defined]  # private
    # Not DTensor(), whose __init__ does nothing but has three wrappers that double the time.
    made = DTensor.__new__(DTensor, own, spec, requires_grad=False)
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


class ScalarReads(threading.local):
    """Whether ``item()``, ``float()`` and ``bool()`` of a DTensor read a value over all ranks.

    torch reads the local tensor. If the DTensor is a sum or a norm, that is only this rank's part
    (https://github.com/pytorch/pytorch/issues/166638). An optimizer that reads it would step by a
    different number on each rank. So reads are **collective** inside the step of an optimizer,
    which all ranks run. Elsewhere they are as in torch, because one rank alone may print a number.
    torch calls no hook after a step that has raised, so each read checks that the step is still on
    the stack.
    """

    _depth = 0  # how many nested optimizer steps ran at ``begin_step``; 0 after ``end_step``
    _num_inside = 0  # how many ``inside_step`` blocks are active

    def begin_step(self) -> None:
        """Make reads collective until the present step of an optimizer returns or raises."""
        _register_read()
        self._depth = self._depth or num_running_steps()

    def end_step(self) -> None:
        """End the ``begin_step`` of the current step, or of a nested step that has raised."""
        if self._depth and self._depth >= num_running_steps():
            self._depth = 0

    @contextlib.contextmanager
    def inside_step(self) -> Iterator[None]:
        """Make reads collective inside the block."""
        _register_read()
        self._num_inside += 1
        try:
            yield
        finally:
            self._num_inside -= 1

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Read as torch does inside the block."""
        before = self._depth, self._num_inside
        self._depth = self._num_inside = 0
        try:
            yield
        finally:
            self._depth, self._num_inside = before

    @property
    def is_over_ranks(self) -> bool:
        """Whether a read of this thread is collective."""
        return self._num_inside > 0 or 0 < self._depth <= num_running_steps()


scalar_reads = ScalarReads()


def _register_read() -> None:
    read = torch.ops.aten._local_scalar_dense.default
    DTensor._op_dispatcher._custom_op_handlers.setdefault(read, _read)


def _read(op_call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    tensor: DTensor = args[0]
    local = tensor.full_tensor() if scalar_reads.is_over_ranks else local_of(tensor)
    return op_call(local)
