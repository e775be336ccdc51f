"""What ``zero_grad`` clears besides ``.grad``: gradients that are pending.

Gradients that are accumulated and not reduced yet (*pending* ones) are in no ``.grad``, and users
expect ``zero_grad`` to drop them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshard._torch.dtensor import gradient_dtype, place_like, plain_of
from meshard._torch.private import version_of

# The objects that have, or may have, pending gradients for ``zero_grad()`` to clear.
pending_holders: weakref.WeakSet[Any] = weakref.WeakSet()


def clear_around(
    call: Callable[[], Any],
    params_of: Callable[[], Iterable[torch.Tensor]],
    always_clears: bool,
    *,
    finish_copies: Callable[[list[torch.Tensor]], None],
    clear: Callable[[list[torch.Tensor]], None],
) -> Any:
    """Run a ``zero_grad`` by ``call()``, and drop pending gradients if it clears any.

    ``finish_copies`` waits for copies that still use ``.grad``, and ``clear`` drops pending
    gradients. While the process has no pending gradients, this costs one ``if``.
    """
    if not pending_holders:
        return call()
    params = list(params_of())
    finish_copies(params)
    if always_clears:
        clear(params)
        return call()
    witness = _Witness(params)
    try:
        return call()
    finally:
        if witness.was_cleared():
            clear(params)


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
    return version_of(tensor), version_of(plain_of(tensor))


def _zero_grad_of(param: torch.Tensor) -> torch.Tensor:
    local = plain_of(param)
    zeros = torch.zeros(local.shape, dtype=gradient_dtype(param), device=local.device)
    return place_like(param, zeros) if isinstance(param, DTensor) else zeros
