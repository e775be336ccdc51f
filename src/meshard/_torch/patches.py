"""What meshard replaces in torch: ``zero_grad``, and for ``overlap_optimizer`` reads and clipping.

torch has no hook for ``zero_grad``. What runs around it is in ``_gradients/zero_grad.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshard._torch.private import skip_dynamo

# ``around(call, params_of, always_clears)`` runs in place of a method and calls it by ``call()``.
# ``params_of()`` returns the parameters of the optimizer or module. ``always_clears``: the method
# is torch's own, which clears gradients at every call.
Around = Callable[[Callable[[], Any], Callable[[], Iterable[torch.Tensor]], bool], Any]
_around: Around | None = None
_replaced: dict[type, tuple[Any, Any]] = {}  # by class: its original zero_grad, and ours


def patch_zero_grad(around: Around) -> None:
    """Replace ``zero_grad`` of ``Optimizer`` and ``Module`` by a call of ``around``."""
    global _around
    _around = around
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
        # ``__get__`` binds a function as well as a partialmethod.
        call = functools.partial(own.__get__(self), *args, **kwargs)
        if _around is None:
            return call()
        return _around(call, functools.partial(params_of, self), always_clears)

    _replaced[owner] = own, zero_grad
    setattr(owner, "zero_grad", zero_grad)  # noqa: B010  # mypy refuses the assignment
