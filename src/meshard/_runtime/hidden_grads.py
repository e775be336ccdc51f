"""When may autograd see the ``.grad`` of parameters that are kept whole? See ``plain_grads``."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

from meshard._runtime.plain_grads import PlainGrads
from meshard._runtime.unit import Unit


class HiddenGrads:
    """The buckets of a root; none, unless ``replicate`` was applied to it."""

    def __init__(self) -> None:
        self._units: list[weakref.ref[Unit]] = []

    def watch(self, units: Iterable[Unit]) -> None:
        """Look after those of ``units`` that keep their parameters whole, from now on."""
        self._units = [weakref.ref(unit) for unit in units if _grads_of(unit) is not None]

    def _all(self) -> Iterator[tuple[Unit, PlainGrads]]:
        for ref in self._units:
            unit = ref()
            grads = None if unit is None else _grads_of(unit)
            if unit is not None and grads is not None:
                yield unit, grads

    def hide(self, early: tuple[Unit, int] | None) -> None:
        """A backward begins.

        Args:
            early: A unit and a parameter of it that has got its gradient already.
        """
        for unit, grads in self._all():
            grads.hide(early[1] if early is not None and early[0] is unit else None)

    def show(self) -> None:
        """A backward is over."""
        for _, grads in self._all():
            grads.show()


def _grads_of(unit: Unit) -> PlainGrads | None:
    grads = None if unit.gradients is None else unit.gradients.sharded
    return grads if isinstance(grads, PlainGrads) else None
