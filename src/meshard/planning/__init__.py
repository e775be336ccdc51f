"""Plans: the memory and the communication of a job, before it runs."""

from meshard.planning.machine import Collective
from meshard.planning.plan import (
    CollectiveSum,
    Comparison,
    Plan,
    PlannedMoment,
    PlannedUnit,
    plan,
)
from meshard.planning.sweep import SweepRow, fit, sweep

__all__ = [
    "Collective",
    "CollectiveSum",
    "Comparison",
    "Plan",
    "PlannedMoment",
    "PlannedUnit",
    "SweepRow",
    "fit",
    "plan",
    "sweep",
]
