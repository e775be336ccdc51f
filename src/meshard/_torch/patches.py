"""Methods of torch that meshard replaces: ``zero_grad`` of optimizers and of modules.

Gradients that are accumulated and not reduced yet are in no ``.grad``, and torch has no hook for
``zero_grad``. While there are none in the process, a replaced method costs one ``if``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshard._torch.private import skip_dynamo

_holders: weakref.WeakSet[Any] = weakref.WeakSet()  # of pending gradients
_clear: Callable[[list[torch.Tensor]], None] | None = None
_replaced: dict[type, tuple[Any, Any]] = {}  # by class: its own zero_grad, and ours


def patch_zero_grad(clear: Callable[[list[torch.Tensor]], None]) -> None:
    """Replace ``zero_grad`` of ``Optimizer`` and ``Module``; ``clear`` drops pending gradients."""
    global _clear
    _clear = clear
    if not _replaced:
        _replace(Optimizer, params_in)
        _replace(nn.Module, nn.Module.parameters)
        patch_new_optimizers()


def unpatch_zero_grad() -> None:
    """Put the methods back, unless they were replaced again since."""
    for owner, (own, ours) in _replaced.items():
        if vars(owner).get("zero_grad") is ours:
            setattr(owner, "zero_grad", own)  # noqa: B010  # mypy refuses the assignment
    _replaced.clear()


def hold_pending(holder: object) -> None:
    """Note that ``holder`` has pending gradients, or may have."""
    _holders.add(holder)


def release_pending(holder: object) -> None:
    """Note that ``holder`` has no pending gradients any more."""
    _holders.discard(holder)


def params_in(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters of all param groups, in order."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def patch_new_optimizers() -> None:
    """Replace the ``zero_grad`` of each class of optimizers that has one of its own.

    Called at the beginning of each backward, after which gradients may be pending.
    """
    if not _replaced:
        return  # unpatch_zero_grad was called
    classes = [Optimizer]
    for each in classes:
        classes += each.__subclasses__()
        if each not in _replaced and "zero_grad" in vars(each):
            _replace(each, params_in)


def _replace(owner: type, params_of: Callable[[Any], Iterable[torch.Tensor]]) -> None:
    own = vars(owner)["zero_grad"]

    @skip_dynamo
    @functools.wraps(own)
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _holders and _clear is not None:
            _clear(list(params_of(self)))
        return own.__get__(self)(*args, **kwargs)  # a function, or a partialmethod

    _replaced[owner] = own, zero_grad
    setattr(owner, "zero_grad", zero_grad)  # noqa: B010  # mypy refuses the assignment
