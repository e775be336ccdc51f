"""What if autograd is asked for the gradients of shards?

Shards are in no graph: forward uses whole parameters, and ``.grad`` of the shards is set after the
reduction. ``loss.backward(inputs=shards)`` would silently do nothing, and so would
``torch.autograd.grad`` with ``allow_unused=True``. The former is given the whole parameters
instead, the latter refused.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from meshard._runtime.optimizer_steps import owner_of

_grad = torch.autograd.grad
_backward = torch.autograd.backward
_is_explained = False


def explain_autograd() -> None:
    """Look at the inputs of ``torch.autograd.grad`` and ``backward`` from now on."""
    global _is_explained
    if not _is_explained:
        torch.autograd.grad = _grad_of_plain_tensors
        torch.autograd.backward = _backward_to_whole_parameters
        _is_explained = True


def _listed(inputs: Any) -> Sequence[Any]:
    if inputs is None:
        return ()
    return inputs if isinstance(inputs, Sequence) else (inputs,)


@functools.wraps(_grad)
def _grad_of_plain_tensors(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    inputs = inputs if isinstance(inputs, (torch.Tensor, Sequence)) else tuple(inputs)
    if any(owner_of(each) is not None for each in _listed(inputs)):
        raise RuntimeError(
            "torch.autograd.grad cannot return gradients of sharded parameters, which are in no "
            "graph: call loss.backward() and read .grad of the parameters, which is reduced over "
            "all ranks then."
        )
    return _grad(outputs, inputs, *args, **kwargs)


@functools.wraps(_backward)
def _backward_to_whole_parameters(*args: Any, **kwargs: Any) -> None:
    inputs = kwargs.get("inputs")
    if inputs is not None:
        inputs = inputs if isinstance(inputs, (torch.Tensor, Sequence)) else tuple(inputs)
        kwargs["inputs"] = [
            each if (owner := owner_of(each)) is None else owner.whole_of(each)
            for each in _listed(inputs)
        ]
    _backward(*args, **kwargs)
