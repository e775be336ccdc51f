"""An optimizer that steps each unit during backward."""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import chain
from operator import is_
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from meshard._engine.optimizer_hooks import (
    find_overlapped,
    is_scaled,
    owner_of,
    register_overlapped,
    unregister_overlapped,
)
from meshard._engine.unit import Unit, require_units, units_in
from meshard._params.replicated_params import ReplicatedParams
from meshard.clipping import check_limit, unit_clip
from meshard.optim.deferred_clip import DeferredStep, DeferredWindow
from meshard.optim.flat import POINTWISE, FlatStepper, Params
from meshard.optim.flat_slices import State
from meshard.optim.joined_steps import JoinedSteps, MakeOptimizer
from meshard.optim.offloaded_step import HostWorker
from meshard.optim.unit_step import ChangeGradients, UnitStepper

_NOT_SCALED = (
    "Compute in bfloat16, which needs no loss scaling "
    "(MixedPrecisionPolicy(param_dtype=torch.bfloat16)), pass enabled=False to the scaler, or step "
    "in the ordinary way (detach())."
)


def check_not_scaled(unit: Unit) -> None:
    """Raise if gradients are those of a scaled loss.

    Raises:
        RuntimeError: Naming the unit and the alternatives.
    """
    if is_scaled():
        raise RuntimeError(
            "ShardedGradScaler cannot be used with overlap_optimizer, which steps unit "
            f"{unit.label!r} in backward, before gradients could be unscaled and found to be "
            f"finite. {_NOT_SCALED}"
        )


def refuse_scaler() -> None:
    """Raise: a scaler is about to step what has been stepped in backward.

    Raises:
        RuntimeError: Naming the alternatives.
    """
    raise RuntimeError(
        "torch.amp.GradScaler cannot be used with overlap_optimizer, which has stepped in backward "
        f"already, by gradients that were still scaled. {_NOT_SCALED}"
    )


def no_unit(param: torch.Tensor, number: int) -> str:
    """Return what is wrong with a parameter, of the param group with this number."""
    return (
        f"a parameter of shape {tuple(param.shape)} in param group {number} is in no unit of the "
        "module, so there is no moment in backward at which its gradient is known to be complete; "
        "leave it out of param_groups and step it by an ordinary optimizer of its own, or apply "
        "fully_shard to the module around it."
    )


def check_rest(units: Iterable[Unit], what: str) -> None:
    """Raise unless no unit is in the middle of a step.

    Raises:
        RuntimeError: Naming the unit.
    """
    for unit in units:
        if not unit.lifecycle.is_between_steps():
            raise RuntimeError(
                f"{what} was called inside the forward or backward of unit {unit.label!r}; "
                "call it between steps."
            )


