"""Gradient accumulation across microbatches."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshard._comm.blocking import gather_from_all
from meshard._engine.unit import Unit, require_units, units_in
from meshard._params.replicated_params import ReplicatedParams
from meshard._params.unit_params import GroupSpec
from meshard.policies import GradientSync, check_iterable

Batch = TypeVar("Batch")
_END: Any = object()  # marks the end of an iterator, whose length need not be known

# --- how far each backward reduces ---------------------------------------------------------------


@contextlib.contextmanager
def gradient_sync(module: nn.Module, mode: GradientSync) -> Iterator[None]:
    """Reduce gradients as far as ``mode`` inside, for all units in ``module``.

    On exit each unit has the mode that it had before.

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
    """Accumulate unsharded gradients without any collective: ``gradient_sync`` with NONE.

    Takes memory for all gradients on each rank; ``GradientSync.REDUCE_SCATTER`` takes a shard.
    """
    return gradient_sync(module, GradientSync.NONE)


def microbatches(
    module: nn.Module,
    batches: Iterable[Batch],
    *,
    until_last: GradientSync = GradientSync.REDUCE_SCATTER,
) -> Iterator[Batch]:
    """Iterate over the microbatches of one step, reducing fully after the last only.

    The sync mode (``until_last`` before the last batch) and ``set_is_last_backward`` are set before
    each batch is yielded, and restored when the loop ends. ``batches`` is read one batch ahead.

    Raises:
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
    return _microbatches(module, batches, until_last, require_units(module))


def _microbatches(
    module: nn.Module, batches: Iterable[Batch], until_last: GradientSync, units: list[Unit]
) -> Iterator[Batch]:
    lifecycles = {id(unit.lifecycle): unit.lifecycle for unit in units}.values()
    before = [lifecycle.is_last_backward for lifecycle in lifecycles]
    try:
        for batch, following in itertools.pairwise(itertools.chain(batches, [_END])):
            is_last = following is _END
            for lifecycle in lifecycles:
                lifecycle.is_last_backward = is_last
            with gradient_sync(module, GradientSync.FULL if is_last else until_last):
                yield batch
    finally:
        for lifecycle, was_last in zip(lifecycles, before, strict=True):
            lifecycle.is_last_backward = was_last


# --- pending gradients ---------------------------------------------------------------------------


class PendingGradients(dict[str, DTensor | None]):
    """Gradients that are accumulated but not in ``.grad``, by parameter name.

    The value of a parameter is its partial sum, a DTensor ``(Partial("avg"), Shard(dim))`` that is
    reduced over the shard group; None if its gradients have not been reduced at all. The mapping is
    false if nothing is pending, on all ranks alike, also if it is empty on this one.
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

    **Collective:** only if ``set_is_last_backward(False)`` left reductions in flight.

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
            param = unit.group.params[index]  # installed: either its sharded or unsharded tensor
            # A unit of several modules may have parameters that are not in this module.
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
    units = require_units(module)
    for unit in reversed(units):
        unit.lifecycle.flush(unit)
    for unit in units:
        unit.lifecycle.finish_reductions()
    for unit in reversed(units):
        unit.lifecycle.end_window(unit)


# --- ranks with different numbers of batches -----------------------------------------------------


def uneven_batches(module: nn.Module, batches: Iterable[Batch]) -> Iterator[Batch | None]:
    """Iterate over this rank's batches, and then over None until every rank has used up its own.

    A rank without a batch takes part in the reductions of the others with a gradient of zero, and
    gradients are divided by the number of ranks that had a batch (unless
    ``set_gradient_divide_factor`` was called). ``.grad`` is there also where the batch is None, so
    every rank steps its optimizer every time, and ranks stay equal.

    **Collective:** every rank of the mesh, at each iteration (one number per rank). For each batch
    run one forward of ``module``, which ``replicate`` was applied to, and one backward that reduces
    fully. All ranks wait for one that leaves the loop early.

    Raises:
        RuntimeError: A batch was skipped, or its gradients were not reduced fully (``no_sync``).
        ValueError: ``module`` is not replicated, or some of it is sharded.

    >>> import torch, meshard
    >>> model = meshard.replicate(torch.nn.Linear(1, 1))
    >>> for batch in meshard.uneven_batches(model, torch.ones(3, 2, 1)):
    ...     if batch is not None:
    ...         model(batch).sum().backward()
    >>> model.bias.grad
    tensor([6.])
    """
    units = list(units_in(module))
    groups = [unit.group for unit in units if unit.params]
    is_replicated = all(isinstance(group.storage, ReplicatedParams) for group in groups)
    if not is_replicated or "_meshard_buckets" not in vars(module):
        raise ValueError(
            "uneven_batches needs a module to which meshard.replicate was applied, without sharded "
            "units inside; where parameters are sharded, a rank that has no batch left must run an "
            "empty one, because others gather its shards."
        )
    check_iterable("batches", batches)
    return _uneven_batches(module, batches, units, groups[0].spec)


def _uneven_batches(
    module: nn.Module, batches: Iterable[Batch], units: list[Unit], spec: GroupSpec
) -> Iterator[Batch | None]:
    pg = spec.mesh_info.replicate_group
    assert pg is not None
    buckets = module.__dict__["_meshard_buckets"]
    averaging = [unit for unit in units if unit.settings.divide_factor is None]
    remaining = iter(batches)
    try:
        while True:
            batch: Any = next(remaining, _END)
            has_batch = torch.tensor([batch is not _END], dtype=torch.int32, device=spec.device)
            have = gather_from_all(has_batch, pg, label="(uneven batches)").view(-1).tolist()
            if not any(have):
                return
            for unit in averaging:
                unit.settings.divide_factor = float(sum(have))
            buckets.buffers_from = have.index(1)  # the rank whose buffers count
            number = units[0].lifecycle.backward_number
            if batch is _END:
                buckets.before_forward(module, ())
                _reduce_zeros(units)
                batch = None
            yield batch
            is_skipped = units[0].lifecycle.backward_number == number
            if is_skipped or any(unit.gradients.is_pending for unit in units):
                # gloo aborts where the reduction of another rank meets the next exchange.
                raise RuntimeError(
                    "uneven_batches needs one backward under GradientSync.FULL for each batch, and "
                    "this one was skipped, or its gradients are pending: do not use no_sync in the "
                    "loop, and multiply the loss by 0 instead of skipping a batch."
                )
    finally:
        for unit in averaging:
            unit.settings.divide_factor = None
        buckets.buffers_from = 0


def _reduce_zeros(units: list[Unit]) -> None:
    """Run a backward that uses no parameter, so that it issues the collectives of the others'."""

    def join(_: torch.Tensor) -> None:
        for unit in units:
            if unit.params:
                unit.lifecycle.gradient_joins(unit)

    with torch.enable_grad():
        zero = torch.zeros((), requires_grad=True)
        zero.register_hook(join)
        (zero * 1).backward()
