"""Hooks between optimizers and units.

It must not step while gradients are accumulated that are not in ``.grad``; its ``zero_grad`` must
clear those too; and whole copies are stale once it has stepped. The user wires nothing. torch's
foreach kernels on DTensors raise no version counter, so the versions of the shards alone do not
tell that a whole copy is stale.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from meshard._params.sharded_param import TensorTag, tag_of
from meshard._torch.private import queue_backward_callback, skip_dynamo


class Overlapping(Protocol):
    """An optimizer that steps in backward."""

    def steps_in_backward(self, param: torch.Tensor) -> bool:
        """Whether it steps this very parameter."""


_alive: weakref.WeakSet[Overlapping] = weakref.WeakSet()


def register_overlapped(optimizer: Overlapping) -> None:
    """Note that an optimizer steps in backward from now on."""
    _alive.add(optimizer)


def unregister_overlapped(optimizer: Overlapping) -> None:
    """Note that it does not any more."""
    _alive.discard(optimizer)


def find_overlapped(params: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """Return the first of ``params`` that some optimizer steps in backward."""
    if not _alive:
        return None
    optimizers = tuple(_alive)
    for param in params:
        if any(optimizer.steps_in_backward(param) for optimizer in optimizers):
            return param
    return None


class _ScaledBackward:
    """Queued on a backward of a scaled loss, and dropped by autograd when that is over."""

    num_alive = 0

    def __init__(self) -> None:
        _ScaledBackward.num_alive += 1

    def __call__(self) -> None:
        """Do nothing at the end: what other callbacks do then belongs to this backward, too."""

    def __del__(self) -> None:
        _ScaledBackward.num_alive -= 1


def mark_scaled(losses: Iterable[torch.Tensor]) -> None:
    """Note that the backward of these is that of a loss that was multiplied by a scale."""
    for loss in losses if _alive else ():
        if loss.requires_grad:
            loss.register_hook(_begin_scaled)


def _begin_scaled(gradient: torch.Tensor) -> None:
    queue_backward_callback(_ScaledBackward())


def is_scaled() -> bool:
    """Whether a backward of a scaled loss is under way."""
    return _ScaledBackward.num_alive > 0


class Stepped(Protocol):
    """What holds parameters that an optimizer may step."""

    def make_room(self) -> None:
        """Give back memory that an optimizer may need for its step."""

    def record_step(self) -> None:
        """An optimizer has stepped."""

    def owns(self, param: torch.Tensor) -> bool:
        """Whether this very tensor is one of its parameters."""

    def sharded_of(self, unsharded: torch.Tensor) -> torch.Tensor | None:
        """Return the sharded parameter that this very tensor is the whole of, if it is."""

    def check_may_step(self) -> None:
        """Raise if gradients are pending."""

    def finish_copies(self) -> None:
        """Have nothing on its way into a ``.grad``."""

    def clear_pending(self, ids: set[int]) -> None:
        """Forget pending gradients of the parameters with these ids."""


@runtime_checkable
class StepsInPortions(Protocol):
    """An optimizer that may need less memory for its step than a unit does for its backward."""

    @property
    def is_in_portions(self) -> bool:
        """Whether the next step does."""


# Keyed by id: tensors compare by value, and a weak reference to one would forbid Module.to to swap
# it. A stranger may get the id later, so the owner is asked.
_owners: weakref.WeakValueDictionary[int, Stepped] = weakref.WeakValueDictionary()
_manually_unsharded: weakref.WeakValueDictionary[int, Stepped] = weakref.WeakValueDictionary()
_Shape = list[tuple[int, ...]]  # of an optimizer: the ids of its parameters, by group
_stepped_by: weakref.WeakKeyDictionary[Optimizer, tuple[_Shape, list[weakref.ref[Stepped]]]]
_stepped_by = weakref.WeakKeyDictionary()
_is_watching = False


def watch_optimizers(owner: Stepped, params: list[torch.Tensor]) -> None:
    """Have ``owner`` hear of every ``torch.optim.Optimizer`` that holds one of ``params``."""
    global _is_watching
    for param in params:
        _owners[id(param)] = owner
    _stepped_by.clear()
    if not _is_watching:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        # There is no hook for zero_grad, so methods are replaced, which mypy refuses.
        Optimizer.zero_grad = _clearing(  # type: ignore[method-assign]
            Optimizer.zero_grad, _params_of
        )
        nn.Module.zero_grad = _clearing(  # type: ignore[method-assign]
            nn.Module.zero_grad, nn.Module.parameters
        )
        _is_watching = True


def register_manually_unsharded(owner: Stepped, all_unsharded: Iterable[torch.Tensor]) -> None:
    """Note that ``module.parameters()`` yields whole parameters of ``owner`` outside of forward."""
    for unsharded in all_unsharded:
        _manually_unsharded[id(unsharded)] = owner


def sharded_of_all(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return ``params`` with the sharded parameter, whose ``.grad`` counts, for every whole one."""
    if not _manually_unsharded:
        return list(params)
    found = []
    for param in params:
        owner = _manually_unsharded.get(id(param))
        sharded = None if owner is None else owner.sharded_of(param)
        found.append(param if sharded is None else sharded)
    return found


