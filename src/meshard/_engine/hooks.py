"""Hooks on modules, on autograd and on ``load_state_dict``.

A hook refers weakly to its unit and reads ``unit.lifecycle`` at each call. Hooks do not store the
lifecycle: it is made at the first use of the model, and ``fully_shard`` of an outer module replaces
it.

``load_state_dict`` cannot copy an ordinary tensor to a sharded parameter, which is a DTensor. So
before a module loads, a hook replaces each unsharded tensor in the state dict by this rank's shard
of that tensor, without communication. (A DTensor with other placements is gathered first.)
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import cache, partial
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from meshard._engine.lifecycle import OtherThreadError
from meshard._engine.outputs import (
    WATCHED,
    cast_floats,
    detached_from_others,
    moved_from_host,
    tensors_in,
)
from meshard._engine.param_group import sharded_params
from meshard._engine.program import Call, Pass
from meshard._engine.unit import (
    Unit,
    alive,
    outside_units,
    unit_of,
    units_of,
)
from meshard._params.unit_params import GradientHook, ShardedParam
from meshard._torch.dtensor import is_alias, is_placed_like, is_plain, local_of, plain_of, set_local
from meshard._torch.private import (
    base_of,
    call_codes,
    called_in,
    number_of,
    outside_of_transforms,
    skip_dynamo,
    skip_dynamo_once,
    tangents_of,
    without_modes,
)
from meshard._torch.user_line import listed, warn_user

_OF_TORCH = "got mixed torch.Tensor and DTensor"
_REMEDIES = (
    "Outside of the forward and backward of their unit, parameters are shards. What helps:\n"
    "* Call the module that fully_shard was applied to, and not one inside it. Where its parent "
    "reads its parameters, as nn.MultiheadAttention does, apply fully_shard to the parent instead, "
    "or pass unshard_on_access=True for this module.\n"
    "* For another method than forward: meshard.register_fsdp_forward_method(module, name).\n"
    "* Anywhere else, as in a loss function: with meshard.unsharded_params(module): around the "
    "read.\n"
    "An input that is a DTensor needs to_local() or full_tensor()."
)


def gradient_hook_maker(
    unit: Unit, *, is_replicated: bool = False
) -> Callable[[int], GradientHook]:
    """Return a function that takes a parameter's index in ``unit`` and makes its gradient hook."""
    unit_ref, hook = weakref.ref(unit), _arrival_hook if is_replicated else _gradient_hook
    return lambda index: partial(hook, unit_ref, index)


@skip_dynamo
def _gradient_hook(unit_ref: weakref.ref[Unit], index: int, param: torch.Tensor) -> None:
    unit = unit_ref()
    # torch calls this even if the parameter was frozen after the forward, but sets no .grad then.
    if unit is not None and param.requires_grad:
        unit.lifecycle.on_gradient(unit, index)


@skip_dynamo
def _arrival_hook(unit_ref: weakref.ref[Unit], index: int, gradient: torch.Tensor) -> bool:
    if (unit := unit_ref()) is None:
        return False
    unit.lifecycle.on_replicated_gradient(unit, index, gradient)
    return True


def register_hooks(unit: Unit) -> None:
    """Register hooks that tell the lifecycle when a module of ``unit`` runs.

    If several units share modules, only the first also hooks ``state_dict`` and casts buffers.
    """
    explain_uncaught()
    for module in alive(unit.modules):
        register_forward_hooks(unit, module)
        if unit.sibling_of is None:
            module.register_state_dict_pre_hook(_before_state_dict)
            module.register_state_dict_post_hook(_after_state_dict)
            if unit.buffer_dtype is not None:
                _cast_buffers(module)
                module.register_load_state_dict_post_hook(_cast_buffers)


