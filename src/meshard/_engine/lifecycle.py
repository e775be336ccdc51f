"""The actions of a training step. Hooks on modules and on autograd call these methods.

All ranks must issue the same collectives in the same order, even if the losses of two ranks use
different parameters. So a reduction does not wait for the last gradient of a unit, which may not
come on some ranks. Instead, a forward gathers units as their modules run, and records the order.
From the record follows a *program* for the backward (``program.py``): it gathers each unit
(BEGIN), and later reshards and reduces it (OVER), even if this rank's loss does not use the unit.
Only a replicated module that is the only unit of its root reduces as its gradients come.

A *window* is all microbatches of one optimizer step.

If shards live in host memory, they are copied to the device, and gradients are copied back.
``Lifecycle`` waits for these copies at the end of the last backward of a window, at the end of an
evaluation, in ``finalize_gradients`` and ``finalize_backward``, and when it cleans up an
interrupted step. At any other time, code on the host must wait itself before it touches shards or
gradients (``ParamGroup.settle``, ``ParamGroup.finish_copies``).
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from meshard._comm.communicator import Communicator, mark
from meshard._comm.first_values import compare_first_values
from meshard._communicators import make_communicator
from meshard._engine.param_group import (
    Lease,
    ParamGroup,
    ParamState,
)
from meshard._engine.program import BackwardRun, Call, Event, ManualFinalization, Pass, Recorder
from meshard._engine.unit import Root, Unit, alive
from meshard._gradients.accumulator import unrecorded
from meshard._gradients.buckets import BucketedGradients
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


# Some pipeline schedules compute gradients of parameters later: they search the graph for the
# parameters that modules then hold. After a reshard those are shards, which no graph has.
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
    """Raised in a thread that calls a model in the middle of another thread's step with it."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} while another thread runs a forward or backward of the same model, whose "
            "parameters are gathered and freed in between; on several ranks let one thread "
            "call all models, because threads would take turns differently on each rank; on one "
            "rank let one at a time run it (threading.Lock), or give each a copy.deepcopy.",
        )


def _is_on_stack(unit: Unit, inside: Unit | None = None) -> bool:
    """Whether this thread's stack has a forward of ``unit``.

    If ``inside`` is ``unit``, the forward that has just begun does not count.
    """
    return calls_on_stack(alive(unit.modules)) > (inside is unit)


@skip_dynamo
def _end_of_graph_task(lifecycle_ref: weakref.ref[Lifecycle]) -> None:
    lifecycle = lifecycle_ref()
    if lifecycle is not None and lifecycle.backward is not None:
        lifecycle.finish_backward(lifecycle.backward)