def check_not_overlapped(params: Iterable[torch.Tensor]) -> None:
    """Raise if another optimizer steps one of ``params`` in backward.

    Raises:
        ValueError: Likewise.
    """
    param = find_overlapped(params)
    if param is not None:
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} is stepped in backward by another "
            "optimizer already; call its detach() first (OverlappedOptimizer.attached_to(module) "
            "finds it), or give each its own parameters."
        )


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
        unregister_overlapped(self)

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
        register_overlapped(self)

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
        unit.group.pending_step = DeferredStep(
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


def overlap_optimizer(
    module: nn.Module,
    optimizer: type[Optimizer] | Callable[[Iterable[Any]], Optimizer],
    param_groups: Params | None = None,
    *,
    max_unit_norm: float | None = None,
    clip_value: float | None = None,
    clip: str | None = None,
    max_norm: float | None = None,
    min_step_bytes: int = 2**20,
    **optimizer_kwargs: Any,
) -> OverlappedOptimizer:
    """Have each unit of ``module`` stepped in backward, and its gradients freed at once.

    A unit is stepped when the gradient of its whole window is reduced: in the last backward
    (``GradientSync.FULL``, and the last one by ``set_is_last_backward``), once, while the backward
    of other units goes on. ``.grad`` is None afterwards. The training loop stays as it is: ``step``
    and ``zero_grad`` of what is returned find nothing left to do, and only check. The numbers are
    those of the ordinary optimizer, bit for bit.

    Args:
        module: With units in it. Call this after the last ``fully_shard``, between two steps.
        optimizer: A class, or what makes an optimizer from param groups. torch's pointwise ones
            (``SGD``, ``Adam``, ``AdamW``, ``Adagrad``, ``Adadelta``, ``Adamax``, ``RMSprop``,
            ``NAdam``, ``RAdam``) step flat shards, any other one the parameters of a unit.
        param_groups: As for that optimizer; None: all trainable parameters of ``module``.
        max_unit_norm: Clip the gradients of each unit by their own norm.
        clip_value: Clamp every element of the gradients to ``[-clip_value, clip_value]``.
        clip: ``"deferred"`` clips by the norm of all gradients together, ``max_norm``. Gradients
            are then kept, out of ``.grad``, and each unit is stepped in the next forward, just
            before it is gathered (or when someone reads it). The norm is ``total_norm`` of what is
            returned.
        max_norm: What that norm is at most.
        min_step_bytes: One call of an optimizer takes the host as long as some twenty tensors in
            it. So small units wait, at the latest until the end of the backward, and are stepped
            together when their gradients have so many bytes on a rank. 0: each by itself, at once.
        **optimizer_kwargs: Passed on to ``optimizer``.

    Returns:
        A ``torch.optim.Optimizer`` with the ``param_groups`` and the ``state_dict`` of the ordinary
        one, in both directions. The units keep it, so it steps until its ``detach``.

    Raises:
        RuntimeError: A forward or backward is under way.
        TypeError: ``optimizer`` makes no ``Optimizer``, or one that must be given a closure.
        ValueError: There is no unit in ``module``, a parameter is in none or stepped in backward by
            another optimizer already, ``differentiable=True``, a limit is not positive, ``clip``
            and ``max_norm`` do not come together, or ``clip`` is for a replicated module.

    >>> import torch, meshard
    >>> layer = meshard.fully_shard(torch.nn.Linear(2, 2))
    >>> optimizer = meshard.overlap_optimizer(layer, torch.optim.AdamW, lr=1e-3)
    >>> layer(torch.ones(1, 2)).sum().backward()  # steps
    >>> layer.weight.grad is None
    True
    >>> optimizer.step()  # checks
    >>> optimizer.zero_grad()
    """
    units = require_units(module)
    check_rest(units, "overlap_optimizer")
    change = unit_clip(max_unit_norm, clip_value)
    _check_deferred(clip, max_norm)
    if clip is not None and any(_is_replicated(unit) for unit in units):
        raise ValueError(
            'clip="deferred" steps a parameter when it is read next, which nobody hears of where '
            "replicate keeps it an ordinary tensor; clip each bucket (max_unit_norm), or step as "
            "usual after meshard.clip_grad_norm_."
        )
    if param_groups is None:
        param_groups = [param for param in module.parameters() if param.requires_grad]
    make = functools.partial(cast("MakeOptimizer", optimizer), **optimizer_kwargs)
    template = make(cast("list[dict[str, Any]]", param_groups))
    _check(template)
    check_not_overlapped(param for group in template.param_groups for param in group["params"])
    if type(template) in POINTWISE:
        make = functools.partial(type(template))
    return OverlappedOptimizer(template, make, units, change, max_norm, min_step_bytes)


def _is_replicated(unit: Unit) -> bool:
    return unit.group is not None and isinstance(unit.group.tensors, ReplicatedParams)


def _check_deferred(clip: str | None, max_norm: float | None) -> None:
    check_limit("max_norm", max_norm)
    if clip not in (None, "deferred"):
        raise ValueError(f'clip must be "deferred" or None, got {clip!r}.')
    if (clip is None) is not (max_norm is None):
        raise ValueError(
            f'clip="deferred" and max_norm go together, got clip={clip!r} and max_norm={max_norm}; '
            "to clip each unit by its own norm, pass max_unit_norm."
        )


def _check(template: object) -> None:
    if not isinstance(template, Optimizer):
        raise TypeError(
            f"optimizer must be a class of optimizers, or make one; got a "
            f"{type(template).__name__}."
        )
    if isinstance(template, torch.optim.LBFGS):
        raise TypeError(
            "LBFGS computes the loss several times per step, so it cannot step in backward; build "
            "it on module.parameters() as usual."
        )
    if any(group.get("differentiable") for group in template.param_groups):
        raise ValueError("overlap_optimizer has no differentiable step.")
