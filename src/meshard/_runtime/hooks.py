"""How do module and autograd events reach the lifecycle? Mechanics only.

Hooks hold their unit weakly and look the lifecycle up through it, because an outer ``fully_shard``
puts another lifecycle in its place.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from meshard._runtime.group_tensors import GradientHook
from meshard._runtime.misread import explain
from meshard._runtime.schedule import ForwardCall, ForwardPass
from meshard._runtime.unit import Unit

_MAX_DEPTH = 3  # of objects in objects that are searched for outputs
_WATCHED = "_meshard_watched"  # on an output: a unit has put its hook there
_PLAIN = (int, float, str, bool, bytes, type(None))


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Have ``callback`` called when the present backward ends.

    Autograd has no public way to ask for this; torch's own DDP uses the same private engine.
    """
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def gradient_hook_maker(unit: Unit) -> Callable[[int], GradientHook]:
    """Return what makes the hook for the whole gradient of parameter ``index`` of a unit."""
    unit_ref = weakref.ref(unit)

    def make(index: int) -> GradientHook:
        def gradient_hook(_: torch.Tensor) -> None:
            unit = unit_ref()
            if unit is not None:
                unit.lifecycle.gradient_arrived(unit, index)

        return gradient_hook

    return make


def register_hooks(unit: Unit) -> None:
    """Tell the lifecycle of ``unit`` whenever one of its modules runs."""
    for place, ref in enumerate(unit.modules):
        module = ref()
        assert module is not None
        hooks = ModuleHooks(unit, place)
        module.register_forward_pre_hook(hooks.pre_forward, prepend=True, with_kwargs=True)
        # always_call: an exception in forward must leave the unit sharded.
        module.register_forward_hook(hooks.post_forward, with_kwargs=True, always_call=True)


class ModuleHooks:
    """The two hooks of one module of a unit.

    Args:
        unit: Held weakly.
        place: Which of the unit's modules.
    """

    __slots__ = ("_place", "_unit")

    def __init__(self, unit: Unit, place: int) -> None:
        self._unit = weakref.ref(unit)
        self._place = place

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleHooks:
        """Be the hooks of the unit's copy, if the unit is being copied: see ``unit_copy``."""
        copied = copy.copy(self)
        unit = self._unit()
        if id(unit) in memo:
            copied._unit = weakref.ref(memo[id(unit)])
        return copied

    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        unit = self._unit()
        if unit is None:
            return None
        if unit.lifecycle.is_running(unit) and not _is_inside_itself(module):
            # Only Exceptions reach post_forward: a KeyboardInterrupt ended the last forward.
            unit.lifecycle.abort()
        unit.lifecycle.pre_forward(unit)
        dtype = unit.casts.inputs
        if dtype is None:
            return None
        return cast_floats(args, dtype), cast_floats(kwargs, dtype)

    def post_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        unit = self._unit()
        if unit is None:
            return None
        # When forward raises, torch calls this inside its except block, without an output.
        failed = output is None and sys.exc_info()[0] is not None
        of = unit.lifecycle.schedule.current
        if failed:
            explain(sys.exc_info()[1])
        call = unit.lifecycle.post_forward(unit, self._place, failed=failed)
        if failed or call is None:
            return None
        result = output
        if unit.casts.outputs is not None:
            result = cast_floats(output, unit.casts.outputs)
        if unit.group is not None and torch.is_grad_enabled():
            result = _detached_from_inputs(result, args, kwargs)
            watch_outputs(result, self._unit, of, call)
        return None if result is output else result

    def run(
        self,
        module: nn.Module,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call ``method`` as if it were what ``module(...)`` calls."""
        output = None
        try:
            changed = self.pre_forward(module, args, kwargs)
            if changed is not None:
                args, kwargs = changed
            output = method(*args, **kwargs)
            result = self.post_forward(module, args, kwargs, output)
        except Exception:
            if output is None:
                self.post_forward(module, args, kwargs, None)
            raise
        return output if result is None else result


def hooks_of(module: nn.Module, unit: Unit) -> ModuleHooks:
    """Return the hooks of one of the modules of ``unit``."""
    place = next(place for place, ref in enumerate(unit.modules) if ref() is module)
    return ModuleHooks(unit, place)


def _detached_from_inputs(output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return ``output`` with every tensor in it replaced by a view that is not this module's own.

    A module may hand an input on (a layer that is dropped), or the output of a unit inside it. Its
    hook would then be on the tensor of the other one, and their backwards could not be told apart;
    a module that does so on some ranks only would be ahead of the other there, and behind here.
    """
    inputs = {id(value) for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)}

    def is_of_another(leaf: Any) -> bool:
        return (
            isinstance(leaf, torch.Tensor)
            and leaf.requires_grad
            and (id(leaf) in inputs or hasattr(leaf, _WATCHED))
        )

    def view(leaf: Any) -> Any:
        return leaf.view_as(leaf) if is_of_another(leaf) else leaf

    if isinstance(output, torch.Tensor):
        return view(output)
    if isinstance(output, _PLAIN):
        return output
    leaves, tree = pytree.tree_flatten(output)
    if not any(is_of_another(leaf) for leaf in leaves):
        return output
    return pytree.tree_unflatten([view(leaf) for leaf in leaves], tree)