def _params_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def owners_of(params: Iterable[torch.Tensor]) -> list[Stepped]:
    """Return the groups that have one of ``params`` as a sharded parameter, each once."""
    found: dict[int, Stepped] = {}
    for param in params:
        owner = _owners.get(id(param))
        if owner is not None and id(owner) not in found and owner.owns(param):
            found[id(owner)] = owner
    return list(found.values())


def owner_of(param: torch.Tensor) -> Stepped | None:
    """Return the group whose sharded parameter this very tensor is."""
    owner = _owners.get(id(param))
    return owner if owner is not None and owner.owns(param) else None


_NEVER_TRAINED = {
    TensorTag.ORIGINAL: "as it was before fully_shard, which has put a sharded parameter in its "
    "place; build the optimizer after the last call of fully_shard",
    TensorTag.REPLACED_LATER: "as it was before it was replaced (assigned anew, or loaded with "
    "assign=True); build the optimizer afterwards",
    TensorTag.UNSHARDED: "as the unsharded copy that exists inside forward, or after unshard; "
    "build the optimizer outside of forward, and after reshard",
}


def _check_trains(optimizer: Optimizer) -> None:
    for param in _params_of(optimizer):
        mark, fqn = tag_of(param)
        if mark in _NEVER_TRAINED:
            raise RuntimeError(
                f"this {type(optimizer).__name__} would never train the model: it holds parameter "
                f"{fqn!r} {_NEVER_TRAINED[mark]}, from module.parameters()."
            )


def _shape_of(optimizer: Optimizer) -> _Shape:
    return [tuple(map(id, group["params"])) for group in optimizer.param_groups]


def _known_owners(optimizer: Optimizer) -> list[Stepped] | None:
    """Return the groups that have its parameters; None if it has not stepped with these yet."""
    known = _stepped_by.get(optimizer)
    if known is None or known[0] != _shape_of(optimizer):
        return None
    return [owner for ref in known[1] if (owner := ref()) is not None]


def _owners_in(optimizer: Optimizer) -> list[Stepped]:
    owners = _known_owners(optimizer)
    if owners is None:
        _check_trains(optimizer)  # here, because it is not done again at every step
        owners = owners_of(_params_of(optimizer))
        _stepped_by[optimizer] = _shape_of(optimizer), [weakref.ref(each) for each in owners]
    return owners


def check_may_step(params: Iterable[torch.Tensor]) -> None:
    """Raise if gradients of one of ``params`` are accumulated that are not in ``.grad``.

    Raises:
        RuntimeError: Naming the unit and what to do.
    """
    for owner in owners_of(params):
        owner.check_may_step()


@skip_dynamo
def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]
) -> tuple[tuple[Any, ...], dict[Any, Any]] | None:
    owners = _owners_in(optimizer)
    if not owners:
        return None
    for owner in owners:
        owner.check_may_step()
    if not (isinstance(optimizer, StepsInPortions) and optimizer.is_in_portions):
        for owner in owners:
            owner.make_room()
    _watch_zero_grad(type(optimizer))
    # torch passes the optimizer itself as the first argument.
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return None

    def closure_and_check() -> Any:
        loss = closure()
        for owner in owners:
            owner.check_may_step()
        return loss

    if len(args) > 1:
        return (args[0], closure_and_check, *args[2:]), kwargs
    return args, {**kwargs, "closure": closure_and_check}


def _watch_zero_grad(optimizer_class: type[Optimizer]) -> None:
    """Wrap the ``zero_grad`` of a class that has one of its own."""
    own = vars(optimizer_class).get("zero_grad")
    if own is not None and not hasattr(own, "_meshard_clears"):
        # Replaced on purpose, as above.
        optimizer_class.zero_grad = _clearing(own, _params_of)  # type: ignore[method-assign]


@skip_dynamo
def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
    for owner in _owners_in(optimizer):
        owner.record_step()


def _clearing(
    zero_grad: Callable[..., None], params_of: Callable[[Any], Iterable[torch.Tensor]]
) -> Callable[..., None]:
    @skip_dynamo
    @functools.wraps(zero_grad)
    def zero_grad_and_clear(self: Any, *args: Any, **kwargs: Any) -> None:
        own = list(params_of(self))
        params = sharded_of_all(own)
        is_known = isinstance(self, Optimizer) and not _manually_unsharded
        owners = _known_owners(self) if is_known else None
        if owners is None:
            owners = owners_of(params)
        for owner in owners:
            owner.finish_copies()
        zero_grad(self, *args, **kwargs)
        for given, param in zip(own, params, strict=True):
            if given is not param:
                param.grad = None  # zero_grad has seen the whole parameter only
        if owners:
            ids = {id(param) for param in params}
            for owner in owners:
                owner.clear_pending(ids)

    # A mark on a function, whose type has no such attribute.
    zero_grad_and_clear._meshard_clears = True  # type: ignore[attr-defined]
    return zero_grad_and_clear
