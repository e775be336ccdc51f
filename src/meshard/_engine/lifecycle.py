"""What happens at each moment of a step. Hooks on modules and on autograd call these methods.

Every rank must issue the same collectives in the same order, even if ranks use different parameters
of a unit. Units are gathered in the order in which their modules run. A unit is reduced when its
last gradient arrives. If this rank does not use one of its parameters, a gradient never arrives.
Then the unit is reduced when a unit that ran before it in forward begins its backward, or when the
whole backward ends. An outer unit is reduced after the units inside it, even if it had all
gradients before. So the order depends on which units ran, never on which of their parameters got a
gradient.

A *window* is all microbatches of one optimizer step.

If shards live in host memory, they are copied to the device, and gradients are copied back. The
lifecycle waits for these copies at the end of the last backward of a window, at the end of an
evaluation, when a call of the user finishes reductions (``finalize_gradients``), and when it cleans
up an interrupted step. At other times copies may be running. Other code on the host must then wait
before it touches shards or gradients (``ParamGroup.settle``, ``ParamGroup.finish_copies``).
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn

from meshard._comm import spans
from meshard._comm.communicator import Communicator, StepPhase
from meshard._comm.first_values import compare_first_values
from meshard._communicators import make_communicator
from meshard._engine.manual_unshard import ManualUnshard
from meshard._engine.out_of_turn import Prefetcher, RetainedUnits
from meshard._engine.param_group import ParamGroup, ParamState, refuse_backward_optimizer
from meshard._engine.schedule import ForwardCall, ForwardPass, StepSchedule
from meshard._engine.step_state import BackwardRun, ManualFinalization
from meshard._engine.unit import Root, Unit, alive, buckets_in
from meshard._gradients.reduce_queue import ReduceQueue
from meshard._torch.patches import patch_new_optimizers
from meshard._torch.private import (
    BackwardCall,
    accumulates_any,
    graph_task_id,
    has_backward_optimizers,
    is_distributed_backward,
    is_in_compiled_autograd,
    is_in_distributed_autograd,
    is_reduced_by_ddp,
    keeps_graph,
    next_node,
    queue_backward_callback,
    running_node,
    skip_dynamo,
    without_modes,
)
from meshard._torch.user_line import warn_user

_NOT_DISTRIBUTED = (
    "a module of fully_shard or replicate was used inside torch.distributed.autograd.context(). "
    "The backward() there does not reduce its gradients, nor put them into .grad; run the module "
    "and loss.backward() outside of the context."
)
_NOT_IN_DDP = (
    "a module of fully_shard or replicate runs inside DistributedDataParallel, and both would "
    "reduce its gradients; leave DistributedDataParallel away: meshard.replicate does what it does."
)
_Finalizing = list[weakref.ref[Unit]]


_NOT_COMPILED = (
    "modules of fully_shard and replicate do not work under compiled autograd, which would leave "
    "gradients out of .grad; leave torch._dynamo.config.compiled_autograd off, and compile modules "
    "(module.compile()): their backwards are compiled too."
)


class RefusedError(RuntimeError):
    """A forward or backward was refused, and has not begun."""

    def __init__(self, lifecycle: Lifecycle, message: str) -> None:
        self.lifecycle = lifecycle
        super().__init__(message)


class OtherThreadError(RefusedError):
    """A second thread used the model during a step of a first thread. That step goes on."""

    def __init__(self, lifecycle: Lifecycle, what: str) -> None:
        super().__init__(
            lifecycle,
            f"{what} while another thread runs a forward or backward of the same model, whose "
            "parameters are gathered and freed in between; on several ranks let one thread "
            "call all models, because threads would take turns differently on each rank; on one "
            "rank let one at a time run it (threading.Lock), or give each a copy.deepcopy.",
        )


@skip_dynamo
def _end_of_graph_task(lifecycle_ref: weakref.ref[Lifecycle]) -> None:
    lifecycle = lifecycle_ref()
    if lifecycle is None:
        return
    try:
        lifecycle.finish_backward()
    except BaseException:
        lifecycle.record_failure()
        raise


def _backward_raised(lifecycle_ref: weakref.ref[Lifecycle], _: object) -> None:
    lifecycle = lifecycle_ref()
    if lifecycle is None:
        return
    try:
        lifecycle.record_failure()
    except BaseException as error:
        # This function is a weakref callback, and Python swallows what such a callback raises.
        # ``Failure.clear`` raises this error again.
        lifecycle.failure.interrupt = error


class Lifecycle:
    """The steps of one root and all units inside it.

    A lifecycle is made once one of these units is used. While the user applies ``fully_shard`` to
    one layer after the other, each layer is a root of its own for a while, and needs no lifecycle.
    """

    def __init__(self, root: Root) -> None:
        # The calls that have begun and not ended, outermost first. None: no forward runs. The list
        # is empty when a forward begins, and stays empty if an interrupt comes before the first
        # call is recorded.
        self.forward: list[tuple[Unit, ForwardCall]] | None = None
        self.backward: BackwardRun | None = None  # a backward may run inside a forward
        self.failure = root.failure  # shared with the parameter groups
        self.is_last_backward = True
        # Not None after set_manual_backward_finalization(True): ``finalize_backward`` ends windows,
        # and the last backward does not.
        self.finalization: ManualFinalization | None = None
        self.schedule = StepSchedule()
        self.retained = RetainedUnits()
        self._units = root.units
        self._num_backwards = 0
        # The passes whose autograd graph may be alive on this rank: hooks in a graph keep its pass
        # alive. Other ranks may have freed a graph, so this list must not decide whether a
        # collective is issued.
        self._passes: list[weakref.ref[ForwardPass]] = []
        self._prefetcher = Prefetcher(self._units)
        devices = (group.spec.device for group in self.groups() if group.params)
        comm = make_communicator(next(devices, torch.device("cpu")))
        comm.root_names = root.names
        self._has_compared = False  # whether ranks have compared their initial weights
        self._queue = ReduceQueue(comm)
        self.use(comm)

    def use(self, comm: Communicator) -> None:
        """Finish the reductions in flight, and communicate through ``comm`` from now on."""
        self._queue.finish_all()
        self.comm, self._queue = comm, ReduceQueue(comm)
        for unit in self.units():
            unit.group.unit_params.comm = comm.with_custom(unit.settings.comm)

    def units(self) -> list[Unit]:
        return alive(self._units)

    def groups(self) -> list[ParamGroup]:
        return [unit.group for unit in self.units()]

    @property
    def is_idle(self) -> bool:
        """Whether no forward and no backward runs."""
        return self.forward is None and self.backward is None

    @property
    def running(self) -> list[tuple[Unit, ForwardCall]]:
        """The calls that have begun and not ended, outermost first. Recomputations are left out."""
        return [] if self.forward is None else self.forward

    @property
    def present_pass(self) -> ForwardPass:
        """The pass that runs. A recomputation belongs to the pass whose backward runs."""
        forward_pass = None if self.backward is None else self.backward.current_pass
        return self.schedule.current if forward_pass is None else forward_pass

    # --- forward ----------------------------------------------------------------------

    def pre_forward(self, unit: Unit) -> ForwardCall | None:
        """Unshard ``unit``, one of whose modules is about to run.

        Returns the new call; None in a backward that recomputes the forward (checkpointing).
        """
        self.abort_if_failed()
        if self.forward is None and self.backward is None:
            self._refuse_unless_waited("a forward")
            self._refuse_other_reductions()
            # Set before the rest, so that a second thread, and the clean-up after an interrupt, see
            # that a forward runs.
            self.forward = []
            self.retained.begin_forward()
            self.comm.begin_phase(StepPhase.FORWARD)
            self.schedule.begin_forward(with_graph=torch.is_grad_enabled())
            if torch.is_grad_enabled():
                passes = (ref for ref in self._passes if ref() is not None)
                self._passes = [*passes, weakref.ref(self.schedule.current)]
        call, group = None, unit.group
        in_forward, with_graph = self.backward is None, torch.is_grad_enabled()
        if in_forward:
            assert self.forward is not None
            if len(unit.step.modules_run) == len(unit.modules):
                unit.step.modules_run.clear()  # all have run: the unit runs a second time
            call = self.schedule.enter(unit.number, with_graph=with_graph, node=next_node())
            self.forward.append((unit, call))
            unit.step.num_running += 1
        if spans.recorder is not None:
            self._enter_phase("forward" if in_forward else "recompute", unit)
        if not group.params:
            return call
        if self.backward is not None and group.state is ParamState.SHARDED:
            self._end_units_before_recompute(self.backward, running_node())
        up_next: list[Unit] = []  # a recomputation prefetches nothing: the backward around it does
        is_manual = in_forward and group.is_manually_unsharded
        # If a unit has several modules, the first module to run unshards the unit. The others
        # mostly find the unit installed. Then they do not look again for edits by the user, nor
        # read requires_grad again, unless the user has called unshard().
        is_installed = group.state is ParamState.INSTALLED
        looks_for_edits = call is not None and (call.is_first or is_manual or not is_installed)
        reshards_after = unit.reshards_after_forward
        if looks_for_edits:
            group.forget_stale(voids_graphs=reshards_after and not unit.step.awaits_gradients)
        if in_forward:
            up_next = self._prefetcher.after_entry(unit, self.schedule)
        keeps_shard = with_graph and reshards_after
        self._prefetcher.unshard(unit, up_next, in_forward=in_forward, keep_shard=keeps_shard)
        group.install_unsharded(read_flags=looks_for_edits)
        if is_manual and not reshards_after:  # the user's unshard() outlasts the forward
            group.finish_manual_unshard(group.start_manual_unshard())
        if in_forward and with_graph:
            unit.step.last_pass = self.schedule.current
        if group.num_trainable:
            unit.step.may_run_again = not with_graph
            unit.step.awaits_gradients |= with_graph
            unit.note_open()
        return call

    def _refuse_other_reductions(self) -> None:
        """Raise if a feature of torch would take the gradients before meshard reduces them."""
        if torch.is_grad_enabled() and is_in_distributed_autograd():
            raise RefusedError(self, _NOT_DISTRIBUTED)
        if any(map(is_reduced_by_ddp, alive(self.units()[0].modules))):
            raise RefusedError(self, _NOT_IN_DDP)
        if not has_backward_optimizers():
            return
        refused = functools.partial(RefusedError, self)
        for group in self.groups():
            for param in group.params:
                name = f"{param.fqn!r} of unit {group.label!r}"
                refuse_backward_optimizer(name, param.sharded, refused)

    def post_forward(self, unit: Unit, module: nn.Module, *, failed: bool) -> ForwardCall | None:
        """Record that ``module`` of ``unit`` has run, or raised; reshard the unit if that is due.

        Returns the call of the unit to which this run of ``module`` belongs. In a recomputation,
        that is always the last call of the unit in the recomputed pass.
        """
        group = unit.group
        if self.backward is not None:
            # A recomputation ends. ``failed`` does not count here: checkpointing may end it early,
            # by an exception.
            self.check_recomputes(unit)
            if not unit.step.is_in_backward:
                group.install_sharded()
            if spans.recorder is not None:
                self._enter_phase("backward", unit)
            return self.present_pass.last_call.get(unit.number)
        call, running = None, self.running
        if self.forward is not None and unit.step.num_running:
            while running[-1][0] is not unit:
                # ``post_forward`` was not called for an inner unit. Usually a KeyboardInterrupt has
                # ended the inner forward: after that torch calls no hooks. The forward of ``unit``
                # has caught it, and ends now.
                inner, cut_off = running.pop()
                inner.step.num_running -= 1
                self.schedule.exit(cut_off)
                inner.group.reshard(keep_post_forward=True)
            _, call = running.pop()
            unit.step.num_running -= 1
            self.schedule.exit(call)
            if spans.recorder is not None:
                self._enter_phase_around()
        unit.step.modules_run.add(id(module))
        if self._runs(unit):
            return call  # the unit still runs: one of its modules has called itself or another
        have_all_run = len(unit.step.modules_run) == len(unit.modules)
        if failed or (have_all_run and unit.reshards_after_forward):
            group.reshard(keep_post_forward=not failed)
        elif not running:
            unit.forget_unchosen_copy()
        if not running:
            self._end_forward(failed=failed)
        return call

    # Callers of the next two methods test ``spans.recorder`` first: without a trace, a call would
    # cost more than the test.

    def _enter_phase(self, phase: str, unit: Unit | None) -> None:
        """Record for a trace that a phase of ``unit`` begins. ``unit`` is None outside of units."""
        if spans.recorder is not None:  # another thread may have ended the trace since
            spans.recorder.enter(phase, "" if unit is None else unit.label, self.comm.clock)

    def _enter_phase_around(self) -> None:
        """Record for a trace that a forward or backward ends, perhaps inside another forward."""
        if self.running:
            self._enter_phase("forward", self.running[-1][0])
        else:
            self._enter_phase("", None)

    def check_recomputes(self, unit: Unit) -> None:
        """Raise unless a backward of this thread recomputes this forward (checkpointing)."""
        if graph_task_id() >= 0:
            return
        if self.failure.marks:
            raise RuntimeError(
                f"a backward inside the forward of unit {unit.label!r} has raised, and the forward "
                "went on; do not catch that error inside the forward, whose step is lost."
            )
        raise OtherThreadError(self, f"a forward of unit {unit.label!r} ran")

    def is_inside(self, unit: Unit) -> bool:
        """Whether ``unit`` runs. In a backward: whether its modules hold unsharded parameters."""
        if self.backward is not None:
            return unit.group.state is ParamState.INSTALLED
        return self._runs(unit)

    def _runs(self, unit: Unit) -> bool:
        return self.forward is not None and unit.step.num_running > 0

    def _end_forward(self, *, failed: bool) -> None:
        if failed:
            # An evaluation (grad is disabled) is no microbatch. If it fails, the window goes on.
            self.abort(keeps_window=not torch.is_grad_enabled())
            return
        self.forward = None
        self._prefetcher.drop_unused()
        if not torch.is_grad_enabled():
            self._settle_host()  # after an evaluation the user may edit shards
        for unit in self.units():
            if unit.step.modules_run and unit.group.state is not ParamState.SHARDED:
                if unit.reshards_after_forward:
                    # Examples of units that are not sharded here: only some modules of the unit
                    # have run, or the user called unshard() after its forward.
                    unit.group.reshard(keep_post_forward=True)
                elif torch.is_grad_enabled() and not unit.gradients.is_replicated:
                    unit.group.keep_installed()
                else:  # replicate, or the end of an evaluation: users may now edit parameters
                    unit.group.install_sharded()
            unit.step.modules_run.clear()

    # --- backward ---------------------------------------------------------------------

    @property
    def backward_number(self) -> int:
        """The number of the backward that runs, or of the next one."""
        return self._num_backwards + (self.backward is None)

    def _ensure_backward(self, first: Unit, early: int | None = None) -> BackwardRun:
        """Return the backward that runs; begin it if it has not begun.

        ``first`` is the unit for which a gradient has come. If autograd has put the gradient into
        ``.grad`` of a parameter, ``early`` is the index of the parameter.
        """
        task, run = graph_task_id(), self.backward
        if run is not None and run.graph_task == task and not self.failure.marks:
            return run  # the usual case, in which there is nothing to begin and nothing to record
        if self.abort_if_failed() and early is not None:
            raise RefusedError(
                self,
                "the last backward raised, and its gradients were dropped only now, together with "
                f"the one that parameter {first.params[early].fqn!r} has just got; call "
                "reset_iter_state() on the root after a backward that raised, unless a forward "
                "follows, and run this backward again.",
            )
        if self.backward is not None:
            self._record_nested(self.backward)
            return self.backward
        self._refuse_unless_waited("a backward")
        if is_in_compiled_autograd():
            raise RefusedError(self, _NOT_COMPILED)
        if is_distributed_backward():
            # Also warn, because distributed autograd drops the text of the error.
            warn_user(_NOT_DISTRIBUTED)
            raise RuntimeError(_NOT_DISTRIBUTED)
        # If this method is interrupted before the callbacks below are in place, only this mark
        # records the failure. Otherwise ``marks.clear()`` below removes the mark.
        self.failure.marks.append("begun")
        self._num_backwards += 1
        run = self.backward = BackwardRun(
            graph_task=task,
            thread=threading.get_ident(),
            keeps_graph=keeps_graph(),
            accumulates=early is not None or self._will_accumulate(first),
        )
        if self.finalization is not None:
            self.finalization.is_due = True
            self.finalization.is_split |= run.keeps_graph
        self.failure.backward_call = BackwardCall()
        self._queue.begin_backward()
        patch_new_optimizers()
        # When a backward raises, autograd drops ``end`` without calling it. Python then calls the
        # callbacks of the weak references in ``run.ends``, the newest reference first. The callback
        # of the newest is ``marks.append``, a C method, which no interrupt can cut off. So the
        # failure is recorded before ``_backward_raised`` gives modules their shards again.
        end, me = functools.partial(_end_of_graph_task, weakref.ref(self)), weakref.ref(self)
        queue_backward_callback(end)
        for unit, grads in buckets_in(self.units()):
            grads.hide(early if unit is first else None)
            unit.gradients.begin_backward(unit.settings)
        self.retained.begin_backward()
        run.ends = [
            weakref.ref(end, functools.partial(_backward_raised, me)),
            weakref.ref(end, self.failure.marks.append),
        ]
        # From here on the callbacks record a failure, and the mark "begun" is no longer needed.
        self.failure.marks.clear()
        return run

    def _will_accumulate(self, first: Unit) -> bool:
        """Whether the present graph task adds to ``.grad`` of any parameter of the root."""
        units = dict.fromkeys((first, *reversed(self.units())))
        return accumulates_any(param.unsharded for unit in units for param in unit.params)

    def _record_nested(self, run: BackwardRun) -> None:
        """Record that another graph task, such as one of a reentrant checkpoint, is inside ``run``.

        On CPU, raise if it runs in another thread.
        """
        # On a device, autograd runs the backwards of all callers on a thread of its own, so thread
        # ids tell nothing.
        if threading.get_ident() != run.thread and self.comm.waits_block_host:
            raise OtherThreadError(self, "a backward ran")
        run.has_nested = True

    def pre_backward(
        self, unit: Unit, forward_pass: ForwardPass, call: ForwardCall, gradient: torch.Tensor
    ) -> torch.Tensor | None:
        """Unshard ``unit``, whose backward begins: one of its outputs has got its ``gradient``.

        Returns what autograd uses instead of ``gradient``; None: ``gradient`` itself.
        """
        group = unit.group
        if group.is_summoned:
            raise RuntimeError(
                f"a backward reached unit {unit.label!r} inside {group.summoned_by.caller}, from a "
                "forward made before it; run that backward before, or after."
            )
        run = self._ensure_backward(unit)
        if spans.recorder is not None:
            self._enter_phase("backward", unit)
        self._reach(run, forward_pass)
        self._begin_skipped(run, forward_pass, call.exit_position + 1)
        self._begin_unit(run, unit, forward_pass, call)
        if not group.params:
            return None
        replacement = None
        if unit.settings.unshard_in_backward:
            # A checkpoint inside the unit may run a part of the forward again. That part reads the
            # parameters from the modules, which must hold the unsharded ones.
            group.install_unsharded(read_flags=False)
            replacement = self.retained.on_backward(unit, gradient)
        if unit.step.arrived and self._is_complete(run, unit):
            # All gradients came in the backwards of later calls of the unit. The reduction has
            # waited for the backward of the first call, which begins now.
            self._reduce_outwards(unit)
        return replacement

    def _reach(self, run: BackwardRun, forward_pass: ForwardPass) -> None:
        """Begin the backward of a pass, unless it has begun. End the passes reached earlier."""
        if forward_pass in run.reached:
            return
        for later in self._ended_passes(run):
            self._end_pass(run, later)
        forward_pass.open(self._num_backwards)
        run.reached.append(forward_pass)
        # With retain_graph=True, an earlier backward may have gone through the graph of this pass
        # and reduced its units. The present backward brings gradients for these units once more.
        for call in forward_pass.exits if run.accumulates else ():
            unit = self._units[call.unit]()
            if unit is not None and call.has_graph and unit.group.num_trainable:
                unit.await_gradients()

    def _end_pass(self, run: BackwardRun, forward_pass: ForwardPass) -> None:
        """End the units of a pass that have not ended, in the same order on all ranks.

        That reduces a unit of which this rank lacks a gradient. Ranks that lack none have reduced
        it earlier, at its last gradient.
        """
        self._begin_skipped(run, forward_pass, 0)
        self._end_units_over(run, forward_pass, lambda _: True)

    def _ended_passes(self, run: BackwardRun) -> list[ForwardPass]:
        """Return the reached passes, except one whose forward has called this backward."""
        return [
            forward_pass
            for forward_pass in run.reached
            if not self.running or forward_pass is not self.schedule.current
        ]

    def _begin_unit(
        self, run: BackwardRun, unit: Unit, forward_pass: ForwardPass, call: ForwardCall
    ) -> None:
        """Begin the backward of ``call``: end units that are over, unshard ``unit``, prefetch."""
        # If the call has several outputs, another output may have got its gradient before.
        has_begun = call.reached_in == self._num_backwards
        call.reached_in = self._num_backwards
        self._end_units_over(
            run, forward_pass, lambda first: first.first_inside > call.exit_position
        )
        run.current_pass = unit.step.in_pass = forward_pass
        unit.step.in_call = call
        if not unit.params:
            return
        if not unit.step.is_in_backward:
            unit.step.is_in_backward = True
            if unit.group.num_trainable:
                # ``_reach`` does this too, but not under torch.autograd.grad. Example: a backward
                # with retain_graph=True has reduced the unit. Then autograd.grad(create_graph=True)
                # goes through the same graph for a gradient penalty. The backward of the penalty
                # may bring gradients of the unit on some ranks only, but all must reduce the unit.
                unit.await_gradients()
        if unit.settings.unshard_in_backward:
            # The prefetch is issued once per call, as ranks may use different numbers of outputs.
            up_next = (
                [] if has_begun else self._prefetcher.after_backward_of(unit, forward_pass, call)
            )
            self._prefetcher.unshard(unit, up_next, in_forward=False, keep_shard=False)

    def _begin_skipped(self, run: BackwardRun, forward_pass: ForwardPass, first: int) -> None:
        """Begin the backward of ``exits[first:]``, calls that autograd leaves out on this rank.

        Example: the loss of this rank does not use the output of an auxiliary head. Other ranks
        gather and reduce for these calls, so this rank must do so too. Nothing is done under
        ``torch.autograd.grad``, which accumulates nothing: it leaves out the same calls on all
        ranks.
        """
        for call in forward_pass.pop_skipped(first) if run.accumulates else ():
            unit = self._units[call.unit]()
            if unit is None or not unit.params or self._runs(unit):
                continue
            if call.is_watched or unit.group.num_trainable:
                self._begin_unit(run, unit, forward_pass, call)
                if unit.settings.unshard_in_backward:
                    unit.group.count_out_frozen()  # as ``pre_backward`` does on other ranks

    def _end_units_over(
        self,
        run: BackwardRun,
        forward_pass: ForwardPass,
        is_over: Callable[[ForwardCall], bool],
    ) -> None:
        """End units of a pass, last first, as long as ``is_over`` of their first call is True."""
        for number in forward_pass.pop_over(is_over):
            other = self._units[number]()
            if other is None:
                continue
            self._reshard_after_backward(other)
            if not self.schedule.runs_before(forward_pass, number):
                self._reduce_if_due(run, other, is_at_end=False)

    def _end_units_before_recompute(self, run: BackwardRun, node: int) -> None:
        """End the units whose backward is over when autograd node ``node`` recomputes a forward.

        The recomputation is about to gather. A rank that used all parameters of such a unit may
        have reduced the unit before this gather, at its last gradient. So a rank that left out a
        parameter must reduce the unit before this gather too.
        """
        forward_pass, backward = run.current_pass, self._num_backwards
        if forward_pass is not None:
            self._begin_skipped(run, forward_pass, forward_pass.num_begun_before(node))
            self._end_units_over(run, forward_pass, lambda first: first.is_over_at(node, backward))

    def post_gradient(self, unit: Unit, index: int) -> None:
        """Record the gradient of parameter ``index``. Reduce ``unit`` if it has all gradients."""
        run = self._ensure_backward(unit, index)
        run.accumulates = True
        step, group = unit.step, unit.group
        if not step.awaits_gradients:
            unit.await_gradients()
        step.arrived.add(index)
        # This method runs for every gradient, so it counts them before it calls ``_is_complete``.
        if len(step.arrived) >= group.num_trainable and self._is_complete(run, unit):
            # The unit stays unsharded here, because nodes that are still to run may have saved one
            # of its weights. Example: its first layer is frozen, and the gradient of the unit's
            # input goes through that layer.
            self._reduce_outwards(unit)
            if spans.recorder is not None:
                around = unit.parent() if unit.parent is not None else None
                self._enter_phase("backward", around or unit)
            return
        if group.gradients.is_replicated:
            group.gradients.receive(index, unit.settings)
        if self._queue.may_free:
            self._queue.progress()

    def gradient_from_outside(self, unit: Unit) -> None:
        """Record that this backward brings gradients of ``unit`` which no hook of the unit reports.

        An example is the gradient of a parameter that ``unsharded_params`` has unsharded. The unit
        is reduced at the end of the backward, if not before.
        """
        self._ensure_backward(unit).accumulates = True
        unit.await_gradients()

    def _is_complete(self, run: BackwardRun, unit: Unit) -> bool:
        """Whether all gradients of ``unit`` came, and no rank expects more of them.

        A unit that is not complete now is reduced when its backward is over.
        """
        step = unit.step
        if len(step.arrived) < unit.group.num_trainable:
            return False
        # The unit may run several times. The backward of its first call comes last. If this rank
        # used no parameter in that call, all its gradients come before that backward begins. Other
        # ranks reduce only after that backward has begun, so this rank waits for it too.
        if step.in_call is not None and not step.in_call.is_first:
            return False
        # A unit that was read counts as running until the forward of its reader ends. Units that
        # run meanwhile are not inside it. Whether they are reduced before its last gradient comes
        # depends on what this rank has used. So it waits until it is over: then they are over too.
        if step.in_call is not None and step.in_call.is_read:
            return False
        # A reentrant checkpoint starts a nested run of the autograd engine (a graph task) inside
        # this backward. If a parameter is also used outside of the checkpoint, or in another one,
        # the nested run brings only one of several gradients to add up.
        return not run.has_nested and not self.schedule.runs_before(step.in_pass, unit.number)

    def _reshard_after_backward(self, unit: Unit) -> None:
        """End the backward of ``unit``, unless this backward runs inside a forward of ``unit``."""
        if self._runs(unit):
            return  # that forward goes on, and uses the unsharded parameters
        unit.step.end_backward()
        if unit.settings.reshard_after_backward and not unit.step.is_retained:
            unit.group.reshard()
        else:
            unit.group.install_sharded()

    def _reduce_if_due(self, run: BackwardRun, unit: Unit, *, is_at_end: bool) -> None:
        """Reduce ``unit``, of which nothing is left to run, if its gradients are still due.

        ``is_at_end``: see ``_reduce_outwards``.
        """
        if not unit.step.awaits_gradients:
            return
        if any(call.has_graph for other, call in self.running if other is unit):
            return  # this backward runs inside that call, and the backward of its graph comes later
        if unit.step.is_wanted_unsharded and not unit.step.arrived:
            _check_finds_parameters(unit)
        # A pipeline schedule may compute only gradients of inputs now, and those of parameters
        # later. The unit must accumulate zeros then, so that ``_take_split_gradients`` finds the
        # later gradients: it looks only in units that hold unreduced gradients.
        is_split = run.keeps_graph and not unit.settings.sync.reduces
        if run.accumulates or is_split:
            self._reduce_outwards(unit, is_at_end=is_at_end)
        elif not run.keeps_graph:
            unit.step.record_taken()

    def _reduce_outwards(self, unit: Unit, *, is_at_end: bool = False) -> None:
        """Reduce or accumulate ``unit``, whose gradients are complete; then those around it.

        A unit waits until all units inside it are complete. When the last inner unit is complete,
        the loop goes on to the outer unit, which has waited. ``is_at_end``: the backward ends, so
        no gradient will come from inside ``unit``.
        """
        unit.step.are_complete = True
        candidate: Unit | None = unit
        while candidate is not None and (
            candidate.step.are_complete or not candidate.step.awaits_gradients
        ):
            if candidate.children and not is_at_end and self._awaits_units_inside(candidate):
                return
            if candidate.step.are_complete:  # otherwise no gradient is due, as in a frozen unit
                self._reduce_or_accumulate(candidate)
            # The unit around may contain other units that are not reduced yet: their turn in
            # ``finish_backward`` comes later, or their backward does. So is_at_end is False for it.
            is_at_end = False
            candidate = candidate.parent() if candidate.parent is not None else None

    def _reduce_or_accumulate(self, unit: Unit) -> None:
        """Reduce the gradients of ``unit``, or under NONE only add them up. They are complete."""
        unit.step.record_taken()
        sync = unit.settings.sync
        if sync.reduces:
            ends_window = self.is_last_backward and self.finalization is None
            self._start_reduction(
                unit,
                over_replicas=sync.over_replicas,
                ends_window=sync.ends_window and ends_window,
            )
        else:
            unit.gradients.accumulate(unit.settings)

    def _awaits_units_inside(self, unit: Unit) -> bool:
        """Whether gradients or backwards of units inside ``unit`` are, or may be, still to come.

        Backwards of frozen units count too, and those that this rank leaves out: other ranks gather
        for them before they reduce ``unit``.
        """
        if unit.has_open_children:
            return True
        forward_pass, call = unit.step.in_pass, unit.step.in_call
        if forward_pass is None or call is None:
            return False
        return forward_pass.may_begin_inside(call, self._num_backwards)

    def _start_reduction(self, unit: Unit, *, over_replicas: bool, ends_window: bool) -> None:
        on_reduced = None
        if unit.on_reduced:
            self._queue.finish_of(unit.gradients)
            if unit.reduced_in == self._num_backwards:
                raise RuntimeError(
                    f"unit {unit.label!r} has got a gradient after its optimizer has stepped it in "
                    "this backward: its parameters take part in something that autograd runs "
                    "later, or in a loss with a backward of its own. Add up all losses, with terms "
                    "like penalties on weights computed after the forward, or step it in the "
                    "ordinary way (detach() of what overlap_optimizer has returned)."
                )
            on_reduced = functools.partial(self.notify_reduced, unit) if ends_window else None
        self._queue.start(
            unit.gradients,
            unit.settings,
            over_replicas=over_replicas,
            ends_window=ends_window,
            on_reduced=on_reduced,
        )
        if over_replicas and not self._has_compared:
            self._compare_first_values()
        if ends_window:
            unit.gradients.end_window()

    def _compare_first_values(self) -> None:
        """Tell of different initial weights on ranks. Called after a collective of all ranks.

        **Collective:** the meshes of all sharded units. ``CommLedger`` does not list it.
        """
        groups = [group for group in self.groups() if group.params]
        sharded = [group for group in groups if not group.gradients.is_replicated]
        brought = [(group.spec.mesh_info, group.first_values()) for group in sharded]
        without_modes(compare_first_values, brought)
        self._has_compared = True

    def notify_reduced(self, unit: Unit) -> None:
        """Call ``unit.on_reduced``, once per backward, when its gradients are published."""
        if unit.on_reduced and unit.reduced_in != self._num_backwards:
            unit.reduced_in = self._num_backwards
            for subscriber in tuple(unit.on_reduced):
                subscriber(unit)

    def finish_backward(self, run: BackwardRun | None = None) -> None:
        """End the backward that runs. If autograd runs none now, ``run`` stands for it."""
        run = run or self.backward
        assert run is not None
        units = self.units()
        ended = self._ended_passes(run)
        for forward_pass in ended:
            self._end_pass(run, forward_pass)
            forward_pass.is_spent |= not run.keeps_graph
        to_come = self._units_to_come(run, units, ended)
        if run.accumulates or not run.keeps_graph:
            self.schedule.end_passes()
        run.current_pass = None
        self.retained.end_backward()
        for unit in reversed(units):  # units inside first
            if unit.number not in to_come:
                self._reshard_after_backward(unit)
                self._reduce_if_due(run, unit, is_at_end=True)
        if run.accumulates and self.finalization is None:
            # A unit whose backward is still to come is left out: that backward will reduce it.
            over = [u for u in units if u.number not in to_come or not u.step.awaits_gradients]
            self._publish(over)
        self._prefetcher.drop_unused()
        for _, grads in buckets_in(units):
            grads.show()
        self.failure.backward_call = None
        self.backward = None
        if spans.recorder is not None:
            self._enter_phase_around()
        # ``ends`` is cleared last. If a line above raises, autograd drops the callback that
        # ``_ensure_backward`` has queued, and the weak references in ``ends`` record the failure.
        run.ends.clear()

    def _publish(self, units: Sequence[Unit]) -> None:
        """As a backward ends, finish the reductions whose results belong into ``.grad``.

        Units under FULL are flushed first: a unit without gradients in this backward may still hold
        some of earlier microbatches.
        """
        full = [unit for unit in reversed(units) if unit.settings.sync.ends_window]
        for unit in full:
            self._flush(unit, ends_window=self.is_last_backward)
        if not self.is_last_backward:
            self._queue.finish_published()  # users may read .grad before the next backward
            return
        self._queue.finish_all()
        for unit in full:
            self.notify_reduced(unit)
        self._settle_host()

    def _units_to_come(
        self, run: BackwardRun, units: Sequence[Unit], ended: Sequence[ForwardPass]
    ) -> set[int]:
        """Return the numbers of the units whose backward is still to come, after this backward.

        These units ran in passes that this backward has not reached. Example: for each chunk of the
        hidden states, a loss runs the output layer and calls backward; the backward of the other
        layers comes last. All ranks return the same numbers, because the numbers do not depend on
        which graphs are alive.
        """
        if not run.reached:
            return set()
        reached = set[int]().union(*(forward_pass.units for forward_pass in ended))
        return {
            unit.number
            for unit in units
            if (last := unit.step.last_pass) is not None
            and not last.is_spent
            and unit.number not in reached
            and not unit.step.is_in_backward
            and not unit.step.arrived
        }

    def start_manual_unshard(self, unit: Unit) -> ManualUnshard | None:
        """Start gathering ``unit`` for the user's ``unshard()``. None if it has no parameters.

        **Collective:** the shard group.
        """
        unit.step.is_wanted_unsharded = True
        return unit.group.start_manual_unshard() if unit.params else None

    def awaits_backward(self, unit: Unit) -> bool:
        """Whether a forward of ``unit`` has a graph, on this rank, whose backward may come."""
        return unit.step.awaits_gradients or any(
            unit.number in forward_pass.units and not forward_pass.is_spent
            for forward_pass in alive(self._passes)
        )

    # --- outside of a backward --------------------------------------------------------

    def finish_split_backward(self) -> None:
        """Accumulate the gradients that a pipeline schedule wrote outside of backwards, and reduce.

        Gradients are accumulated only in units that already hold unreduced gradients. These units
        are the same on all ranks. The units in which the schedule wrote gradients may differ.
        """
        self.abort_if_failed()
        with self.failure.recorded():
            self._take_split_gradients()
            self.finish_backward(BackwardRun())

    def _take_split_gradients(self) -> None:
        for unit in self.units():
            if unit.gradients.is_unreduced:
                unit.gradients.accumulate(unit.settings)

    def start_flush(self, units: Sequence[Unit]) -> None:
        """Start reducing pending gradients of ``units`` over all ranks, which ends their window."""
        self.abort_if_failed()
        with self.failure.recorded():
            for unit in reversed(units):
                self._flush(unit, ends_window=True)

    def finish_flush(self, units: Sequence[Unit]) -> None:
        self.finish_reductions()
        for unit in reversed(units):
            self.notify_reduced(unit)

    def _flush(self, unit: Unit, *, ends_window: bool) -> None:
        gradients = unit.gradients
        self._queue.finish_partials_of(gradients)
        if gradients.is_pending:
            self._start_reduction(unit, over_replicas=True, ends_window=ends_window)
        elif ends_window:
            gradients.end_window()

    def set_manual(self, enabled: bool) -> None:
        """Let ``finalize_backward`` end windows if ``enabled``, and otherwise the last backward."""
        self.abort_if_failed()
        finalization = self.finalization
        if enabled is (finalization is not None):
            return
        is_unfinished = finalization is not None and (
            finalization.is_due or finalization.started is not None
        )
        if is_unfinished or graph_task_id() >= 0:
            raise RuntimeError(
                "set_manual_backward_finalization cannot change the mode during a backward, or "
                "between a backward and its finalize_backward() (or reset_iter_state()); change it "
                "before the first forward of a step."
            )
        self.finalization = ManualFinalization() if enabled else None

    def start_finalization(self) -> _Finalizing | None:
        """Reshard the units, and start reducing pending gradients of those whose ``sync`` is FULL.

        Returns the latter units, for ``finish_finalization``; None if no backward has run yet.
        """
        units = self.units()
        self.check_between_steps(units[0], "finalize_backward")
        self._refuse_unless_waited("another finalize_backward")
        if graph_task_id() >= 0:
            raise RuntimeError("finalize_backward was called inside a backward; call it after.")
        finalization = self.finalization
        if finalization is None:
            raise RuntimeError(
                "finalize_backward needs set_manual_backward_finalization(True) before the "
                "backward; without it the last backward has reduced everything. "
                "meshard.finalize_gradients(module) reduces what is pending in either mode."
            )
        if not self._num_backwards:
            return None
        if finalization.is_split:
            with self.failure.recorded():
                self._take_split_gradients()
        for unit in units:
            # A unit whose backward is still to come stays as it is.
            is_over = not unit.step.awaits_gradients and not unit.step.is_retained
            if is_over and unit.settings.reshard_after_backward:
                unit.group.reshard()
        full = [unit for unit in units if unit.settings.sync.ends_window]
        self.start_flush(full)
        finalization.started = [weakref.ref(unit) for unit in full]
        return finalization.started

    def finish_finalization(self, started: _Finalizing) -> None:
        """Finish the reductions that ``start_finalization`` started."""
        self.abort_if_failed()
        finalization = self.finalization
        if finalization is None or finalization.started is not started:
            raise RuntimeError(
                "this handle of finalize_backward is not valid any more: reset_iter_state() was "
                "called, or a step failed, which has dropped the gradients."
            )
        self.finish_flush(alive(started))
        finalization.settle()

    def _refuse_unless_waited(self, what: str) -> None:
        if self.finalization is not None and self.finalization.started is not None:
            raise RefusedError(
                self,
                f"{what} began before the wait() of the handle that finalize_backward("
                "async_op=True) has returned; call wait() first, or reset_iter_state() to drop "
                "the step.",
            )

    def finish_reductions(self) -> None:
        self.abort_if_failed()
        with self.failure.recorded():
            self._queue.finish_all()
            self._settle_host()

    def _settle_host(self) -> None:
        """Wait for copies to and from host memory. Put gradients copied there into ``.grad``."""
        for group in self.groups():
            group.settle()

    # --- failures ---------------------------------------------------------------------

    def record_failure(self) -> None:
        """Record that a backward raised. Communicate nothing: other ranks may not have failed."""
        # The mark comes first: the next step then calls abort() even if this method is interrupted.
        self.failure.marks.append("raised")
        self.failure.backward_call = None
        for group in self.groups():
            group.install_sharded()

    def check_between_steps(self, unit: Unit, caller: str) -> None:
        """Raise if a forward or backward of the model runs. Clean up a step that has failed."""
        self.abort_if_failed()
        if not self.is_idle:
            raise RuntimeError(
                f"{caller} was called inside the forward or backward of unit {unit.label!r}; call "
                "it between steps, after reset_iter_state() on the root if a step was interrupted. "
                "A forward may read parameters of another unit that has unshard_on_access=True."
            )

    def abort_if_failed(self) -> bool:
        """Clean up if the last step failed. Return whether it did."""
        run = self.backward
        is_elsewhere = run is not None and graph_task_id() != run.graph_task
        if is_elsewhere and self.failure.has_backward_returned():
            self.record_failure()  # the backward has raised, and no callback has recorded it yet
        has_failed = bool(self.failure.marks)
        if has_failed:
            self.abort()
        return has_failed

    def abort(self, *, keeps_window: bool = False) -> None:
        """Reset every unit to idle: resharded, no collective in flight, no window open.

        The gradients of all units are dropped if a backward or a reduction has failed, if a
        reduction is in flight, or if a window is open: some gradients are missing then. With
        ``keeps_window``, reductions in flight are finished, and an open window stays open and keeps
        its gradients, unless a backward or a reduction has failed.
        """
        pending = (group.gradients for group in self.groups())
        is_void = bool(self.failure.marks)
        if keeps_window and not is_void:
            with self.failure.recorded():
                self._queue.finish_all()
        else:
            is_void |= any(grads.num_in_flight or grads.window.is_open for grads in pending)
        if is_void:
            # ``failure.clear()`` at the end removes this mark. If this method is interrupted, the
            # mark stays, and the next use aborts again.
            self.failure.marks.append("aborted")
            self.failure.num_voided += 1
        if self.backward is not None:
            self.backward.ends.clear()
        self._passes = []
        self.failure.backward_call = None
        self._prefetcher.drop_unused()
        self.schedule.forget()
        self.retained.release()
        self._queue.abandon()
        if self.finalization is not None:
            self.finalization.settle()
        for unit in self.units():
            unit.step.reset()
        for group in self.groups():
            group.reshard()
            group.gradients.abandon(is_void=is_void)
        for _, grads in buckets_in(self.units()):
            grads.show()
        self._settle_host()
        self.forward = self.backward = None
        self.failure.clear()


def _check_finds_parameters(unit: Unit) -> None:
    """Raise if a pipeline schedule splits this backward, and would miss gradients of ``unit``.

    The schedule calls ``unshard()`` on the unit. Then it looks in the graph for the parameters that
    the modules of the unit hold. If the forward has resharded the unit, the modules hold shards.
    The schedule does not find these in the graph, and writes no gradients.
    """
    is_split = not unit.settings.sync.reduces and keeps_graph()
    if is_split and not unit.group.is_manually_unsharded:
        raise RuntimeError(
            f"unit {unit.label!r} would get no gradients from this schedule, which computes those "
            "of parameters apart from those of inputs: the unit was resharded after its forward. "
            "Call fully_shard(..., reshard_after_forward=False) on all units of the stage, or "
            "set_reshard_after_forward(False)."
        )
