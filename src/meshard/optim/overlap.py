"""Optimizers that step each unit during backward."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from meshard._comm.communicator import CommStream, Handle, ranged
from meshard._comm.host_copies import HostCopies
from meshard._engine.param_group import ParamGroup, ParamState, owner_of
from meshard._engine.unit import Unit, require_units
from meshard._optimizer_hooks import find_overlapped, watch_reads_and_clipping
from meshard._torch.dtensor import plain_of
from meshard._torch.patches import params_in
from meshard._torch.private import without_torch_function
from meshard.clipping import unit_clip
from meshard.grad_scaler import is_backward_scaled
from meshard.optim.host_state import StreamedStep, check_host_state
from meshard.optim.local_step import POINTWISE, LocalStep
from meshard.optim.mapping import (
    MakeOptimizer,
    MappedOptimizer,
    OptimGroups,
    Params,
    States,
    are_same,
    check_makes_optimizers,
    check_template,
    check_wait,
    objects_in,
    params_of,
)
from meshard.optim.owner import OwnerOptimizer
from meshard.optim.replicas import PartsGather, cut_over_replicas
from meshard.policies import check_bool

ChangeGradients = Callable[[Sequence[torch.Tensor]], None]  # clips them in place
_GRADIENT = attrgetter("grad")
_NOT_SCALED = (
    "Compute in bfloat16, which needs no loss scaling "
    "(MixedPrecisionPolicy(param_dtype=torch.bfloat16)), pass enabled=False to the scaler, or step "
    "by an ordinary optimizer."
)


class Worker(ThreadPoolExecutor):
    """The thread in which an ``OverlappedOptimizer`` steps units in host memory."""


class OverlappedOptimizer(MappedOptimizer):
    """An optimizer that steps each unit in backward: see ``overlap_optimizer``.

    ``param_groups``, ``state`` and ``state_dict`` are those of the ordinary optimizer. The units
    hold a reference to this optimizer. So it steps them also if you drop yours.
    """

    _maker = "overlap_optimizer"

    def __init__(
        self,
        template: Optimizer,  # its param groups and state are taken over
        make: MakeOptimizer,
        units: Sequence[Unit],
        *,
        change: ChangeGradients | None,
        waits_in_step: bool,  # whether ``step`` waits for all units; if not, each next gather does
        gathers: Sequence[PartsGather] = (),  # of the units whose state is cut over the replicas
        streamed: Callable[[ParamGroup], StreamedStep] | None = None,  # if state is in host memory
    ) -> None:
        self._waits_in_step = waits_in_step
        self._steppers: weakref.WeakKeyDictionary[Unit, UnitStepper] = weakref.WeakKeyDictionary()
        self._planned: list[object] = []  # ``objects_in`` of the groups that steppers know
        self._stepped: set[UnitStepper] = set()  # those that have stepped in this window
        super().__init__(template)
        worker = Worker(1, thread_name_prefix="meshard optimizer")
        of_unit = {gather.group: gather for gather in gathers}
        for unit in units:
            local = LocalStep(make, template.defaults) if streamed is None else streamed(unit.group)
            gather = of_unit.get(unit.group)
            self._steppers[unit] = UnitStepper(unit.group, local, worker, change, gather)
        steppers = list(self._steppers.values())
        self._before = dict(zip(steppers[1:], steppers, strict=False))  # stepped next, in backward
        self._private = list(self._steppers.values())
        self._plan()
        for unit in units:
            unit.on_reduced.append(self._on_reduced)

    # --- for users -------------------------------------------------------------------------

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Finish the steps that backward has begun, and step by every gradient still in ``.grad``.

        A gradient is there if the last backward of its window has not run, or if you have set it
        yourself. ``closure``, which computes the loss and runs backward, is called first.

        **Stream:** the current one waits for all steps, unless ``wait="gather"``.

        Raises:
            RuntimeError: Gradients are pending: see ``meshard.pending_gradients``. Or a unit has
                got a gradient since its turn in the last backward, as from a penalty computed
                before the forward: a second step would not be the step by their sum.
        """
        loss = self._loss_of(closure)
        stepped, self._stepped = self._stepped, set()
        self._plan_if_changed()
        for unit, stepper in self._steppers.items():
            # If another backward has run since this unit was stepped, a gradient belongs to the
            # next window. Then it is no late one, and is stepped below.
            if stepper in stepped and unit.lifecycle.backward_number <= unit.reduced_in + 1:
                stepper.refuse_gradient()
        for stepper in self._steppers.values():
            stepper.step(self.param_groups, self._state)
        if self._waits_in_step:
            self.wait()
        return loss

    def wait(self) -> None:
        """Wait for all steps that have been begun.

        Call this before you read or change parameters by an operator or through a tensor that you
        hold, if you do so before ``step``, or with ``wait="gather"`` at any time.
        **Stream:** the current one waits; for units in host memory the host does.

        Raises:
            Exception: The first that a step in host memory has raised.
        """
        errors = []
        for unit in self._steppers:
            try:
                unit.group.finish_pending_step()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Step further parameters of the module.

        Raises:
            ValueError: A parameter is in no unit, or another optimizer steps it in backward.
        """
        super().add_param_group(param_group)
        if not self._planned:
            return  # ``__init__`` has called this
        try:
            self._plan()
        except ValueError:
            del self.param_groups[-1]
            raise

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Refuse a ``torch.amp.GradScaler``, which reads this attribute first."""
        raise RuntimeError(
            "torch.amp.GradScaler cannot be used with overlap_optimizer, which has stepped in "
            f"backward already, by gradients that were still scaled. {_NOT_SCALED}"
        )

    # --- in backward -----------------------------------------------------------------------

    def _on_reduced(self, unit: Unit) -> None:
        if is_backward_scaled():
            raise RuntimeError(
                "ShardedGradScaler cannot be used with overlap_optimizer, which steps unit "
                f"{unit.label!r} in backward, before gradients could be unscaled and found to be "
                f"finite. {_NOT_SCALED}"
            )
        stepper = self._steppers[unit]
        if stepper in self._stepped:
            self._stepped.clear()  # a unit steps once per window, so another window has begun
        if not self._stepped:
            self._plan_if_changed()
        if (following := self._before.get(stepper)) is not None:
            following.prefetch()
        self._stepped.add(stepper)  # also if the step raises
        if not stepper.step(self.param_groups, self._state):
            self._stepped.discard(stepper)

    def _plan_if_changed(self) -> None:
        if not are_same(objects_in(self.param_groups), self._planned):
            self._plan()

    def _plan(self) -> None:
        """Tell each stepper which parameters ``param_groups`` have now."""
        param = find_overlapped(params_in(self), but=self)
        if param is not None:
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} is stepped by another optimizer of "
                "overlap_optimizer already, for as long as its module lives; change the "
                "param_groups of that one, or give each its own parameters."
            )
        members: dict[ParamGroup | None, dict[int, list[torch.Tensor]]] = {
            unit.group: {} for unit in self._steppers
        }
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                of_unit = members.get(owner_of(param))
                if of_unit is None:
                    raise ValueError(
                        f"a parameter of shape {tuple(param.shape)} in param group {number} is in "
                        "no unit of the module, so there is no moment in backward at which its "
                        "gradient is known to be complete; leave it out of param_groups and step "
                        "it by an ordinary optimizer of its own, or apply fully_shard to the "
                        "module around it."
                    )
                of_unit.setdefault(number, []).append(param)
        for unit, stepper in self._steppers.items():
            stepper.members = members[unit.group]
            if stepper.members:
                unit.group.overlapped.add(self)
        self._planned = objects_in(self.param_groups)


