"""Gathers on access from a parent's forward.

A unit that opted in is then gathered by the read. The forward of the unit around the read stands in
for its own: it is given back when that ends, and what that returned says when its backward begins.
Other units do not pay: the modules of this one hold their parameters in a dict that notices reads.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch import nn

from meshard._engine.hooks import is_hidden, watch_outputs
from meshard._engine.schedule import Phase
from meshard._engine.unit import Unit, unit_of
from meshard._torch.private import skip_dynamo

_reading: weakref.WeakSet[Unit] = weakref.WeakSet()  # gathered by a read, in a forward that runs
_readers: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def gather_on_access(unit: Unit) -> None:
    """Have reads of the parameters of ``unit`` gather it while a unit around it runs.

    So do reads of those of its companions, which are gathered with it.
    """
    groups = [each.group for each in (unit, *unit.siblings) if each.group is not None]
    params = [param for group in groups for param in group.params]
    for module in dict.fromkeys(owner for param in params for owner, _ in param.owners):
        # Past Module.__setattr__, which takes names of parameters only.
        module.__dict__["_parameters"] = _NoticedReads(module._parameters, unit)
    for param in params:
        param.find_owner_dicts()


class _NoticedReads(dict[str, Any]):
    """The ``_parameters`` of a module: ``module.weight`` comes here, ``parameters()`` does not.

    Args:
        params: What the module holds.
        unit: Whose parameters they are.
    """

    __slots__ = ("_unit",)

    def __init__(self, params: dict[str, Any], unit: Unit) -> None:
        super().__init__(params)
        self._unit = weakref.ref(unit)

    def __getitem__(self, name: str) -> Any:
        unit = self._unit()
        if unit is not None and _is_closed(unit):
            for each in (unit, *unit.siblings):
                _read(each)
        return super().__getitem__(name)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def _is_closed(unit: Unit) -> bool:
    """Whether the modules of ``unit`` hold shards."""
    group = unit.group
    return group is not None and not group.is_unsharded_installed and not group.is_summoned


@skip_dynamo
def _read(unit: Unit) -> None:
    """Gather ``unit``, if a unit runs that can give it back."""
    lifecycle = unit.lifecycle
    if lifecycle.phase is Phase.BACKWARD:
        # Checkpointing runs a part of forward again. What is over is given back by the lifecycle.
        lifecycle.pre_forward(unit)
        return
    reader = next((one for one in reversed(lifecycle.running()) if one not in _reading), None)
    if reader is None:
        return
    for ref in reader.modules:
        module = ref()
        if module is not None and module not in _readers:
            # First of all its hooks: it still runs. Also if it raises. Left in place, because a
            # module that raises must not lose a hook in the middle of them.
            module.register_forward_hook(_end_reads, prepend=True, always_call=True)
            _readers.add(module)
    _reading.add(unit)
    lifecycle.pre_forward(unit)


@skip_dynamo
def _end_reads(module: nn.Module, args: Any, output: Any) -> None:
    """End the forward of what was read in a forward that ends."""
    reader = unit_of(module)
    if reader is None:
        return
    lifecycle = reader.lifecycle
    failed = output is None and sys.exc_info()[0] is not None
    while (running := lifecycle.running()) and running[-1] in _reading:
        unit = running[-1]
        _reading.discard(unit)
        of = lifecycle.schedule.present
        records = not failed and torch.is_grad_enabled()
        if records and is_hidden(output, unit, args, {}):
            lifecycle.retained.retain_hidden(unit, output, of)
        call = lifecycle.post_forward(unit, 0, failed=failed)
        if records and call is not None:
            watch_outputs(output, weakref.ref(unit), of, call)
