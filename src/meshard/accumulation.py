"""Gradient accumulation across microbatches."""

from __future__ import annotations

import contextlib
import enum
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshard._comm.blocking import gather_from_all
from meshard._engine.lifecycle import Lifecycle
from meshard._engine.unit import Unit, require_units, units_in
from meshard._params.replicated_params import ReplicatedParams
from meshard.policies import GradientSync, check_bool, check_iterable

Batch = TypeVar("Batch")
_END: Any = object()  # follows the last batch of an iterator

# --- how far each backward reduces ---------------------------------------------------------------


@contextlib.contextmanager
def gradient_sync(module: nn.Module, mode: GradientSync) -> Iterator[None]:
    """Inside the context, reduce gradients of all units in ``module`` as far as ``mode`` says.

    On exit, restore the previous mode of each unit.

    Raises:
        TypeError: ``mode`` is not a ``GradientSync``.
        ValueError: There is no unit in ``module``.

    >>> import torch, meshard
    >>> layer = meshard.fully_shard(torch.nn.Linear(2, 2))
    >>> with meshard.gradient_sync(layer, meshard.GradientSync.NONE):
    ...     layer(torch.ones(1, 2)).sum().backward()
    >>> layer.weight.grad is None
    True
    """
    if not isinstance(mode, GradientSync):
        raise TypeError(f"mode must be a meshard.GradientSync, got {mode!r}.")
    units = require_units(module)
    before = [unit.settings.sync for unit in units]
    for unit in units:
        unit.settings.sync = mode
    try:
        yield
    finally:
        for unit, sync in zip(units, before, strict=True):
            unit.settings.sync = sync