class UnitStepper:
    """The step of those parameters of one unit that an optimizer holds.

    On a device the step is queued on the optimizer stream, beside the backward of other units. A
    unit in host memory without loose parameters is stepped by a worker thread, once its gradients
    have arrived there. Until the next gather has waited for the step, this object is the unit's
    ``pending_step``. Other steps (on CPU, under ``replicate``, or of loose parameters in host
    memory) are never pending. ``group`` is held weakly.
    """

    def __init__(
        self,
        group: ParamGroup,
        local: LocalStep | StreamedStep,
        worker: Executor,  # for a unit whose shards live in host memory
        change: ChangeGradients | None,
        gather: PartsGather | None,
    ) -> None:
        self._gather = gather
        self._group = weakref.ref(group)
        self._local = local
        self._worker = worker
        self._change = change
        self.members: Mapping[int, list[torch.Tensor]] = {}  # by the index of their param group
        self._work: Handle | WorkerStep  # the pending step

    @property
    def group(self) -> ParamGroup:
        """The parameters of the unit."""
        group = self._group()
        assert group is not None
        return group

    def step(self, groups: OptimGroups, states: States) -> bool:
        """Step by the gradients in ``.grad``, and free them. Return whether there are any.

        ``groups`` are all param groups of the optimizer.
        **Stream:** the optimizer stream; for parameters of ``replicate`` the current one.
        """
        if not self.members:
            return False
        group, host_copies = self.group, self.group.unit_params.host_copies
        # Wait for copies of gradients to the host only if clipping reads their values here, or if
        # some gradients are not in ``.grad`` yet. Otherwise the worker waits for them.
        if self._change is not None or not group.gradients.are_shown:
            group.gradients.settle()
        grads = self._grads()
        if not grads:
            return False
        if group.state is ParamState.GATHERING:
            group.reshard()  # drops a prefetch that was not used: it gathers the old weights
        if host_copies is not None:  # on a device, the steps of all optimizers have one stream
            group.finish_pending_step()
        with torch.no_grad():  # on the current stream, where schedulers write to tensors
            own = [{**groups[number], "params": each} for number, each in self.members.items()]
            self._local.take(own, states)
        # Parameters of replicate are read without a gather that could wait.
        waits = group.comm.waits_block_host or group.gradients.is_replicated
        has_stream = host_copies is None and not waits
        stream = group.comm.on_stream(CommStream.OPTIMIZER) if has_stream else nullcontext()
        try:
            with stream, torch.no_grad(), ranged("optimizer", group.label):
                if self._change is not None:
                    self._change(grads)
                group.record_step()
                if host_copies is not None and not self._local.has_loose:
                    self._work = WorkerStep(self._worker.submit(self._step_in_worker, host_copies))
                    group.pending_step = self
                    return True
                if host_copies is not None:
                    host_copies.wait()
                self._local.run()
                group.comm.hold_until_done([plain_of(grad) for grad in grads])
                self._work = group.comm.record()
                if self._gather is not None:
                    self._gather.start()
            if has_stream and self._gather is None:
                group.pending_step = self
        finally:
            with without_torch_function():
                for param in self._params:
                    param.grad = None
        return True

    def prefetch(self) -> None:
        """Begin to copy state from host memory, if it rests there. **Stream:** that of steps."""
        if isinstance(self._local, StreamedStep) and self.members:
            with self.group.comm.on_stream(CommStream.OPTIMIZER):
                self._local.prefetch()

    def refuse_gradient(self) -> None:
        """Raise if a parameter has a gradient, although this window was stepped already."""
        if self._grads():
            raise RuntimeError(
                f"unit {self.group.label!r} was stepped in backward, and its parameters have got a "
                "gradient since: from a term that is computed before the forward, such as a "
                "penalty on weights, or from a backward of its own. Compute such terms after the "
                "forward and add them to the loss, or step by an ordinary optimizer. To go on, "
                "drop this gradient by zero_grad()."
            )

    def show(self, states: States) -> None:
        """Wait for the step, and write the state to ``states``."""
        if (group := self._group()) is not None:
            group.finish_pending_step()
        self._local.show(states)

    @property
    def _params(self) -> list[torch.Tensor]:
        return [param for params in self.members.values() for param in params]

    def _grads(self) -> list[torch.Tensor]:
        with without_torch_function():
            return [grad for grad in map(_GRADIENT, self._params) if grad is not None]

    def _step_in_worker(self, host_copies: HostCopies) -> None:
        host_copies.wait()
        with torch.no_grad(), ranged("optimizer", self.group.label):
            self._local.run()

    # --- the pending step, for the engine --------------------------------------------------

    def before_gather(self) -> None:
        """Make the next gather of the unit wait for the step.

        **Stream:** the gather stream waits; for a step in host memory the host does.
        """
        if isinstance(self._work, WorkerStep):
            self.finish()
        else:
            self.group.comm.enter_after(CommStream.GATHER, self._work)

    def finish(self) -> None:
        """Make what the caller does next wait for the step.

        **Stream:** the current one waits.
        """
        try:
            self._work.wait()
        finally:
            # On a device only the current stream has waited. The step stays pending, because the
            # gather stream must wait for it too.
            if isinstance(self._work, WorkerStep):
                self.group.pending_step = None


