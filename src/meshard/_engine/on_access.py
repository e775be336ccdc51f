"""Gathers on access from a parent's forward.

A unit with ``unshard_on_access`` is gathered when the forward of a unit around it reads one of its
parameters. From then on the unit is treated as if it ran inside that forward: it is resharded when
that forward ends, and its backward begins with the gradient of what that forward returned. Modules
of such units hold their parameters in a dict that notices reads; other units cost nothing more.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from meshard._engine.hooks import end_forward, has_raised, watch_outputs
from meshard._engine.step_state import Phase
from meshard._engine.unit import Unit, alive, unit_of, with_siblings
from meshard._torch.private import skip_dynamo, without_modes

# Units that were gathered because a parameter was read; the forward that read it still runs.
_read_units: weakref.WeakSet[Unit] = weakref.WeakSet()
_readers: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules with the hook ``_end_reads``


def gather_on_access(unit: Unit) -> None:
    """Gather ``unit`` and its siblings when a unit around it reads one of their parameters."""
    params = [param for each in with_siblings(unit) for param in each.params]
    for module in dict.fromkeys(owner for param in params for owner, _ in param.owners):
        module.__dict__["_parameters"] = _NoticedReads(module._parameters, unit)
    for param in params:
        param.find_owner_dicts()


class _NoticedReads(dict[str, Any]):
    """The ``_parameters`` of a module: ``module.weight`` is a read, ``parameters()`` is not."""

    __slots__ = ("_unit",)

    def __init__(self, params: dict[str, Any], unit: Unit) -> None:
        super().__init__(params)
        self._unit = weakref.ref(unit)

    def __getitem__(self, name: str) -> Any:
        unit = self._unit()
        if unit is not None and unit.group.holds_shards:
            for each in with_siblings(unit):
                _read(each)
        return super().__getitem__(name)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


@skip_dynamo
def _read(unit: Unit) -> None:
    """Gather ``unit`` if another unit is running. ``unit`` is resharded when that one ends."""
    lifecycle = unit.lifecycle
    if lifecycle.phase is Phase.BACKWARD:
        # Activation checkpointing recomputes the forward that reads. The lifecycle reshards the
        # unit when its backward is over.
        without_modes(lifecycle.pre_forward, unit)
        return
    running = (one for one, _ in reversed(lifecycle.running))
    reader = next((one for one in running if one not in _read_units), None)
    if reader is None:
        return
    for module in alive(reader.modules):
        if module not in _readers:
            # The first of the forward hooks, so that ``reader`` still counts as running when it is
            # called, also after an exception. It is never removed: the time for that is its own
            # call, while torch iterates over the hooks.
            module.register_forward_hook(_end_reads, prepend=True, always_call=True)
            _readers.add(module)
    _read_units.add(unit)
    without_modes(lifecycle.pre_forward, unit)


@skip_dynamo
def _end_reads(module: nn.Module, args: Any, output: Any) -> None:
    """End the forwards of the units that were read in the forward that ends."""
    reader = unit_of(module)
    if reader is None:
        return
    lifecycle = reader.lifecycle
    failed = output is None and has_raised(module)
    while lifecycle.running and (unit := lifecycle.running[-1][0]) in _read_units:
        _read_units.discard(unit)
        watched = end_forward(unit, module, output, args, failed=failed)
        if watched is not None:
            watch_outputs(output, watched)