def watch_outputs(
    output: Any, unit_ref: weakref.ref[Unit], of: ForwardPass, call: ForwardCall
) -> None:
    """Have ``pre_backward`` called before the first gradient of an output is used."""

    def output_hook(_: torch.Tensor) -> None:
        unit = unit_ref()
        if unit is not None:
            unit.lifecycle.pre_backward(unit, of, call)

    if isinstance(output, torch.Tensor):
        if output.requires_grad:
            setattr(output, _WATCHED, True)
            output.register_hook(output_hook)
        return
    for tensor in _tensors_in(output):
        if tensor.requires_grad:
            setattr(tensor, _WATCHED, True)
            tensor.register_hook(output_hook)


def _tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Iterate over the tensors in containers, and in the attributes of objects."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif not isinstance(leaf, _PLAIN) and depth < _MAX_DEPTH:
            # torch's pytree does not know this class: a dataclass, say.
            for attribute in getattr(leaf, "__dict__", {}).values():
                yield from _tensors_in(attribute, depth + 1)


def _is_inside_itself(module: nn.Module) -> bool:
    """Whether a call of ``module`` is being made inside another call of it."""
    # Where a forward is called from, and the name that the module has there.
    ways = {nn.Module._call_impl.__code__: "self", ModuleHooks.run.__code__: "module"}
    num_calls, frame = 0, sys._getframe()
    while frame is not None:
        name = ways.get(frame.f_code)
        num_calls += name is not None and frame.f_locals.get(name) is module
        frame = frame.f_back  # type: ignore[assignment]
    return num_calls > 1


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` with every floating-point tensor in it cast to ``dtype``.

    Containers without anything to cast are returned as they are, the same object; plain tensors
    and flat tuples do not pay for a walk over a tree.
    """
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.dtype != dtype:
            return value.to(dtype)
        return value
    if isinstance(value, _PLAIN):
        return value
    if type(value) is tuple:
        cast = tuple(cast_floats(item, dtype) for item in value)
        return cast if any(a is not b for a, b in zip(cast, value, strict=True)) else value
    if type(value) is dict:
        changed = {key: cast_floats(item, dtype) for key, item in value.items()}
        return changed if any(changed[key] is not value[key] for key in value) else value
    leaves, tree = pytree.tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return value  # not a container that torch's pytree knows
    cast_leaves = [cast_floats(leaf, dtype) for leaf in leaves]
    if all(a is b for a, b in zip(cast_leaves, leaves, strict=True)):
        return value
    return pytree.tree_unflatten(cast_leaves, tree)
