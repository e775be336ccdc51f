"""Explanations of reads of sharded parameters.

An operator that gets a shard beside a plain tensor fails with "got mixed torch.Tensor and DTensor".
torch raises that where no Python runs, and a tensor class that could see it would slow down
every operator on shards. So the error is explained once it is there: when it leaves the forward of
any unit, or the program. The frames it came from tell what was read.
"""

from __future__ import annotations

import contextlib
import dis
import sys
import weakref
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshard._engine.unit import Unit
from meshard._params.sharded_param import UnitParam
from meshard._torch.dtensor import local_of
from meshard._torch.private import base_of

_TEXT_OF_TORCH = "got mixed torch.Tensor and DTensor"
_MAX_NODES = 8  # of a graph, between a parameter and what was computed from it
_STATES = {
    "GATHERING": "being gathered ahead",
    "UNSHARDED": "whole, but kept for its own forward and backward",
    "SUMMONED": "open on rank 0 only",
}
_Found = dict[int, tuple[Unit, UnitParam]]  # by id of the sharded parameter

_units: weakref.WeakSet[Unit] = weakref.WeakSet()
_is_watching = False


def watch_reads(unit: Unit) -> None:
    """Have errors about parameters of ``unit`` explained."""
    global _is_watching
    _units.add(unit)
    if not _is_watching:
        _is_watching = True
        others = sys.excepthook

        def explain_and_report(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            explain(error)
            others(kind, error, trace)

        sys.excepthook = explain_and_report


def explain(error: BaseException | None) -> None:
    """Add to the text of ``error`` what was read, if a shard was read where none may be."""
    if not isinstance(error, RuntimeError) or _TEXT_OF_TORCH not in str(error):
        return
    if "register_fsdp_forward_method" in str(error):
        return  # by the unit inside
    read = []
    with contextlib.suppress(Exception):  # nothing may hide the error that is being explained
        read = list(_read_in(error.__traceback__).values())
    if not read:
        return
    # The text and not a note: notes came with Python 3.11, and logs that take str() drop them.
    error.args = (f"{error}\n\n{_explanation(read)}", *error.args[1:])


def _explanation(read: list[tuple[Unit, UnitParam]]) -> str:
    unit, param = read[0]
    of_unit = [other.fqn for one, other in read if one is unit]
    prefix = f"{unit.fqn}." if unit.fqn else ""
    names = " and ".join(repr(f"{prefix}{fqn}") for fqn in of_unit)
    were = (
        "parameters {} of unit {!r} were" if len(of_unit) > 1 else "parameter {} of unit {!r} was"
    )
    shape, own = tuple(param.layout.shape), tuple(local_of(param.sharded).shape)
    return (
        were.format(names, unit.label)
        + f" read while that unit is not running. The unit is {_state_of(unit)}; its modules "
        f"show this rank's shard, {own} of {shape}. Parameters are whole inside their unit's own "
        "forward and backward. What helps:\n"
        "* If the forward of a parent reads it, as that of nn.MultiheadAttention reads out_proj: "
        "apply fully_shard to the parent instead of this module, or pass unshard_on_access=True "
        "for this module.\n"
        "* If another method of a sharded module reads it: "
        "meshard.register_fsdp_forward_method(module, name).\n"
        "* Anywhere else, as in a loss function: with meshard.unsharded_params(module): around "
        "the read."
    )


def _state_of(unit: Unit) -> str:
    residence = "sharded" if unit.group is None else unit.group.state.name
    return _STATES.get(residence, "sharded")


def _read_in(trace: TracebackType | None) -> _Found:
    """Return what the innermost frame that has any of our parameters at hand was using."""
    ours = {
        id(param.sharded): (unit, param)
        for unit in _units
        if unit.group is not None
        for param in unit.group.params
    }
    frames = []
    while trace is not None:
        frames.append((trace.tb_frame, trace.tb_lasti))
        trace = trace.tb_next
    for frame, at in reversed(frames):
        for values in (_loaded(frame, at), list(frame.f_locals.values())):
            origins = (_origin(value) for value in values if isinstance(value, DTensor))
            found = {id(tensor): ours[id(tensor)] for tensor in origins if id(tensor) in ours}
            if found:
                return found
    return {}


def _origin(tensor: torch.Tensor) -> torch.Tensor:
    """Return the parameter that a tensor is, or is computed from."""
    if tensor.grad_fn is None:
        base = base_of(tensor)
        return tensor if base is None else base
    nodes: list[Any] = [tensor.grad_fn]
    for node in nodes:
        if hasattr(node, "variable"):
            variable: torch.Tensor = node.variable
            return variable
        if len(nodes) < _MAX_NODES:
            nodes += [each for each, _ in node.next_functions if each is not None]
    return tensor


def _loaded(frame: FrameType, at: int) -> Iterator[Any]:
    """Iterate over what the failing lines of a frame name: ``w``, ``self.layers[0].weight``."""
    lines = _lines_at(frame, at)
    spans = [(start, end) for start, end, line in frame.f_code.co_lines() if line in lines]
    value: Any = None
    index: Any = None
    for instruction in dis.get_instructions(frame.f_code):
        if not any(start <= instruction.offset < end for start, end in spans):
            continue
        name = instruction.argval
        if instruction.opname.startswith(("LOAD_FAST", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF")):
            name = name[-1] if isinstance(name, tuple) else name  # two loads in one
            value = frame.f_locals.get(name, frame.f_globals.get(name))
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            value = _attribute(value, name)
        elif instruction.opname == "LOAD_CONST":
            index = name
            continue
        elif instruction.opname == "BINARY_SUBSCR" or instruction.argrepr == "[]":
            value = value[index] if isinstance(value, (nn.ModuleList, nn.Sequential)) else None
        else:
            value = None
        yield value


def _lines_at(frame: FrameType, at: int) -> range:
    """Return the lines of what a frame was doing; the first of them only, before Python 3.11."""
    code = frame.f_code
    if sys.version_info >= (3, 11):
        first, last, _, _ = list(code.co_positions())[at // 2]
        if first is not None and last is not None:
            return range(first, last + 1)
    line = next((line for start, end, line in code.co_lines() if start <= at < end), None)
    return range(line or 0, (line or 0) + 1)


def _attribute(value: Any, name: str) -> Any:
    """Look an attribute up without running a property, or gathering anything."""
    if isinstance(value, nn.Module):
        for names in (value._parameters, value._modules):
            if name in names:
                return names.get(name)
    return getattr(value, "__dict__", {}).get(name)
