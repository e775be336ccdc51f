"""Plans of many settings of one job: which fit, and which of those send least."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from meshard.planning.plan import Plan, bytes_of, plan

MakeJob = Callable[..., Callable[[], object]]


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One setting.

    Attributes:
        settings: The keyword arguments of the job.
        world_size: How many ranks it was planned for.
        plan: Its plan; None if the job, or ``plan``, raised an exception.
        error: What was raised.
    """

    settings: dict[str, Any]
    world_size: int
    plan: Plan | None
    error: str = ""

    def fits(self, limit: str | float | None) -> bool:
        """Whether the plan fits; without a limit, whether there is one."""
        return self.plan is not None and (limit is None or self.plan.fits(limit))


def sweep(
    job: MakeJob,
    settings: Mapping[str, Sequence[Any]],
    *,
    limit: str | float | None = None,
    **options: Any,
) -> list[SweepRow]:
    """Plan a job for every combination of settings, and rank them.

    What fits into ``limit`` comes first. Of that, what sends fewest bytes between nodes, then in
    all, then what takes least memory.

    Args:
        job: As for ``plan``, with keyword arguments.
        settings: The values of each keyword argument.
        limit: The memory of a rank, in bytes or as in ``"80GB"``.
        **options: Of ``plan``; ``world_size`` is needed.

    Returns:
        One row for each combination. One that raised an exception has its text, and comes last.

    >>> import torch, meshard
    >>> def job(reshard=True):
    ...     layers = [meshard.fully_shard(torch.nn.Linear(64, 64),
    ...                                   reshard_after_forward=reshard) for _ in range(3)]
    ...     model = meshard.fully_shard(torch.nn.Sequential(*layers))
    ...     return lambda: model(torch.ones(2, 64)).sum().backward()
    >>> from meshard.planning import sweep
    >>> for row in sweep(job, {"reshard": [True, False]}, world_size=8):
    ...     print(row.settings, row.plan.collectives["all_gather"].count)
    {'reshard': False} 3
    {'reshard': True} 6
    """
    limit = None if limit is None else bytes_of(limit)
    combinations = itertools.product(*settings.values())
    chosen = (dict(zip(settings, values, strict=True)) for values in combinations)
    rows = [_row_of(job, each, **options) for each in chosen]
    return sorted(rows, key=lambda row: _rank_of(row, limit))


def fit(
    job: MakeJob,
    settings: Mapping[str, Sequence[Any]],
    *,
    limit: str | float,
    world_size: int,
    **options: Any,
) -> tuple[SweepRow | None, SweepRow | None]:
    """Find the smallest world and the cheapest setting that fit into ``limit``.

    Args:
        job: As for ``sweep``.
        settings: As for ``sweep``; they may be empty.
        limit: The memory of a rank, in bytes or as in ``"80GB"``.
        world_size: How many ranks there are at most.
        **options: Of ``plan``. In a world without such a ``rank``, the last one is planned.

    Returns:
        The row with the fewest ranks (powers of two, or else ``world_size``) on which any setting
        fits, and the best row of ``sweep`` on ``world_size`` ranks. None: nothing fits.

    Raises:
        RuntimeError: No setting could be planned on ``world_size`` ranks.
    """
    best, *_ = rows = sweep(job, settings, limit=limit, world_size=world_size, **options)
    check_some(rows)
    if not best.fits(limit):
        return None, None
    for power in range((world_size - 1).bit_length()):
        size = 2**power
        own = {**options, "rank": min(options.get("rank", 0), size - 1)}
        smaller, *_ = sweep(job, settings, limit=limit, world_size=size, **own)
        if smaller.fits(limit):
            return smaller, best
    return best, best


def check_some(rows: Sequence[SweepRow]) -> None:
    """Raise a RuntimeError if no row of a sweep has a plan."""
    if rows[0].plan is None:  # such rows come last
        raise RuntimeError(f"no setting could be planned: {rows[0].error}")


def _row_of(job: MakeJob, settings: dict[str, Any], *, world_size: int, **options: Any) -> SweepRow:
    # Catch any exception: that a job refuses a setting is a result too, for example if the number
    # of ranks cannot be divided by that of replicas.
    try:
        planned = plan(partial(job, **settings), world_size=world_size, **options)
    except Exception as error:
        return SweepRow(settings, world_size, None, f"{type(error).__name__}: {error}")
    return SweepRow(settings, world_size, planned)


def _rank_of(row: SweepRow, limit: int | None) -> tuple[bool, bool, int, int, int]:
    if row.plan is None:
        return True, True, 0, 0, 0
    peak = row.plan.peak_bytes
    if not row.fits(limit):
        return False, True, peak, 0, 0
    return False, False, row.plan.wire_bytes_between_nodes, row.plan.wire_bytes, peak