def no_sync(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Accumulate gradients unsharded, without reducing them: ``gradient_sync`` with NONE.

    Each rank then keeps all gradients unsharded in memory. Under ``GradientSync.REDUCE_SCATTER`` it
    keeps only its shard of them (but all of them under ``replicate``).
    """
    return gradient_sync(module, GradientSync.NONE)


def microbatches(
    module: nn.Module,
    batches: Iterable[Batch],
    *,
    until_last: GradientSync = GradientSync.REDUCE_SCATTER,
) -> Iterator[Batch]:
    """Iterate over the microbatches of one step. Only the last one reduces gradients fully.

    The sync mode (FULL for the last batch, ``until_last`` for the others) and
    ``set_is_last_backward`` are set before each batch is yielded, and restored when the loop ends.
    ``batches`` is read one batch ahead.

    If a forward or backward raises (but not a forward without grad), the gradients that the loop
    has accumulated are dropped. Do not catch the exception inside the loop: the next iteration
    would raise a RuntimeError.

    Raises:
        RuntimeError: After an iteration that dropped accumulated gradients, but by ``zero_grad``.
        TypeError: ``until_last`` is not a ``GradientSync``.
        ValueError: There is no unit in ``module``.

    >>> import torch, meshard
    >>> layer = meshard.fully_shard(torch.nn.Linear(2, 1, bias=False))
    >>> for batch in meshard.microbatches(layer, torch.ones(3, 1, 2)):
    ...     layer(batch).sum().backward()
    >>> layer.weight.grad.full_tensor()
    tensor([[3., 3.]])
    """
    if not isinstance(until_last, GradientSync):
        raise TypeError(f"until_last must be a meshard.GradientSync, got {until_last!r}.")
    check_iterable("batches", batches)
    return _microbatches(batches, until_last, require_units(module))


def _microbatches(
    batches: Iterable[Batch], until_last: GradientSync, units: list[Unit]
) -> Iterator[Batch]:
    lifecycles = {id(unit.lifecycle): unit.lifecycle for unit in units}.values()
    before = [lifecycle.is_last_backward for lifecycle in lifecycles]
    modes_before = [unit.settings.sync for unit in units]
    for lifecycle in lifecycles:
        lifecycle.abort_if_cut_off()  # a failure before this loop does not count
    voided_before = [lifecycle.failure.generation for lifecycle in lifecycles]
    windows = [unit.gradients.window for unit in units]
    try:
        for window in windows:
            window.is_in_loop = True
        for batch, following in itertools.pairwise(itertools.chain(batches, [_END])):
            is_last = following is _END
            for lifecycle in lifecycles:
                lifecycle.is_last_backward = is_last
            for unit in units:
                unit.settings.sync = GradientSync.FULL if is_last else until_last
            yield batch
            if _has_dropped(lifecycles, voided_before):
                raise RuntimeError(
                    "a forward or backward in this loop over microbatches() raised (or "
                    "reset_iter_state() was called), which has dropped the gradients that the "
                    "window had accumulated, so it would step by the other microbatches only. Let "
                    "the exception end the loop; then begin the window anew, by another call of "
                    "microbatches(), or skip the step."
                )
    finally:
        for window in windows:
            window.is_in_loop = False
        for lifecycle, was_last in zip(lifecycles, before, strict=True):
            lifecycle.is_last_backward = was_last
        for unit, mode in zip(units, modes_before, strict=True):
            unit.settings.sync = mode


def _has_dropped(lifecycles: Iterable[Lifecycle], voided_before: list[int]) -> bool:
    """Whether gradients were dropped since ``voided_before`` was read, or a clean-up is due."""
    if any(lifecycle.failure.has_happened() for lifecycle in lifecycles):
        return True  # not cleaned up here: until that is done, optimizers refuse to step
    for lifecycle in lifecycles:
        lifecycle.abort_if_cut_off()
    return [lifecycle.failure.generation for lifecycle in lifecycles] != voided_before


# --- pending gradients ---------------------------------------------------------------------------


class PendingGradients(dict[str, DTensor | None]):
    """Gradients that are accumulated but not in ``.grad``, by parameter name.

    The value of a parameter is its partial sum, a DTensor ``(Partial("avg"), Shard(dim))`` (on the
    axes of the unit's mesh) that is reduced over the shard group; None if some of its gradients
    have not been reduced at all.
    ``bool()`` of the mapping says whether gradients are pending. ``bool()`` is the same on all
    ranks, even on a rank where the mapping is empty.
    """

    def __init__(self, partials: dict[str, DTensor | None], *, is_open: bool) -> None:
        super().__init__(partials)
        self._is_open = is_open

    def __bool__(self) -> bool:
        return self._is_open

    def __repr__(self) -> str:
        return f"PendingGradients({list(self)}, is_open={self._is_open})"


def pending_gradients(module: nn.Module) -> PendingGradients:
    """Return the gradients that the units in ``module`` have accumulated and not fully reduced.

    **Collective:** only if reductions are in flight, as after ``set_is_last_backward(False)`` or
    under manual finalization.

    >>> import torch, meshard
    >>> layer = meshard.fully_shard(torch.nn.Linear(2, 2))
    >>> with meshard.no_sync(layer):
    ...     layer(torch.ones(1, 2)).sum().backward()
    >>> sorted(meshard.pending_gradients(layer))
    ['bias', 'weight']
    """
    units = require_units(module)
    names = {id(param): name for name, param in module.named_parameters(remove_duplicate=False)}
    partials: dict[str, DTensor | None] = {}
    is_open = False
    for unit in units:
        unit.lifecycle.finish_reductions()
        is_open = is_open or unit.gradients.is_pending
        for index, partial in unit.gradients.pending_of_params().items():
            param = unit.group.params[index]
            # Modules hold the parameter's sharded or unsharded tensor. The parameter has no name in
            # ``module`` if another module of the unit holds it.
            name = names.get(id(param.sharded)) or names.get(id(param.unsharded)) or param.fqn
            partials[name] = partial
    return PendingGradients(partials, is_open=is_open)


def finalize_gradients(module: nn.Module) -> None:
    """Reduce all pending gradients fully, without another backward.

    **Collective:** every rank of the mesh. Afterwards ``.grad`` is as if the last backward had run
    under ``GradientSync.FULL``, and ``pending_gradients`` is empty.

    >>> import torch, meshard
    >>> layer = meshard.fully_shard(torch.nn.Linear(2, 2))
    >>> with meshard.no_sync(layer):
    ...     layer(torch.ones(1, 2)).sum().backward()
    >>> meshard.finalize_gradients(layer)
    >>> bool(meshard.pending_gradients(layer)), layer.bias.grad.full_tensor()
    (False, tensor([1., 1.]))
    """
    by_root: dict[Lifecycle, list[Unit]] = {}
    for unit in require_units(module):
        by_root.setdefault(unit.lifecycle, []).append(unit)
    for lifecycle, units in by_root.items():
        lifecycle.start_flush(units)
    for lifecycle, units in by_root.items():
        lifecycle.finish_flush(units)


# --- ranks with different numbers of batches -----------------------------------------------------


def uneven_batches(
    module: nn.Module,
    batches: Iterable[Batch],
    *,
    divide_by_initial_world_size: bool = False,
    throw_on_early_termination: bool = False,
) -> Iterator[Batch | None]:
    """Iterate over this rank's batches, and then over None until every rank has used up its own.

    A rank without a batch takes part in the reductions of the others with a gradient of zero.
    Gradients are divided by the number of ranks that had a batch when they were reduced (unless
    ``set_gradient_divide_factor`` was called). ``.grad`` is set even if the batch is None. So every
    rank must step its optimizer in every iteration, to keep the ranks equal: call ``step()`` also
    if the batch is None, and call ``zero_grad()`` only after it.

    Each batch needs a backward. At most one backward per iteration may reduce fully. Under
    ``no_sync`` none does. Ranks with a batch must enter ``no_sync`` in the same iterations; the
    ranks without a batch follow them.

    **Collective:** every rank of the mesh, twice in each iteration. Each rank sends a number when
    the iteration begins, and a second one when gradients are reduced, or else when the iteration
    ends. Your own collectives must come after the second one. With ``broadcast_buffers``, buffers
    are sent once per iteration and after the last, from the first rank that had a batch in the
    previous iteration. If a rank leaves the loop (``break``) before it reduces, the loop ends on
    ranks without a batch, and raises on others. If one rank alone leaves it after it has reduced,
    all others wait for it.

    Args:
        module: The module that ``replicate`` was applied to.
        batches: The batches of this rank.
        divide_by_initial_world_size: Divide by the number of all ranks, as DDP's ``join`` does.
        throw_on_early_termination: Raise on all ranks once one has no batch left.

    Raises:
        RuntimeError: On all ranks. A batch was skipped, two backwards of an iteration reduced, only
            some ranks with a batch reduced, only some ranks stepped, or the batches of another rank
            raised; or with ``throw_on_early_termination``, one rank has no batch left.
        ValueError: ``module`` is not replicated, or some of it is sharded.

    >>> import torch, meshard
    >>> model = meshard.replicate(torch.nn.Linear(1, 1))
    >>> for batch in meshard.uneven_batches(model, torch.ones(3, 2, 1)):
    ...     if batch is not None:
    ...         model(batch).sum().backward()
    >>> model.bias.grad
    tensor([6.])
    """
    check_bool("divide_by_initial_world_size", divide_by_initial_world_size)
    check_bool("throw_on_early_termination", throw_on_early_termination)
    units = list(units_in(module))
    are_replicated = all(
        isinstance(unit.group.unit_params, ReplicatedParams) for unit in units if unit.params
    )
    if not are_replicated or "_meshard_buckets" not in vars(module):
        raise ValueError(
            "uneven_batches needs a module to which meshard.replicate was applied, without sharded "
            "units inside; where parameters are sharded, a rank that has no batch left must run a "
            "batch of one dummy row, whose loss counts as zero (with labels of -100, or a weight "
            "of 0), because others gather its shards."
        )
    check_iterable("batches", batches)
    loop = _UnevenLoop(
        units,
        divides_by_all=divide_by_initial_world_size,
        ends_early=throw_on_early_termination,
    )
    return _uneven_batches(module, batches, loop)


def _uneven_batches(
    module: nn.Module, batches: Iterable[Batch], loop: _UnevenLoop
) -> Iterator[Batch | None]:
    buckets, lifecycle = module.__dict__["_meshard_buckets"], loop.lifecycle
    if buckets.is_looped:
        raise RuntimeError("a loop over uneven_batches of this module is under way; end it first.")
    if lifecycle.finalization is not None:
        raise RuntimeError(
            "uneven_batches does not work with set_manual_backward_finalization(True): ranks "
            "without a batch take part in the reductions of a backward. Disable it for the loop."
        )
    remaining = _reporting(batches, loop)
    buckets.is_looped, lifecycle.before_reduction = True, loop.before_reduction
    try:
        while True:
            batch: Any = next(remaining, _END)
            has_batch = batch is not _END
            loop.begin(has_batch=has_batch)
            buckets.prepare(module)
            # prepare() may have made new param groups, whose counts of steps begin at 0.
            loop.count_steps_from_here()
            if not loop.having:
                return
            if has_batch:
                try:
                    yield batch
                except GeneratorExit:
                    loop.leave()
                    raise
                loop.end()
            elif loop.join(module):
                yield None
            else:
                return
            buckets.buffers_from = loop.having[0]
    finally:
        buckets.is_looped, lifecycle.before_reduction = False, None
        lifecycle.usual_divide_factor = None
        buckets.buffers_from = 0


def _reporting(batches: Iterable[Batch], loop: _UnevenLoop) -> Iterator[Batch]:
    """Iterate over ``batches``. If that raises an exception, let the other ranks raise too."""
    try:
        # ``yield from`` would close a generator of the user when the loop ends early.
        for batch in batches:  # noqa: UP028
            yield batch
    except Exception:
        loop.tell_that_batches_raised()
        raise


class _Report(enum.IntEnum):
    """What a rank sends to all others in an iteration of ``uneven_batches``."""

    # Sent as an iteration begins:
    NO_BATCH = enum.auto()
    HAS_BATCH = enum.auto()
    FAILED = enum.auto()  # also sent if the body runs no backward, or a second backward reduces
    # A rank with a batch sends one of these when it reduces its first unit, or else when the body
    # of the loop ends. A rank without a batch sends one at once.
    REDUCES = enum.auto()
    KEEPS = enum.auto()  # its backward has accumulated, and reduced nothing
    JOINS = enum.auto()  # it has no batch, and will take part in the reductions of the others
    LEFT = enum.auto()  # it had a batch, and has left the loop before any reduction
    # Sent as an iteration begins, in place of NO_BATCH or HAS_BATCH:
    RAISED = enum.auto()  # its iterator over batches has raised an exception


_BASE = 16  # larger than any report: ranks send ``report + _BASE * steps`` as one number


class _UnevenLoop:
    """What a rank knows of the others in ``uneven_batches``.

    The ranks exchange reports twice per iteration. If something fails after the second exchange,
    the rank reports it in the first exchange of the next iteration, before any other collective.
    """

    def __init__(self, units: list[Unit], *, divides_by_all: bool, ends_early: bool) -> None:
        spec = units[0].group.spec
        assert spec.mesh_info.replicate_group is not None
        self.lifecycle = units[0].lifecycle
        self.having: list[int] = []  # the ranks that have a batch in the present iteration
        self._units, self._pg, self._device = units, spec.mesh_info.replicate_group, spec.device
        self._divides_by_all, self._ends_early = divides_by_all, ends_early
        self._problem = ""
        self._has_failed = False  # whether something failed after the second exchange
        self._began_at = 0  # ``backward_number`` when the iteration began
        self._reduces_in: int | None = None  # ``backward_number`` of the backward that reduces
        self.count_steps_from_here()

    def count_steps_from_here(self) -> None:
        self._steps_before = self._num_steps()

    def _num_steps(self) -> int:
        return max(unit.group.num_effective_steps for unit in self._units)

    def begin(self, *, has_batch: bool) -> None:
        """Learn which ranks have a batch; raise if an earlier iteration has failed on any rank.

        **Collective:** all ranks.
        """
        report = _Report.HAS_BATCH if has_batch else _Report.NO_BATCH
        steps = self._num_steps() - self._steps_before
        ranks = self._exchange(_Report.FAILED if self._has_failed else report, steps)
        self.having, without = ranks[_Report.HAS_BATCH], ranks[_Report.NO_BATCH]
        if self._ends_early and self.having and without:
            self._raise(
                f"rank(s) {without} have no batch left, and uneven_batches was called with "
                "throw_on_early_termination=True."
            )
        if self.having and not self._divides_by_all:
            self.lifecycle.usual_divide_factor = float(len(self.having))
        self._began_at, self._reduces_in = self.lifecycle.backward_number, None

    def tell_that_batches_raised(self) -> None:
        """Let the other ranks raise too, in ``begin``, instead of waiting for this one.

        **Collective:** all ranks.
        """
        with contextlib.suppress(RuntimeError):
            self._exchange(_Report.RAISED)

    def _exchange(self, report: _Report, steps: int = 0) -> dict[_Report, list[int]]:
        """Return the ranks by what they report. Raise if one has failed, or if only some stepped.

        ``steps`` is the number of optimizer steps of this rank in the last iteration.
        """
        own = torch.tensor([report + _BASE * steps], dtype=torch.int32, device=self._device)
        numbers = gather_from_all(own, self._pg, label="(uneven batches)").view(-1).tolist()
        ranks: dict[_Report, list[int]] = {each: [] for each in _Report}
        for rank, number in enumerate(numbers):
            ranks[_Report(number % _BASE)].append(rank)
        if ranks[_Report.FAILED]:
            self._raise(
                f"rank(s) {ranks[_Report.FAILED]} skipped a batch of uneven_batches, or reduced "
                "twice for one. Run one backward under GradientSync.FULL for each batch, or one "
                "under no_sync, and multiply the loss by 0 instead of skipping a batch."
            )
        if ranks[_Report.RAISED]:
            self._raise(
                f"the batches that rank(s) {ranks[_Report.RAISED]} passed to uneven_batches raised "
                "an exception there; see its traceback."
            )
        counts = [number // _BASE for number in numbers]
        behind = [rank for rank, count in enumerate(counts) if count < max(counts)]
        if behind and ranks[_Report.HAS_BATCH] + ranks[_Report.NO_BATCH]:
            self._raise(
                f"ranks drift apart: in the last iteration of uneven_batches, rank(s) {behind} did "
                "not step their optimizer, or had no gradient to step by, and others did. Call "
                "step() also where the batch is None, and zero_grad() only after it: .grad holds "
                "the gradients of the other ranks when such an iteration begins."
            )
        return ranks

    def _exchange_mode(self, report: _Report) -> GradientSync | None:
        """Return how far the ranks with a batch reduce.

        If one of them has left the loop, the others with a batch raise, and the rest return None.
        **Collective:** all ranks.
        """
        ranks = self._exchange(report)
        reducing, keeping = ranks[_Report.REDUCES], ranks[_Report.KEEPS]
        if ranks[_Report.LEFT]:
            if report in (_Report.REDUCES, _Report.KEEPS):
                self._raise(f"rank(s) {ranks[_Report.LEFT]} have left a loop over uneven_batches.")
            return None
        if reducing and keeping:
            self._raise(
                f"in an iteration of uneven_batches, rank(s) {reducing} reduced gradients fully "
                f"and rank(s) {keeping} did not; enter no_sync in the same iterations on all ranks "
                "that have a batch."
            )
        return GradientSync.FULL if reducing else GradientSync.NONE

    def _raise(self, problem: str) -> NoReturn:
        self._problem = problem  # raised again, if the user catches the error and goes on
        raise RuntimeError(problem)

    def before_reduction(self) -> None:
        """Report that this rank reduces: called before each reduction of a unit over all ranks."""
        if self._problem:
            raise RuntimeError(self._problem)
        if self._reduces_in is None:
            self._reduces_in = self.lifecycle.backward_number
            self._exchange_mode(_Report.REDUCES)
        elif self._reduces_in != self.lifecycle.backward_number:
            # A second backward of this iteration reduces, which is an error. Ranks that have run
            # only one backward are in begin() of the next iteration, and wait for a report. The
            # report that is sent here makes all ranks raise.
            self._exchange(_Report.FAILED)

    def join(self, module: nn.Module) -> bool:
        """Run a backward that uses no parameter, but issues the collectives of the other ranks.

        If the others only accumulate gradients, this rank accumulates a zero. Returns whether the
        other ranks are still in the loop.
        """
        mode = self._exchange_mode(_Report.JOINS)
        if mode is None:
            return False
        self._reduces_in = self.lifecycle.backward_number

        def arrive(_: torch.Tensor) -> None:
            for unit in self._units:
                if any(param.sharded.requires_grad for param in unit.params):
                    unit.lifecycle.gradient_from_outside(unit)

        with gradient_sync(module, mode), torch.enable_grad():
            zero = torch.zeros((), device="cpu", requires_grad=True)
            zero.register_hook(arrive)
            (zero * 1).backward()
        return True

    def leave(self) -> None:
        """Report that the user has left the loop, because others may be waiting for a report."""
        if self._reduces_in is None and not self._problem:
            with contextlib.suppress(RuntimeError):  # the group may be destroyed already
                self._exchange_mode(_Report.LEFT)

    def end(self) -> None:
        """End an iteration with a batch: the body of the loop is over."""
        if self._problem:
            raise RuntimeError(self._problem)
        if self._reduces_in is None:
            has_run = self.lifecycle.backward_number > self._began_at
            self._exchange_mode(_Report.KEEPS if has_run else _Report.FAILED)
        elif any(unit.gradients.is_pending for unit in self._units):
            self._has_failed = True
