"""Hooks on the steps of all optimizers.

The user registers nothing. Above all the hooks do four things:

* They refuse a step while gradients are pending: accumulated, and not in ``.grad``.
* They make ``zero_grad`` clear pending gradients too.
* They record each step, after which unsharded copies are stale. The versions of shards do not show
  a step, because torch's foreach kernels on DTensors do not raise them.
* They warn about parameters that would not be trained, or by each rank apart, without an error.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from meshard._comm.divergence import is_debugging
from meshard._engine.param_group import (
    ParamGroup,
    all_owners,
    has_been_sharded,
    latest_registration,
    owner_of,
    owners_of,
    sharded_params_of,
)
from meshard._engine.unit import alive, units_of
from meshard._gradients.zero_grad import clear_around
from meshard._params.unit_params import TensorTag, tag_left_out, tag_of, tag_tensor
from meshard._torch.dtensor import local_of, set_local, with_own_storage
from meshard._torch.patches import params_in, patch_reads_and_clipping, patch_zero_grad
from meshard._torch.private import (
    accumulation_hooks_of,
    before_compiling,
    skip_dynamo,
    without_torch_function,
)
from meshard._torch.user_line import listed, warn_user

_registered = object()  # another one whenever a parameter or a module is put into a module


@dataclass(slots=True)
class _Known:
    """What is known of an optimizer that has stepped, until ``key`` changes."""

    # ``latest_registration()``, ``_registered``, and the ids in each param group.
    key: tuple[object, object, list[tuple[int, ...]]]
    owners: list[weakref.ref[ParamGroup]]  # of its parameters
    num_steps: int = 0


_known: weakref.WeakKeyDictionary[Optimizer, _Known] = weakref.WeakKeyDictionary()


def find_overlapped(
    params: Iterable[torch.Tensor], *, but: Optimizer | None = None
) -> torch.Tensor | None:
    """Return the first of ``params`` that an overlapped optimizer other than ``but`` steps."""
    given = list(params)
    stepping = {each for owner in owners_of(given) for each in owner.overlapped} - {but}
    held = {id(param) for each in stepping for param in params_in(each)}
    return next((param for param in given if id(param) in held), None)


def refuse_to_clip_overlapped(params: Iterable[torch.Tensor]) -> None:
    """Raise a RuntimeError if an overlapped optimizer steps one of ``params``."""
    if find_overlapped(params) is not None:
        raise RuntimeError(
            "clip_grad_norm_ comes too late: an optimizer of overlap_optimizer steps each unit in "
            "backward, before the gradients of all are there. Clip each unit by its own norm "
            "(overlap_optimizer(..., max_unit_norm=)), clip by value (clip_value=), or step by an "
            "ordinary optimizer."
        )


@functools.cache
def watch_reads_and_clipping() -> None:
    """From now on, reads of sharded parameters wait for pending steps, and clipping is refused."""

    def wait_for_step(tensor: torch.Tensor) -> None:
        group = owner_of(tensor)
        if group is not None:
            group.finish_pending_step()

    patch_reads_and_clipping(before_read=wait_for_step, before_clipping=refuse_to_clip_overlapped)


@functools.cache
def _register_hooks() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    register_module_parameter_registration_hook(_on_registration)
    register_module_module_registration_hook(_on_registration)


def _on_registration(_: nn.Module, name: str, new: object) -> None:
    global _registered
    # Units put their own parameters into modules in each forward. Those have a tag.
    if not isinstance(new, torch.Tensor) or tag_of(new)[0] is None:
        _registered = object()


def watch_optimizers() -> None:
    """From now on, run these hooks around every optimizer step and in every ``zero_grad``."""
    _register_hooks()
    around = functools.partial(clear_around, finish_copies=finish_copies, clear=clear_pending)
    patch_zero_grad(around)


def check_may_step(params: Iterable[torch.Tensor]) -> list[ParamGroup]:
    """Raise a RuntimeError if one of ``params`` has pending gradients. Return their groups."""
    owners = owners_of(params)
    for owner in owners:
        owner.check_may_step()
    return owners


def finish_copies(params: Sequence[torch.Tensor]) -> None:
    """Wait for copies of ``params`` and their gradients to and from host memory."""
    for owner in owners_of(sharded_params_of(params)):
        owner.finish_copies()


def clear_pending(params: Sequence[torch.Tensor]) -> None:
    """Drop the pending gradients of ``params``, whose ``.grad`` is about to be cleared.

    If ``params`` has unsharded parameters (after ``unshard()``, or after a forward that left them
    to the modules), ``.grad`` of the sharded ones is cleared here.
    """
    sharded = sharded_params_of(params)
    owners = owners_of(sharded)
    for given, param in zip(params, sharded, strict=True):
        if given is not param:
            param.grad = None
    ids = set(map(id, sharded))
    for owner in owners:
        owner.clear_pending(ids)


def warn_about_strays(
    params: Iterable[torch.Tensor], owners: Sequence[ParamGroup], names: Mapping[int, str]
) -> None:
    """Warn once about those of ``params`` that have gradients which nothing reduces.

    They are in no unit. ``owners`` are the groups of the other ``params``. If there are no others
    (example: adapters were added to a frozen model), all groups take the place of ``owners``, and
    only parameters inside modules of units count. If no group is on a mesh of several ranks, there
    is no warning. ``names`` has the known names of parameters, by id. Under ``MESHARD_DEBUG=1``
    this raises a RuntimeError.
    """
    around = owners or all_owners()
    if all(owner.spec.mesh_info.mesh.size() == 1 for owner in around):
        return
    strays = [
        param
        for param in params
        if not isinstance(param, DTensor)
        and param.grad is not None
        and not has_been_sharded(param)
        and not accumulation_hooks_of(param)  # such a hook may reduce the gradient
        and param.grad.any()  # torch.distributed.checkpoint steps by zeros to make a state
    ]
    if strays:
        tag_left_out(_outermost(around))
        strays = [param for param in strays if tag_of(param)[0] is None]
    if strays and not owners:
        sharded = [owner for owner in around if owner.spec.mesh_info.mesh.size() > 1]
        modules = (module for owner in sharded for module in alive(owner.modules))
        inside = {id(param) for module in modules for param in module.parameters()}
        strays = [param for param in strays if id(param) in inside]
    if not strays:
        return
    shown = [names.get(id(param)) or f"(of shape {tuple(param.shape)})" for param in strays]
    text = (
        f"ranks drift apart: trainable parameters {listed(shown)} are in no unit "
        f"({len(strays)} in all), so each rank steps them by its own gradients, and norms differ.\n"
        "Apply fully_shard to the module around them too, usually the root, after its layers "
        "(print(meshard.describe(model)) lists what is in no unit). Adapters such as LoRA's must "
        "be added before fully_shard. If something else reduces their gradients, as DDP does or "
        "a loop of yours, pass them in ignored_params."
    )
    if is_debugging():
        raise RuntimeError(text)
    for param in strays:
        tag_tensor(param, TensorTag.LEFT_OUT, names.get(id(param), ""))
    warn_user(text)


def _outermost(owners: Iterable[ParamGroup]) -> list[nn.Module]:
    """Return the modules of the roots of ``owners``."""
    held = (module for owner in owners for module in alive(owner.modules))
    roots = dict.fromkeys(unit.root for module in held for unit in units_of(module))
    return [module for root in roots for module in alive(alive(root.units)[0].modules)]


def _warn_about_untrained(owners: Sequence[ParamGroup]) -> None:
    """Warn about parameters inside the roots of ``owners`` that are not trained as they look.

    Some have gradients and are in no unit or in one of ``owners``, and no optimizer has stepped
    them. Others are sharded, and the user has assigned an ordinary tensor to ``.data``, which
    changes no shard.
    """
    roots = _outermost(owners)
    tag_left_out(roots)
    named = [pair for module in roots for pair in module.named_parameters()]
    optimizers = {*_known, *(each for owner in all_owners() for each in owner.overlapped)}
    stepped = {id(param) for each in optimizers for param in params_in(each)}
    untrained, assigned = [], []
    for (name, _), param in zip(named, sharded_params_of(p for _, p in named), strict=True):
        is_stepped = id(param) in stepped or bool(accumulation_hooks_of(param))  # a hook may step
        has_gradient = param.requires_grad and param.grad is not None
        # Another unit may be another optimizer's, which has not stepped yet.
        is_beside = (owner := owner_of(param)) is None or owner in owners
        is_left_out = tag_of(param)[0] is TensorTag.LEFT_OUT
        if has_gradient and is_beside and not (is_stepped or is_left_out):
            untrained.append(name)
        with without_torch_function():
            if isinstance(param, DTensor) and param.data_ptr():  # the memory is its local tensor's
                assigned.append(name)
    if untrained:
        warn_user(
            f"no optimizer has stepped trainable parameters {listed(untrained)} ({len(untrained)} "
            "in all), which have gradients. Put new modules in before fully_shard, and build the "
            "optimizer afterwards, from module.parameters(). Freeze by requires_grad_(False) what "
            "is not to be trained."
        )
    if assigned:
        warn_user(
            f".data of sharded parameters {listed(assigned)} was assigned an ordinary tensor, "
            "which changes no shard. Write to them inside meshard.unsharded_params(module), or by "
            "module.load_state_dict()."
        )


_NEVER_TRAINED = {
    TensorTag.ORIGINAL: "as it was before fully_shard, which has put a sharded parameter in its "
    "place; build the optimizer after the last call of fully_shard",
    TensorTag.REPLACED_LATER: "as it was before it was replaced (assigned anew, or loaded with "
    "assign=True); build the optimizer afterwards",
    TensorTag.UNSHARDED: "as the unsharded copy that exists inside forward, or after unshard; "
    "build the optimizer outside of forward and after reshard(), or after reset_iter_state() if a "
    "step was interrupted",
    TensorTag.SUMMONED: "as the unsharded copy that existed inside unsharded_params; build the "
    "optimizer outside of that block",
}


def _owners_in(optimizer: Optimizer) -> list[ParamGroup]:
    """Return the groups that have parameters of ``optimizer``, from the cache if it is valid."""
    ids = [tuple(map(id, group["params"])) for group in optimizer.param_groups]
    key = latest_registration(), _registered, ids
    known = _known.get(optimizer)
    if known is not None and known.key == key:
        return alive(known.owners)
    params = params_in(optimizer)
    for param in params:
        tag, fqn = tag_of(param)
        # The tag may be out of date: a parameter of ``replicate`` may have been replaced and put
        # back, or swapped with another. So raise only if no unit has the parameter now.
        if tag in _NEVER_TRAINED and owner_of(param) is None:
            raise RuntimeError(
                f"this {type(optimizer).__name__} would never train the model: it holds parameter "
                f"{fqn!r} {_NEVER_TRAINED[tag]}, from module.parameters()."
            )
    owners = owners_of(params)
    names = {
        id(param): name
        for group in optimizer.param_groups
        for param, name in zip(group["params"], group.get("param_names", ()), strict=False)
    }
    warn_about_strays(params, owners, names)
    _known[optimizer] = _Known(key, [weakref.ref(each) for each in owners])
    return owners


@skip_dynamo  # a compiled function may be running, and dynamo would compile this call too
def _before_compiling(_: Any) -> None:
    """Give gradients a form that ``torch.compile`` accepts.

    ``torch.compile`` makes a DTensor anew from its local tensor, and raises an error if the storage
    offsets of the two differ. Those of our gradients do: the DTensor has offset 0, and its local
    tensor, a view of the unit's flat gradient, has another (see ``place_like``).
    """
    for owner in all_owners():
        for param in owner.params:
            gradient = param.sharded.grad
            if isinstance(gradient, DTensor) and local_of(gradient).storage_offset():
                set_local(gradient, with_own_storage(local_of(gradient)))


@skip_dynamo
def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]
) -> tuple[tuple[Any, ...], dict[Any, Any]] | None:
    owners = _owners_in(optimizer)
    before_compiling(_before_compiling)
    if not owners:
        return None
    for owner in owners:
        owner.check_may_step()
    known = _known[optimizer]
    known.num_steps += 1
    # By the third step, optimizers that step in turn have all stepped. To make a state, torch's
    # functions for checkpoints step one optimizer alone.
    if known.num_steps == 3:
        _warn_about_untrained(owners)
    for owner in owners:
        owner.forget_version()  # before the step, because an interrupted one skips _after_step
    # torch passes the optimizer itself as the first argument.
    if len(args) > 1 and args[1] is not None:
        return (args[0], _around(args[1], owners), *args[2:]), kwargs
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": _around(kwargs["closure"], owners)}
    return None


def _around(closure: Callable[[], Any], owners: Sequence[ParamGroup]) -> Callable[[], Any]:
    """Return ``closure`` for use inside a step: after it, no gradient may be pending."""

    def closure_and_check() -> Any:
        loss = closure()
        for owner in owners:
            owner.check_may_step()
        return loss

    return closure_and_check


@skip_dynamo
def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
    for owner in _owners_in(optimizer):
        owner.record_step()
