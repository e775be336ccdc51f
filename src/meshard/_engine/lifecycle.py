"""The actions of a training step. Hooks on modules and on autograd call these methods.

Every rank must issue the same collectives in the same order, even if ranks use different parameters
of a unit. A forward gathers units as their modules run, and records them. Its backward executes the
program of that record (``program.py``): it gathers a unit at BEGIN, and reshards and reduces it at
OVER, even if this rank does not use the unit. The last gradient of a unit triggers nothing, except
in a replicated module that is the only unit of its root.

A *window* is all microbatches of one optimizer step.

If shards live in host memory, they are copied to the device, and gradients are copied back. The
lifecycle waits for these copies at the end of the last backward of a window, at the end of an
evaluation, when a call of the user finishes reductions (``finalize_gradients``), and when it cleans
up an interrupted step. At any other time, code on the host must wait for copies itself before it
touches shards or gradients (``ParamGroup.settle``, ``ParamGroup.finish_copies``).
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from meshard._comm import spans
from meshard._comm.communicator import Communicator, StepPhase
from meshard._comm.first_values import compare_first_values
from meshard._communicators import make_communicator
from meshard._engine.param_group import (
    Lease,
    ParamGroup,
    ParamState,
)
from meshard._engine.program import Call, Event, Pass, Recorder
from meshard._engine.step_state import BackwardRun, ManualFinalization
from meshard._engine.unit import Root, Unit, alive
from meshard._gradients.buckets import BucketedGradients
from meshard._gradients.published import unrecorded
from meshard._gradients.reduce_queue import ReduceQueue
from meshard._torch.patches import patch_new_optimizers
from meshard._torch.private import (
    accumulates_any,
    calls_on_stack,
    graph_task_id,
    has_backward_optimizer,
    has_backward_optimizers,
    is_distributed_backward,
    is_in_compiled_autograd,
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
    "reduce its gradients; remove DistributedDataParallel: meshard.replicate does what it does."
)
_NOT_IN_BACKWARD = (
    "parameter {!r} of unit {!r} has _in_backward_optimizers: torch's _apply_optimizer_in_backward "
    "steps it before its gradient is reduced, or never. Build the model again without them, and "
    "call meshard.overlap_optimizer(module, SGD, lr=...) after fully_shard or replicate, which "
    "steps in backward too."
)
_NOT_COMPILED = (
    "modules of fully_shard and replicate do not work under compiled autograd, which would leave "
    "gradients out of .grad; leave torch._dynamo.config.compiled_autograd off, and compile modules "
    "(module.compile()): their backwards are compiled too."
)


# A pipeline schedule calls ``unshard()``, and later searches the graph for the modules' parameters.
_FINDS_NO_PARAMETERS = (
    "unit {!r} would get no gradients from this schedule, which computes those of parameters apart "
    "from those of inputs: the unit was resharded after its forward. Call fully_shard(..., "
    "reshard_after_forward=False) on all units of the stage, or set_reshard_after_forward(False)."
)
_WENT_ON = (
    "a backward inside the forward of unit {!r} has raised, and the forward went on; do not catch "
    "that error inside the forward, whose step is lost."
)
_Finalizing = list[weakref.ref[Unit]]


class OtherThreadError(RuntimeError):
    """Raised in a thread that uses a model while another thread runs it. The other step goes on."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} while another thread runs a forward or backward of the same model, whose "
            "parameters are gathered and freed in between; on several ranks let one thread "
            "call all models, because threads would take turns differently on each rank; on one "
            "rank let one at a time run it (threading.Lock), or give each a copy.deepcopy.",
        )


def _is_on_stack(unit: Unit, inside: Unit | None = None) -> bool:
    """Whether this thread runs ``unit``. A call of ``inside`` that just begins does not count."""
    return calls_on_stack(alive(unit.modules)) > (inside is unit)


@skip_dynamo
def _end_of_graph_task(lifecycle_ref: weakref.ref[Lifecycle]) -> None:
    lifecycle = lifecycle_ref()
    if lifecycle is not None and lifecycle.backward is not None:
        lifecycle.finish_backward(lifecycle.backward)


