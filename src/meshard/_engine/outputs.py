"""Tensors in the inputs and outputs of modules.

Tensors are found in what torch's pytree flattens (tuples, lists, dicts, named tuples, and
registered classes, such as the outputs of Hugging Face models), in dataclasses, and in subclasses
of dict and of named tuples. Other objects are not searched. Tensors and flat tuples cost no walk
over a tree.

The second part explains three kinds of errors of torch: about shards beside ordinary tensors ("got
mixed torch.Tensor and DTensor"); about dtypes, if buffers are not in the dtype of the parameters;
and about the meta device, if buffers were left there. torch raises these errors in C++, before any
code of meshard is called. A tensor class that checked for the first kind would slow down every
operator on shards. So an error is explained when it leaves the forward of a unit. An error of the
first kind is also explained when it leaves a module inside a unit, if the user called that module
by itself. The local variables in the traceback tell which tensors were used.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshard._engine.unit import Unit, alive, joined, outside_units, units_in
from meshard._engine.unwritten import REMEDY
from meshard._params.sharded_param import ShardedParam, UnitParam
from meshard._torch.dtensor import local_of
from meshard._torch.private import number_of, tree_flatten, tree_unflatten
from meshard._torch.user_line import listed

WATCHED = "_meshard_watched"  # attribute of an output that has the hook of a unit
_PLAIN = (int, float, str, bool, bytes, type(None), torch.dtype, torch.device)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in ``value``. The docstring of this file says what is searched."""
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

    A container in which nothing changes is returned itself; others are copied. ``around`` has the
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
    """Map a container that pytree takes for a leaf: a dataclass, or a subclass of a container."""
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
    # dataclasses.replace would call __init__, which may compute something, or not take all fields.
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

    It is no view: pipeline schedules that split backwards detach the outputs of their stages in
    place, which torch refuses for views.
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
    """Return ``output`` with an alias for each tensor that was there before the forward.

    ``since`` is what ``next_node()`` returned when the forward began: nodes made before have lower
    numbers. Each thread counts its nodes from 0, so the node of an input from another thread may
    have a higher one. So tensors are compared with ``inputs`` too. The output of a unit inside gets
    an alias as well.

    A module may return one of its inputs (a layer that is dropped), or the output of a unit inside
    it. Without the alias, two units would have hooks on the same tensor, and nothing would tell
    whose backward begins first. If only some ranks dropped the layer, the order would differ
    between ranks. The tensor may also have been used before the forward, and its gradient then
    comes when the backward of this unit is over.
    A module may also return a leaf, such as its own parameter. A hook on the leaf would stay there
    for all later backwards.
    """

    def alias(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        is_old = number_of(tensor) < since or hasattr(tensor, WATCHED)  # of a leaf it is -1
        if is_old or any(value is tensor for value in inputs):
            made: torch.Tensor = _Alias.apply(tensor)  # type: ignore[no-untyped-call]  # torch's
            return made
        return tensor

    return map_tensors(alias, output)


# --- errors of torch that are explained --------------------------------------------------

_TEXT_OF_TORCH = "got mixed torch.Tensor and DTensor"
_ABOUT_DTYPES = re.compile("dtype|(scalar|data|input|weight|bias) ?type", re.IGNORECASE)
_ABOUT_META = re.compile(r"\bmeta\b", re.IGNORECASE)
_EXPLAINED = "_meshard_is_explained"
_PASSED = "_meshard_passed"  # ids of the units through whose forward the error came up
_Sharded = dict[int, tuple[Unit, UnitParam]]  # by id of the sharded parameter
_REMEDIES = (
    "Parameters are unsharded inside their unit's own forward and backward. What helps:\n"
    "* If the forward of a parent reads it, as that of nn.MultiheadAttention reads out_proj: "
    "apply fully_shard to the parent instead of this module, or pass unshard_on_access=True "
    "for this module.\n"
    "* If another method of a sharded module reads it: "
    "meshard.register_fsdp_forward_method(module, name).\n"
    "* Anywhere else, as in a loss function: with meshard.unsharded_params(module): around "
    "the read."
)
_REMEDIES_OUTSIDE = (
    "What helps:\n"
    "* Call the module that fully_shard was applied to, which gathers its parameters, and not a "
    "module inside it.\n"
    "* Or apply fully_shard to the module that is called too, before the one around it: then it "
    "gathers its own.\n"
    "* Or read it inside with meshard.unsharded_params(model), or in a method of the sharded "
    "module after meshard.register_fsdp_forward_method(module, name)."
)


def explain(error: BaseException | None, unit: Unit, module: nn.Module, inputs: Any) -> None:
    """Add cause and remedy to the message of ``error``, if it is one of the kinds explained here.

    ``error`` has left the forward of ``module`` of ``unit``, which was called with ``inputs``.
    """
    if not isinstance(error, RuntimeError) or hasattr(error, _EXPLAINED):
        return
    text = ""
    with contextlib.suppress(Exception):  # an error in here would hide the one to explain
        if _TEXT_OF_TORCH in str(error):
            text = _explanation(error, unit, module, inputs)
        elif _ABOUT_META.search(str(error)) and (held := _meta_tensors(_outermost(module, unit))):
            text = f"On the meta device, without values, are {', '.join(held)}. {REMEDY}"
        elif _ABOUT_DTYPES.search(str(error)):
            text = _about_dtypes(error, unit, module)
    if not text:
        setattr(error, _PASSED, {*getattr(error, _PASSED, ()), id(unit)})
    else:
        _add_to_message(error, text)


def _add_to_message(error: BaseException, text: str) -> None:
    # Not by add_note(): that needs Python 3.11, and logs of str(error) leave notes out.
    error.args = (f"{error}\n\n{text}", *error.args[1:])
    setattr(error, _EXPLAINED, True)


def _explanation(error: BaseException, unit: Unit, module: nn.Module, inputs: Any) -> str:
    outermost = _outermost(module, unit)
    # If the error came up through the forward of a unit, that unit was unsharded when the error was
    # raised. So its parameters cannot be the cause.
    passed = getattr(error, _PASSED, ())
    units = [each for each in units_in(outermost) if id(each) not in passed]
    sharded, frames = _sharded_of(units), _frames_of(error)
    found = _first_known(sharded, frames)
    # Without tensor parallelism, inputs should be ordinary tensors. A DTensor there is the cause.
    if not found and all(
        param.dtensor_placement is None for param in unit.params if isinstance(param, ShardedParam)
    ):
        given = next((each for each in tensors_in(inputs) if isinstance(each, DTensor)), None)
        if given is not None:
            return _was_given(f"unit {unit.label!r}", given)
    if not found and (text := _given_to_plain(outermost, unit, frames)):
        return text
    found = found or _first_known(sharded, map(_parameters_of, frames))
    if found:
        param = found[0][1]
        return (
            f"{_names_of(found)} was read while that unit is "
            f"not running; its modules hold this rank's shard, "
            f"{tuple(local_of(param.sharded).shape)} of {tuple(param.sharded.shape)}. {_REMEDIES}"
        )
    # No parameter was found. So name the units whose attribute stands in the line that failed; if
    # there is none, the units inside ``module``.
    suspects = [each for each in units if each.params and each.group.holds_shards]
    words = set(re.findall(r"\w+", traceback.extract_tb(error.__traceback__)[-1].line or ""))
    named = [each for each in suspects if _attribute_of(each) in words]
    which = "named in the line that failed" if named else f"inside {unit.label!r}"
    inside = set(units_in(module))
    labels = [each.label for each in named or suspects if named or each in inside]
    if not labels:
        return ""
    return (
        "a parameter of another unit was probably read while that unit is not running, when its "
        f"modules hold shards. Units {which} that are sharded now: "
        f"{listed(labels)}. {_REMEDIES}"
    )


def _about_dtypes(error: RuntimeError, unit: Unit, module: nn.Module) -> str:
    """Return a text about parameters, buffers and inner units whose dtype is not that of ``unit``.

    The text is empty if there are none.
    """
    casts = zip(unit.group.unit_params.compute_dtypes, unit.params, strict=True)
    dtype = next((to for to, param in casts if to != param.sharded.dtype), unit.input_dtype)
    others = [
        f"{each.label} ({computes[0]})"
        for each in units_in(module)
        if (computes := list(each.group.unit_params.compute_dtypes)) and dtype not in computes
    ]
    if dtype is None:
        return ""
    text = ""
    kept = [f"{p.fqn} ({p.sharded.dtype})" for p in unit.params if p.keeps_dtype]
    if kept:
        text = (
            f"unit {unit.label!r} computes in {dtype}, but param_dtype_override_fn leaves "
            f"parameters of it in their own dtype: {listed(kept)}. Leave only those whose module "
            f"casts what it multiplies by them, and returns {dtype}: an nn.Linear with a bias does "
            "not, nor do most norms.\n"
        )
    if others:
        text += (
            f"unit {unit.label!r} computes in {dtype}, but units inside it in another dtype: "
            f"{listed(others)}. If that is not what you want, pass the same mp_policy to every "
            "call of fully_shard.\n"
        )
    named = _outermost(module, unit).named_modules()
    prefix = next((fqn for fqn, each in named if each is module), unit.fqn)
    held = {
        inner: [
            f"{joined(fqn, name)} ({buffer.dtype})"
            for name, buffer in inner._buffers.items()
            if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype
        ]
        for fqn, inner in outside_units(prefix, module, set())
    }
    # The names begin with buffers of modules whose forward has failed, from the innermost outwards.
    callers = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    running = [each for each in callers if isinstance(each, nn.Module)]
    first = dict.fromkeys([*reversed(running), *held])
    names = [name for inner in first for name in held.get(inner, ())]
    if not names:
        return text
    return text + (
        f"unit {unit.label!r} computes in {dtype}, but buffers of it have another dtype: "
        f"{listed(names)}. If that is the cause, one of these helps:\n"
        f"* MixedPrecisionPolicy(..., buffer_dtype={dtype}) casts them once; from then on they are "
        "updated and saved in that dtype.\n"
        "* To leave them in theirs, apply fully_shard without param_dtype to the module that uses "
        "them (to each BatchNorm, say), or cast them in forward, where they are read."
    )


def _meta_tensors(outermost: nn.Module) -> list[str]:
    """Return the names of the buffers and parameters that are on the meta device."""
    buffers = outermost.named_buffers(remove_duplicate=False)
    params = outermost.named_parameters(remove_duplicate=False)
    found = [f"buffer {name!r}" for name, buffer in buffers if buffer.is_meta]
    return found + [f"parameter {name!r}" for name, param in params if param.is_meta]


def explain_outside(error: BaseException | None, units: Iterable[Unit]) -> None:
    """Add to torch's message which parameter of ``units`` was read while none of them ran.

    ``error`` has left a module inside one of these units. The user called that module by itself.
    """
    if _TEXT_OF_TORCH not in str(error) or error is None or hasattr(error, _EXPLAINED):
        return
    sharded, frames = _sharded_of(units), _frames_of(error)
    found = _first_known(sharded, frames) or _first_known(sharded, map(_parameters_of, frames))
    if found:
        where = "outside of the forward of that unit, where its modules hold this rank's shard"
        _add_to_message(error, f"{_names_of(found)} was read {where}. {_REMEDIES_OUTSIDE}")


def _given_to_plain(outermost: nn.Module, unit: Unit, frames: list[list[Any]]) -> str:
    """Return the text about a DTensor passed to a module of ordinary parameters; empty if none was.

    The DTensor may be the output of a module under tensor parallelism (use_local_output=False).
    """
    unsharded = {id(param.unsharded) for param in unit.params}
    for values in frames:
        module = next((value for value in values if isinstance(value, nn.Module)), None)
        if module is None:
            continue
        given = next((value for value in values if isinstance(value, DTensor)), None)
        held = [param for param in module._parameters.values() if param is not None]
        is_plain = any(id(p) in unsharded and not isinstance(p, DTensor) for p in held)
        if given is None or not is_plain or any(True for _ in module.children()):
            return ""
        fqn = next((name for name, each in outermost.named_modules() if each is module), "")
        what = f"module {fqn!r} ({type(module).__name__}) of unit {unit.label!r}"
        return _was_given(what, given)
    return ""


def _was_given(what: str, given: DTensor) -> str:
    return (
        f"{what} was given a DTensor of shape {tuple(given.shape)} and placements "
        f"{given.placements}, but its parameters are ordinary tensors inside its forward. Pass the "
        "input as an ordinary tensor, by to_local() or full_tensor() (ColwiseParallel and "
        "RowwiseParallel do so with use_local_output=True, their default), or place its parameters "
        "on the same mesh before fully_shard, as by SequenceParallel."
    )


def _attribute_of(unit: Unit) -> str:
    """Return the attribute name in the path of ``unit``: ``layers`` for ``layers.0``."""
    return next((part for part in reversed(unit.fqn.split(".")) if not part.isdigit()), "")


def _outermost(module: nn.Module, unit: Unit) -> nn.Module:
    """Return the module of the outermost unit around ``module``."""
    return next(iter(alive(unit.lifecycle.units()[0].modules)), module)


def _sharded_of(units: Iterable[Unit]) -> _Sharded:
    return {id(param.sharded): (each, param) for each in units for param in each.params}


def _frames_of(error: BaseException) -> list[list[Any]]:
    """Return the values of the local variables of each frame of a traceback, innermost first."""
    frames = [list(frame.f_locals.values()) for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames[::-1]


def _names_of(found: list[tuple[Unit, UnitParam]]) -> str:
    """Name the unit of the first parameter in ``found``, and all its parameters in ``found``."""
    unit = found[0][0]
    names = [repr(joined(unit.fqn, param.fqn)) for each, param in found if each is unit]
    return f"parameter {' or '.join(names)} of unit {unit.label!r}"


def _parameters_of(local_variables: list[Any]) -> list[Any]:
    modules = [value for value in local_variables if isinstance(value, nn.Module)]
    return [param for module in modules for param in module._parameters.values()]


def _first_known(sharded: _Sharded, frames: Iterable[list[Any]]) -> list[tuple[Unit, UnitParam]]:
    """Return the sharded parameters among the values of the first frame that has any."""
    known = ({id(each): None for each in values if id(each) in sharded} for values in frames)
    return [sharded[each] for each in next(filter(None, known), {})]
