"""Is a unit in the middle of a window, and by what has it divided so far?"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(slots=True)
class Window:
    """The microbatches whose gradients are added up before a step, for one unit.

    Attributes:
        is_open: A backward was not FULL, and none since was.
    """

    is_open: bool = False
    _has_divided: bool = False
    _factor: float | None = None

    def divide(self, factor: float | None, label: str) -> None:
        """Note that gradients are divided by ``factor``; None: the number of ranks.

        Args:
            factor: See ``resolve_divisors``.
            label: Name of the unit.

        Raises:
            RuntimeError: The window was begun with another one.
        """
        if self._has_divided and factor != self._factor:
            raise RuntimeError(
                f"unit {label!r} has divided part of this window by "
                f"{self._factor or 'the number of ranks'}, and would divide the rest by "
                f"{factor or 'the number of ranks'}; a divide factor that is a "
                "callable or a tensor must give the same value for all microbatches of a window "
                "(for a count of tokens: that of the whole window)."
            )
        self._has_divided, self._factor = True, factor

    def close(self) -> None:
        """What comes next belongs to another window."""
        self.is_open = self._has_divided = False

    def copy(self) -> Window:
        """Return the same, for the copy of a unit."""
        return dataclasses.replace(self)
