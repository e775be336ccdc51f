"""Plans: the memory and the communication of a job, before it runs."""

from meshard.planning.measuring import measure
from meshard.planning.plan import (
    CollectiveSum,
    Comparison,
    Plan,
    PlannedMoment,
    PlannedUnit,
    plan,
)
from meshard.planning.sweep import SweepRow, fit, sweep
from meshard.planning.tape import Collective
from meshard.planning.timing import KindTime, Link, MeasuredWork, Profile, StepTime

__all__ = [
    "Collective",
    "CollectiveSum",
    "Comparison",
    "KindTime",
    "Link",
    "MeasuredWork",
    "Plan",
    "PlannedMoment",
    "PlannedUnit",
    "Profile",
    "StepTime",
    "SweepRow",
    "fit",
    "measure",
    "plan",
    "sweep",
]
