"""Clipping by the norm of all gradients of a window, which is known with the last of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshard.clipping import clip_coefficient, get_total_norm


class DeferredWindow:
    """The gradients of one window, from the first that is put aside to the norm of all.

    Args:
        params: Parameters in the order in which their norms are added up.
        max_norm: Limit of the norm of all gradients together.
    """

    def __init__(self, params: Sequence[torch.Tensor], max_norm: float) -> None:
        self._params = params
        self._max_norm = max_norm
        self._grads: dict[torch.Tensor, torch.Tensor] = {}
        self._coefficient: torch.Tensor | None = None
        self.total_norm: torch.Tensor | None = None
        self.is_void = False  # its backward was interrupted

    @property
    def is_closed(self) -> bool:
        """Whether the norm is known."""
        return self._coefficient is not None

    def add(self, grads: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Add the gradients of some parameters, each with its parameter."""
        self._grads.update(grads)

    def close(self) -> torch.Tensor:
        """Return the factor by which the gradients are clipped.

        **Collective:** the first time, as ``get_total_norm``.
        """
        if self._coefficient is None:
            grads = [self._grads[param] for param in self._params if param in self._grads]
            self._grads.clear()
            self.total_norm = get_total_norm(grads)
            self._coefficient = clip_coefficient(self.total_norm, self._max_norm)
        return self._coefficient

    def abandon(self) -> None:
        """Drop all gradients."""
        self._grads.clear()
        self.is_void = True
