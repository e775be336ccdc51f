"""Gradient accumulation across microbatches."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from torch import nn
from torch.distributed.tensor import DTensor

from meshard._comm.first_values import ranks_of, rows_over_mesh
from meshard._engine.lifecycle import Lifecycle
from meshard._engine.unit import Unit, require_units
from meshard.policies import GradientSync

Batch = TypeVar("Batch")
_END: Any = object()  # follows the last batch of an iterator

# --- how far each backward reduces ---------------------------------------------------------------


@contextlib.contextmanager
def gradient_sync(module: nn.Module, mode: GradientSync) -> Iterator[None]:
    """Inside the context, reduce gradients of all units in ``module`` as far as ``mode`` says.

    On exit, restore the previous mode of each unit.

    Raises:
        ValueError: There is no unit in ``module``.

    >>> import torch, meshard
    >>> layer = meshard.fully_shard(torch.nn.Linear(2, 2))
    >>> with meshard.gradient_sync(layer, meshard.GradientSync.NONE):
    ...     layer(torch.ones(1, 2)).sum().backward()
    >>> layer.weight.grad is None
    True
    """
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

    If the loop is left before its last batch has run (by an exception or ``break``), the gradients
    that it has accumulated are dropped. If an exception of a forward or backward is caught inside
    the loop, the loop goes on, and the optimizer refuses to step by what the others have left.

    Raises:
        ValueError: There is no unit in ``module``.

    >>> import torch, meshard
    >>> layer = meshard.fully_shard(torch.nn.Linear(2, 1, bias=False))
    >>> for batch in meshard.microbatches(layer, torch.ones(3, 1, 2)):
    ...     layer(batch).sum().backward()
    >>> layer.weight.grad.full_tensor()
    tensor([[3., 3.]])
    """
    return _microbatches(batches, until_last, require_units(module))


def _microbatches(
    batches: Iterable[Batch], until_last: GradientSync, units: list[Unit]
) -> Iterator[Batch]:
    lifecycles = list({id(unit.lifecycle): unit.lifecycle for unit in units}.values())
    before = [lifecycle.is_last_backward for lifecycle in lifecycles]
    modes_before = [unit.settings.sync for unit in units]
    for lifecycle in lifecycles:
        lifecycle.abort_if_cut_off()  # a failure before this loop does not count
    generations = [lifecycle.failure.generation for lifecycle in lifecycles]
    is_complete = False
    try:
        for unit in units:
            unit.gradients.window.is_in_loop = True
        for batch, following in itertools.pairwise(itertools.chain(batches, [_END])):
            is_last = following is _END
            for lifecycle in lifecycles:
                lifecycle.is_last_backward = is_last
            for unit in units:
                unit.settings.sync = GradientSync.FULL if is_last else until_last
            yield batch
        is_complete = True
        for lifecycle, generation in zip(lifecycles, generations, strict=True):
            lifecycle.abort_if_cut_off()
            if lifecycle.failure.generation != generation:  # a microbatch has failed
                lifecycle.failure.is_dirty = True
    finally:
        windows = [unit.gradients.window for unit in units]
        is_cut_off = not is_complete and any(window.is_open for window in windows)
        for window in windows:
            window.is_in_loop = False
        for lifecycle, was_last in zip(lifecycles, before, strict=True):
            lifecycle.is_last_backward = was_last
            if is_cut_off and lifecycle.is_idle:
                lifecycle.abort()
        for unit, mode in zip(units, modes_before, strict=True):
            unit.settings.sync = mode


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
        is_open = is_open or bool(unit.gradients.pending)
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


def uneven_batches(module: nn.Module, batches: Iterable[Batch]) -> Iterator[tuple[Batch, float]]:
    """Iterate over ``(batch, weight)`` on every rank, until all ranks have used up their batches.

    The weight is 1.0. A rank that has no batch left gets its last one again, with weight 0.0, so
    that it issues the collectives of the others: multiply the loss by the weight. The loss must be
    finite. Gradients are divided by the number of ranks that still have a batch, unless
    ``set_gradient_divide_factor`` was called.

    Every rank runs the same steps in each iteration, and leaves the loop in the same one.
    **Collective:** all ranks of the mesh, once as each iteration begins and once at the end.

    Raises:
        RuntimeError: On all ranks, before the first iteration: a rank has no batch at all.
        ValueError: There is no unit in ``module``.

    >>> import torch, meshard
    >>> model = meshard.fully_shard(torch.nn.Linear(1, 1))
    >>> for batch, weight in meshard.uneven_batches(model, torch.ones(3, 2, 1)):
    ...     (weight * model(batch).sum()).backward()
    >>> model.bias.grad.full_tensor()
    tensor([6.])
    """
    return _uneven_batches(batches, [unit for unit in require_units(module) if unit.params])


def _uneven_batches(batches: Iterable[Batch], units: list[Unit]) -> Iterator[tuple[Batch, float]]:
    mesh_infos = {unit: unit.group.spec.mesh_info for unit in units}
    largest = max(mesh_infos.values(), key=lambda info: info.mesh.size())
    counted = [unit for unit in units if unit.settings.divide_factor is None]
    last: Any = _END
    try:
        for batch in itertools.chain(batches, itertools.repeat(_END)):
            has_batch = batch is not _END
            rows = rows_over_mesh([int(has_batch)], largest, purpose="uneven_batches")
            having = sum(count for (count,) in rows)
            if not having:
                return
            if last is _END and having < len(rows):
                without = [
                    rank for rank, row in zip(ranks_of(largest), rows, strict=True) if not any(row)
                ]
                raise RuntimeError(
                    f"rank(s) {without} passed no batch at all to uneven_batches; each rank needs "
                    "one to run again, so give it one of another rank."
                )
            for unit in counted:
                count = mesh_infos[unit].shard_count * mesh_infos[unit].replicate_count
                unit.settings.divide_factor = count * having / len(rows)
            last = batch if has_batch else last
            yield last, float(has_batch)
    finally:
        for unit in counted:
            unit.settings.divide_factor = None
