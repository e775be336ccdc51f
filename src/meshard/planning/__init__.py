"""Foresight: what a job takes and sends, before it runs."""

from meshard.planning.plan import (
    Collective,
    CollectiveSum,
    Comparison,
    Plan,
    PlannedMoment,
    PlannedUnit,
    plan,
)

__all__ = [
    "Collective",
    "CollectiveSum",
    "Comparison",
    "Plan",
    "PlannedMoment",
    "PlannedUnit",
    "plan",
]