class Lifecycle:
    """The steps of one root and all units inside it.

    It is made at the first use of one of these units. Before that, while the user applies
    ``fully_shard`` to one layer after the other, each layer is a root and needs no lifecycle.
    """

    def __init__(self, root: Root) -> None:
        # The calls that have begun and not ended, outermost first. Recomputations do not count.
        self.running: list[tuple[Unit, Call]] = []
        self.backward: BackwardRun | None = None  # a backward may run inside a forward
        self.failure = root.failure  # shared with the parameter groups
        self.is_last_backward = True
        # Set by set_manual_backward_finalization(True): windows then end at ``finalize_backward``,
        # not at the last backward.
        self.finalization: ManualFinalization | None = None
        self.recorder = Recorder()
        self._units = root.units
        self._num_backwards = 0
        self._prefetched: list[Unit] = []
        devices = (group.spec.device for group in self.groups() if group.params)
        comm = make_communicator(next(devices, torch.device("cpu")))
        comm.root_names = root.names
        self._has_compared = False  # whether ranks have compared their initial weights
        self._queue = ReduceQueue(comm)
        self.use(comm)

    def use(self, comm: Communicator) -> None:
        """Finish the reductions in flight, and communicate through ``comm`` from now on."""
        with self.failure.recorded():
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
        """Whether neither a forward nor a backward runs."""
        return not self.running and self.backward is None

    @property
    def present_pass(self) -> Pass:
        """The pass that runs. A recomputation belongs to the pass whose backward runs."""
        run = self.backward
        return run.reached[-1] if run is not None and run.reached else self.recorder.current

    # --- forward ----------------------------------------------------------------------

    def begin_call(self, unit: Unit) -> Call | None:
        """Unshard ``unit``, because one of its modules is about to run.

        Returns the new call; None if checkpointing runs the forward again in a backward.
        """
        self._check_nests(unit)
        if self.backward is not None:
            self._recompute(self.backward, unit)
            return None
        with_graph, group = torch.is_grad_enabled(), unit.group
        if not self.running:
            self._begin_forward(unit)
        was_unsharded = group.leases & Lease.USER  # by the user
        if was_unsharded and unit.reshards_after_forward:
            unit.step.lost_unshard = True
            group.end_unshard(voids_graphs=not self.recorder.is_open(unit.number))
        call = self.recorder.enter(unit.number, node=next_node(), with_graph=with_graph)
        self.running.append((unit, call))
        if spans.recorder is not None:
            self._enter_phase("forward", unit)
        if len(unit.step.modules_run) >= len(unit.modules):
            unit.step.modules_run.clear()  # all have run, so the unit runs again
        if not group.params:
            return call
        # The first call in a pass looks for edits and reads requires_grad. Later calls skip this if
        # the unit is installed, unless unshard() has installed it.
        is_first = self.present_pass.calls[unit.number][0] is call
        if is_first or group.state is not ParamState.INSTALLED or group.leases & Lease.USER:
            group.drop_if_stale()
            group.read_flags()
        following = self._following(unit.settings.forward_prefetch, self.recorder.next_in_forward())
        keeps_shard = with_graph and unit.reshards_after_forward and not was_unsharded
        to_keep = unit.settings.post_forward_group if keeps_shard else None
        self._unshard(unit, Lease.RUNS, following, in_forward=True, post_forward_group=to_keep)
        unit.step.is_due |= with_graph and group.num_trainable > 0
        return call

    def _check_nests(self, unit: Unit) -> None:
        """Check that the calls around a new call of ``unit`` still run. Clean up if they do not."""
        outermost = self.running[0][0] if self.running else None
        if self.abort_if_failed():
            if outermost is not None and _is_on_stack(outermost, inside=unit):
                raise RuntimeError(_WENT_ON.format(outermost.label))
            outermost = None
        if self.backward is not None:
            return  # a recomputation
        if graph_task_id() >= 0:
            return  # in a reentrant checkpoint, perhaps in a device thread of autograd
        thread = threading.get_ident()
        if outermost is None:
            self.failure.thread = thread
            return
        if self.failure.thread != thread:
            raise OtherThreadError(f"a forward of unit {unit.label!r} began")
        # A KeyboardInterrupt may have cut off a forward, and only the stack shows that. Units
        # inside a root's forward do not look at the stack, which would cost too much.
        may_be_cut_off = outermost is unit or not outermost.is_root
        if may_be_cut_off and not _is_on_stack(outermost, inside=unit):
            self.abort()

    def _begin_forward(self, unit: Unit) -> None:
        self._refuse_unless_waited("a forward")
        self._refuse_other_reductions()
        self.comm.begin_phase(StepPhase.FORWARD)
        if self.recorder.begin(sum(group.num_steps for group in self.groups())):
            for group in self.groups():
                if group.leases & Lease.LATER:  # kept for a backward that has not come
                    group.release(Lease.LATER)

    def _refuse_other_reductions(self) -> None:
        """Raise if a feature of torch would take the gradients before meshard reduces them."""
        if any(map(is_reduced_by_ddp, alive(self.units()[0].modules))):
            raise RuntimeError(_NOT_IN_DDP)
        if not has_backward_optimizers():
            return
        for group in self.groups():
            for param in group.params:
                if has_backward_optimizer(param.sharded):
                    raise RuntimeError(_NOT_IN_BACKWARD.format(param.fqn, group.label))

    def end_call(
        self, unit: Unit, module: nn.Module, *, failed: bool, is_hidden: bool = False
    ) -> Call | None:
        """Record that ``module`` of ``unit`` ran or raised. Reshard the unit if its forward ended.

        ``is_hidden``: a backward may come, but no hook will report its beginning. Returns the call
        of the unit that this run of ``module`` belongs to. In a recomputation, it is always the
        last call of the unit in the recomputed pass.
        """
        if self.abort_if_failed():
            if not failed:
                raise RuntimeError(_WENT_ON.format(unit.label))
            return None
        if self.backward is not None:
            # A recomputation ends. ``failed`` is ignored: checkpointing may stop it early by an
            # exception.
            if spans.recorder is not None:
                self._enter_phase("backward", unit)
            calls = self.present_pass.calls.get(unit.number)
            if not calls:
                return None
            if calls[-1].reached_in != self.backward.number:  # its BEGIN comes later
                unit.group.install_sharded()
            return calls[-1]
        if not self._runs(unit):
            return None  # ``abort`` has ended the call
        while True:
            inner, call = self.running.pop()
            self.recorder.exit(call)
            if inner is unit:
                break
            # A KeyboardInterrupt has ended ``inner`` without a call of its hooks, and the forward
            # of ``unit`` has caught the interrupt.
            inner.group.release(Lease.RUNS, keep_post_forward=True)
        if spans.recorder is not None:
            self._enter_phase_around()
        unit.step.modules_run.add(id(module))
        if is_hidden:
            unit.group.leases |= Lease.HIDDEN
        is_last = len(unit.step.modules_run) >= len(unit.modules) and not self._runs(unit)
        if failed or (unit.reshards_after_forward and is_last):
            unit.group.release(Lease.RUNS, keep_post_forward=True)
        if not self.running:
            self._end_forward(failed=failed)
        return call

    def _runs(self, unit: Unit) -> bool:
        return bool(self.running) and any(running is unit for running, _ in self.running)

    def _end_forward(self, *, failed: bool) -> None:
        if failed:
            # An evaluation (grad is disabled) is not a microbatch: if it fails, the window goes on.
            self.abort(keeps_window=not torch.is_grad_enabled())
            return
        for unit in self.units():
            unit.step.modules_run.clear()
            group = unit.group
            if not group.leases & Lease.RUNS:
                continue
            if unit.reshards_after_forward:  # only some of its modules have run
                group.release(Lease.RUNS, keep_post_forward=True)
                continue
            if torch.is_grad_enabled() and not unit.gradients.is_replicated:
                group.keep()  # a loss may read the unsharded parameters
                group.release(Lease.RUNS)
            else:
                group.release(Lease.RUNS, keeps_copy=True)
                group.install_sharded()  # so that users edit the shards
            # If the copy was kept only by default, such as the root's, the next forward must not
            # reuse it. It may be stale, and look fresh: torch's foreach kernels, and edits through
            # .data, do not raise the versions of the shards.
            is_chosen = unit.settings.reshard_after_forward is not None
            if not is_chosen and unit.settings.reshard_after_backward:
                group.forget_version()
        self._drop_unused_gathers()
        if not torch.is_grad_enabled():  # after an evaluation the user may edit shards
            for group in self.groups():
                if not group.leases & Lease.USER:
                    group.install_sharded()
            self._settle_host()

    # Callers of the next two methods test ``spans.recorder`` first, which is faster than a call.

    def _enter_phase(self, phase: str, unit: Unit | None) -> None:
        """Record for a trace that a phase of ``unit`` begins; ``unit`` is None outside of units."""
        if spans.recorder is not None:  # another thread may have ended the trace since
            spans.recorder.enter(phase, "" if unit is None else unit.label, self.comm.clock)

    def _enter_phase_around(self) -> None:
        """Record for a trace that a forward or backward ends. A forward around it may go on."""
        if self.running:
            self._enter_phase("forward", self.running[-1][0])
        else:
            self._enter_phase("", None)

    # --- gathers ahead ----------------------------------------------------------------

    def _following(self, chosen: list[weakref.ref[Unit]], predicted: int | None) -> list[Unit]:
        """Return the units to gather next: those that the user chose, or else the predicted one."""
        if chosen:
            # Leave out units of other roots. Their gathers would be dropped when the forward or
            # backward of this root ends.
            return [each for each in alive(chosen) if each.root.lifecycle is self]
        following = None if predicted is None else self._units[predicted]()
        return [] if following is None else [following]

    def _unshard(
        self,
        unit: Unit,
        why: int,
        following: Sequence[Unit],
        *,
        in_forward: bool,
        post_forward_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Unshard ``unit``, which is about to compute, and start gathering ``following`` ahead."""
        group = unit.group
        if group.state is ParamState.SHARDED:
            self._start_unshard(unit, in_forward=in_forward)
            # This gather was not started ahead, so compute waits for it below. Start the next
            # gathers before that wait, so that they run meanwhile.
            self._gather_ahead(following, in_forward=in_forward)
            group.take(why, post_forward_group)
        else:
            group.take(why, post_forward_group)
            self._gather_ahead(following, in_forward=in_forward)
        group.void_graphs_of_older_steps()

    def _gather_ahead(self, units: Sequence[Unit], *, in_forward: bool) -> None:
        for head in units:
            for unit in (head, *head.siblings):  # a forward enters them together
                group = unit.group
                if unit.params and group.state is ParamState.SHARDED:
                    if in_forward:
                        group.drop_if_stale()
                    self._start_unshard(unit, in_forward=in_forward)
                    group.leases |= Lease.AHEAD
                    self._prefetched.append(unit)

    def start_for_user(self, unit: Unit) -> int:
        """Start gathering for the user's ``unshard()``: see ``ParamGroup.start_for_user``."""
        self.abort_if_cut_off()
        return unit.group.start_for_user()

    def _start_unshard(self, unit: Unit, *, in_forward: bool) -> None:
        is_freed_after = unit.settings.reshard_after_backward
        unit.group.start_unshard(only_for_backward=not in_forward and is_freed_after)

    def _drop_unused_gathers(self) -> None:
        """Drop the gathers that were started ahead but not used."""
        for unit in self._prefetched:
            if unit.group.leases & Lease.AHEAD:
                unit.group.release(Lease.AHEAD)
        self._prefetched.clear()

    # --- backward ---------------------------------------------------------------------

    @property
    def backward_number(self) -> int:
        """The number of the backward that runs, or of the next one."""
        return self._num_backwards + (self.backward is None)

    def on_output_gradient(self, unit: Unit, this: Pass, call: Call) -> None:
        """Begin the backward of a call of ``unit``: one of its outputs has got its gradient."""
        if unit.group.is_summoned:
            raise RuntimeError(
                f"a backward reached unit {unit.label!r} inside {unit.group.summoned_by.caller}, "
                "from a forward made before it; run that backward before entering that block, or "
                "after leaving it."
            )
        run = self._ensure_backward(unit)
        if spans.recorder is not None:
            self._enter_phase("backward", unit)
        if this not in run.reached:
            self._reach(run, this)
        self._advance(run, this, call.exit + 1)
        this.begin = min(this.begin, call.exit)
        self._begin(run, unit, this, call)

    def _reach(self, run: BackwardRun, this: Pass) -> None:
        """Begin the backward of a pass. First end the backward of the pass reached before."""
        for other in self._ended_passes(run.reached[-1:]):
            self._advance(run, other, 0)
        this.rewind()
        run.reached.append(this)
        # With retain_graph=True, an earlier backward may have gone through the graph of this pass
        # and reduced its units. The present backward brings new gradients for them.
        for call in this.exits if run.accumulates else ():
            unit = self._units[call.unit]()
            if unit is not None and call.has_graph and unit.group.num_trainable:
                unit.step.is_due = True

    def _ended_passes(self, passes: list[Pass]) -> list[Pass]:
        """Return ``passes``, except one whose forward still runs: it has called this backward."""
        return [each for each in passes if not self.running or each is not self.recorder.current]

    def _advance(self, run: BackwardRun, this: Pass, first: int) -> None:
        """Execute the program of a pass down to index ``first``."""
        while (event := this.next_event()) is not None:
            kind, call, index = event
            if index < first:
                return
            unit = self._units[call.unit]()
            if kind is Event.BEGIN:
                this.begin -= 1
                # Autograd leaves this call out on this rank. Gather the unit all the same, because
                # other ranks may gather it. Not under torch.autograd.grad (``accumulates`` is
                # False): there all ranks are expected to leave out the same calls.
                is_left_out = call.has_graph and call.reached_in != run.number
                if unit is not None and is_left_out and run.accumulates and not self._runs(unit):
                    self._begin(run, unit, this, call)
            else:
                this.over -= 1
                if unit is not None:
                    self._end(run, unit, this)

    def _begin(self, run: BackwardRun, unit: Unit, this: Pass, call: Call) -> None:
        """Execute BEGIN of ``call``: unshard the unit, and start gathering the next one."""
        has_begun = call.reached_in == run.number  # by another output of the call
        call.reached_in = run.number
        group = unit.group
        if not group.params:
            return
        # ``_reach`` does this too, but not under torch.autograd.grad. Suppose a backward with
        # retain_graph=True has reduced the unit, and autograd.grad(create_graph=True) then goes
        # through the same graph for a gradient penalty. The backward of the penalty may bring
        # gradients of the unit on some ranks only, but all ranks must reduce it.
        if not group.leases & Lease.BACKWARD and group.num_trainable:
            unit.step.is_due = True
        if not unit.settings.unshard_in_backward:
            return
        group.count_out_frozen()
        following = []
        if not has_begun:  # once per call: ranks may use different numbers of outputs
            chosen = unit.settings.backward_prefetch
            following = self._following(chosen, this.next_in_backward(call))
            if not chosen:
                following = [each for each in following if each.settings.unshard_in_backward]
        self._unshard(unit, Lease.BACKWARD, following, in_forward=False)

    def _end(self, run: BackwardRun, unit: Unit, this: Pass) -> None:
        """Execute OVER of ``unit`` in a pass: reshard it, then reduce it."""
        if self._runs(unit):
            return  # a forward of the unit has called this backward, and still runs
        # Another pass, or a later backward through this one, may need the unit: nodes of its loss
        # may read the unsharded parameters before any hook on an output fires.
        is_held = run.keeps_graph or self.recorder.is_open(unit.number, but=this)
        if run.makes_graph:
            unit.group.keep(Lease.GRAPH)  # the new graph has saved its parameters
        elif not is_held and unit.settings.reshard_after_backward:
            unit.group.end_unshard()
        ends = 0 if is_held else Lease.KEPT | Lease.HIDDEN
        self._end_use(unit, Lease.BACKWARD | ends)
        if not self.recorder.is_open_before(unit.number, this):
            self._reduce(run, unit)

    def _end_use(self, unit: Unit, why: int) -> None:
        """End the leases ``why`` on ``unit`` after a backward."""
        unit.group.release(why, keeps_copy=not unit.settings.reshard_after_backward)
        if not unit.group.leases & (Lease.RUNS | Lease.BACKWARD | Lease.USER):
            unit.group.install_sharded()  # graphs have saved the tensors themselves

    def _recompute(self, run: BackwardRun, unit: Unit) -> None:
        """Unshard ``unit``, because checkpointing runs its forward again in a backward."""
        if graph_task_id() < 0:
            raise OtherThreadError(f"a forward of unit {unit.label!r} ran")
        if spans.recorder is not None:
            self._enter_phase("recompute", unit)
        group = unit.group
        if not group.params:
            return
        if group.state is ParamState.SHARDED and run.reached:
            this = run.reached[-1]
            self._advance(run, this, this.first_after(running_node(), run.number))
        group.count_out_frozen()
        self._unshard(unit, Lease.BACKWARD, (), in_forward=False)
        unit.step.is_due |= torch.is_grad_enabled() and group.num_trainable > 0

    def on_gradient(self, unit: Unit, index: int) -> None:
        """Record that parameter ``index`` has got its gradient, which a reduction takes later."""
        run = self._ensure_backward(unit, index)
        run.accumulates = unit.step.is_due = True
        unit.gradients.arrived.add(index)

    def on_replicated_gradient(self, unit: Unit, index: int, gradient: torch.Tensor) -> None:
        """Take the gradient of a replicated parameter, and send its bucket if that is complete.

        Buckets are sent in order, so those before it must be complete too. If the root has other
        units, buckets are sent at OVER instead. The same holds once a reentrant checkpoint has
        begun a graph task inside this one, because both graph tasks may bring a gradient of the
        parameter.
        """
        run, gradients, settings = self._ensure_backward(unit), unit.gradients, unit.settings
        assert isinstance(gradients, BucketedGradients)
        run.accumulates = unit.step.is_due = True
        if gradients.backward != run.number:
            with unrecorded():
                gradients.begin(settings)
            gradients.backward = run.number
        is_complete = gradients.receive(index, gradient, settings)
        is_alone = len(self._units) == 1 and not run.has_nested
        if is_complete and is_alone and settings.sync.over_replicas and run.reached:
            with unrecorded():
                gradients.send_complete(settings, self._queue.divide_factor(settings))

    def gradient_from_outside(self, unit: Unit) -> None:
        """Record that this backward brings gradients of ``unit`` that no hook of the unit reports.

        They are those of parameters inside ``unsharded_params``. The unit is reduced at the end of
        the backward, if not before.
        """
        self._ensure_backward(unit).accumulates = True
        unit.step.is_due = True

    def _ensure_backward(self, first: Unit, early: int | None = None) -> BackwardRun:
        """Return the backward that runs; begin it if it has not begun.

        ``first`` is the unit for which a gradient has come. ``early`` is the index of the parameter
        if autograd has already added the gradient to ``.grad`` of an unsharded parameter.
        """
        task, run = graph_task_id(), self.backward
        if run is not None and run.graph_task == task and not self.failure.is_dirty:
            return run
        if self.abort_if_failed() and early is not None:
            raise RuntimeError(
                "the last backward raised, and its gradients were dropped only now, together with "
                f"the one that parameter {first.params[early].fqn!r} has just got; call "
                "reset_iter_state() on the root after a backward that raised, unless a forward "
                "follows, and run this backward again.",
            )
        if self.backward is not None:
            self.backward.has_nested = True
            return self.backward
        self._refuse_unless_waited("a backward")
        if is_in_compiled_autograd():
            raise RuntimeError(_NOT_COMPILED)
        if is_distributed_backward():
            # Also warn, because distributed autograd drops the text of the error.
            warn_user(_NOT_DISTRIBUTED)
            raise RuntimeError(_NOT_DISTRIBUTED)
        end = functools.partial(_end_of_graph_task, weakref.ref(self))
        queue_backward_callback(end)
        self.failure.end = weakref.ref(end)
        self._num_backwards += 1
        run = self.backward = BackwardRun(
            number=self._num_backwards,
            graph_task=task,
            keeps_graph=keeps_graph(),
            makes_graph=torch.is_grad_enabled(),
            accumulates=early is not None or self._will_accumulate(first),
        )
        if self.finalization is not None:
            self.finalization.is_due = True
            self.finalization.is_split |= run.keeps_graph
        self._queue.begin_backward()
        patch_new_optimizers()
        return run

    def _will_accumulate(self, first: Unit) -> bool:
        """Whether the present graph task adds to ``.grad`` of any parameter of the root."""
        units = dict.fromkeys((first, *reversed(self.units())))
        return accumulates_any(param.unsharded for unit in units for param in unit.params)

    def finish_backward(self, run: BackwardRun) -> None:
        """End a backward: execute the rest of the programs that it has reached, and publish."""
        units, ended = self.units(), self._ended_passes(run.reached)
        for each in run.reached:
            self._advance(run, each, 0 if each in ended else each.begin)
        if not run.keeps_graph:
            self.recorder.close(run.reached)
        reached = {number for each in ended for number in each.calls}
        for unit in reversed(units):  # units inside first
            runs, is_open = self._runs(unit), self.recorder.is_open(unit.number)
            # No hook reports a backward through the graph that a create_graph backward has made. So
            # all ranks reduce units with a GRAPH lease at the end.
            is_reached = unit.number in reached or unit.group.leases & Lease.GRAPH
            comes_later = is_open and not is_reached and not runs
            if comes_later:  # the unit's own backward, which will reduce it
                continue
            if not runs:
                ends = not is_open and not run.keeps_graph
                self._end_use(unit, Lease.BACKWARD | Lease.LATER if ends else Lease.BACKWARD)
            self._reduce(run, unit)
        if run.accumulates and self.finalization is None:
            self._publish([unit for unit in units if not unit.step.is_due])
        self._drop_unused_gathers()
        self.backward = None
        if spans.recorder is not None:
            self._enter_phase_around()
        self.failure.end = None  # last: if a line above raises, the backward has failed

    # --- reductions -------------------------------------------------------------------

    def _reduce(self, run: BackwardRun, unit: Unit) -> None:
        """If ``unit`` is due, start its reduction, or only add up its gradients under NONE."""
        if not unit.step.is_due:
            return
        sync, gradients = unit.settings.sync, unit.gradients
        # A pipeline schedule may compute gradients of inputs now, and those of parameters later.
        # ``_take_split_gradients`` looks for the latter only in units that have ``U``. So the unit
        # accumulates now, even if it has no gradients.
        is_split = run.keeps_graph and not sync.reduces
        if is_split and unit.step.lost_unshard and not (run.makes_graph or gradients.arrived):
            raise RuntimeError(_FINDS_NO_PARAMETERS.format(unit.label))
        if not (run.accumulates or is_split):
            if not run.keeps_graph:
                unit.step.record_taken()
            return
        unit.step.record_taken()
        reduces_now = sync.over_replicas if gradients.is_replicated else sync.reduces
        if reduces_now:
            ends_window = sync.ends_window and self.is_last_backward and self.finalization is None
            self._start_reduction(unit, over_replicas=sync.over_replicas, ends_window=ends_window)
        else:
            gradients.accumulate(unit.settings)

    def _start_reduction(self, unit: Unit, *, over_replicas: bool, ends_window: bool) -> None:
        on_reduced = None
        if unit.on_reduced:
            self._queue.finish_while(lambda of: of is unit.gradients)
            if unit.reduced_in == self._num_backwards:
                raise RuntimeError(
                    f"unit {unit.label!r} has got a gradient after its optimizer has stepped it in "
                    "this backward: its parameters take part in something that autograd runs "
                    "later, or in a loss with a backward of its own. Add up all losses, with terms "
                    "like penalties on weights computed after the forward, or step it by an "
                    "ordinary optimizer."
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
        """Report initial weights that differ between ranks, once, after a reduction over all ranks.

        **Collective:** the meshes of all sharded units. ``CommLedger`` does not list it.
        """
        groups = [group for group in self.groups() if group.params]
        sharded = [group for group in groups if not group.gradients.is_replicated]
        brought = [(group.spec.mesh_info, group.first_values()) for group in sharded]
        without_modes(compare_first_values, brought)
        self._has_compared = True

    def notify_reduced(self, unit: Unit) -> None:
        """Call ``unit.on_reduced``, at most once per backward, now that gradients are published."""
        if unit.on_reduced and unit.reduced_in != self._num_backwards:
            unit.reduced_in = self._num_backwards
            for subscriber in tuple(unit.on_reduced):
                subscriber(unit)

    def _publish(self, units: Sequence[Unit]) -> None:
        """At the end of a backward, finish the reductions whose results belong in ``.grad``.

        Units under FULL are flushed first: a unit without gradients in this backward may still hold
        gradients of earlier microbatches.
        """
        full = [unit for unit in units if unit.settings.sync.ends_window]
        for unit in reversed(full):
            self._flush(unit, ends_window=self.is_last_backward)
        if self.is_last_backward:
            self.finish_flush(full)
        else:  # users may read .grad before the next backward
            self._queue.finish_while(lambda of: of.publishes)

    # --- outside of a backward --------------------------------------------------------

    def finish_split_backward(self) -> None:
        """Accumulate the gradients that a pipeline schedule wrote outside of backwards, and reduce.

        Gradients are accumulated only in units that already hold unreduced gradients, because these
        are the same on all ranks. The units in which the schedule wrote gradients may differ.
        """
        self.abort_if_failed()
        with self.failure.recorded():
            self._take_split_gradients()
            self.finish_backward(BackwardRun(self._num_backwards))

    def _take_split_gradients(self) -> None:
        self.recorder.close_all()
        self._end_uses()
        for unit in self.units():
            if unit.gradients.is_unreduced:
                unit.gradients.accumulate(unit.settings)

    def _end_uses(self) -> None:
        """End all leases of units for which no backward is expected."""
        for unit in self.units():
            if not self.recorder.is_open(unit.number):
                if unit.settings.reshard_after_backward:
                    unit.group.end_unshard()
                self._end_use(unit, Lease.BACKWARD | Lease.LATER)

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
        self._queue.finish_while(lambda of: of is gradients and not of.publishes)
        if gradients.arrived:  # from a backward that did not reach a pass with the unit
            self._end_use(unit, Lease.LATER)
        if gradients.is_pending or gradients.arrived:
            self._start_reduction(unit, over_replicas=True, ends_window=ends_window)
        elif ends_window:
            gradients.end_window()

    def set_manual(self, enabled: bool) -> None:
        """End windows at ``finalize_backward`` if ``enabled``, and else at the last backward."""
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
        """Reshard all units, and start reducing pending gradients of units under FULL.

        Returns the units under FULL, for ``finish_finalization``; None if no backward has run yet.
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
        self._end_uses()
        full = [unit for unit in units if unit.settings.sync.ends_window]
        self.start_flush(full)
        finalization.started = [weakref.ref(unit) for unit in full]
        return finalization.started

    def finish_finalization(self, started: _Finalizing) -> None:
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
            raise RuntimeError(
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
        """Wait for copies to and from host memory. Put the copied gradients into ``.grad``."""
        for group in self.groups():
            group.settle()

    # --- failures ---------------------------------------------------------------------

    def check_between_steps(self, unit: Unit, caller: str) -> None:
        """Raise if a forward or backward of the model runs. First clean up after a failed step."""
        self.abort_if_cut_off()
        if not self.is_idle:
            raise RuntimeError(
                f"{caller} was called inside the forward or backward of unit {unit.label!r}; call "
                "it between steps, after reset_iter_state() on the root if a step was interrupted."
            )

    def abort_if_failed(self) -> bool:
        """Clean up if the last step failed. Return whether it did."""
        has_failed = self.failure.has_happened()
        if has_failed:
            self.abort()
        return has_failed

    def abort_if_cut_off(self) -> None:
        """Clean up if the last step failed, or if an interrupt has cut off a forward."""
        if self.abort_if_failed() or self.backward is not None or not self.running:
            return
        if not _is_on_stack(self.running[0][0]):
            self.abort()

    def abort(self, *, keeps_window: bool = False) -> None:
        """Reset every unit to idle: resharded, no collective in flight, no window open.

        The gradients of all units are dropped if a backward or a reduction has failed, if a
        reduction is in flight, if a window is open, or if gradients have come that are not reduced:
        some gradients are missing then. With ``keeps_window``, unless a backward or a reduction has
        failed, reductions in flight are finished, and an open window stays open.
        """
        is_void = self.failure.has_happened()
        if keeps_window and not is_void:
            with self.failure.recorded():
                self._queue.finish_all()
        else:
            every = [group.gradients for group in self.groups()]
            is_void |= any(g.is_in_flight or g.window.is_open or g.arrived for g in every)
        self.failure.is_dirty = True  # if this method is interrupted, the next use aborts again
        self.failure.generation += is_void
        self.running, self.backward, self.failure.end = [], None, None
        self._prefetched.clear()
        self.recorder.forget()
        self._queue.abandon()
        if self.finalization is not None:
            self.finalization.settle()
        for unit in self.units():
            unit.step.record_taken()
            unit.step.modules_run.clear()
            unit.group.release(Lease.ALL)
            if is_void or not keeps_window:
                unit.group.gradients.abandon(is_void=is_void)
        self._settle_host()
        self.failure.is_dirty = False
