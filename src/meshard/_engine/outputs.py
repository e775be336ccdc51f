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

WATCHED = "_meshard_watched"  # attribute of an output on which a unit has registered a hook
_PLAIN = (int, float, str, bool, bytes, type(None), torch.dtype, torch.device)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in ``value``, also those inside of lists, dicts, dataclasses and so on."""
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

    A container in which ``function`` changes nothing is not copied. ``around`` has the ids of the
    objects that contain ``value``, because ``value`` may refer back to one of them.
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
    """Map the fields of a dataclass, dict or named tuple that pytree does not flatten."""
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
    # Not dataclasses.replace: it calls __init__, which may have side effects or lack some fields.
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

    A DTensor stays as it is, because its mesh says on which device it belongs.
    """

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device) if tensor.is_cpu and not isinstance(tensor, DTensor) else tensor

    return map_tensors(move, value)


class _Alias(torch.autograd.Function):
    """Return a tensor with the same memory, but with an autograd node of its own.

    The result is not a view, because pipeline schedules that split the backward call ``detach_()``
    on the outputs of a stage, and torch refuses that for a view.
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
    """Return ``output`` with an alias for each tensor that this forward may not have made itself.

    These are tensors older than the forward, its ``inputs``, and outputs of inner units. A tensor
    is older if its autograd node has a number below ``since``, which was ``next_node()`` when the
    forward began. An input from another thread may have a higher number: threads count separately.

    A module may return an input (a dropped layer), or the output of an inner unit. Without an
    alias, two units would have hooks on one tensor, and which unit's backward begins first could
    differ between ranks, as only some ranks may drop the layer. Also, if code before the forward
    has used the tensor too, the hook would fire too late: autograd adds up the gradients of all
    uses first, and so ends the backward of this unit before it knows the sum.
    A module may also return a leaf, such as its own parameter. A hook on a leaf would stay for all
    later backwards.
    """

    def alias(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        is_old = number_of(tensor) < since or hasattr(tensor, WATCHED)  # a leaf has number -1
        if is_old or any(value is tensor for value in inputs):
            made: torch.Tensor = _Alias.apply(tensor)  # type: ignore[no-untyped-call]  # torch's
            return made
        return tensor

    return map_tensors(alias, output)
