"""How is autograd kept out of what we compute, where it mostly is out already?"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Args = ParamSpec("Args")
Result = TypeVar("Result")


def unrecorded(function: Callable[Args, Result]) -> Callable[Args, Result]:
    """Return ``function`` as ``torch.no_grad()`` would, at no cost inside a backward.

    A backward records nothing but under ``create_graph``, and entering ``torch.no_grad`` takes a
    dozen calls.
    """

    @functools.wraps(function)
    def call(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return call
