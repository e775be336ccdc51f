"""Tensors in the inputs and outputs of modules.

Containers that torch's pytree knows are opened: tuples, lists, dicts, named tuples, and whatever
is registered, as Hugging Face does with its outputs. So are dataclasses, and to find outputs the
attributes of any other object. Plain tensors and flat tuples do not pay for a walk over a tree.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from meshard._torch.private import number_of, tree_flatten, tree_leaves, tree_unflatten

WATCHED = "_meshard_watched"  # on an output: a unit has put its hook there
_MAX_DEPTH = 3  # of objects in objects that are searched
_PLAIN = (int, float, str, bool, bytes, type(None), torch.dtype, torch.device)
_SIMPLE = (torch.Tensor, *_PLAIN)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in containers, and in the attributes of objects."""
    found: list[torch.Tensor] = []
    _collect(value, found, 0, set())
    return found


def _collect(value: Any, found: list[torch.Tensor], depth: int, seen: set[int]) -> None:
    if isinstance(value, torch.Tensor):
        # What an object only refers to, a weight say, is not an output.
        if depth == 0 or not value.is_leaf:
            found.append(value)
    elif isinstance(value, _PLAIN):
        return
    elif type(value) is tuple or type(value) is list:
        for item in value:
            _collect(item, found, depth, seen)
    elif type(value) is dict:
        for item in value.values():
            _collect(item, found, depth, seen)
    else:
        leaves = tree_leaves(value)
        if len(leaves) != 1 or leaves[0] is not value:
            for leaf in leaves:
                _collect(leaf, found, depth, seen)
        elif depth < _MAX_DEPTH and id(value) not in seen:
            seen.add(id(value))
            for each in _inside(value):
                _collect(each, found, depth + 1, seen)


def _inside(value: Any) -> Iterator[Any]:
    """Iterate over what an object of a class that torch does not know holds."""
    if isinstance(value, nn.Module | type):
        return
    if isinstance(value, Mapping):
        yield from list(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from list(value)
    yield from list(getattr(value, "__dict__", {}).values())
    for each in type(value).__mro__:
        slots = each.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield getattr(value, name)


def takes_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a forward that is called with these may leave tensors in one of them.

    In a list that collects hidden states, say, or in the cache of keys and values of an attention.
    """
    return any(_takes_tensors(value) for value in (*args, *kwargs.values()))


def _takes_tensors(value: Any) -> bool:
    if isinstance(value, _SIMPLE):
        return False
    return any(map(_takes_tensors, value)) if type(value) is tuple else True


def left_in(args: tuple[Any, ...], kwargs: dict[str, Any], since: int) -> list[torch.Tensor]:
    """Return the tensors that a forward has left in what it was called with.

    Args:
        args: Of the forward.
        kwargs: Of the forward.
        since: What ``next_node`` was when it began.
    """
    given = [value for value in (*args, *kwargs.values()) if _takes_tensors(value)]
    return [
        tensor
        for tensor in tensors_in(given)
        if number_of(tensor) >= since and not hasattr(tensor, WATCHED)
    ]


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return ``value`` with ``function`` applied to every tensor in it.

    Containers in which nothing changes are returned as they are, the same object; others are
    copied. Objects that are neither registered with torch's pytree nor dataclasses are left alone.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, _PLAIN):
        return value
    if type(value) is tuple:
        mapped = tuple(
            function(item) if isinstance(item, torch.Tensor) else map_tensors(function, item)
            for item in value
        )
        return mapped if any(a is not b for a, b in zip(mapped, value, strict=True)) else value
    if type(value) is dict:
        changed = {key: map_tensors(function, item) for key, item in value.items()}
        return changed if any(changed[key] is not value[key] for key in value) else value
    leaves, tree = tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return _map_fields(function, value)
    mapped_leaves = [map_tensors(function, leaf) for leaf in leaves]
    if all(a is b for a, b in zip(mapped_leaves, leaves, strict=True)):
        return value
    return tree_unflatten(mapped_leaves, tree)


def _map_fields(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Map what pytree does not open: dataclasses, dicts and named tuples that were subclassed."""
    if isinstance(value, tuple) and hasattr(value, "_replace"):  # PackedSequence
        # Of a named tuple: hasattr has told us, but not mypy.
        old = value._asdict()  # type: ignore[attr-defined]
    elif isinstance(value, dict):
        old = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        old = {name: getattr(value, name) for name in names if hasattr(value, name)}
    else:
        return value
    mapped = {name: map_tensors(function, item) for name, item in old.items()}
    changes = {name: new for name, new in mapped.items() if new is not old[name]}
    if not changes:
        return value
    if isinstance(value, tuple):
        # Likewise.
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
    """Return ``output`` with every tensor in it replaced by a view that is not this module's own.

    A module may hand an input on (a layer that is dropped), or the output of a unit inside it. Its
    hook would then be on the tensor of the other one, and their backwards could not be told apart;
    a module that does so on some ranks only would be ahead of the other there, and behind here.
    """
    if type(output) is torch.Tensor and not kwargs:  # as a rule, in a third of the time
        is_of_another = hasattr(output, WATCHED) or any(value is output for value in args)
        return output.view_as(output) if is_of_another and output.requires_grad else output
    inputs = {id(value) for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)}

    def view(tensor: torch.Tensor) -> torch.Tensor:
        is_of_another = id(tensor) in inputs or hasattr(tensor, WATCHED)
        return tensor.view_as(tensor) if is_of_another and tensor.requires_grad else tensor

    return map_tensors(view, output)
