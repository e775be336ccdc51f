"""What happens at each moment of a step. Here schedule and parameter groups meet.

Every rank must issue the same collectives in the same order, also when ranks use different
parameters of a unit. Gathers follow the order of the modules. A unit is reduced once its gradients
are complete, and at the latest when an earlier unit begins its backward; a unit that contains
others is reduced after them, even if its own gradients were complete before. So the order depends
on which units ran, never on which of their parameters got a gradient.

The host waits for copies between its memory and the device at the end of a backward, unless more
backwards of the same window follow; at the end of an evaluation; when reductions are finished by
hand; and when an interrupted step is cleaned up. In between, shards and gradients in host memory
belong to the device.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from meshard._comm.communicator import Communicator, StepPhase
from meshard._comm.divergence import is_debugging
from meshard._comm.first_values import warn_if_different
from meshard._engine.owners import refuse_backward_optimizer
from meshard._engine.param_group import ParamGroup, ParamState
from meshard._engine.retained import RetainedUnits
from meshard._engine.schedule import ForwardCall, ForwardPass, Phase, Prefetcher, StepSchedule
from meshard._engine.unit import Unit, alive, buckets_in
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
    keeps_graph,
    next_node,
    queue_backward_callback,
    running_node,
    skip_dynamo,
    without_modes,
)
from meshard.policies import GradientSync

_NOT_DISTRIBUTED = (
    "a module of fully_shard or replicate was used inside torch.distributed.autograd.context(). "
    "The backward() there does not reduce its gradients, nor put them into .grad; run the module "
    "and loss.backward() outside of the context."
)
Finalized = list[weakref.ref[Unit]]


_NOT_COMPILED = (
    "modules of fully_shard and replicate do not work under compiled autograd, which would leave "
    "gradients out of .grad; leave torch._dynamo.config.compiled_autograd off, and compile modules "
    "(module.compile()): their backwards are compiled too."
)


class RefusedError(RuntimeError):
    """A forward or backward was refused before it changed anything."""

    def __init__(self, lifecycle: Lifecycle, message: str) -> None:
        self.lifecycle = lifecycle
        super().__init__(message)


class OtherThreadError(RefusedError):
    """A second thread has come into a step; the step of the first goes on."""

    def __init__(self, lifecycle: Lifecycle, what: str) -> None:
        super().__init__(
            lifecycle,
            f"{what} while another thread runs a forward or backward of the same model, whose "
            "parameters are gathered and freed in between; let one thread at a time run it "
            "(threading.Lock), or give each thread a copy.deepcopy of the model.",
        )


@skip_dynamo
def _end_backward(lifecycle_ref: weakref.ref[Lifecycle]) -> None:
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
        lifecycle.interrupt = error  # Python ignores it here


class Lifecycle:
    """The steps of one root and all units inside it, which leave their present lifecycle."""

    def __init__(self, units: Sequence[Unit], comm: Communicator) -> None:
        self.phase = Phase.IDLE
        self.is_last_backward = True
        self.is_manual = False  # windows end in finalize_backward, not in the last backward
        self._is_due = False  # in that mode, a backward has run since
        self._is_split = False  # likewise, one that kept its graph: its gradients may come later
        # The units whose window a ``finalize_backward`` ends that was not waited for.
        self._finalized: Finalized | None = None
        # Not empty: a step began and was not ended. Appended to before what an interrupt may cut
        # off, cleared after it; shared with the parameter groups.
        self.failures: list[object] = []
        # The call of the backward that runs, if any; likewise shared.
        self._backward_calls: list[BackwardCall] = []
        self.interrupt: BaseException | None = None  # that abort is still to raise
        self._ends: list[weakref.ref[Any]] = []  # to the callback at the end of the backward
        self.schedule = StepSchedule()
        self.retained = RetainedUnits()
        self.usual_divide_factor: float | None = None  # of units that have none of the user's
        # Called before each reduction over replicas: see ``meshard.uneven_batches``.
        self.before_reduction: Callable[[], None] | None = None
        self._units = [weakref.ref(unit) for unit in units]  # in module order, outermost first
        # The forwards that have begun and not ended, outermost first.
        self.running: list[tuple[Unit, ForwardCall]] = []
        self._num_backwards = 0
        self._has_compared = is_debugging()  # the values that ranks brought; fully_shard then has
        self._graph_task = -1  # the autograd run in which the present backward began
        self._thread = 0  # likewise, its thread
        self._has_nested = False  # another autograd run began inside it
        self._accumulates = True  # it adds to .grad, as torch.autograd.grad does not
        self._keeps_graph = False  # another backward may follow through its graph
        self._reached: list[ForwardPass] = []  # the passes whose backward it has begun
        self._passes: list[weakref.ref[ForwardPass]] = []  # with a graph that this rank keeps
        self._prefetcher = Prefetcher(self._units)
        self._queue = ReduceQueue(comm)
        for number, unit in enumerate(units):
            unit.number, unit.lifecycle = number, self
            unit.reduced_in = -1
            unit.group.storage.label = unit.label
            unit.group.failures = self.failures
            unit.group.backward_calls = self._backward_calls
        self.use(comm)

    def use(self, comm: Communicator) -> None:
        """Communicate through ``comm`` from now on. No collective may be in flight."""
        self._queue.finish_all()
        self.comm, self._queue = comm, ReduceQueue(comm)
        for unit in self.units():
            unit.group.storage.comm = comm.with_custom(unit.settings.comm)

    def units(self) -> list[Unit]:
        return alive(self._units)

    def groups(self) -> list[ParamGroup]:
        return [unit.group for unit in self.units()]

    # --- forward ----------------------------------------------------------------------

    def pre_forward(self, unit: Unit) -> ForwardCall | None:
        """Unshard ``unit``, one of whose modules is about to run. None: in a recomputation."""
        self.abort_if_failed()
        if self.phase is Phase.IDLE:
            self._refuse_unless_waited("a forward")
            self._refuse_other_reductions()
            self.phase = Phase.FORWARD  # first: a second thread, and an interrupt, may come here
            self.retained.begin_forward()
            self.comm.release_cached_memory(keep_for=StepPhase.FORWARD)  # only a backward needs it
            self.schedule.begin_forward(with_graph=torch.is_grad_enabled())
            if torch.is_grad_enabled():
                passes = (ref for ref in self._passes if ref() is not None)
                self._passes = [*passes, weakref.ref(self.schedule.current)]
        call = None
        in_forward, with_graph = self.phase is Phase.FORWARD, torch.is_grad_enabled()
        if in_forward:
            call = self.schedule.enter(unit.number, with_graph=with_graph, node=next_node())
            self.running.append((unit, call))
        group = unit.group
        if not group.params:
            return call
        if not in_forward and group.state is ParamState.SHARDED:
            self._end_backwards_after(running_node())
        up_next: list[Unit] = []  # in a recomputation: backward prefetches what follows
        is_manual = in_forward and group.is_manually_unsharded
        # Of a unit of many modules, the others find what the first of this pass has installed.
        is_first = is_manual or call is None or call.is_first
        is_installed = not is_first and group.state is ParamState.INSTALLED
        if in_forward and not is_installed:
            voids_graphs = unit.reshards_after_forward and not unit.step.awaits_gradients
            group.forget_stale(voids_graphs=voids_graphs)
        if in_forward:
            up_next = self._prefetcher.after_entry(unit, self.schedule)
        keeps_shard = with_graph and unit.reshards_after_forward
        self._prefetcher.unshard(unit, up_next, in_forward=in_forward, keep_shard=keeps_shard)
        group.install_unsharded(read_flags=in_forward and not is_installed)
        if is_manual and not unit.reshards_after_forward:  # it lasts until reshard()
            group.finish_manual_unshard(group.start_manual_unshard())
        if in_forward and with_graph:
            unit.step.last_pass = self.schedule.current
        if group.num_trainable:
            unit.step.may_run_again = not with_graph
            unit.step.awaits_gradients |= with_graph
        return call

    def _refuse_other_reductions(self) -> None:
        """Raise if something of torch's would take the gradients of the forward that begins."""
        if torch.is_grad_enabled() and is_in_distributed_autograd():
            raise RefusedError(self, _NOT_DISTRIBUTED)
        if not has_backward_optimizers():
            return
        refused = functools.partial(RefusedError, self)
        for group in self.groups():
            for param in group.params:
                name = f"{param.fqn!r} of unit {group.label!r}"
                refuse_backward_optimizer(name, param.sharded, refused)

    def post_forward(self, unit: Unit, module: nn.Module, *, failed: bool) -> ForwardCall | None:
        """Reshard ``unit`` if its policy says so: one of its modules has run, or raised."""
        group = unit.group
        if self.phase is Phase.BACKWARD:
            # A recomputation; checkpointing may stop one by an exception.
            self.check_recomputes(unit)
            if not unit.step.is_in_backward:
                group.install_sharded()
            return self.schedule.present.last_call.get(unit.number)
        call = None
        if self.running and self.running[-1][0] is unit:
            call = self.running.pop()[1]
            self.schedule.exit(call)
        if self._runs(unit):
            return call  # a module that called itself
        unit.step.modules_run.add(id(module))
        have_all_run = len(unit.step.modules_run) == len(unit.modules)
        if failed or (have_all_run and unit.reshards_after_forward):
            group.reshard(keep_post_forward=not failed)
        elif not self.running:
            unit.distrust_leftovers()
        if not self.running:
            self._end_forward(failed=failed)
        return call

    def check_recomputes(self, unit: Unit) -> None:
        """Raise unless the backward that runs is that of this thread: it computes forward again."""
        if graph_task_id() < 0:
            raise OtherThreadError(self, f"a forward of unit {unit.label!r} ran")

    def is_inside(self, unit: Unit) -> bool:
        """Whether a forward of ``unit`` is running, or is computed again."""
        if self.phase is Phase.BACKWARD:
            return unit.group.state is ParamState.INSTALLED
        return self._runs(unit)

    def _runs(self, unit: Unit) -> bool:
        return bool(self.running) and any(other is unit for other, _ in self.running)

    def _end_forward(self, *, failed: bool) -> None:
        if failed:
            self.abort()
            return
        self.phase = Phase.IDLE
        self._prefetcher.drop_unused()
        if not torch.is_grad_enabled():
            self._settle_host()  # after an evaluation the user may edit shards
        for unit in self.units():
            if unit.step.modules_run:
                has_graph = torch.is_grad_enabled() and unit.gradients.bucket is None
                if unit.reshards_after_forward:
                    # Of several modules, not all have run; or the user has called unshard() since.
                    unit.group.reshard(keep_post_forward=True)
                elif has_graph:
                    unit.group.keep_installed()
                else:  # after an evaluation the user may edit parameters, or build an optimizer
                    unit.group.install_sharded()
                unit.step.modules_run.clear()

    # --- backward ---------------------------------------------------------------------

    @property
    def _ends_window(self) -> bool:
        """Whether the backward that runs ends the window of units that it reduces fully."""
        return self.is_last_backward and not self.is_manual

    @property
    def backward_number(self) -> int:
        """The number of the backward that runs, or of the next one."""
        return self._num_backwards + (self.phase is not Phase.BACKWARD)

    def _begin_backward(self, first: Unit, early: int | None = None) -> None:
        """Begin a backward, unless it has begun.

        ``first`` is the unit that it has reached; ``early``, the parameter of it whose gradient is
        there already.
        """
        self.abort_if_failed()
        if self.phase is Phase.BACKWARD:
            if graph_task_id() != self._graph_task:
                self._check_nested()
            return
        self._refuse_unless_waited("a backward")
        if is_in_compiled_autograd():
            raise RefusedError(self, _NOT_COMPILED)
        if is_distributed_backward():
            warnings.warn(_NOT_DISTRIBUTED, stacklevel=2)  # torch drops the text of the error
            raise RuntimeError(_NOT_DISTRIBUTED)
        self.failures.append("begun")  # until its end is sure to be noticed
        self.phase = Phase.BACKWARD
        self._thread = threading.get_ident()
        self._num_backwards += 1
        self._is_due = self.is_manual
        self._keeps_graph = keeps_graph()
        self._is_split |= self.is_manual and self._keeps_graph
        self._reached = []
        self._accumulates = early is not None or self._will_accumulate(first)
        self._graph_task, self._has_nested = graph_task_id(), False
        self._backward_calls[:] = [BackwardCall()]
        self._queue.begin_backward()
        patch_new_optimizers()
        # Autograd drops its callbacks without calling them when a backward raises. That is recorded
        # by a method of C, which no interrupt can cut off; only then modules get shards again.
        end, me = functools.partial(_end_backward, weakref.ref(self)), weakref.ref(self)
        queue_backward_callback(end)
        for unit, grads in buckets_in(self.units()):
            grads.hide(early if unit is first else None)
            unit.gradients.begin_backward(unit.settings)
        self.retained.begin_backward()
        self._ends = [
            weakref.ref(end, functools.partial(_backward_raised, me)),
            weakref.ref(end, self.failures.append),
        ]
        self.failures.clear()  # last: this frame holds ``end``, also in a traceback

    def _will_accumulate(self, first: Unit) -> bool:
        """Whether this autograd run adds to ``.grad`` of a parameter, if it does so at all."""
        units = dict.fromkeys((first, *reversed(self.units())))
        return accumulates_any(param.unsharded for unit in units for param in unit.params)

    def _check_nested(self) -> None:
        """Record another autograd run inside the backward, as that of a reentrant checkpoint."""
        # On a device all backwards share autograd's thread.
        if threading.get_ident() != self._thread and self.comm.waits_block_host:
            raise OtherThreadError(self, "a backward ran")
        self._has_nested = True

    def pre_backward(
        self, unit: Unit, of: ForwardPass, call: ForwardCall, gradient: torch.Tensor
    ) -> torch.Tensor | None:
        """Unshard ``unit``: the first gradient of one of its outputs is there.

        Returns what autograd uses instead of it; None: the gradient itself.
        """
        group = unit.group
        if group.is_summoned:
            raise RuntimeError(
                f"a backward reached unit {unit.label!r} inside {group.summoned_by.caller}, from a "
                "forward made before it; run that backward before, or after."
            )
        self._begin_backward(unit)
        self._reach(of)
        self._begin_skipped(of, lambda other: other.exit_position > call.exit_position)
        self._begin_backward_of(unit, of, call)
        if not group.params:
            return None
        replacement = None
        if unit.settings.unshard_in_backward:
            group.install_unsharded(read_flags=False)  # checkpointing may run forward again
            replacement = self.retained.on_backward(unit, gradient)
        if unit.step.arrived and unit.step.has_all(group.num_trainable):
            self._on_complete_gradients(unit)  # they were complete in a later call
        return replacement

    def _reach(self, of: ForwardPass) -> None:
        """Record that this backward has come to a pass, and so is through with later ones."""
        if of in self._reached:
            return
        for later in self._ended_passes():
            self._end_pass(later)
        of.open(self._num_backwards)
        self._reached.append(of)
        # An earlier backward may have taken the gradients of units that this one comes to again.
        for call in of.exits if self._accumulates else ():
            unit = self._units[call.unit]()
            if unit is not None and call.has_graph:
                unit.step.awaits_gradients |= unit.group.num_trainable > 0

    def _end_pass(self, of: ForwardPass) -> None:
        """Complete the units of a pass, in the order in which other ranks have reduced them.

        These may have had all gradients of a unit earlier than this rank.
        """
        self._begin_skipped(of, lambda _: True)
        self._complete_over(of, lambda _: True)

    def _ended_passes(self) -> list[ForwardPass]:
        """Return the reached passes, without one whose forward runs around this backward."""
        return [of for of in self._reached if not self.running or of is not self.schedule.current]

    def _begin_backward_of(self, unit: Unit, of: ForwardPass, call: ForwardCall) -> None:
        """Complete the units whose backward is over, and unshard ``unit`` and what comes next."""
        has_begun = call.begun_in == self._num_backwards  # by another of its outputs
        call.begun_in = self._num_backwards
        self._complete_over(of, lambda first: first.entered > call.exited, but=unit)
        self.schedule.in_backward = unit.step.in_pass = of
        unit.step.in_call = call
        if not unit.params:
            return
        if not unit.step.is_in_backward:
            unit.step.is_in_backward = True
            unit.step.awaits_gradients |= unit.group.num_trainable > 0
        if unit.settings.unshard_in_backward:
            # Once: ranks may use different numbers of outputs.
            up_next = [] if has_begun else self._prefetcher.after_backward_of(unit, of, call)
            self._prefetcher.unshard(unit, up_next, in_forward=False, keep_shard=False)

    def _begin_skipped(self, of: ForwardPass, is_next: Callable[[ForwardCall], bool]) -> None:
        """Begin the backwards that this rank has left out: other ranks gather for theirs.

        So a unit that the loss of one rank does not use (an auxiliary head, a dropped layer) issues
        the same collectives on all ranks. Calls of a run that accumulates nothing are left out on
        all ranks alike.
        """
        for call in StepSchedule.pop_skipped(of, is_next) if self._accumulates else ():
            unit = self._units[call.unit]()
            if unit is None or not unit.params or self._runs(unit):
                continue
            if call.is_watched or unit.group.num_trainable:
                self._begin_backward_of(unit, of, call)

    def _complete_over(
        self, of: ForwardPass, is_over: Callable[[ForwardCall], bool], *, but: Unit | None = None
    ) -> None:
        """Complete the units of a pass whose backward is over."""
        for number in StepSchedule.pop_over(of, is_over):
            other = self._units[number]()
            if other is not None and other is not but:
                self._complete(other, of)

    def _end_backwards_after(self, node: int) -> None:
        """Complete what is over when ``node`` runs: a recomputation in it is about to gather.

        A rank that used all parameters of a unit has reduced it at its last gradient. One that left
        a parameter out must not gather first.
        """
        of = self.schedule.in_backward
        if of is None:
            return

        def is_over(first: ForwardCall) -> bool:
            if first.began_at <= node:
                return False
            if first.has_graph:
                return True
            # It ran in a reentrant checkpoint, perhaps the one that is recomputed now.
            unit = self._units[first.unit]()
            return unit is not None and unit.step.is_in_backward and unit.step.in_call is first

        self._begin_skipped(of, lambda call: call.began_at > node)
        self._complete_over(of, is_over)

    def gradient_arrived(self, unit: Unit, index: int) -> None:
        """Reduce ``unit`` if the gradient of parameter ``index`` is its last one."""
        if self.phase is not Phase.BACKWARD or self.failures or self._is_cut_off():
            self._begin_backward(unit, index)
        self._accumulates = True
        step = unit.step
        step.awaits_gradients = True
        step.arrived.add(index)
        if graph_task_id() != self._graph_task:
            self._check_nested()
        if step.has_all(unit.group.num_trainable):
            # Not resharded yet: a node may have saved a weight and not contribute to its gradient.
            self._on_complete_gradients(unit)
            return
        if unit.gradients.bucket is not None:
            unit.gradients.pack_arrived(index)
        if self._queue.has_sent_input:
            self._queue.free_input_if_sent()

    def gradient_joins(self, unit: Unit) -> None:
        """Record a gradient from outside of the unit's forward; it is reduced at the very end."""
        self._begin_backward(unit)
        self._accumulates = unit.step.awaits_gradients = True

    def _on_complete_gradients(self, unit: Unit) -> None:
        # A reentrant checkpoint runs a backward of its own inside this one. A gradient that arrives
        # there is a part: other parts come from outside of the checkpoint, or from the next one.
        if not self._has_nested and not self.schedule.runs_before(unit.step.in_pass, unit.number):
            unit.step.is_ready = True
            self._reduce_if_ready(unit)

    def _complete(self, unit: Unit, of: ForwardPass | None = None) -> None:
        """Reshard and reduce a unit of which nothing is left to run, of this pass or of all."""
        if self._runs(unit):
            return  # a backward inside the forward of this unit
        unit.step.end_backward()
        unit.group.install_sharded()
        if unit.settings.reshard_after_backward and not unit.step.is_retained:
            unit.group.reshard()
        if of is not None and self.schedule.runs_before(of, unit.number):
            return
        if not unit.step.awaits_gradients:
            return
        if unit.step.is_wanted_unsharded and not unit.step.arrived:
            _check_finds_parameters(unit)
        if self._accumulates or unit.settings.sync is GradientSync.NONE:
            unit.step.is_ready = True
            self._reduce_if_ready(unit, is_at_end=of is None)
        elif not self._keeps_graph:
            unit.step.record_taken()

    def _reduce_if_ready(self, unit: Unit, *, is_at_end: bool = False) -> None:
        if unit.step.awaits_gradients and not unit.step.is_ready:
            return
        if not is_at_end and (unit.has_open_children or self._may_begin_inside(unit)):
            return
        if unit.step.is_ready:  # otherwise it has nothing to train
            unit.step.record_taken()
            if unit.settings.sync is GradientSync.NONE:
                self._queue.accumulate(unit.gradients, unit.settings)
            else:
                is_full = unit.settings.sync is GradientSync.FULL
                ends_window = is_full and self._ends_window
                self._start_reduction(unit, over_replicas=is_full, ends_window=ends_window)
        parent = unit.parent() if unit.parent is not None else None
        if parent is not None:
            self._reduce_if_ready(parent)

    def _may_begin_inside(self, unit: Unit) -> bool:
        """Whether the backward of a unit inside ``unit`` is to come.

        It may be frozen, and left out by this rank only: other ranks gather for it first.
        """
        of, call = unit.step.in_pass, unit.step.in_call
        if not unit.children or of is None or call is None:
            return False
        return StepSchedule.may_begin_inside(of, call, self._num_backwards)

    def _start_reduction(self, unit: Unit, *, over_replicas: bool, ends_window: bool) -> None:
        if over_replicas and self.before_reduction is not None:
            self.before_reduction()
        on_reduced = None
        if unit.on_reduced:
            self._queue.finish_of(unit.gradients)
            if unit.reduced_in == self._num_backwards:
                raise RuntimeError(
                    f"unit {unit.label!r} has got a gradient after its optimizer has stepped it in "
                    "this backward: its parameters take part in something that autograd runs "
                    "later. Step it in the ordinary way (detach() of what overlap_optimizer has "
                    "returned)."
                )
            on_reduced = functools.partial(self.end_window, unit) if ends_window else None
        if over_replicas and not self._has_compared:
            self._compare_first_values()
        self._queue.start(
            unit.gradients,
            unit.settings,
            over_replicas=over_replicas,
            usual_factor=self.usual_divide_factor,
            on_reduced=on_reduced,
        )

    def _compare_first_values(self) -> None:
        """Warn if the ranks brought different values. Called where all ranks are in step.

        **Collective:** the meshes of all sharded units; outside of what the ledger lists.
        """
        self._has_compared = True
        groups = [group for group in self.groups() if group.params]
        sharded = [group for group in groups if group.gradients.bucket is None]
        brought = [(group.spec.mesh_info, group.take_first_values()) for group in sharded]
        without_modes(warn_if_different, brought)

    def end_window(self, unit: Unit) -> None:
        """Call the subscribers of a unit, once: its gradient is published."""
        if unit.on_reduced and unit.reduced_in != self._num_backwards:
            unit.reduced_in = self._num_backwards
            for subscriber in tuple(unit.on_reduced):
                subscriber(unit)

    def finish_backward(self) -> None:
        units = self.units()
        ended = self._ended_passes()
        for of in ended:
            self._end_pass(of)
        to_come = self._units_to_come(units, ended)
        self.schedule.end_backward(ends_passes=self._accumulates or not self._keeps_graph)
        self.retained.end_backward()
        for unit in reversed(units):  # units inside before the unit around them
            if unit.number not in to_come:
                self._complete(unit)
        full = [
            unit
            for unit in reversed(units if self._accumulates else ())
            if unit.settings.sync is GradientSync.FULL
            and not (unit.number in to_come and unit.step.awaits_gradients)
        ]
        for unit in full if not self.is_manual else ():
            # It may have got nothing today, and hold gradients of earlier microbatches.
            self._flush(unit, ends_window=self._ends_window)
        if self._ends_window and self._accumulates:
            self._queue.finish_all()
            for unit in full:
                self.end_window(unit)
            self._settle_host()
        self._prefetcher.drop_unused()
        for _, grads in buckets_in(units):
            grads.show()
        self._reached = []
        self.phase = Phase.FORWARD if self.running else Phase.IDLE  # it ran inside a forward
        self._backward_calls.clear()
        self._ends = []  # last: until here the backward counts as failed if it does not go on

    def _units_to_come(self, units: Sequence[Unit], ended: Sequence[ForwardPass]) -> set[int]:
        """Return the units whose backward comes later, as this one has reached other passes only.

        So a loss may run a part of the model again, chunk by chunk, with a backward in each. The
        answer is the same on all ranks: it does not depend on which graphs a rank keeps alive.
        """
        for of in ended:
            of.is_spent |= not self._keeps_graph
        if not self._reached:
            return set()
        reached = set[int]().union(*(of.units for of in ended))
        return {
            unit.number
            for unit in units
            if (last := unit.step.last_pass) is not None
            and not last.is_spent
            and unit.number not in reached
            and not unit.step.is_in_backward
            and not unit.step.arrived
        }

    def awaits_backward(self, unit: Unit) -> bool:
        """Whether a forward of ``unit`` has a graph, on this rank, whose backward may come."""
        return unit.step.awaits_gradients or any(
            unit.number in of.units and not of.is_spent for of in alive(self._passes)
        )

    # --- outside of a backward --------------------------------------------------------

    def finish_split_backward(self) -> None:
        """Take the gradients that a pipeline schedule wrote outside of any backward, and finish.

        Taken where others were accumulated, which all ranks agree on; they may have written
        different ones.
        """
        self.abort_if_failed()
        with self._recorded_failure():
            self._take_split_gradients()
            self._accumulates = True  # whatever the last run of autograd did
            self.finish_backward()

    def _take_split_gradients(self) -> None:
        for unit in self.units():
            if unit.gradients.is_unreduced:
                self._queue.accumulate(unit.gradients, unit.settings)

    def start_flush(self, units: Sequence[Unit]) -> None:
        """Start reducing fully what is pending in ``units``, which ends their window."""
        self.abort_if_failed()
        with self._recorded_failure():
            for unit in reversed(units):
                self._flush(unit, ends_window=True)

    def finish_flush(self, units: Sequence[Unit]) -> None:
        self.finish_reductions()
        for unit in reversed(units):
            self.end_window(unit)

    def _flush(self, unit: Unit, *, ends_window: bool) -> None:
        self._queue.finish_partials_of(unit.gradients)
        if unit.gradients.is_pending:
            self._start_reduction(unit, over_replicas=True, ends_window=ends_window)
        unit.gradients.window.close()

    def set_manual(self, enabled: bool) -> None:
        """Choose whether ``finalize_backward`` ends windows, or the last backward."""
        self.abort_if_failed()
        if enabled is self.is_manual:
            return
        is_due = self._is_due or self._finalized is not None
        if is_due or graph_task_id() >= 0 or self.before_reduction is not None:
            raise RuntimeError(
                "set_manual_backward_finalization cannot change the mode during a backward, "
                "between a backward and its finalize_backward() (or reset_iter_state()), or in a "
                "loop over uneven_batches; change it before the first forward of a step."
            )
        self.is_manual = enabled

    def start_finalization(self) -> Finalized | None:
        """Reshard, and start reducing what is pending, as far as the settings say.

        None: no backward has run yet.
        """
        units = self.units()
        self.check_between_steps(units[0], "finalize_backward")
        self._refuse_unless_waited("another finalize_backward")
        if graph_task_id() >= 0:
            raise RuntimeError("finalize_backward was called inside a backward; call it after.")
        if not self.is_manual:
            raise RuntimeError(
                "finalize_backward needs set_manual_backward_finalization(True) before the "
                "backward; without it the last backward has reduced everything. "
                "meshard.finalize_gradients(module) reduces what is pending in either mode."
            )
        if not self._num_backwards:
            return None
        if self._is_split:
            with self._recorded_failure():
                self._take_split_gradients()
        for unit in units:
            # Not one whose backward is to come.
            is_over = not unit.step.awaits_gradients and not unit.step.is_retained
            if is_over and unit.settings.reshard_after_backward:
                unit.group.reshard()
        full = [unit for unit in units if unit.settings.sync is GradientSync.FULL]
        self.start_flush(full)
        self._finalized = [weakref.ref(unit) for unit in full]
        return self._finalized

    def finish_finalization(self, started: Finalized) -> None:
        """Finish the reductions that were started, and end the windows."""
        self.abort_if_failed()
        if self._finalized is not started:
            raise RuntimeError(
                "this handle of finalize_backward is not valid any more: reset_iter_state() was "
                "called, or a step failed, which has dropped the gradients."
            )
        self.finish_flush(alive(started))
        self._end_finalization()

    def _end_finalization(self) -> None:
        self._finalized, self._is_due, self._is_split = None, False, False

    def _refuse_unless_waited(self, what: str) -> None:
        if self._finalized is not None:
            raise RefusedError(
                self,
                f"{what} began before the wait() of the handle that finalize_backward("
                "async_op=True) has returned; call wait() first, or reset_iter_state() to drop "
                "the step.",
            )

    def finish_reductions(self) -> None:
        self.abort_if_failed()
        with self._recorded_failure():
            self._queue.finish_all()
            self._settle_host()

    def _settle_host(self) -> None:
        """Wait for copies to and from host memory, and publish their gradients."""
        for group in self.groups():
            if group.storage.host_copies is not None:
                group.settle()

    # --- failures ---------------------------------------------------------------------

    @contextlib.contextmanager
    def _recorded_failure(self) -> Iterator[None]:
        """Record if reductions outside of a backward were cut off: some gradients are lost."""
        try:
            yield
        except BaseException:
            self.failures.append("cut off")
            raise

    def record_failure(self) -> None:
        """Record that a backward raised. The exception is propagating: do not communicate."""
        self.failures.append("raised")  # first; the next step begins with abort()
        self._backward_calls.clear()
        self.running.clear()
        for group in self.groups():
            group.install_sharded()

    def check_between_steps(self, unit: Unit, caller: str) -> None:
        """Raise if a module runs, forward or backward. Cleans up a step that failed."""
        self.abort_if_failed()
        if self.phase is not Phase.IDLE:
            raise RuntimeError(
                f"{caller} was called inside the forward or backward of unit {unit.label!r}; call "
                "it between steps, after reset_iter_state() on the root if a step was interrupted. "
                "A forward may read parameters of another unit that has unshard_on_access=True."
            )

    def _is_cut_off(self) -> bool:
        """Whether the present backward has raised, and autograd has not dropped its callbacks yet.

        The thread of a device may do that after the exception has reached the user.
        """
        if self.phase is not Phase.BACKWARD or graph_task_id() == self._graph_task:
            return False
        return any(call.has_returned() for call in self._backward_calls)

    def abort_if_failed(self) -> None:
        if self._is_cut_off():
            self.record_failure()
        if self.failures:
            self.abort()

    def abort(self) -> None:
        """Reset every unit to idle: resharded, no collective in flight, no window open.

        Gradients of an interrupted window are dropped, because its microbatches are not all there.
        Gradients of a window that had ended stay, unless a backward failed.
        """
        pending = (group.gradients for group in self.groups())
        is_void = bool(self.failures) or any(g.num_in_flight or g.window.is_open for g in pending)
        if is_void:
            self.failures.append("aborted")  # until the end: this may be interrupted too
        self._ends = []
        self._passes, self._reached = [], []
        self._backward_calls.clear()
        self._prefetcher.drop_unused()
        self.schedule.forget()
        self.retained.release()
        self._queue.abandon()
        self._end_finalization()
        for unit in self.units():
            unit.step.reset()
        for group in self.groups():
            group.reshard()
            group.gradients.abandon(is_void=is_void)
        for _, grads in buckets_in(self.units()):
            grads.show()
        self._settle_host()
        self.running.clear()
        self.phase = Phase.IDLE
        self.failures.clear()
        interrupt, self.interrupt = self.interrupt, None
        if interrupt is not None:
            raise interrupt


def _check_finds_parameters(unit: Unit) -> None:
    """Raise if a pipeline schedule splits this backward, and would miss gradients of ``unit``.

    It looks for the parameters of the graph on the modules, where shards are once a forward has
    ended the schedule's ``unshard()``, and writes no gradient of what it does not find.
    """
    is_split = unit.settings.sync is GradientSync.NONE and keeps_graph()
    if is_split and not unit.group.is_manually_unsharded:
        raise RuntimeError(
            f"unit {unit.label!r} would get no gradients from this schedule, which computes those "
            "of parameters apart from those of inputs: the unit was resharded after its forward. "
            "Call fully_shard(..., reshard_after_forward=False) on all units of the stage, or "
            "set_reshard_after_forward(False)."
        )
