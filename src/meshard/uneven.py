"""What if ranks have different numbers of batches?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import nn

from meshard._comm.setup_communicator import gather_from_all
from meshard._runtime.plain_tensors import PlainTensors
from meshard._runtime.unit import Unit, units_in

Batch = TypeVar("Batch")
_END: Any = object()


def uneven_batches(module: nn.Module, batches: Iterable[Batch]) -> Iterator[Batch | None]:
    """Iterate over this rank's batches, and then over None until all ranks have used up theirs.

    A rank that has run out takes part in the reductions of the others with a gradient of zero, and
    gradients are divided by the number of ranks that had a batch (unless
    ``set_gradient_divide_factor`` has said by what). So ``.grad`` is the same on all ranks, also
    where the batch is None, and every rank steps its optimizer every time: parameters, optimizer
    states and schedulers stay equal.

    **Collective:** every rank of the mesh, at each iteration (one number per rank). For each batch
    run one forward of ``module`` and one backward that reduces fully (``GradientSync.FULL``). All
    ranks wait for one that leaves the loop early.

    Args:
        module: What ``replicate`` was applied to.
        batches: This rank's.

    Yields:
        Each batch; then None, with the gradients of the other ranks in ``.grad`` already.

    Raises:
        ValueError: ``module`` is not replicated, or some of it is sharded: ranks without a batch
            would not gather what the others need. There, run such a rank on an empty batch.

    >>> import torch, meshard
    >>> model = meshard.replicate(torch.nn.Linear(1, 1))
    >>> for batch in meshard.uneven_batches(model, torch.ones(3, 2, 1)):
    ...     if batch is not None:
    ...         model(batch).sum().backward()
    >>> model.bias.grad
    tensor([6.])
    """
    units = list(units_in(module))
    if not units or not all(_is_replicated(unit) for unit in units):
        raise ValueError(
            "uneven_batches needs a module to which meshard.replicate was applied, without sharded "
            "units inside; where parameters are sharded, a rank that has no batch left must run an "
            "empty one, because others gather its shards."
        )
    return _uneven_batches(module, batches, units)


def _is_replicated(unit: Unit) -> bool:
    return unit.group is None or isinstance(unit.group.tensors, PlainTensors)


def _uneven_batches(
    module: nn.Module, batches: Iterable[Batch], units: list[Unit]
) -> Iterator[Batch | None]:
    place = next(unit.group.place for unit in units if unit.group is not None)
    group, left = place.roles.replicate_group, iter(batches)
    assert group is not None
    factors = [unit.settings.divide_factor for unit in units]
    try:
        while True:
            batch = next(left, _END)
            own = torch.tensor([batch is not _END], dtype=torch.int32, device=place.device)
            have = gather_from_all(own, group, label="(uneven batches)").view(-1).tolist()
            if not any(have):
                return
            for unit, factor in zip(units, factors, strict=True):
                unit.settings.divide_factor = float(sum(have)) if factor is None else factor
            module.__dict__["_meshard_before_forward"].source = have.index(1)
            if batch is _END:
                _take_part(module, units)
            yield None if batch is _END else cast("Batch", batch)
    finally:
        for unit, factor in zip(units, factors, strict=True):
            unit.settings.divide_factor = factor
        module.__dict__["_meshard_before_forward"].source = 0


def _take_part(module: nn.Module, units: list[Unit]) -> None:
    """Issue the collectives of a forward and a backward that use no parameter."""
    module.__dict__["_meshard_before_forward"](module, ())

    def join(_: torch.Tensor) -> None:
        for unit in units:
            if unit.group is not None:
                unit.lifecycle.gradient_joins(unit)

    with torch.enable_grad():
        nothing = torch.zeros((), requires_grad=True)
        nothing.register_hook(join)
        (nothing * 1).backward()
