"""Optimizers that step each unit during backward."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from meshard._comm.communicator import CommStream, Pending
from meshard._comm.host_copies import HostCopies
from meshard._comm.spans import WORKER, profiled
from meshard._engine.param_group import ParamGroup, ParamState, owner_of
from meshard._engine.unit import Unit, require_units, units_in
from meshard._torch.dtensor import plain_of
from meshard._torch.patches import params_in
from meshard._torch.private import without_torch_function
from meshard.clipping import (
    check_limit,
    clip_coefficient,
    get_total_norm,
    scale_gradients,
    unit_clip,
)
from meshard.grad_scaler import is_backward_scaled
from meshard.optim.hooks import find_overlapped, overlapped_optimizers
from meshard.optim.local import (
    POINTWISE,
    LocalStep,
    MakeOptimizer,
    Params,
    check_makes_optimizers,
    list_params,
)
from meshard.optim.mapping import (
    MappedOptimizer,
    OptimGroups,
    States,
    are_same,
    objects_in,
)
from meshard.optim.owner import OwnerOptimizer

ChangeGradients = Callable[[Sequence[torch.Tensor]], None]  # clips them in place
_GRADIENT = attrgetter("grad")
_NOT_SCALED = (
    "Compute in bfloat16, which needs no loss scaling "
    "(MixedPrecisionPolicy(param_dtype=torch.bfloat16)), pass enabled=False to the scaler, or step "
    "in the ordinary way (detach())."
)
_REFUSED: dict[type[Optimizer], str] = {
    OwnerOptimizer: "exchanges matrices of several units at a time, in the same order on all "
    "ranks; call its step() after backward. (owner_optimizer has a fallback for other parameters.)",
    torch.optim.LBFGS: "computes the loss several times per step, so it cannot step in backward; "
    "build it on module.parameters() as usual.",
    torch.optim.Adafactor: "needs norms of rows and columns, which no shard has; "
    "meshard.owner_optimizer steps it on unsharded parameters.",
    torch.optim.SparseAdam: "takes sparse gradients, and reduced gradients are dense; use Adam.",
}


class Worker(ThreadPoolExecutor):
    """The thread in which an ``OverlappedOptimizer`` steps units in host memory."""


class OverlappedOptimizer(MappedOptimizer):
    """An optimizer that steps each unit in backward: see ``overlap_optimizer``.

    ``param_groups``, ``state`` and ``state_dict`` are those of the ordinary optimizer. The units
    hold a reference to this optimizer. So it steps them until ``detach``, also if you drop yours
    (``attached_to`` finds it again). With ``clip="deferred"`` the units hold none, and only your
    call of ``step`` steps.
    """

    def __init__(
        self,
        template: Optimizer,  # its param groups and state are taken over
        make: MakeOptimizer,
        units: Iterable[Unit],
        *,
        change: ChangeGradients | None,
        max_norm: float | None,  # of all gradients; if given, nothing is stepped in backward
        waits_in_step: bool,  # whether ``step`` waits for all units; if not, each next gather does
    ) -> None:
        worker = Worker(1, thread_name_prefix="meshard optimizer")
        self._make_stepper = functools.partial(UnitStepper, make=make, worker=worker, change=change)
        self._max_norm = max_norm
        self._waits_in_step = waits_in_step
        self._units = weakref.WeakSet(units)
        self._steppers: weakref.WeakKeyDictionary[Unit, UnitStepper] = weakref.WeakKeyDictionary()
        self._planned: list[object] = []  # ``objects_in`` of the groups that steppers were made for
        # The steppers whose units were reduced in this window, and whether they had a gradient.
        self._stepped: dict[UnitStepper, bool] = {}
        self.total_norm: torch.Tensor | None = None
        """With ``clip="deferred"``: the norm of all gradients of this optimizer that the last
        ``step`` found, before clipping; zero if there was none."""
        self._is_made = False
        super().__init__(template)  # calls ``add_param_group``
        self._is_made = True
        self._plan()
        if max_norm is None:
            for unit in self._units:
                unit.on_reduced.append(self._on_reduced)
        overlapped_optimizers[self] = max_norm is None

    # --- for users -------------------------------------------------------------------------

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse pickling and copying: units of a model refer to this very optimizer."""
        raise TypeError(
            "what overlap_optimizer returns can be neither pickled nor copied; save its "
            "state_dict(), which any optimizer of its class can load."
        )

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Finish the steps that backward has begun, and step by every gradient still in ``.grad``.

        A gradient is there if the last backward of its window has not run, or if you have set it
        yourself. With ``clip="deferred"``, and after ``detach()``, all gradients are there.
        ``closure``, which computes the loss and runs backward, is called first.

        **Collective:** with ``clip="deferred"``, as ``get_total_norm``.
        **Stream:** the current one waits for all steps, unless ``wait="gather"``.

        Raises:
            RuntimeError: Gradients are pending: see ``meshard.pending_gradients``. Or a unit has
                got a gradient since its turn in the last backward, as from a penalty computed
                before the forward: a second step would not be the step by their sum.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepped = {stepper for stepper, had_gradient in self._stepped.items() if had_gradient}
        self._stepped.clear()
        if self._max_norm is not None:
            self._step_clipped(self._max_norm)
        else:
            self._fresh_steppers()
            for unit, stepper in self._steppers.items():
                # If another backward has run since this unit was stepped, a gradient belongs to the
                # next window. Then it is no late one, and is stepped below.
                if stepper in stepped and unit.lifecycle.backward_number <= unit.reduced_in + 1:
                    stepper.refuse_gradient()
            for stepper in self._steppers.values():
                self._step(stepper)
        if self._waits_in_step:
            self.wait()
        return loss

    def _step_clipped(self, max_norm: float) -> None:
        """Clip by the norm of all gradients, and step each unit now or before its next gather."""
        steppers = self._fresh_steppers()
        for stepper in steppers:
            stepper.group.gradients.settle()
        grads = [param.grad for param in params_in(self) if param.grad is not None]
        self.total_norm = get_total_norm(grads)
        coefficient = clip_coefficient(self.total_norm, max_norm)
        for stepper in steppers:
            if stepper.take(self.param_groups, self._state, coefficient):
                (stepper.step if self._waits_in_step else stepper.defer)()

    def wait(self) -> None:
        """Wait for all steps that have been begun, and take deferred ones now.

        Call this before you read or change parameters, if you do so before ``step``, or with
        ``wait="gather"`` at any time. **Collective:** with ``clip="deferred"``, ``wait="gather"``
        and an optimizer that communicates in its step (``Adafactor``); so are ``state``,
        ``state_dict`` and ``detach``, which call this.
        **Stream:** the current one waits; for units in host memory the host does.

        Raises:
            Exception: The first that a step in host memory, or a deferred one, has raised.
        """
        errors = []
        for unit in self._steppers:
            try:
                unit.group.finish_pending_step()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def detach(self) -> None:
        """From now on step in ``step`` only, without clipping, like any optimizer.

        Steps that wait for a gather are taken now. Gradients that a window has accumulated so far
        are kept. From now on gradients stay in ``.grad`` after the last backward of a window and
        after ``step``, until ``zero_grad``. To go back, call ``overlap_optimizer`` with the same
        parameters, and load the ``state_dict``.

        Raises:
            RuntimeError: A forward or backward is under way.
        """
        for unit in self._units:
            unit.lifecycle.check_between_steps(unit, "detach")
        self.wait()
        if overlapped_optimizers.pop(self, False):
            for unit in self._units:
                unit.on_reduced.remove(self._on_reduced)
            self._make_stepper = functools.partial(self._make_stepper, change=None)
            self._planned = []  # so the next step makes steppers anew, which do not clip
        self._max_norm = None
        self._waits_in_step = True  # .grad stays now, and the next backward may change it

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Step further parameters of the module.

        Raises:
            ValueError: A parameter is in no unit, or another optimizer steps it in backward.
        """
        super().add_param_group(param_group)
        if not self._is_made:
            return
        try:
            if self in overlapped_optimizers:
                _check_not_overlapped(self.param_groups[-1]["params"], but=self)
            self._plan()
        except ValueError:
            del self.param_groups[-1]
            raise

    @staticmethod
    def attached_to(module: nn.Module) -> list[OverlappedOptimizer]:
        """Return the optimizers, not detached, of units in ``module``, in the order of creation."""
        units = set(units_in(module))
        attached = [each for each in overlapped_optimizers if isinstance(each, OverlappedOptimizer)]
        return [each for each in attached if not units.isdisjoint(each._steppers)]

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Refuse a ``torch.amp.GradScaler``, which reads this attribute first."""
        if overlapped_optimizers.get(self):
            raise RuntimeError(
                "torch.amp.GradScaler cannot be used with overlap_optimizer, which has stepped in "
                f"backward already, by gradients that were still scaled. {_NOT_SCALED}"
            )
        return False

    # --- in backward -----------------------------------------------------------------------

    def _on_reduced(self, unit: Unit) -> None:
        if is_backward_scaled():
            raise RuntimeError(
                "ShardedGradScaler cannot be used with overlap_optimizer, which steps unit "
                f"{unit.label!r} in backward, before gradients could be unscaled and found to be "
                f"finite. {_NOT_SCALED}"
            )
        if self._steppers.get(unit) in self._stepped:
            self._stepped.clear()  # a unit steps once per window, so another window has begun
        if not self._stepped:
            self._fresh_steppers()
        stepper = self._steppers.get(unit)
        if stepper is None:
            return
        self._stepped[stepper] = True  # also if the step raises
        self._stepped[stepper] = self._step(stepper)

    def _step(self, stepper: UnitStepper) -> bool:
        """Step by the gradients in ``.grad``; return whether there were any."""
        if not stepper.take(self.param_groups, self._state):
            return False
        taken = stepper.taken
        try:
            stepper.step()
        finally:
            if self not in overlapped_optimizers:  # detached: like others, it leaves .grad alone
                for param, grad in taken:
                    param.grad = grad
        return True

    def _fresh_steppers(self) -> list[UnitStepper]:
        """Return a stepper for each unit, for the parameters that ``param_groups`` have now."""
        if not are_same(objects_in(self.param_groups), self._planned):
            self._plan()
        return list(self._steppers.values())

    def _plan(self) -> None:
        units: dict[object, Unit] = {unit.group: unit for unit in self._units}
        members: dict[Unit, dict[int, list[torch.Tensor]]] = {}
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                unit = units.get(owner_of(param))
                if unit is None:
                    raise ValueError(
                        f"a parameter of shape {tuple(param.shape)} in param group {number} is in "
                        "no unit of the module, so there is no moment in backward at which its "
                        "gradient is known to be complete; leave it out of param_groups and step "
                        "it by an ordinary optimizer of its own, or apply fully_shard to the "
                        "module around it."
                    )
                members.setdefault(unit, {}).setdefault(number, []).append(param)
        self.wait()
        for stepper in self._private:
            stepper.show(self._state)
        self._steppers.clear()
        for unit in sorted(members, key=lambda each: each.number):
            self._steppers[unit] = self._make_stepper(unit.group, members[unit])
            unit.group.overlapped.add(self)
        self._private = list(self._steppers.values())
        self._planned = objects_in(self.param_groups)


