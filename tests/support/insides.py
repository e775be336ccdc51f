"""Use this where a test is about units, their memory or the lifetime of what the engine keeps.

Outside of the folders ``comm``, ``params``, ``shared_memory`` and ``torch``, tests read no other
private name of the engine: if it is rebuilt, this file is what changes.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from meshard._comm import gradient_buffer
from meshard._comm.streams import StreamCommunicator
from meshard._communicators import make_communicator
from meshard._engine import lifecycle
from meshard._engine.param_group import Lease
from meshard._engine.unit import Unit, units_in, units_of
from meshard._gradients.buckets import partition as partition


def units(module: nn.Module) -> list[Unit]:
    """Return the units of ``module`` and of everything inside it."""
    return list(units_in(module))


def own_units(module: nn.Module) -> list[Unit]:
    """Return the units that ``module`` itself became: none, one, or one for each of its meshes."""
    return units_of(module)


def labels(module: nn.Module) -> list[str]:
    """Return the names of the units of ``module``, as errors and ``CommLedger`` have them."""
    return [unit.label for unit in units_in(module)]


def unsharded_units(module: nn.Module) -> list[str]:
    """Return the names of the units that are not resharded, or not gathered to the end."""
    return [unit.label for unit in units_in(module) if unit.group.state.name != "SHARDED"]


def leases(module: nn.Module) -> tuple[str, str]:
    """Return why the unit of ``module`` is unsharded ("RUNS KEPT", say), and its state."""
    (unit,) = units_of(module)
    bits = [(name, bit) for name, bit in vars(Lease).items() if name.isupper()]
    held = [name for name, bit in bits if bit.bit_count() == 1 and unit.group.leases & bit]
    return " ".join(held), unit.group.state.name.lower()


def unsharded_storages(module: nn.Module) -> list[torch.UntypedStorage]:
    """Return the memory under each unsharded parameter, of size zero while it is freed."""
    unsharded = [param.unsharded for unit in units_in(module) for param in unit.params]
    return [vars(each).get("inner", each).untyped_storage() for each in unsharded]


def unsharded_bytes(module: nn.Module) -> int:
    storages = {storage._cdata: storage.nbytes() for storage in unsharded_storages(module)}
    return sum(storages.values())


def engine_refs(module: nn.Module) -> list[weakref.ref[Any]]:
    """Return weak references to what the engine keeps for ``module``, which must die with it."""
    found: list[Any] = []
    for unit in units_in(module):
        found += [unit, unit.lifecycle, unit.group, unit.gradients, *unit.params]
        found.append(getattr(unit.group.unit_params, "flat_shard", None))
    return [weakref.ref(each) for each in found if each is not None]


def left_alive(refs: list[weakref.ref[Any]]) -> list[str]:
    """Return the types of those objects that are still alive."""
    return [type(each).__name__ for ref in refs if (each := ref()) is not None]


def use_communicator(monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any]) -> None:
    """Let roots that are used for the first time take their communicator from ``make(usual)``.

    ``usual()`` returns the communicator that they would take.
    """
    monkeypatch.setattr(
        lifecycle, "make_communicator", lambda device: make(lambda: make_communicator(device))
    )


def use_streams(monkeypatch: pytest.MonkeyPatch, device_module: Any) -> None:
    """Let roots that are used for the first time communicate on streams of ``device_module``."""
    comm = StreamCommunicator(device_module)
    use_communicator(monkeypatch, lambda _: comm)


def keep_backward_callbacks(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Return a list that keeps the callbacks of backwards alive, also of those that raise."""
    kept: list[Callable[[], None]] = []
    queue = lifecycle.queue_backward_callback

    def queue_and_keep(callback: Callable[[], None]) -> None:
        queue(callback)
        kept.append(callback)

    monkeypatch.setattr(lifecycle, "queue_backward_callback", queue_and_keep)
    return kept


def large_from(numel: int) -> AbstractContextManager[Any]:
    """Let units count as large from ``numel`` elements on: their gradients are packed singly."""
    return mock.patch.object(gradient_buffer, "_LARGE", numel)
