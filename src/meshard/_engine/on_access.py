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

from meshard._engine.unit import Unit, alive, units_in, with_siblings
from meshard._torch.private import skip_dynamo, without_modes


def gather_on_access(unit: Unit) -> None:
    """Replace dicts of modules, so that a unit around ``unit`` gathers it by reading a parameter.

    The siblings of ``unit`` are gathered together with it.
    """
    params = [param for each in with_siblings(unit) for param in each.params]
    for module in dict.fromkeys(owner for param in params for owner, _ in param.owners):
        module.__dict__["_parameters"] = _NoticedReads(module._parameters, unit)
    # The loop has given modules another ``_parameters`` dict. Such a module may also hold
    # parameters of a unit inside: its tied weight belongs to ``unit``, say, and its bias to the
    # unit inside. So the units inside look up the dicts again.
    inside = [each for module in alive(unit.modules) for each in units_in(module)]
    for param in [param for each in inside for param in each.params]:
        param.find_owner_dicts()


class _NoticedReads(dict[str, Any]):
    """The ``_parameters`` of a module: ``module.weight`` is a read, ``parameters()`` is not."""

    __slots__ = ("_is_assigning", "_unit")

    def __init__(self, params: dict[str, Any], unit: Unit) -> None:
        super().__init__(params)
        self._unit = weakref.ref(unit)
        self._is_assigning = False

    def __getitem__(self, name: str) -> Any:
        unit = self._unit()
        if unit is not None and not self._is_assigning and _begins_use(unit):
            for each in with_siblings(unit):
                _read(each)
        return super().__getitem__(name)

    def assign(self, module: Any, name: str, param: Any) -> None:
        """Call ``setattr``, which looks the name up in this dict. That does not count as a read."""
        before, self._is_assigning = self._is_assigning, True
        try:
            setattr(module, name, param)
        finally:
            self._is_assigning = before

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def _begins_use(unit: Unit) -> bool:
    """Whether a read of a parameter of ``unit`` begins a new use of the unit.

    It does not while the unit runs, or after another read in the same forward of a reader. It does
    even if an earlier use has left the unit unsharded, because a backward may reshard it, and that
    of the new use must then gather.
    """
    return unit.group.holds_shards or not (unit.step.num_running or unit.group.is_summoned)


@skip_dynamo
def _read(unit: Unit) -> None:
    """Gather ``unit`` if a reader runs. The reader's ``post_forward`` ends the call of ``unit``."""
    lifecycle = unit.lifecycle
    if lifecycle.backward is not None:
        # Activation checkpointing recomputes the reader's forward. The lifecycle reshards ``unit``
        # when the backward of ``unit`` is over.
        if unit.group.holds_shards:
            without_modes(lifecycle.pre_forward, unit)
        return
    if lifecycle.running:
        call = without_modes(lifecycle.pre_forward, unit)
        assert call is not None  # a forward runs
        call.is_read = True
