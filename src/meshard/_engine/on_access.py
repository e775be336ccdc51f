"""Gathers on access from a parent's forward.

A unit with ``unshard_on_access`` is gathered when the forward of an outer unit, the *reader*, reads
one of its parameters. From then on the unit is treated as if it ran inside the reader's forward: it
is resharded when that forward ends, and its backward begins with the gradient of the reader's
output. Modules of such units hold their parameters in a dict that notices reads. For other units
nothing changes.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from meshard._engine.hooks import end_forward, has_raised, watch_outputs
from meshard._engine.step_state import Phase
from meshard._engine.unit import Unit, alive, unit_of, with_siblings
from meshard._torch.private import skip_dynamo, without_modes

# The modules with the hook ``_end_reads``, but for deep copies of them, which get a second one.
_readers: weakref.WeakSet[nn.Module] = weakref.WeakSet()


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
    """Gather ``unit`` if a reader is running. ``_end_reads`` reshards it when the reader ends."""
    lifecycle = unit.lifecycle
    if lifecycle.phase is Phase.BACKWARD:
        # Activation checkpointing recomputes the reader's forward. The lifecycle reshards ``unit``
        # when the backward of ``unit`` is over.
        without_modes(lifecycle.pre_forward, unit)
        return
    running = reversed(lifecycle.running)
    reader = next((one for one, call in running if not call.is_read), None)
    if reader is None:
        return
    for module in alive(reader.modules):
        if module not in _readers:
            # This hook is put first, so that ``reader`` still counts as running when the hook is
            # called, also after an exception. The hook is never removed: the only time for that
            # would be its own call, during which torch iterates over the hooks.
            module.register_forward_hook(_end_reads, prepend=True, always_call=True)
            _readers.add(module)
    call = without_modes(lifecycle.pre_forward, unit)
    assert call is not None  # a forward runs
    call.is_read = True


@skip_dynamo
def _end_reads(module: nn.Module, args: Any, output: Any) -> None:
    """End the forwards of the units that the forward of ``module`` has read."""
    reader = unit_of(module)
    if reader is None:
        return
    lifecycle = reader.lifecycle
    failed = output is None and has_raised(module)
    while lifecycle.running and lifecycle.running[-1][1].is_read:
        unit, _ = lifecycle.running[-1]
        watched = end_forward(unit, module, output, args, failed=failed)
        if watched is not None:
            watch_outputs(output, watched)