def register_forward_hooks(unit: Unit, module: nn.Module, *, is_around: bool = False) -> None:
    """Make each forward of ``module`` begin and end a forward of ``unit``.

    The new hooks run before and after all hooks that ``module`` has now. With ``is_around`` they
    run between those and the forward. ``module`` then is an outer module whose forward may read
    parameters of ``unit`` directly (the user has passed ``unshard_on_access=True``).
    """
    hooks = ModuleHooks(unit, casts=not is_around)
    module.register_forward_pre_hook(hooks.pre_forward, prepend=not is_around, with_kwargs=True)
    # always_call: the hook must reshard the unit even if the forward raises an Exception.
    module.register_forward_hook(
        hooks.post_forward, prepend=is_around, with_kwargs=True, always_call=True
    )


@torch.no_grad()
def _cast_buffers(module: nn.Module, _: Any = None) -> None:
    """Cast the floating-point buffers of a unit to its ``buffer_dtype``.

    The cast is in place, so that a buffer that several units share stays one tensor.
    """
    unit = unit_of(module)
    if unit is None or unit.buffer_dtype is None:
        return
    for _, inner in outside_units("", module, set()):
        for buffer in inner._buffers.values():
            if buffer is not None and buffer.is_floating_point():
                buffer.data = buffer.to(unit.buffer_dtype)


def _before_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Raise if gradients are not in ``.grad`` yet, because a checkpoint would lose them.

    Optimizer steps that wait for the next forward are done now. While a forward runs, modules keep
    its unsharded parameters, and ``_put_shards`` replaces these in the finished state dict.
    """
    for unit in units_of(module):
        unit.lifecycle.abort_if_cut_off()
        if unit.lifecycle.is_idle:
            unit.group.install_sharded()  # modules may still hold unsharded parameters
        unit.group.check_nothing_is_pending()
        unit.group.finish_pending_step()


class _ShardsOnly:
    """An object in the metadata of a state dict, which warns when rank 0 pickles the state dict."""

    def __init__(self, state_dict: OrderedDict[str, Any]) -> None:
        self._state_dict = weakref.ref(state_dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> _ShardsOnly:
        state_dict = self._state_dict()
        return self if state_dict is None else _ShardsOnly(memo.get(id(state_dict), state_dict))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an empty OrderedDict, so that ``torch.load`` does not need meshard."""
        state_dict = self._state_dict() or OrderedDict[str, Any]()
        # Do not warn if the user has replaced all shards, or destroyed the process group.
        has_shards = any(isinstance(value, DTensor) for value in state_dict.values())
        if has_shards and dist.is_initialized() and dist.get_rank() == 0:
            warn_user(
                "rank 0 pickles a sharded state_dict (torch.save?), which holds its own shards "
                f"only, and not those of the other {dist.get_world_size() - 1} ranks. For one file "
                "with whole tensors call get_model_state_dict of "
                "torch.distributed.checkpoint.state_dict on all ranks, with "
                "StateDictOptions(full_state_dict=True, cpu_offload=True); to write all shards, "
                "torch.distributed.checkpoint.save. If each rank writes a file of its own, "
                "ignore this.",
            )
        return OrderedDict, ()


