"""What meshard replaces in torch: ``zero_grad``, and for ``overlap_optimizer`` reads and clipping.

Gradients that are accumulated and not reduced yet (*pending* ones) are in no ``.grad``. Users
expect ``zero_grad`` to drop them, and torch has no hook for it. While the process has no pending
gradients, a replaced method costs one ``if``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshard._torch.dtensor import gradient_dtype, place_like, plain_of
from meshard._torch.private import skip_dynamo

# The objects that have, or may have, pending gradients for ``zero_grad()`` to clear.
pending_holders: weakref.WeakSet[Any] = weakref.WeakSet()
_finish_copies: Callable[[list[torch.Tensor]], None] | None = None
_clear: Callable[[list[torch.Tensor]], None] | None = None
_replaced: dict[type, tuple[Any, Any]] = {}  # by class: its original zero_grad, and ours


def patch_zero_grad(
    *,
    finish_copies: Callable[[list[torch.Tensor]], None],
    clear: Callable[[list[torch.Tensor]], None],
) -> None:
    """Replace ``zero_grad`` of ``Optimizer`` and ``Module``.

    ``finish_copies`` waits for copies that still use ``.grad``, and ``clear`` drops pending
    gradients.
    """
    global _finish_copies, _clear
    _finish_copies, _clear = finish_copies, clear
    if not _replaced:
        _replace(Optimizer, params_in, always_clears=True)
        _replace(nn.Module, nn.Module.parameters, always_clears=True)
        patch_new_optimizers()


def patch_reads_and_clipping(
    *,
    before_read: Callable[[torch.Tensor], None],
    before_clipping: Callable[[Iterable[torch.Tensor]], None],
) -> None:
    """Replace the methods that read a DTensor, and what torch's ``clip_grad_norm_`` calls.

    ``before_read`` gets each DTensor before it is read. ``before_clipping`` gets the parameters
    before they are clipped: if backward has stepped them, none has a gradient, and torch would
    return a norm of 0.
    """
    _call_before(DTensor, "to_local", before_read)
    _call_before(DTensor, "redistribute", before_read)  # full_tensor calls it
    _call_before(nn.utils.clip_grad, "_clip_grads_with_norm_", before_clipping)


def _call_before(owner: Any, name: str, check: Callable[[Any], None]) -> None:
    own = getattr(owner, name)

    @functools.wraps(own)
    def checked(first: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            check(first)
        return own(first, *args, **kwargs)

    setattr(owner, name, checked)


def unpatch_zero_grad() -> None:
    """Restore the original methods, except where other code has replaced ours since."""
    for owner, (own, ours) in _replaced.items():
        if vars(owner).get("zero_grad") is ours:
            setattr(owner, "zero_grad", own)  # noqa: B010  # mypy refuses the assignment
    _replaced.clear()


def params_in(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters of all param groups, in order."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def patch_new_optimizers() -> None:
    """Replace the ``zero_grad`` of each class of optimizers that has one of its own.

    Such a method need not clear gradients at every call: accelerate's does nothing until the last
    microbatch. This function is called as each backward begins, because new classes may have been
    defined, and gradients may be pending after the backward.
    """
    if not _replaced:
        return  # unpatch_zero_grad was called
    classes = [Optimizer]
    for each in classes:
        classes += each.__subclasses__()
        if each not in _replaced and "zero_grad" in vars(each):
            _replace(each, params_in, always_clears=False)


def _replace(
    owner: type, params_of: Callable[[Any], Iterable[torch.Tensor]], *, always_clears: bool
) -> None:
    own = vars(owner)["zero_grad"]

    @skip_dynamo
    @functools.wraps(own)
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = own.__get__(self)  # binds a function as well as a partialmethod
        if not pending_holders or _clear is None or _finish_copies is None:
            return call(*args, **kwargs)
        params = list(params_of(self))
        _finish_copies(params)
        if always_clears:
            _clear(params)
            return call(*args, **kwargs)
        witness = _Witness(params)
        try:
            return call(*args, **kwargs)
        finally:
            if witness.was_cleared():
                _clear(params)

    _replaced[owner] = own, zero_grad
    setattr(owner, "zero_grad", zero_grad)  # noqa: B010  # mypy refuses the assignment


class _Witness:
    """A parameter whose ``.grad`` shows whether a call of ``zero_grad`` has cleared gradients.

    If the parameter has no ``.grad``, it gets one of zeros during the call.
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._param = min(params, key=lambda each: plain_of(each).numel(), default=None)
        if self._param is None:
            return
        self._is_lent = self._param.grad is None
        if self._is_lent:
            self._param.grad = _zero_grad_of(self._param)
        self._grad = self._param.grad
        self._versions = _versions(self._grad)

    def was_cleared(self) -> bool:
        """Return whether ``.grad`` was removed or written to. Also take back the lent zeros."""
        if self._param is None:
            return False
        is_same = self._param.grad is self._grad
        if is_same and self._is_lent:
            self._param.grad = None
        return not is_same or _versions(self._grad) != self._versions


def _versions(tensor: Any) -> tuple[int, int]:
    # An edit in place of a DTensor raises only the version of the DTensor, and an edit of its local
    # tensor only that of the local tensor. Foreach kernels on DTensors raise neither, so their
    # edits go unnoticed.
    return tensor._version, plain_of(tensor)._version


def _zero_grad_of(param: torch.Tensor) -> torch.Tensor:
    local = plain_of(param)
    zeros = torch.zeros(local.shape, dtype=gradient_dtype(param), device=local.device)
    return place_like(param, zeros) if isinstance(param, DTensor) else zeros
