"""Which units does a call on a sharded module reach, and what may be passed to it?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from meshard._runtime.unit import Unit, unit_of, units_in, units_of


def as_module(module: Any) -> nn.Module:
    """Return what a mixin calls ``self``: it is always mixed into a module."""
    assert isinstance(module, nn.Module)
    return module


def own_unit(module: Any) -> Unit:
    """Return the unit that was made for ``module``, the outer one if there are several."""
    unit = unit_of(module)
    assert unit is not None
    return unit


def own_units(module: Any) -> list[Unit]:
    """Return the units that were made for ``module``: one for each mesh of its parameters."""
    return units_of(as_module(module))


def reached_units(module: Any, recurse: bool) -> Iterator[Unit]:
    """Iterate over the units of ``module``, and with ``recurse`` over those inside."""
    return units_in(as_module(module)) if recurse else iter(own_units(module))


def check_bool(name: str, value: object) -> None:
    """Raise a TypeError unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {value!r}.")