class Lifecycle:
    """Runs the steps of one root (an outermost unit) and of all units inside it.

    Created when one of these units is first used. Before that, while the user applies
    ``fully_shard`` to one layer after the other, each layer is a root and needs no ``Lifecycle``.
    """

    def __init__(self, root: Root) -> None:
        # Forwards that are running, outermost first; not those that checkpointing runs again.
        self.running: list[tuple[Unit, Call]] = []
        self.backward: BackwardRun | None = None  # if a backward runs, perhaps inside a forward
        self.failure = root.failure  # each parameter group of the root has this object too
        self.is_last_backward = True
        # Not None after set_manual_backward_finalization(True): then the user's call of
        # ``finalize_backward``, and not the last backward of a step, completes ``.grad``.
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
        """The record of the forward that runs; in a backward, of the forward it goes through."""
        run = self.backward
        return run.reached[-1] if run is not None and run.reached else self.recorder.current

    # --- forward ----------------------------------------------------------------------

    def begin_call(self, unit: Unit) -> Call | None:
        """Unshard ``unit``, because one of its modules is about to run.

        Returns the record of this forward; None if checkpointing runs it again in a backward.
        """
        self._check_nests(unit)
        if self.backward is not None:
            self._recompute(self.backward, unit)
            return None
        with_graph, group = torch.is_grad_enabled(), unit.group
        if not self.running:
            self._begin_forward()
        was_unsharded = group.leases & Lease.USER  # by the user's unshard()
        if was_unsharded and unit.reshards_after_forward:
            unit.step.lost_unshard = True
            group.end_unshard(voids_graphs=not self.recorder.is_open(unit.number))
        call = self.recorder.enter(unit.number, node=next_node(), with_graph=with_graph)
        self.running.append((unit, call))
        mark("forward", unit.label)
        if len(unit.step.modules_run) >= len(unit.modules):
            unit.step.modules_run.clear()  # all of its modules have run: a second forward begins
        if not group.params:
            return call
        # Take over the user's edits of shards and of requires_grad. Skip this in a second call of
        # the unit in one forward of the root, if the first has left the unit unsharded.
        is_first = self.recorder.current.calls[unit.number][0] is call
        if is_first or group.state is not ParamState.INSTALLED or group.leases & Lease.USER:
            group.drop_if_stale()
            group.read_flags()
        following = self._following(unit.settings.forward_prefetch, self.recorder.next_in_forward())
        to_keep = unit.settings.post_forward_group if with_graph and not was_unsharded else None
        self._unshard(unit, Lease.RUNS, following, in_forward=True, post_forward_group=to_keep)
        unit.step.is_due |= with_graph and group.num_trainable > 0
        return call

    def _check_nests(self, unit: Unit) -> None:
        """Check that the forwards recorded as around this one still run. If not, clean up."""
        outermost = self.running[0][0] if self.running else None
        if self.abort_if_failed():
            if outermost is not None and _is_on_stack(outermost, inside=unit):
                raise RuntimeError(_WENT_ON.format(outermost.label))
            outermost = None
        if self.backward is not None:
            return  # checkpointing runs this forward again
        if graph_task_id() >= 0:
            return  # a reentrant checkpoint runs this forward, perhaps in a thread of autograd
        thread = threading.get_ident()
        if outermost is None:
            self.failure.thread = thread
            return
        if self.failure.thread != thread:
            raise OtherThreadError(f"a forward of unit {unit.label!r} began")
        # A KeyboardInterrupt may have ended the outermost forward without its hooks, which only the
        # stack shows. Units inside a root's forward do not look, because that is slow.
        may_be_cut_off = outermost is unit or not outermost.is_root
        if may_be_cut_off and not _is_on_stack(outermost, inside=unit):
            self.abort()

    def _begin_forward(self) -> None:
        self._refuse_unless_waited("a forward")
        # DDP or an optimizer in backward would take gradients before they are reduced.
        if any(map(is_reduced_by_ddp, alive(self.units()[0].modules))):
            raise RuntimeError(_NOT_IN_DDP)
        for group in self.groups() if has_backward_optimizers() else ():
            for param in group.params:
                if has_backward_optimizer(param.sharded):
                    raise RuntimeError(_NOT_IN_BACKWARD.format(param.fqn, group.label))
        if self.recorder.begin(sum(group.num_steps for group in self.groups())):
            for group in self.groups():
                if group.leases & Lease.LATER:  # unsharded for a backward that never came
                    group.release(Lease.LATER)

    def end_call(
        self, unit: Unit, module: nn.Module, *, failed: bool, is_hidden: bool = False
    ) -> Call | None:
        """Record that ``module`` of ``unit`` returned or raised, and reshard if all modules ran.

        ``is_hidden``: a backward may come, but no tensor in the output can have a hook that reports
        it. Returns the record of the forward that ended (if checkpointing ran it again: of the
        unit's last in that forward of the root); None if there is none, as after a clean-up.
        """
        if self.abort_if_failed():
            if not failed:
                raise RuntimeError(_WENT_ON.format(unit.label))
            return None
        if self.backward is not None:
            # Checkpointing has run this forward again. ``failed`` does not matter: checkpointing
            # itself may stop such a forward by an exception, once it has all tensors it needs.
            mark("backward", unit.label)
            calls = self.present_pass.calls.get(unit.number)
            if not calls:
                return None
            if calls[-1].reached_in != self.backward.number:  # its own backward comes later
                unit.group.install_sharded()
            return calls[-1]
        if not self._runs(unit):
            return None  # a clean-up (``abort``) has dropped the record of this forward
        while True:
            inner, call = self.running.pop()
            self.recorder.exit(call)
            if inner is unit:
                break
            # A KeyboardInterrupt has ended the forward of ``inner`` without a call of its hooks,
            # and the forward of ``unit``, around ``inner``, has caught the interrupt.
            inner.group.release(Lease.RUNS, keep_post_forward=True)
        self._mark_around()
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
            # If an evaluation (grad is disabled) fails, keep the gradients of earlier microbatches.
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
                group.keep()  # the user's loss may read the unsharded parameters
                group.release(Lease.RUNS)
            else:
                group.release(Lease.RUNS, keeps_copy=True)
                group.install_sharded()  # so that the user's edits go to the shards
            # Unless the user has turned off resharding, after forward or backward, the next forward
            # must gather again. Nothing may show that shards were edited: torch's foreach kernels,
            # and edits through .data, do not raise their versions.
            is_chosen = unit.settings.reshard_after_forward is not None
            if not is_chosen and unit.settings.reshard_after_backward:
                group.forget_version()
        self._drop_unused_gathers()
        if not torch.is_grad_enabled():  # an evaluation ends, and the user may edit shards next
            for group in self.groups():
                if not group.leases & Lease.USER:
                    group.install_sharded()
            self._settle_host()

    def _mark_around(self) -> None:
        """Tell a profiler that a forward or backward has ended, and which forward goes on."""
        if self.running:
            mark("forward", self.running[-1][0].label)
        else:
            mark("outside", "of units")

    # --- gathers ahead ----------------------------------------------------------------

    def _following(self, chosen: list[weakref.ref[Unit]], predicted: int | None) -> list[Unit]:
        """Return the units to gather next: those that the user chose, or else the predicted one."""
        if chosen:
            # Leave out units of other roots. Their gathers would be dropped unused when the forward
            # or backward of this root ends.
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
            # No earlier unit has started this gather ahead, so ``take`` will wait for it. Start the
            # gathers of ``following`` now: they would otherwise start only after that wait.
            self._gather_ahead(following, in_forward=in_forward)
            group.take(why, post_forward_group)
        else:
            group.take(why, post_forward_group)
            self._gather_ahead(following, in_forward=in_forward)
        group.void_graphs_of_older_steps()

    def _gather_ahead(self, units: Sequence[Unit], *, in_forward: bool) -> None:
        for head in units:
            for unit in (head, *head.siblings):  # all units of one module run together
                group = unit.group
                if unit.params and group.state is ParamState.SHARDED:
                    if in_forward:
                        group.drop_if_stale()
                    self._start_unshard(unit, in_forward=in_forward)
                    group.leases |= Lease.AHEAD
                    self._prefetched.append(unit)

    def _start_unshard(self, unit: Unit, *, in_forward: bool) -> None:
        is_freed_after = unit.settings.reshard_after_backward
        unit.group.start_unshard(only_for_backward=not in_forward and is_freed_after)

    def _drop_unused_gathers(self) -> None:
        """Drop the gathers that were started ahead of units that then did not run."""
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
        """Begin the backward of ``call``, a forward of ``unit``: an output has got its gradient."""
        if unit.group.is_summoned:
            raise RuntimeError(
                f"a backward reached unit {unit.label!r} inside {unit.group.summoned_by.caller}, "
                "from a forward made before it; run that backward before entering that block, or "
                "after leaving it."
            )
        run = self._ensure_backward(unit)
        mark("backward", unit.label)
        if this not in run.reached:
            self._reach(run, this)
        self._advance(run, this, call.exit + 1)
        this.begin = min(this.begin, call.exit)
        self._begin(run, unit, this, call)

    def _reach(self, run: BackwardRun, this: Pass) -> None:
        """Begin the backward of the recorded forward ``this``. First end that of the one before."""
        for other in self._ended_passes(run.reached[-1:]):
            self._advance(run, other, 0)
        this.rewind()
        run.reached.append(this)
        # The forward has set ``is_due``. An earlier backward through the same graph, with
        # retain_graph=True, may have reset it by reducing, but this one brings new gradients.
        for call in this.exits if run.accumulates else ():
            unit = self._units[call.unit]()
            if unit is not None and call.has_graph and unit.group.num_trainable:
                unit.step.is_due = True

    def _ended_passes(self, passes: list[Pass]) -> list[Pass]:
        """Return ``passes`` without the one whose forward still runs, and has called backward()."""
        return [each for each in passes if not self.running or each is not self.recorder.current]

    def _advance(self, run: BackwardRun, this: Pass, first: int) -> None:
        """Execute the events (gathers, reductions) of ``this`` at index ``first`` and above."""
        while (event := this.next_event()) is not None:
            kind, call, index = event
            if index < first:
                return
            unit = self._units[call.unit]()
            if kind is Event.BEGIN:
                this.begin -= 1
                # This rank's backward does not go through ``call``. Gather the unit all the same,
                # because other ranks may. But not under torch.autograd.grad (``accumulates`` is
                # False): its backward is expected to go through the same units on all ranks.
                is_left_out = call.has_graph and call.reached_in != run.number
                if unit is not None and is_left_out and run.accumulates and not self._runs(unit):
                    self._begin(run, unit, this, call)
            else:
                this.over -= 1
                if unit is not None:
                    self._end(run, unit, this)

    def _begin(self, run: BackwardRun, unit: Unit, this: Pass, call: Call) -> None:
        """Begin the backward of ``call``: unshard its unit, and start gathering the next one."""
        has_begun = call.reached_in == run.number  # another output has had its gradient before
        call.reached_in = run.number
        group = unit.group
        if not group.params:
            return
        # For backward(), ``_reach`` has set ``is_due`` already. This is for a gradient penalty: a
        # backward with retain_graph=True has reduced the unit, and autograd.grad(create_graph=True)
        # now goes through the same graph. When the backward of the penalty follows, all ranks must
        # reduce the unit, even if its parameters get gradients on some ranks only.
        if not group.leases & Lease.BACKWARD and group.num_trainable:
            unit.step.is_due = True
        if not unit.settings.unshard_in_backward:
            return
        group.count_out_frozen()
        following = []
        if not has_begun:  # once per call: this rank may use more of its outputs than another
            chosen = unit.settings.backward_prefetch
            following = self._following(chosen, this.next_in_backward(call))
            if not chosen:
                following = [each for each in following if each.settings.unshard_in_backward]
        self._unshard(unit, Lease.BACKWARD, following, in_forward=False)

    def _end(self, run: BackwardRun, unit: Unit, this: Pass) -> None:
        """End the backward of ``unit`` in the recorded forward ``this``: reshard, then reduce."""
        if self._runs(unit):
            return  # a forward of the unit has called this backward, and still runs
        # Another backward may come, through this graph or that of another forward. If its loss
        # reads weights (``weight.square().sum()``), it needs them before a hook on an output fires.
        is_held = run.keeps_graph or self.recorder.is_open(unit.number, but=this)
        if run.makes_graph:
            unit.group.keep(Lease.GRAPH)  # the graph of create_graph=True has saved its parameters
        elif not is_held and unit.settings.reshard_after_backward:
            unit.group.end_unshard()
        ends = 0 if is_held else Lease.KEPT | Lease.HIDDEN
        self._end_use(unit, Lease.BACKWARD | ends)
        if not self.recorder.is_open_before(unit.number, this):
            self._reduce(run, unit)

    def _end_use(self, unit: Unit, why: int) -> None:
        """End the leases ``why`` (reasons to stay unsharded) of ``unit`` after a backward."""
        unit.group.release(why, keeps_copy=not unit.settings.reshard_after_backward)
        if not unit.group.leases & (Lease.RUNS | Lease.BACKWARD | Lease.USER):
            unit.group.install_sharded()  # a graph has the unsharded tensors, so modules need not

    def _recompute(self, run: BackwardRun, unit: Unit) -> None:
        """Unshard ``unit``, because checkpointing runs its forward again in a backward."""
        if graph_task_id() < 0:
            raise OtherThreadError(f"a forward of unit {unit.label!r} ran")
        mark("recompute", unit.label)
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
        """Record that autograd has added to ``.grad`` of the unsharded parameter ``index``."""
        run = self._ensure_backward(unit, index)
        run.accumulates = unit.step.is_due = True
        unit.gradients.arrived.add(index)

    def on_replicated_gradient(self, unit: Unit, index: int, gradient: torch.Tensor) -> None:
        """Take the gradient of a replicated parameter, and send the buckets that are complete.

        Buckets are sent in order: a complete one waits for those before it. If the root has other
        units, buckets are sent when the unit's backward is over. The same holds if a reentrant
        checkpoint runs a backward inside this one: both may bring a gradient of a parameter.
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
        """Record that a parameter that ``unsharded_params`` has put in place has got a gradient.

        No hook of ``unit`` begins its backward inside that block, so ``unit`` is reduced when the
        whole backward ends.
        """
        self._ensure_backward(unit).accumulates = True
        unit.step.is_due = True

    def _ensure_backward(self, first: Unit, early: int | None = None) -> BackwardRun:
        """Return the record of the backward that runs; make it if this is its first hook.

        ``first`` is the unit of that hook. ``early`` is the index of the parameter, if the hook is
        called after autograd has added to ``.grad`` of an unsharded parameter.
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
            # Also warn, because torch.distributed.autograd drops the text of the error.
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
        """Whether this backward adds to any parameter's ``.grad``, unlike torch.autograd.grad."""
        units = dict.fromkeys((first, *reversed(self.units())))
        return accumulates_any(param.unsharded for unit in units for param in unit.params)

    def finish_backward(self, run: BackwardRun) -> None:
        """End a backward: do the gathers and reductions that are left, and set ``.grad`` if due."""
        units, ended = self.units(), self._ended_passes(run.reached)
        for each in run.reached:
            self._advance(run, each, 0 if each in ended else each.begin)
        if not run.keeps_graph:
            self.recorder.close(run.reached)
        reached = {number for each in ended for number in each.calls}
        for unit in reversed(units):  # inner units first
            if not unit.step.is_due and unit.group.is_at_rest:
                continue
            runs, is_open = self._runs(unit), self.recorder.is_open(unit.number)
            # A backward with create_graph=True makes a graph in which no hook reports a backward.
            # So units that such a graph needs (GRAPH) are reduced here, by all ranks.
            is_reached = unit.number in reached or unit.group.leases & Lease.GRAPH
            comes_later = is_open and not is_reached and not runs
            if comes_later:  # a backward through the unit's forward, which will reduce the unit
                continue
            if not runs:
                ends = not is_open and not run.keeps_graph
                self._end_use(unit, Lease.BACKWARD | Lease.LATER if ends else Lease.BACKWARD)
            self._reduce(run, unit)
        if run.accumulates and self.finalization is None:
            self._publish([unit for unit in units if not unit.step.is_due])
        self._drop_unused_gathers()
        self.backward = None
        self._mark_around()
        self.failure.end = None  # last, so that an error above counts as a failed backward

    # --- reductions -------------------------------------------------------------------

    def _reduce(self, run: BackwardRun, unit: Unit) -> None:
        """Start the reduction of ``unit`` if due; under GradientSync.NONE only add up gradients."""
        if not unit.step.is_due:
            return
        sync, gradients = unit.settings.sync, unit.gradients
        # A pipeline schedule may compute gradients of inputs now, and those of parameters later.
        # ``_take_split_gradients`` will look for gradients of parameters only in units that hold
        # unreduced ones. So accumulate now; if no gradient has come, the unit will hold zeros.
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
        """Warn, once, if ranks have different initial weights; raise under MESHARD_DEBUG=1.

        **Collective:** the meshes of all sharded units. The user's ``CommLedger`` does not list it.
        """
        sharded = [
            each for each in self.groups() if each.params and not each.gradients.is_replicated
        ]
        brought = [(group.spec.mesh_info, group.first_values()) for group in sharded]
        without_modes(compare_first_values, brought)
        self._has_compared = True

    def notify_reduced(self, unit: Unit) -> None:
        """Tell subscribers, at most once per backward, that ``.grad`` of ``unit`` is set."""
        if unit.on_reduced and unit.reduced_in != self._num_backwards:
            unit.reduced_in = self._num_backwards
            for subscriber in tuple(unit.on_reduced):
                subscriber(unit)

    def _publish(self, units: Sequence[Unit]) -> None:
        """At the end of a backward, finish the reductions whose results belong in ``.grad``.

        Under GradientSync.FULL, first start reducing what a unit still holds of earlier
        microbatches: this backward may not have gone through that unit.
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
        """Take the gradients that a pipeline schedule wrote without backward(), and reduce them.

        Look only in units that already hold unreduced gradients: these units are the same on all
        ranks, while the schedule may have written gradients in other units on each rank.
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
        """Reshard the units that no backward is expected to need, even after ``unshard()``."""
        for unit in self.units():
            if not self.recorder.is_open(unit.number):
                if unit.settings.reshard_after_backward:
                    unit.group.end_unshard()
                self._end_use(unit, Lease.BACKWARD | Lease.LATER)

    def start_flush(self, units: Sequence[Unit]) -> None:
        """Start reducing, over all ranks, what ``units`` have accumulated, and end their window."""
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
        if gradients.is_in_flight:
            self._queue.finish_while(lambda of: of is gradients and not of.publishes)
        if gradients.arrived:  # from a backward that went through no forward of the unit
            self._end_use(unit, Lease.LATER)
        if gradients.is_pending or gradients.arrived:
            self._start_reduction(unit, over_replicas=True, ends_window=ends_window)
        elif ends_window:
            gradients.end_window()

    def take_modes_of(self, other: Lifecycle) -> None:
        """Take over what ``set_is_last_backward`` and ``set_manual_backward_finalization`` set."""
        self.is_last_backward &= other.is_last_backward
        if other.finalization is not None:
            self.finalization = ManualFinalization()

    def set_manual(self, enabled: bool) -> None:
        """Choose whether ``finalize_backward`` or the last backward completes ``.grad``."""
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
        """Reshard units that no backward needs, and start reductions of units under FULL.

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
        """Wait for copies to and from host memory, and put the copied gradients into ``.grad``."""
        for group in self.groups():
            group.settle()

    # --- failures ---------------------------------------------------------------------

    def check_between_steps(self, unit: Unit, caller: str) -> None:
        """Clean up if the last step failed. Then raise if a forward or backward is running."""
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
        """Clean up after a step that was cut off: reshard all units, and end all collectives.

        Drop all gradients, ``.grad`` too, if some are missing or not reduced: if a backward or a
        reduction has failed, a reduction is in flight, or some microbatches of an optimizer step
        have run, but not the last. ``keeps_window`` (an evaluation was cut off): finish reductions
        and keep all gradients, unless a backward or a reduction has failed.
        """
        is_void = self.failure.has_happened()
        if keeps_window and not is_void:
            with self.failure.recorded():
                self._queue.finish_all()
        else:
            every = [group.gradients for group in self.groups()]
            is_void |= any(g.is_in_flight or g.window.is_open or g.arrived for g in every)
        self.failure.is_dirty = True  # if an interrupt ends this method, the next use cleans up
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