class WorkerStep:
    """A step that a worker thread takes."""

    def __init__(self, future: Future[None]) -> None:
        self.wait: Callable[[], None] = future.result  # raises what the optimizer raised


def overlap_optimizer(
    module: nn.Module,
    optimizer: type[Optimizer] | Callable[[Iterable[Any]], Optimizer],
    param_groups: Params | None = None,
    *,
    max_unit_norm: float | None = None,
    clip_value: float | None = None,
    wait: str = "step",
    over_replicas: bool = False,
    state_device: str | torch.device | None = None,
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
        wait: ``"step"``: steps are over when ``step`` returns. ``"gather"``: the next gather of
            each unit waits, and what reads a sharded parameter; before you use one in another way
            call ``wait`` of what is returned.
        over_replicas: As for ``local_optimizer``, with the same optimizers: the all-gather of the
            new weights of a unit begins in backward too.
        state_device: As for ``local_optimizer``, with the same optimizers: the state of a unit is
            copied to the device while the unit after it is stepped.
        **optimizer_kwargs: Passed on to ``optimizer``.

    Returns:
        An optimizer with the ``state_dict`` of the ordinary one.

    Raises:
        RuntimeError: A forward or backward is under way.
        TypeError: ``optimizer`` makes no ``Optimizer``, or one that is refused (``LBFGS``,
            ``SparseAdam``, one that needs a closure, an ``OwnerOptimizer``).
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
    check_wait(wait)
    check_bool("over_replicas", over_replicas)
    check_makes_optimizers("overlap_optimizer", optimizer)
    make: Any = functools.partial(optimizer, **optimizer_kwargs)
    template = make(params_of(module, param_groups))
    check_template("overlap_optimizer", template)
    if isinstance(template, OwnerOptimizer):
        raise TypeError(
            "OwnerOptimizer exchanges matrices of several units at a time, in the same order on "
            "all ranks; call its step() after backward."
        )
    if type(template) in POINTWISE:
        make = type(template)
    elif over_replicas or state_device is not None:
        raise TypeError(
            f"over_replicas and state_device are for {', '.join(c.__name__ for c in POINTWISE)}, "
            f"not for {type(template).__name__}."
        )
    streamed = None
    if state_device is not None:
        check_host_state(units, state_device)
        step = functools.partial(LocalStep, make, template.defaults)
        streamed = functools.partial(StreamedStep, step)
    watch_reads_and_clipping()
    gathers = cut_over_replicas(units, params_in(template)) if over_replicas else ()
    waits = wait == "step"
    return OverlappedOptimizer(
        template,
        make,
        units,
        change=change,
        waits_in_step=waits,
        gathers=gathers,
        streamed=streamed,
    )
