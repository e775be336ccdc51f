"""Steps deferred until the norm of all gradients is known.

Each unit's gradient is put aside when it is reduced. With the last one the norm is known, and each
unit is stepped just before it is gathered again, in the next forward; or when someone reads it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from meshard._comm.communicator import CommStream
from meshard._engine.param_group import ParamGroup
from meshard.clipping import clip_coefficient, get_total_norm, scale_gradients
from meshard.optim.flat import States
from meshard.optim.pending_step import hide_shards, show_shards
from meshard.optim.unit_step import UnitStepper


class DeferredWindow:
    """The gradients of one window, from the first that is put aside to the norm of all.

    Args:
        max_norm: What their norm together is at most when they are stepped by.
    """

    def __init__(self, max_norm: float) -> None:
        self._max_norm = max_norm
        self._grads: dict[torch.Tensor, torch.Tensor] = {}
        self.total_norm: torch.Tensor | None = None
        self._coefficient: torch.Tensor | None = None
        self._is_void = False

    @property
    def is_closed(self) -> bool:
        """Whether the norm is known."""
        return self._coefficient is not None

    @property
    def is_over(self) -> bool:
        """Whether gradients that come now are of another window."""
        return self.is_closed or self._is_void

    def add(self, grads: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Take the gradients of some parameters into the norm."""
        self._grads.update(grads)

    def close(self, params: Sequence[torch.Tensor]) -> None:
        """Find out the norm.

        **Collective:** as ``get_total_norm``, all ranks alike.

        Args:
            params: In the order in which their norms are added up.
        """
        grads = [self._grads[param] for param in params if param in self._grads]
        self._grads.clear()
        self.total_norm = get_total_norm(grads)
        self._coefficient = clip_coefficient(self.total_norm, self._max_norm)

    @property
    def coefficient(self) -> torch.Tensor:
        """What to multiply gradients by. Known once the window is closed."""
        assert self._coefficient is not None
        return self._coefficient

    def abandon(self) -> None:
        """Forget it all: its backward was interrupted."""
        self._grads.clear()
        self._is_void = True


class DeferredStep:
    """A step that is taken as soon as someone needs it: see ``PendingStep``.

    Args:
        group: Whose step.
        stepper: Has taken the gradients.
        state: Of the optimizer.
        window: What they are part of.
        close: Closes it, if that is still to be done.
    """

    def __init__(
        self,
        group: ParamGroup,
        stepper: UnitStepper,
        state: States,
        window: DeferredWindow,
        close: Callable[[DeferredWindow], None],
    ) -> None:
        self._group = weakref.ref(group)
        self._stepper: UnitStepper | None = stepper
        self._state = state
        self._window = window
        self._close = close
        hide_shards(group)

    def before_gather(self) -> None:
        """Step, and order the next use of the gather lane after that."""
        self._step(CommStream.GATHER)

    def finish(self) -> None:
        """Step, and order what the caller does next after that: a shard is about to be read."""
        self._step(None)

    def abandon(self) -> None:
        """The window is void, unless its end had come before: forget its gradients."""
        if self._window.is_closed or self._stepper is None:
            return
        stepper, self._stepper = self._stepper, None
        group = self._group()
        if group is not None:
            show_shards(group)
            group.pending_step = None
        self._window.abandon()
        stepper.forget()

    def _step(self, comm_stream: CommStream | None) -> None:
        group, stepper = self._group(), self._stepper
        if group is None or stepper is None:
            return
        show_shards(group)
        if not self._window.is_closed:
            self._close(self._window)
        self._stepper = None
        coefficient = self._window.coefficient
        queued = stepper.run(
            self._state, lambda grads: scale_gradients(grads, coefficient), coefficient
        )
        group.record_step()
        group.pending_step = None
        if comm_stream is not None:
            group.comm.enter_after(comm_stream, queued)
        else:
            queued.wait()