class UnitStepper:
    """The step of those parameters of one unit that an optimizer holds.

    On a device the step is queued on the optimizer stream, beside the backward of other units. A
    unit in host memory without loose parameters is stepped by a worker thread, once its gradients
    have arrived there. Until the next gather has waited for the step, this object is the unit's
    ``pending_step``. A deferred step begins only at that gather, in the calling thread. Other steps
    (on CPU, under ``replicate``, or of loose parameters in host memory) are never pending.
    ``group`` is held weakly.
    """

    def __init__(
        self,
        group: ParamGroup,
        members: Mapping[int, list[torch.Tensor]],  # by the index of their param group
        *,
        make: MakeOptimizer,
        worker: Executor,  # for a unit whose shards live in host memory
        change: ChangeGradients | None,
    ) -> None:
        self._group = weakref.ref(group)
        self._members = members
        self._worker = worker
        self._change = change
        self._work: Pending | None = None  # the pending step; None: it is deferred, and not begun
        self.host_copies = group.unit_params.host_copies
        self.local = LocalStep(make)
        self.params = [param for params in members.values() for param in params]
        # Whether a gather comes before each use. Parameters of replicate are read directly.
        self._is_gathered = isinstance(self.params[0], DTensor)
        is_on_device = self.host_copies is None and not group.comm.waits_block_host
        self._has_stream = is_on_device and self._is_gathered
        # The parameters to be stepped, each with its gradient.
        self.taken: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def group(self) -> ParamGroup:
        """The parameters of the unit."""
        group = self._group()
        assert group is not None
        return group

    def take(
        self, groups: OptimGroups, state: States, coefficient: torch.Tensor | None = None
    ) -> bool:
        """Take gradients out of ``.grad``, and copy hyperparameters, for ``step`` or ``defer``.

        ``groups`` are all param groups of the optimizer. Gradients are multiplied by
        ``coefficient``. Return whether any parameter has a gradient.
        """
        group = self.group
        # Wait for copies of gradients to the host only if clipping reads their values here, or if
        # some gradients are not in ``.grad`` yet. Otherwise the worker waits for them.
        if self._change is not None or not group.gradients.are_shown:
            group.gradients.settle()
        with without_torch_function():
            pairs = zip(self.params, map(_GRADIENT, self.params), strict=True)
            taken = [(param, grad) for param, grad in pairs if grad is not None]
        if not taken:
            return False
        if group.state is ParamState.GATHERING:
            group.reshard()  # drops a prefetch that was not used: it gathers the old weights
        group.finish_pending_step()  # that of another optimizer, or a deferred one
        self.taken = taken
        grads = [grad for _, grad in taken]
        with self._on_stream(), torch.no_grad(), self._profiled():
            if self._change is not None:
                self._change(grads)
            if coefficient is not None:
                scale_gradients(grads, coefficient)
                group.comm.hold_until_done([coefficient])
            members = self._members.items()
            self.local.take([_taken(groups[number], own) for number, own in members], state)
        group.record_step()  # while .grad is there: it counts steps that had a gradient
        with without_torch_function():
            for param, _ in taken:
                param.grad = None
        return True

    def refuse_gradient(self) -> None:
        """Raise if a parameter has a gradient, although this window was stepped already."""
        with without_torch_function():
            if all(_GRADIENT(param) is None for param in self.params):
                return
        raise RuntimeError(
            f"unit {self.group.label!r} was stepped in backward, and its parameters have got a "
            "gradient since: from a term that is computed before the forward, such as a penalty on "
            "weights, or from a backward of its own. Compute such terms after the forward and add "
            "them to the loss, or use clip='deferred', which steps in step(). To go on, drop this "
            "gradient by zero_grad()."
        )

    def step(self) -> None:
        """Step by the gradients that ``take`` took."""
        if self.host_copies is not None and not self.local.has_loose:
            self.taken = []
            self._work = WorkerStep(self._worker.submit(self._step_in_worker, self.host_copies))
            self.group.pending_step = self
            return
        if self.host_copies is not None:
            self.host_copies.wait()
        self._work = self.run()
        if self._has_stream:
            self.group.pending_step = self

    def defer(self) -> None:
        """Step before the unit's next gather, by what ``take`` took. Under ``replicate``: now."""
        if self._is_gathered:
            self._work = None
            self.group.pending_step = self
        else:
            self.step()

    def run(self) -> Pending:
        """Step by the gradients that ``take`` took; return the end of the step.

        **Stream:** the optimizer stream; for parameters of ``replicate`` the current one.
        """
        group, grads, self.taken = self.group, self.taken, []
        loose = grads if self.local.has_loose else []
        with self._on_stream(), torch.no_grad(), self._profiled():
            for param, grad in loose:
                param.grad = grad
            try:
                self.local.run()
            finally:
                for param, _ in loose:
                    param.grad = None
            group.comm.hold_until_done([plain_of(grad) for _, grad in grads])
            return group.comm.record()

    def show(self, states: States) -> None:
        """Wait for the step, and write the state to ``states``."""
        self.group.finish_pending_step()
        self.local.show(states)

    def _step_in_worker(self, host_copies: HostCopies) -> None:
        host_copies.wait()
        with torch.no_grad(), profiled("optimizer", self.group.label, WORKER):
            self.local.run()

    # --- the pending step, for the engine --------------------------------------------------

    def before_gather(self) -> None:
        """Make the next gather of the unit wait for the step. Take a deferred step now.

        **Stream:** the gather stream waits; for a step in host memory the host does.
        """
        if self.host_copies is not None:
            self.finish()
        else:
            self.group.comm.enter_after(CommStream.GATHER, self._begun())

    def finish(self) -> None:
        """Make what the caller does next wait for the step. Take a deferred step now.

        **Stream:** the current one waits.
        """
        work = self._begun()
        try:
            work.wait()
        finally:
            # On a device only the current stream has waited, and poll() returns False. The step
            # stays pending, because the gather stream must wait for it too.
            if work.poll():
                self.group.pending_step = None

    def _begun(self) -> Pending:
        if self._work is None:
            device = self.params[0].device.type
            # This may run in a forward, which may be under other modes than step() was.
            with torch.inference_mode(mode=False), torch.autocast(device, enabled=False):
                try:
                    self._work = self.run()
                except BaseException:
                    self.group.pending_step = None  # no second try: some parameters may be stepped
                    raise
        return self._work

    def _profiled(self) -> contextlib.AbstractContextManager[Any]:
        return profiled("optimizer", self.group.label, self.group.comm.clock)

    def _on_stream(self) -> contextlib.AbstractContextManager[None]:
        if self._has_stream:
            return self.group.comm.on_stream(CommStream.OPTIMIZER)
        return contextlib.nullcontext()


