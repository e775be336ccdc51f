"""What does a user hold whose units are stepped in backward? An ordinary-looking optimizer."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshard._runtime.optimizer_steps import owner_of
from meshard._runtime.overlapped_params import note_attached, note_detached
from meshard._runtime.unit import Unit, units_in
from meshard.deferred_steps import DeferredStep, DeferredWindow
from meshard.flat_run import State
from meshard.flat_stepper import POINTWISE, FlatStepper
from meshard.host_steps import HostWorker
from meshard.joined_steps import JoinedSteps, MakeOptimizer
from meshard.overlap_checks import (
    check_not_overlapped,
    check_not_scaled,
    check_rest,
    no_unit,
    refuse_scaler,
)
from meshard.unit_stepper import ChangeGradients, UnitStepper


class OverlappedOptimizer(Optimizer):
    """Steps each unit in backward: see ``overlap_optimizer``.

    ``param_groups``, ``state`` and ``state_dict`` are those of the ordinary optimizer. The units
    keep it: it steps until ``detach``, also if you drop it (``attached_to`` finds it again).

    Args:
        template: The ordinary optimizer, whose place this takes.
        make: Makes another one of its kind, from param groups.
        units: Those that may have the parameters.
        change: Clips the gradients of a unit.
        max_norm: Of all gradients together; steps are put off until it is known.
        min_step_bytes: Units are stepped together until their gradients have so many.
    """

    def __init__(
        self,
        template: Optimizer,
        make: MakeOptimizer,
        units: Iterable[Unit],
        change: ChangeGradients | None = None,
        max_norm: float | None = None,
        min_step_bytes: int = 0,
    ) -> None:
        self._make = make
        self._is_pointwise = type(template) in POINTWISE
        self._change = change
        self._units = weakref.WeakSet(units)
        self._steppers: weakref.WeakKeyDictionary[Unit, UnitStepper] = weakref.WeakKeyDictionary()
        self._ids: set[int] = set()
        self._planned: list[torch.Tensor] = []
        self._num_steppers = 0
        self._number = 0  # of the present window
        self._num_stepped = 0  # in it
        self._is_seen = False  # users may hold parts of the state, and edit them
        self._is_attached = False
        self._max_norm = max_norm
        self._worker = HostWorker()
        self._joined = JoinedSteps(make, min_step_bytes)
        self._window: DeferredWindow | None = None
        self.state = defaultdict(dict)
        super().__init__(template.param_groups, template.defaults)
        self._state.update(template.state)
        self._plan()
        self._attach()

    # --- what users see --------------------------------------------------------------------

    @property
    def state(self) -> defaultdict[torch.Tensor, State]:
        """The state of each parameter, after all steps that are under way."""
        self.wait()
        self._is_seen = True
        for stepper in self._steppers.values():
            stepper.show()
        return self._state

    @state.setter
    def state(self, value: defaultdict[torch.Tensor, State]) -> None:
        self._state = value

    @property
    def total_norm(self) -> torch.Tensor | None:
        """With ``clip="deferred"``: the norm of all gradients of the last window, before clipping.

        None: no window has ended yet.
        """
        return None if self._window is None else self._window.total_norm

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.wait()
        found = state.pop("state", None)
        super().__setstate__(state)
        if found is None:
            return
        self.state = found
        for each in found.values():
            if isinstance(each.get("step"), (int, float)):  # of a torch before 1.12
                each["step"] = torch.tensor(float(each["step"]))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Say what to do instead of pickling what subscribes to the units of a model."""
        raise TypeError(
            "what overlap_optimizer returns can be neither pickled nor copied; save its "
            "state_dict(), which any optimizer of its class can load."
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Check that nothing is pending, and step what has not been stepped in backward.

        That is nothing, as a rule: only gradients that no window has ended (the last backward was
        not the last one by ``set_is_last_backward``), that you have put there yourself, or any
        gradients after ``detach()``.

        Args:
            closure: Computes the loss and runs backward, and is called first.

        Raises:
            RuntimeError: Gradients are pending: see ``meshard.pending_gradients``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._begin_window()
        for stepper in self._fresh_steppers():
            if stepper.may_have_gradients:
                self._step(stepper)
        self._close(self._window)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that have not been stepped, also those that are pending.

        Args:
            set_to_none: As for every optimizer.
        """
        for stepper in self._steppers.values():
            stepper.zero_grad(set_to_none=set_to_none)

    zero_grad._meshard_clears = True  # type: ignore[attr-defined]  # see optimizer_steps

    def wait(self) -> None:
        """Order what you do next after all steps that are under way.

        **Stream:** the current one waits. You need it only where neither meshard nor a DTensor is
        asked: for a local tensor that you hold, say.
        """
        for stepper in self._steppers.values():
            stepper.finish()

    def detach(self) -> None:
        """Step no more in backward: from now on ``step`` steps, as that of any optimizer.

        Param groups, state and LR schedulers stay as they are. Steps that ``clip="deferred"`` has
        put off are taken, clipped: their window had ended. What a window that has not ended has
        accumulated stays, and its last backward leaves it in ``.grad``.

        To go back, call ``overlap_optimizer`` and load the ``state_dict``. It must have the same
        parameters: by default those that require a gradient at that time, so pass ``param_groups``
        if some were frozen or thawed since.

        Raises:
            RuntimeError: A forward or backward is under way.
        """
        check_rest(self._units, "detach")
        self.wait()
        for unit in self._units:
            if self._is_attached:
                unit.on_reduced.remove(self._on_reduced)
        self._is_attached = False
        note_detached(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Step further parameters, of the same units or of others of the same module.

        Args:
            param_group: As for every optimizer.

        Raises:
            ValueError: A parameter is in none of the units, or stepped in backward by another
                optimizer already.
        """
        super().add_param_group(param_group)
        if self._is_attached:
            try:
                check_not_overlapped(self.param_groups[-1]["params"])
                self._plan()
            except ValueError:
                del self.param_groups[-1]
                raise

    @staticmethod
    def attached_to(module: nn.Module) -> list[OverlappedOptimizer]:
        """Return the optimizers that step units of ``module`` in backward, each once.

        Args:
            module: With units in it.
        """
        found: dict[int, OverlappedOptimizer] = {}
        for unit in units_in(module):
            for subscriber in unit.on_reduced:
                owner = getattr(subscriber, "__self__", None)
                if isinstance(owner, OverlappedOptimizer):
                    found[id(owner)] = owner
        return list(found.values())

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What a ``torch.amp.GradScaler`` asks first: the moment to refuse it."""
        if self._is_attached:
            refuse_scaler()
        return False

    # --- what happens in backward ----------------------------------------------------------

    def steps_in_backward(self, param: torch.Tensor) -> bool:
        """Whether ``param`` is stepped in backward."""
        return self._is_attached and id(param) in self._ids

    def _attach(self) -> None:
        for unit in self._units:
            unit.on_reduced.append(self._on_reduced)
        self._is_attached = True
        note_attached(self)

    def _on_reduced(self, unit: Unit) -> None:
        check_not_scaled(unit)
        stepper = self._steppers.get(unit)
        if stepper is not None and stepper.window == self._number:
            self._begin_window()
        if not self._num_stepped:
            self._fresh_steppers()
            stepper = self._steppers.get(unit)
        if stepper is None:
            return
        stepper.window = self._number
        self._num_stepped += 1
        self._step(stepper)
        if self._num_stepped == self._num_steppers:
            self._joined.run()
            self._close(self._window)

    def _begin_window(self) -> None:
        self._number += 1
        self._num_stepped = 0

    def _step(self, stepper: UnitStepper) -> None:
        """Step a unit, or put its step off until the norm of all gradients is known."""
        if self._max_norm is None or not self._is_attached:
            stepper.step(self.param_groups, self._state)
            return
        grads = stepper.put_aside(self.param_groups, self._state)
        if not grads:
            return
        if self._window is None or self._window.is_over:
            self._window = DeferredWindow(self._max_norm)
        self._window.add(grads)
        unit = stepper.unit
        assert unit is not None and unit.group is not None
        unit.group.stepping = DeferredStep(
            unit.group, stepper, self._state, self._window, self._close
        )

    def _close(self, window: DeferredWindow | None) -> None:
        if window is not None and not window.is_over:
            window.close(self._planned)

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _fresh_steppers(self) -> list[UnitStepper]:
        """Return a stepper for each unit, for the parameters that the groups have now."""
        lists = [group["params"] for group in self.param_groups]
        is_planned = all(map(is_, chain.from_iterable(lists), self._planned))
        if not is_planned or sum(map(len, lists)) != len(self._planned):
            self._plan()
        return list(self._steppers.values())

    def _plan(self) -> None:
        """Find out which unit has which parameters.

        Raises:
            ValueError: One is in no unit, or stepped in backward by another optimizer.
        """
        units: dict[object, Unit] = {unit.group: unit for unit in self._units}
        units.pop(None, None)
        members: dict[Unit, dict[int, list[torch.Tensor]]] = {}
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                unit = units.get(owner_of(param))
                if unit is None:
                    raise ValueError(no_unit(param, number))
                members.setdefault(unit, {}).setdefault(number, []).append(param)
        self.wait()
        self._check_shared_units(members)
        self._steppers.clear()
        for unit in sorted(members, key=lambda each: each.number):
            flat = FlatStepper(self._make, is_pointwise=self._is_pointwise)
            self._steppers[unit] = UnitStepper(
                unit,
                members[unit],
                flat,
                joined=self._joined,
                worker=self._worker,
                change=self._change,
            )
            self._steppers[unit].is_seen = self._is_seen
        self._num_steppers = len(self._steppers)
        self._planned = self._params()
        self._ids = set(map(id, self._planned))

    def _check_shared_units(self, units: Iterable[Unit]) -> None:
        for unit in units:
            for subscriber in unit.on_reduced:
                other = getattr(subscriber, "__self__", None)
                if (
                    isinstance(other, OverlappedOptimizer)
                    and other is not self
                    and unit in other._steppers
                    and (self._max_norm or other._max_norm)
                ):
                    raise ValueError(
                        f'with clip="deferred" an optimizer must be the only one that steps unit '
                        f"{unit.label!r} in backward; give it all parameters of the unit."
                    )
