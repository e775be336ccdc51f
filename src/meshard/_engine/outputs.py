"""Tensors in the inputs and outputs of modules.

Tensors are found in what torch's pytree flattens (tuples, lists, dicts, named tuples, and
registered classes, such as the outputs of Hugging Face models), in dataclasses, and in subclasses
of dict and of named tuples. Other objects are not searched. To save time, single tensors, tuples
and dicts are handled without pytree.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshard._torch.private import number_of, tree_flatten, tree_unflatten

WATCHED = "_meshard_watched"  # attribute of an output that has the hook of a unit
_PLAIN = (int, float, str, bool, bytes, type(None), torch.dtype, torch.device)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in ``value``. The docstring of this module says what is searched."""
    found: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(collect, value)
    return found


def map_tensors(
    function: Callable[[torch.Tensor], torch.Tensor], value: Any, around: tuple[int, ...] = ()
) -> Any:
    """Return ``value`` with ``function`` applied to every tensor in it.

    A container in which nothing changes is returned as it is; others are copied. ``around`` has the
    ids of the objects that contain ``value``, in case ``value`` refers back to one of them.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, _PLAIN):
        return value
    if type(value) is tuple:
        mapped = tuple(map_tensors(function, item, around) for item in value)
        return mapped if any(a is not b for a, b in zip(mapped, value, strict=True)) else value
    if type(value) is dict:
        changed = {key: map_tensors(function, item, around) for key, item in value.items()}
        return changed if any(changed[key] is not value[key] for key in value) else value
    leaves, tree = tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return _map_fields(function, value, around)
    mapped_leaves = [map_tensors(function, leaf, around) for leaf in leaves]
    if all(a is b for a, b in zip(mapped_leaves, leaves, strict=True)):
        return value
    return tree_unflatten(mapped_leaves, tree)


def _map_fields(
    function: Callable[[torch.Tensor], torch.Tensor], value: Any, around: tuple[int, ...]
) -> Any:
    """Map a container that pytree treats as a leaf: a dataclass, or a subclass of a container."""
    if id(value) in around or isinstance(value, (type, nn.Module)):
        return value
    if isinstance(value, tuple) and hasattr(value, "_asdict"):  # such as rnn.PackedSequence
        old = value._asdict()
    elif isinstance(value, dict):
        old = value
    elif dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        old = {name: getattr(value, name) for name in names if hasattr(value, name)}
    else:
        return value
    around = (*around, id(value))
    mapped = {name: map_tensors(function, item, around) for name, item in old.items()}
    changes = {name: new for name, new in mapped.items() if new is not old[name]}
    if not changes:
        return value
    if isinstance(value, tuple):
        # mypy does not narrow a tuple by hasattr.
        return value._replace(**changes)  # type: ignore[attr-defined]
    # Not dataclasses.replace: it calls __init__, which may have effects, or not take all fields.
    changed = copy.copy(value)
    for name, new in changes.items():
        if isinstance(changed, dict):
            changed[name] = new
        else:
            object.__setattr__(changed, name, new)  # the dataclass may be frozen
    return changed


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` with every floating-point tensor in it cast to ``dtype``."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() and tensor.dtype != dtype:
            return tensor.to(dtype)
        return tensor

    return map_tensors(cast, value)


def moved_from_host(value: Any, device: torch.device) -> Any:
    """Return ``value`` with every tensor in host memory copied to ``device``.

    DTensors stay as they are: their meshes say where they belong.
    """

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device) if tensor.is_cpu and not isinstance(tensor, DTensor) else tensor

    return map_tensors(move, value)


class _Alias(torch.autograd.Function):
    """An alias with an autograd node of its own.

    It is not a view, because pipeline schedules that split backwards detach the outputs of their
    stages in place, which torch refuses for views.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor) -> Any:
        return tangents[0].view_as(tangents[0])


def detached_from_others(output: Any, inputs: tuple[Any, ...], since: int) -> Any:
    """Return ``output`` with an alias for each tensor that is older than the forward.

    Older tensors have autograd nodes with numbers below ``since``, which was ``next_node()`` when
    the forward began. But each thread counts its own nodes, so an input from another thread may
    have a higher number. Therefore tensors are compared with ``inputs`` too. Outputs of units
    inside get an alias as well.

    A module may return one of its inputs (a dropped layer), or the output of a unit inside it.
    Without an alias, two units would have hooks on one tensor, and it would be unknown whose
    backward begins first. The order could then differ between ranks, as only some may drop the
    layer. If code before the forward has also used the tensor, its gradient comes only when the
    backward of this unit is over.
    A module may also return a leaf, such as its own parameter. A hook on a leaf would stay for all
    later backwards.
    """

    def alias(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        is_old = number_of(tensor) < since or hasattr(tensor, WATCHED)  # a leaf has -1
        if is_old or any(value is tensor for value in inputs):
            made: torch.Tensor = _Alias.apply(tensor)  # type: ignore[no-untyped-call]  # torch's
            return made
        return tensor

    return map_tensors(alias, output)
