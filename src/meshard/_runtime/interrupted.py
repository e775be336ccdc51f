"""What do the units of a root do with a step that was interrupted?"""

from __future__ import annotations

from collections.abc import Iterable

from meshard._runtime.unit import Unit


def note_failure(units: Iterable[Unit]) -> None:
    """A backward has raised. Called while the exception is on its way: do not communicate."""
    for unit in units:
        if unit.group is not None:
            unit.group.show_sharded()
            unit.group.has_failed = True


def has_open_window(units: Iterable[Unit]) -> bool:
    """Whether microbatches have been accumulated, and the last one has not come."""
    return any(unit.gradients is not None and unit.gradients.is_window_open for unit in units)


def put_to_rest(units: Iterable[Unit], *, is_void: bool) -> None:
    """Have units be as between two steps.

    Args:
        units: With nothing on its way.
        is_void: Forget their gradients too.
    """
    for unit in units:
        unit.reset_step()
        if unit.group is not None:
            if is_void and unit.group.stepping is not None:
                unit.group.stepping.abandon()
            unit.group.reshard()
            unit.group.has_failed = False
        if unit.gradients is not None:
            unit.gradients.drop_arrived()
            unit.gradients.forget_in_flight()
            if is_void:
                unit.gradients.clear_window()