def _after_state_dict(
    module: nn.Module, state_dict: OrderedDict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    groups = [
        group for unit in units_of(module) if unit.is_root for group in unit.lifecycle.groups()
    ]
    if any(group.params and group.spec.mesh_info.shard_count > 1 for group in groups):
        metadata["shards_only"] = _ShardsOnly(state_dict)
    _put_shards(module, state_dict, prefix)


def _put_shards(module: nn.Module, state_dict: OrderedDict[str, Any], prefix: str) -> None:
    """Make every parameter in the state dict of ``module`` a shard.

    A state dict made inside a forward, or after ``unshard()``, has unsharded parameters, whose
    memory will be freed. ``_is_same`` recognises these tensors. To look at the modules would not
    do: another thread may have resharded the unit after the state dict was filled.
    """
    params = [param for unit in units_of(module) for param in sharded_params(unit.group)]
    if not params:
        return
    places: dict[nn.Module, list[str]] = {}
    for place, inner in module.named_modules(remove_duplicate=False):
        places.setdefault(inner, []).append(f"{prefix}{place}." if place else prefix)
    for param in params:
        for owner, name in param.owners:
            for place in places.get(owner, ()):
                value = state_dict.get(place + name)
                if value is None:
                    continue
                if _is_same(value, param.unsharded):
                    is_kept = isinstance(value, nn.Parameter)  # keep_vars=True
                    value = param.sharded if is_kept else param.sharded.detach()
                    state_dict[place + name] = value
                shard = local_of(param.sharded)
                if value is param.sharded or not isinstance(value, DTensor):
                    continue
                if is_alias(local_of(value), shard):
                    # torch.distributed.checkpoint.load writes to this local tensor, which after
                    # DTensor.detach() has a version counter of its own. A detach() of the plain
                    # shard shares the shard's counter, by which the next forward notices the write.
                    set_local(value, shard.detach())


def _is_same(value: Any, unsharded: torch.Tensor) -> bool:
    """Whether ``value`` is ``unsharded`` or a result of ``unsharded.detach()``.

    If ``unsharded`` is a tensor subclass, return True for every tensor of its class.
    """
    one, other = plain_of(value), plain_of(unsharded)
    if is_plain(other):
        return is_alias(one, other)
    return type(one) is type(other)  # a subclass, such as float8, holds its values in inner tensors


class UnitHook:
    """A hook that refers weakly to its unit."""

    def __init__(self, unit: Unit) -> None:
        self._unit = weakref.ref(unit)

    def __deepcopy__(self, memo: dict[int, Any]) -> UnitHook:
        """Return a hook for the copy of the unit, or for the same unit if that was not copied."""
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        unit = self._unit()
        if id(unit) in memo:
            vars(copied)["_unit"] = weakref.ref(memo[id(unit)])
        return copied


class ModuleHooks(UnitHook):
    """The forward pre-hook and the forward hook on each module of a unit."""

    def __init__(self, unit: Unit, *, casts: bool = True) -> None:
        super().__init__(unit)
        self._casts = casts  # whether to move inputs, and to cast inputs and outputs

    @skip_dynamo
    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        unit = self._unit()
        if unit is None:
            return None
        group, lifecycle = unit.group, unit.lifecycle
        if group.is_summoned:
            group.summoned_by.check_may_run(group)
            return None
        was_idle = lifecycle.is_idle
        without_modes(lifecycle.begin_call, unit)
        if not self._casts:
            return None
        dtype, device = unit.input_dtype, group.spec.device
        if device.type != "cpu" and (was_idle or unit.is_root):
            args, kwargs = moved_from_host(args, device), moved_from_host(kwargs, device)
        elif dtype is None:
            return None
        if dtype is not None:
            args, kwargs = cast_floats(args, dtype), cast_floats(kwargs, dtype)
        return args, kwargs

    @skip_dynamo
    def post_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        unit = self._unit()
        if unit is None:
            return None
        failed = output is None and has_raised(module)
        if failed:
            explain(sys.exc_info()[1], unit)
        if unit.group.is_summoned or (failed and _was_refused(unit)):
            return None
        if failed:
            # ``end_forward`` may raise a second error, which torch would show as a warning.
            with contextlib.suppress(RuntimeError):
                end_forward(unit, module, output, (args, kwargs), failed=True)
            return None
        watched = end_forward(unit, module, output, (args, kwargs), failed=False)
        result = output
        if self._casts and unit.output_dtype is not None:
            result = cast_floats(output, unit.output_dtype)
        if watched is not None:
            arguments = (*args, *kwargs.values())
            result = detached_from_others(result, arguments, watched.call.began_at)
            watch_outputs(result, watched)
            if not watched.this.is_watched and unit.lifecycle.is_idle:
                unit.lifecycle.recorder.close([watched.this])  # no output requires grad
        return None if result is output else result

    @skip_dynamo_once
    def run(
        self, module: nn.Module, method: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call ``method`` between the two hooks, as ``module(...)`` calls ``forward``."""
        output = None
        try:
            changed = self.pre_forward(module, args, kwargs)
            if changed is not None:
                args, kwargs = changed
            output = method(*args, **kwargs)
            result = self.post_forward(module, args, kwargs, output)
        except BaseException:
            if output is None:
                self.post_forward(module, args, kwargs, None)
            raise
        return output if result is None else result


call_codes[ModuleHooks.run.__code__] = "module"


@skip_dynamo_once
def run_in_units(module: nn.Module, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call ``method`` as ``module(...)`` calls forward: unshard the module's units around it."""
    hooks = (getattr(each, "__self__", None) for each in module._forward_pre_hooks.values())
    for each in reversed([each for each in hooks if isinstance(each, ModuleHooks)]):
        method = partial(each.run, module, method)
    return method(*args, **kwargs)


class Watched(NamedTuple):
    """A finished forward of a unit. The hooks on its outputs hold this, to begin its backward."""

    unit: weakref.ref[Unit]
    this: Pass
    call: Call
    num_rebuilds: int  # ``ParamGroup.num_rebuilds`` when the forward ended


def end_forward(
    unit: Unit, module: nn.Module, output: Any, inputs: Any, *, failed: bool
) -> Watched | None:
    """Record that ``module`` of ``unit`` ran or raised. Return None if outputs need no hooks."""
    lifecycle = unit.lifecycle
    this = lifecycle.present_pass
    # The root needs hooks even without parameters: inner units that do not run in this microbatch
    # may hold gradients of earlier microbatches, which the backward of the root must reduce.
    is_watched = bool(unit.params) or unit.is_root
    records = is_watched and not failed and torch.is_grad_enabled()
    is_hidden = False
    if records and lifecycle.backward is None:
        is_hidden = _is_hidden(output, unit, inputs)
    try:
        call = without_modes(lifecycle.end_call, unit, module, failed=failed, is_hidden=is_hidden)
    except BaseException:
        lifecycle.failure.is_dirty = True  # an interrupt may have left the unit half resharded
        raise
    if not records or call is None:
        return None
    return Watched(weakref.ref(unit), this, call, unit.group.num_rebuilds)


@skip_dynamo
def _output_hook(watched: Watched, may_be_dtensor: bool, gradient: torch.Tensor) -> None:
    unit = watched.unit()
    if unit is None:
        return
    if isinstance(gradient, DTensor) and not may_be_dtensor:
        raise RuntimeError(  # without this, torch would raise in an operator of the unit's backward
            f"backward reached the output of unit {unit.label!r}, an ordinary tensor, with a "
            "gradient that is a DTensor. Was a penalty on sharded weights added to the loss as a "
            "DTensor? Add its full_tensor(): loss + weight.square().sum().full_tensor()."
        )
    if watched.num_rebuilds != unit.group.num_rebuilds:
        raise RuntimeError(  # the parameters of that forward do not exist any more
            f"parameters of unit {unit.label!r} were cast, moved or replaced between its forward "
            "and this backward, which needs those of the forward; run the backward before "
            "module.to(...), or the forward again after it."
        )
    unit.lifecycle.on_output_gradient(unit, watched.this, watched.call)


def watch_outputs(output: Any, watched: Watched) -> None:
    """Register hooks on the tensors in ``output``, which unshard the unit for its backward."""
    found = (output,) if isinstance(output, torch.Tensor) else tensors_in(output)
    for each in (*found, *tangents_of(found)):
        tensor = outside_of_transforms(each)
        if tensor.requires_grad:
            setattr(tensor, WATCHED, True)
            watched.this.is_watched = True
            tensor.register_hook(partial(_output_hook, watched, isinstance(tensor, DTensor)))
            # A linear layer may return a view. If the caller adds to the view in place (`x =
            # layer(x); x += y`), autograd drops the hook above. But the node that made the base of
            # the view stays in the graph, so that node gets a hook too.
            base = base_of(tensor)
            node = None if base is None else base.grad_fn
            # A base that is older than this forward gets no hook: its node belongs to other code.
            if base is not None and node is not None and number_of(base) >= watched.call.began_at:
                node.register_prehook(partial(_base_hook, watched, base.output_nr))


@skip_dynamo
def _base_hook(watched: Watched, index: int, gradients: tuple[Any, ...]) -> None:
    unit, gradient = watched.unit(), gradients[index]
    is_new = unit is not None and watched.call.reached_in != unit.lifecycle.backward_number
    if is_new and gradient is not None:
        _output_hook(watched, True, gradient)


def _is_hidden(output: Any, unit: Unit, inputs: Any) -> bool:
    """Whether a backward may come, but no tensor was found in ``output`` that requires grad."""
    if not unit.params or (isinstance(output, torch.Tensor) and output.requires_grad):
        return False
    found = tensors_in(output)
    if any(each.requires_grad for each in found):
        return False
    is_trained = unit.group.num_trainable > 0
    if not is_trained and not any(each.requires_grad for each in tensors_in(inputs)):
        return False
    if not found and unit not in _warned:
        _warned.add(unit)
        warn_user(
            f"unit {unit.label!r} returned a {type(output).__name__} in which no tensor was "
            "found, so the beginning of its backward cannot be seen; it stays unsharded until "
            "a backward ends. Return the tensors that gradients come back through, and zeros "
            "if only other ranks have any, which would wait for this one; if they are inside "
            "an object, make its class a dataclass, or register it "
            "(torch.export.register_dataclass, torch.utils._pytree.register_pytree_node)."
        )
    return True


_warned: weakref.WeakSet[Unit] = weakref.WeakSet()


def has_raised(module: nn.Module) -> bool:
    """Whether a hook of ``module`` is called because the forward of ``module`` raised.

    If the user calls the module inside an ``except`` block, ``sys.exc_info()`` may have an older
    exception. But the traceback of the older exception does not begin in this call of ``module``.
    """
    trace = sys.exc_info()[2]
    return trace is not None and called_in(trace.tb_frame) is module


def _was_refused(unit: Unit) -> bool:
    """Whether meshard refused this forward, because another thread runs the model of ``unit``."""
    is_other = unit.lifecycle.failure.thread != threading.get_ident()
    return is_other and isinstance(sys.exc_info()[1], OtherThreadError)


def register_load_hooks(unit: Unit) -> None:
    """Register hooks that let ``load_state_dict`` load unsharded tensors into the unit's shards."""
    owned: dict[nn.Module, list[tuple[str, int]]] = {}
    for index, param in enumerate(unit.params):
        for owner, name in param.owners:
            owned.setdefault(owner, []).append((name, index))
    for owner, names in owned.items():
        owner.register_load_state_dict_pre_hook(_LoadHook(unit, names))
    for module in alive(unit.modules):
        module.register_load_state_dict_post_hook(_adopt_loaded)


def _adopt_loaded(module: nn.Module, _: Any) -> None:
    """Make tensors that ``load_state_dict(assign=True)`` has assigned the units' parameters.

    This happens here and not in the next forward: the user may call ``parameters()`` right after
    the load, and tied parameters must be one tensor by then.
    """
    for unit in units_of(module):
        if unit.group.holds_shards:
            unit.group.adopt_edits()


class _LoadHook(UnitHook):
    """The hook that runs before one module loads its own parameters."""

    def __init__(self, unit: Unit, names: list[tuple[str, int]]) -> None:
        super().__init__(unit)
        # For each parameter of the module: its attribute name, and its index in the unit.
        self._names = names

    def __call__(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, *_: Any
    ) -> None:
        """Replace tensors in ``state_dict``, which is torch's copy, by tensors that fit the module.

        If the module holds a sharded parameter, put this rank's shard. If the module holds an
        unsharded parameter, put an unsharded tensor, and also write its values to the shard.
        """
        unit = self._unit()
        if unit is None:
            return
        if unit.lifecycle.is_idle:
            unit.group.install_sharded()  # so that the load goes to the shards
        unit.group.finish_copies()
        unit.group.finish_pending_step()
        is_assigned = metadata.get("assign_to_params_buffers", False)
        location = unit.group.spec.location.device
        for name, index in self._names:
            given = state_dict.get(prefix + name)
            param = unit.group.params[index]
            assert isinstance(param, ShardedParam)
            if not isinstance(given, torch.Tensor) or given.shape != param.sharded.shape:
                continue  # torch reports a missing name or another shape
            held = module._parameters.get(name)
            if held is param.sharded:
                own = local_of(held)
                device = location if own.is_meta else own.device
                state_dict[prefix + name] = _fitting(param, given, device if is_assigned else None)
            elif held is param.unsharded:
                state_dict[prefix + name] = _to_plain(param, given)
                # torch loads only into the unsharded copy, which is dropped later.
                with torch.no_grad():
                    shard = _fitting(param, given)
                    local_of(param.sharded).copy_(local_of(shard))


def _fitting(
    param: ShardedParam, given: torch.Tensor, assigned_on: torch.device | None = None
) -> torch.Tensor:
    """Return ``given`` as a shard with the mesh and placements of ``param``.

    ``assigned_on``: the device to copy the shard to, if torch will assign the result to the module.
    None: torch will only copy its values.

    **Collective:** on the mesh of ``given``, if that is a DTensor with other placements.
    """
    if is_placed_like(given, param.sharded):
        return given
    # A result that torch assigns must be on the device of the old shard. It must also be a copy: a
    # tensor subclass is used as the shard itself, and a view would keep all of ``given`` alive.
    return param.shard_of(_to_plain(param, given), copied_to=assigned_on)


def _to_plain(param: ShardedParam, given: torch.Tensor) -> torch.Tensor:
    if not isinstance(given, DTensor):
        return given
    if given.device_mesh.get_coordinate() is None:
        raise RuntimeError(
            f"parameter {param.fqn!r} cannot be loaded from a DTensor on {given.device_mesh}, "
            "because this rank is not part of that mesh; load an unsharded tensor, or save and "
            "load with torch.distributed.checkpoint."
        )
    unsharded: torch.Tensor = given.full_tensor()
    return unsharded.detach()


# --- torch's "got mixed torch.Tensor and DTensor" -------------------------------------------

# A parameter was read while its module held a shard. torch raises this where no code of meshard
# runs. So help is added when the error leaves the forward of a unit, or ends the program.


def explain(error: BaseException | None, unit: Unit) -> None:
    """If ``error`` is about mixed tensors and DTensors, add which units are sharded, and help."""
    units = [each for each in unit.lifecycle.units() if each.params and each.group.holds_shards]
    if units:
        _add(error, f"Units that are sharded now: {listed([each.label for each in units])}. ")


@cache
def explain_uncaught() -> None:
    """Install an excepthook that explains the error when it ends the program."""
    previous = sys.excepthook

    def explain_first(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        _add(error, "")
        previous(kind, error, trace)

    sys.excepthook = explain_first


def _add(error: BaseException | None, which: str) -> None:
    # Not with add_note(), which needs Python 3.11. Also, str(error) in a log leaves out notes.
    if error is not None and _OF_TORCH in str(error) and _REMEDIES not in str(error):
        error.args = (f"{error}\n\n{which}{_REMEDIES}", *error.args[1:])
