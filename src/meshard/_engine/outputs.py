"""Tensors in the inputs and outputs of modules.

They are found in what torch's pytree flattens (tuples, lists, dicts, named tuples, and registered
classes, such as the outputs of Hugging Face models), in dataclasses, and in subclasses of dict and
of named tuples. Other objects are not searched. Tensors and flat tuples cost no walk over a tree.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meshard._torch.private import number_of, tree_flatten, tree_unflatten

WATCHED = "_meshard_watched"  # attribute of an output that has the hook of a unit
_PLAIN = (int, float, str, bool, bytes, type(None), torch.dtype, torch.device)
_SIMPLE = (torch.Tensor, *_PLAIN)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in containers: see ``map_tensors`` for which."""
    found: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(collect, value)
    return found


def takes_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a forward that is called with these may leave tensors in one of them.

    Examples: a list that collects hidden states, a dict that caches keys and values.
    """
    return any(_takes_tensors(value) for value in (*args, *kwargs.values()))


def _takes_tensors(value: Any) -> bool:
    if isinstance(value, _SIMPLE):
        return False
    return any(map(_takes_tensors, value)) if type(value) is tuple else True


def left_in(args: tuple[Any, ...], kwargs: dict[str, Any], since: int) -> list[torch.Tensor]:
    """Return the tensors that a forward has left in what it was called with.

    Args:
        args: The positional arguments of the forward.
        kwargs: The keyword arguments of the forward.
        since: ``next_node()`` when it began.
    """
    given = [value for value in (*args, *kwargs.values()) if _takes_tensors(value)]
    return [
        tensor
        for tensor in tensors_in(given)
        if number_of(tensor) >= since and not hasattr(tensor, WATCHED)
    ]


def map_tensors(
    function: Callable[[torch.Tensor], torch.Tensor], value: Any, around: tuple[int, ...] = ()
) -> Any:
    """Return ``value`` with ``function`` applied to every tensor in it.

    A container in which nothing changes is returned itself; others are copied.

    Args:
        function: Returns what takes the place of a tensor.
        value: A tensor, a container, or something else, which is returned.
        around: The ids of the objects around ``value``, to which it may refer back.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, _PLAIN):
        return value
    if type(value) is tuple:
        mapped = tuple(
            function(item)
            if isinstance(item, torch.Tensor)
            else map_tensors(function, item, around)
            for item in value
        )
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
    """Map what pytree takes for a leaf: dataclasses, subclasses of dict and of named tuples."""
    if id(value) in around or isinstance(value, (type, nn.Module)):
        return value
    if isinstance(value, tuple) and hasattr(value, "_asdict"):  # PackedSequence
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
    # Not dataclasses.replace: it calls __init__, which may compute, or lack fields.
    changed = copy.copy(value)
    for name, new in changes.items():
        if isinstance(changed, dict):
            changed[name] = new
        else:
            object.__setattr__(changed, name, new)  # it may be frozen
    return changed


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` with every floating-point tensor in it cast to ``dtype``."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() and tensor.dtype != dtype:
            return tensor.to(dtype)
        return tensor

    return map_tensors(cast, value)


def detached_from_others(output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return ``output`` with a view in place of each tensor that is also that of another module.

    A module may return one of its inputs (a layer that is dropped), or the output of a unit inside
    it. Its hook would then be on a tensor that has the hook of the other unit, and their backwards
    could not be told apart; ranks of which some skip a layer would run them in different orders.
    """
    if type(output) is torch.Tensor and not kwargs:  # as a rule, in a third of the time
        is_of_another = hasattr(output, WATCHED) or any(value is output for value in args)
        return output.view_as(output) if is_of_another and output.requires_grad else output
    inputs = {id(value) for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)}

    def view(tensor: torch.Tensor) -> torch.Tensor:
        is_of_another = id(tensor) in inputs or hasattr(tensor, WATCHED)
        return tensor.view_as(tensor) if is_of_another and tensor.requires_grad else tensor

    return map_tensors(view, output)