class WorkerStep:
    """A step that a worker thread takes, as a ``Pending``."""

    def __init__(self, future: Future[None]) -> None:
        self.wait: Callable[[], None] = future.result  # raises what the optimizer raised
        self.poll: Callable[[], bool] = future.done


def _taken(group: dict[str, Any], params: list[torch.Tensor]) -> dict[str, Any]:
    """Return ``group`` with ``params``, and copies of its tensors: schedulers write to those."""
    present = {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
    }
    return {**present, "params": params}


def overlap_optimizer(
    module: nn.Module,
    optimizer: type[Optimizer] | Callable[[Iterable[Any]], Optimizer],
    param_groups: Params | None = None,
    *,
    max_unit_norm: float | None = None,
    clip_value: float | None = None,
    clip: str | None = None,
    max_norm: float | None = None,
    wait: str = "step",
    **optimizer_kwargs: Any,
) -> OverlappedOptimizer:
    """Step each unit of ``module`` in backward, and free its gradients at once.

    A unit is stepped once per window, in the window's last backward, as soon as its gradient is
    reduced; ``.grad`` is None afterwards. (A backward is the last under ``GradientSync.FULL``,
    unless ``set_is_last_backward(False)`` was called.) The training loop stays as it is, and the
    numbers are those of the ordinary optimizer.

    Args:
        module: With units in it. Call this after the last ``fully_shard``, between two steps.
        optimizer: A class, or what makes an optimizer from param groups. torch's pointwise ones
            (see ``local_optimizer``) step ordinary tensors over the shards, any other one its
            sharded parameters.
        param_groups: As for that optimizer; None: all parameters of ``module`` that are not frozen
            now. To thaw some later, pass them too.
        max_unit_norm: Clip the gradients of each unit by their own norm.
        clip_value: Clamp every element of the gradients to ``[-clip_value, clip_value]``.
        clip: ``"deferred"`` clips by the norm of all gradients: they stay in ``.grad``, and units
            are stepped in ``step``, or with ``wait="gather"`` each before its next gather.
        max_norm: Limit of that norm.
        wait: ``"step"``: steps are over when ``step`` returns. ``"gather"``: the next gather of
            each unit waits; call ``wait`` of what is returned before you use a parameter.
        **optimizer_kwargs: Passed on to ``optimizer``.

    Returns:
        An optimizer with the ``state_dict`` of the ordinary one. It steps until its ``detach``.

    Raises:
        RuntimeError: A forward or backward is under way.
        TypeError: ``optimizer`` makes no ``Optimizer``, or an ``OwnerOptimizer``, ``Adafactor``,
            ``LBFGS`` or ``SparseAdam``.
        ValueError: A parameter is in no unit, or stepped in backward by another optimizer already,
            or an argument is not as described here.

    >>> import torch, meshard
    >>> layer = meshard.fully_shard(torch.nn.Linear(2, 2))
    >>> optimizer = meshard.overlap_optimizer(layer, torch.optim.AdamW, lr=1e-3)
    >>> layer(torch.ones(1, 2)).sum().backward()  # steps
    >>> layer.weight.grad is None
    True
    >>> optimizer.step()  # waits
    """
    units = require_units(module)
    for unit in units:
        unit.lifecycle.check_between_steps(unit, "overlap_optimizer")
    change = unit_clip(max_unit_norm, clip_value)
    _check_deferred(clip, max_norm, is_changed=change is not None)
    if wait not in ("step", "gather"):
        raise ValueError(f'wait must be "step" or "gather", got {wait!r}.')
    check_makes_optimizers("overlap_optimizer", optimizer)
    make: Any = functools.partial(optimizer, **optimizer_kwargs)
    template = make(list_params(module, param_groups))
    _check_template(template)
    _check_not_overlapped(param for group in template.param_groups for param in group["params"])
    if type(template) in POINTWISE:
        make = type(template)
    return OverlappedOptimizer(
        template, make, units, change=change, max_norm=max_norm, waits_in_step=wait == "step"
    )


