"""Which methods of a sharded module see whole parameters?

``module(...)`` does, by hooks. Here are the two ways to have others go through the same hooks:
``module.forward(...)`` always, and whatever ``register_fsdp_forward_method`` names.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from meshard._params.private_torch import untraced_itself
from meshard._runtime.hooks import run_in_unit
from meshard._runtime.unit import unit_of

_REGISTERED = "_meshard_forward_methods"  # on a module: names, with what its class does not have


def direct_forward(original: type[nn.Module]) -> Callable[..., Any] | None:
    """Return a ``forward`` for the sharded kind of ``original`` that may be called directly.

    Inside ``module(...)`` the parameters are whole already, and it only passes the call on.
    None where ``original`` has no ordinary method of that name.
    """
    plain = original.forward
    if plain is nn.Module.forward or not inspect.isfunction(plain):
        return None

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        unit = self._meshard_unit
        if unit.group is None or unit.group.is_showing_unsharded:
            return original.forward(self, *args, **kwargs)
        method = functools.partial(original.forward, self)
        return run_in_unit(self, unit, method, args, kwargs)

    # Dynamo keeps what it compiles, and counts it, per code object: each class needs its own.
    forward.__code__ = forward.__code__.replace()
    return functools.wraps(plain)(forward)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Have ``module.method_name(...)`` see whole parameters, as ``module(...)`` does.

    The method goes through the same steps as a forward: gather, casts of inputs and outputs, a
    gather again in backward, and everything given back if it raises. It may call ``module(...)``,
    and be called by it. Registering twice, or on a module that is not sharded, does nothing.

    **Collective:** a call of the method, as a call of the module.

    Args:
        module: A module that ``fully_shard`` was applied to; others are left alone.
        method_name: Name of one of its methods.

    Raises:
        ValueError: ``module`` has no such method.

    >>> import torch, meshard
    >>> class Tokens(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.table = torch.nn.Embedding(4, 2)
    ...     def forward(self, ids):
    ...         return self.table(ids)
    ...     def scores(self, hidden):
    ...         return hidden @ self.table.weight.t()
    >>> tokens = meshard.fully_shard(Tokens())
    >>> meshard.register_fsdp_forward_method(tokens, "scores")
    >>> tokens.scores(torch.ones(1, 2)).shape
    torch.Size([1, 4])
    """
    if not callable(getattr(module, method_name, None)):
        raise ValueError(
            f"cannot register {method_name!r} as a forward method: this {type(module).__name__} "
            "has no method of that name."
        )
    registered = module.__dict__.setdefault(_REGISTERED, {})
    if unit_of(module) is None or method_name == "forward" or method_name in registered:
        return
    # On the class, which only sharded modules have: nothing on the instance refers to itself, so
    # deleting it frees it, and a copy of it calls its own method.
    if not hasattr(vars(type(module)).get(method_name), _REGISTERED):
        setattr(type(module), method_name, _dispatching(type(module), method_name))
    # Somebody may have put another method on this instance.
    registered[method_name] = module.__dict__.pop(method_name, None)


def _dispatching(sharded_class: type[nn.Module], name: str) -> Callable[..., Any]:
    """Return a method that is hooked on the instances that asked for it."""
    original = inspect.getattr_static(sharded_class, name, None)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        registered = self.__dict__.get(_REGISTERED, {})
        called = registered.get(name)
        if called is None and original is not None:
            called = original.__get__(self, type(self))
        if called is None:
            raise AttributeError(f"this {type(self).__name__} has no attribute {name!r}.")
        unit = unit_of(self) if name in registered else None
        return run_in_unit(self, unit, called, args, kwargs) if unit else called(*args, **kwargs)

    if original is not None:
        functools.update_wrapper(method, getattr(sharded_class, name))
    setattr(method, _REGISTERED, True)
    # Dynamo would write the call down as `self.name(...)`, which is this method again.
    return untraced_itself(method)
