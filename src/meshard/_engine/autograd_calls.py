"""Calls of autograd on sharded parameters.

Shards are in no graph: forward uses whole parameters, and ``.grad`` of the shards is set after the
reduction. ``loss.backward(inputs=shards)`` would silently do nothing, and so would
``torch.autograd.grad`` with ``allow_unused=True``. The former is given the whole parameters
instead, the latter refused.

Whole parameters are given back between forward and backward. A backward that comes into a unit by
a tensor of which we know nothing reads memory of size zero, which torch refuses; that is explained.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from meshard._engine.optimizer_hooks import owner_of
from meshard._torch.private import is_in_backward

_grad = torch.autograd.grad
_backward = torch.autograd.backward
_is_explained = False
_num_nested = 0

# How torch says that the memory of a tensor is gone: a view of it, and the tensor itself.
_FREED = ("out of bounds for storage of size 0", "data is not allocated yet")
_EXPLANATION = (
    "This backward probably came into a unit of meshard in a way that could not be seen, after the "
    "unit had given its whole parameters back. A unit hears of its backward by the tensors that "
    "its forward returns, or leaves in a list, dict or object that it was called with. What a "
    "forward leaves on an attribute or in a global variable, beside what it returns, is not found: "
    "return it. Neither may a backward of a model run inside another backward of the same model. "
    "reshard_after_forward=False for that unit keeps its parameters whole until its backward."
)


def explain_autograd() -> None:
    """Look at the inputs of ``torch.autograd.grad`` and ``backward`` from now on."""
    global _is_explained
    if not _is_explained:
        torch.autograd.grad = _grad_of_plain_tensors
        torch.autograd.backward = _backward_to_unsharded_parameters
        _is_explained = True


def num_nested() -> int:
    """Return how many backwards have begun inside another one, as reentrant checkpoints do it.

    A gradient that arrives in one of them is a part: others come from the parts around it.
    """
    return _num_nested


def _listed(inputs: Any) -> Sequence[Any]:
    if inputs is None:
        return ()
    return inputs if isinstance(inputs, Sequence) else (inputs,)


@functools.wraps(_grad)
def _grad_of_plain_tensors(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    inputs = inputs if isinstance(inputs, (torch.Tensor, Sequence)) else tuple(inputs)
    if any(_is_in_no_graph(each) for each in _listed(inputs)):
        raise RuntimeError(
            "torch.autograd.grad cannot return gradients of sharded parameters, which are in no "
            "graph: call loss.backward() and read .grad of the parameters, which is reduced over "
            "all ranks then."
        )
    try:
        return _grad(outputs, inputs, *args, **kwargs)
    except RuntimeError as error:
        _explain_freed(error)
        raise


def _is_in_no_graph(param: torch.Tensor) -> bool:
    owner = owner_of(param)
    return owner is not None and owner.unsharded_of(param)[0] is not param


def _seen_by_autograd(param: torch.Tensor) -> Sequence[torch.Tensor]:
    owner = owner_of(param)
    return [param] if owner is None else owner.unsharded_of(param)


@functools.wraps(_backward)
def _backward_to_unsharded_parameters(*args: Any, **kwargs: Any) -> None:
    inputs = kwargs.get("inputs")
    if inputs is not None:
        inputs = inputs if isinstance(inputs, (torch.Tensor, Sequence)) else tuple(inputs)
        kwargs["inputs"] = [
            unsharded for each in _listed(inputs) for unsharded in _seen_by_autograd(each)
        ]
    global _num_nested
    if is_in_backward():
        _num_nested += 1
    try:
        _backward(*args, **kwargs)
    except RuntimeError as error:
        _explain_freed(error)
        raise


def _explain_freed(error: RuntimeError) -> None:
    """Add to the text of ``error`` what may have happened, if memory was read that was freed."""
    text = str(error)
    if not any(part in text for part in _FREED) or _EXPLANATION in text:
        return
    error.args = (f"{text}\n\n{_EXPLANATION}", *error.args[1:])