def _check_not_overlapped(params: Iterable[torch.Tensor], but: Optimizer | None = None) -> None:
    param = find_overlapped(params, but=but)
    if param is not None:
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} is stepped by another optimizer of "
            "overlap_optimizer already; call its detach() first "
            "(OverlappedOptimizer.attached_to(module) finds it), or give each its own parameters."
        )


def _check_deferred(clip: str | None, max_norm: float | None, *, is_changed: bool) -> None:
    check_limit("max_norm", max_norm)
    if clip not in (None, "deferred"):
        raise ValueError(f'clip must be "deferred" or None, got {clip!r}.')
    if (clip is None) is not (max_norm is None):
        raise ValueError(
            f'clip="deferred" and max_norm go together, got clip={clip!r} and max_norm={max_norm}; '
            "to clip each unit by its own norm, pass max_unit_norm."
        )
    if clip is not None and is_changed:
        raise ValueError(
            'max_unit_norm and clip_value go without clip="deferred", which leaves gradients in '
            ".grad until step(): clip there what else you want to clip."
        )


def _check_template(template: object) -> None:
    if not isinstance(template, Optimizer):
        raise TypeError(
            f"optimizer must be a class of optimizers or make one, got a {type(template).__name__}."
        )
    for cls, reason in _REFUSED.items():
        if isinstance(template, cls):
            raise TypeError(f"{cls.__name__} {reason}")
    if any(group.get("differentiable") for group in template.param_groups):
        raise ValueError("overlap_optimizer has no differentiable step.")
