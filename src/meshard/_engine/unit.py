"""One unit: modules whose parameters are gathered and reduced together.

A unit: some modules, their parameters as one group, and what the user chose for them. Ownership
runs one way, module -> unit -> group -> parameters; every edge back is weak, so that deleting a
model frees its memory without the garbage collector.

A unit communicates on one mesh, by one gather. So the module gets a unit for each: the outer one,
and companions, as if the module had been wrapped several times. They are entered from the outside
and left from the inside; units further inside are inside all of them. Only the outer one casts
what the module is given and what it returns.
"""

from __future__ import annotations

import math
import numbers
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from meshard._comm.communicator import Communicator
from meshard._comm.custom import CommSettings
from meshard._engine.param_group import ParamGroup
from meshard._engine.schedule import ForwardCall, ForwardPass, Phase, StepSchedule
from meshard._gradients.accumulator import GradientState
from meshard._gradients.reduce_plan import TensorHook
from meshard._mesh.mesh_info import MeshInfo
from meshard._params.subclass_params import SubclassParams
from meshard.policies import GradientSync


class Retainer(Protocol):
    """Keeps units whole beyond their forward and backward: see ``retained``."""

    def retain_hidden(self, unit: Unit, output: object, of: ForwardPass) -> None:
        """Keep a unit whole whose output holds no tensor, for one backward of this forward."""


class StepEvents(Protocol):
    """What a unit tells of the moments of its step: see ``lifecycle``."""

    phase: Phase
    schedule: StepSchedule
    is_last_backward: bool
    comm: Communicator

    @property
    def backward_number(self) -> int:
        """Number of the backward that runs, or of the next one."""

    @property
    def retained(self) -> Retainer:
        """What keeps units whole beyond their forward and backward."""

    def use(self, comm: Communicator) -> None:
        """Talk through another communicator from now on. Nothing may be on its way."""

    def running(self) -> list[Unit]:
        """Return the units whose forward has begun and not ended, outermost first."""

    def is_running(self, unit: Unit) -> bool:
        """Whether the outermost forward that has begun and not ended is that of the unit."""

    def is_between_steps(self) -> bool:
        """Whether no module runs, forward or backward."""

    def pre_forward(self, unit: Unit) -> None:
        """A module of the unit is about to run."""

    def post_forward(self, unit: Unit, module_position: int, *, failed: bool) -> ForwardCall | None:
        """A module of the unit has run, or raised."""

    def pre_backward(
        self, unit: Unit, of: ForwardPass, call: ForwardCall, gradient: torch.Tensor
    ) -> torch.Tensor | None:
        """The first gradient of an output is there. Return what to use instead, if anything."""

    def gradient_arrived(self, unit: Unit, index: int) -> None:
        """The whole gradient of one parameter is complete."""

    def gradient_joins(self, unit: Unit) -> None:
        """A whole gradient comes from outside the unit's forward, beside those that do not."""

    def flush(self, unit: Unit) -> None:
        """Reduce fully what the unit has accumulated, without a backward."""

    def end_window(self, unit: Unit) -> None:
        """The gradient of a window is in ``.grad``, whatever backwards have said."""

    def finish_reductions(self) -> None:
        """Have every reduction that was started in ``.grad``, or in its partial."""

    def abort(self) -> None:
        """Be as before a step."""


DivideFactor = float | torch.Tensor | Callable[[], "float | torch.Tensor"]


def check_divide_factor(factor: object) -> float:
    """Return a divide factor as a number. A 0-d tensor is read, and waited for.

    Raises:
        TypeError: It is neither a number nor a 0-d tensor.
        ValueError: It is not positive and finite.
    """
    if isinstance(factor, torch.Tensor) and factor.dim() == 0:
        factor = factor.item()
    if isinstance(factor, bool) or not isinstance(factor, numbers.Real):
        raise TypeError(
            f"factor must be a number, a callable or a 0-d tensor, got {type(factor).__name__}."
        )
    value = float(factor)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"factor must be positive and finite, got {factor}.")
    return value


@dataclass(frozen=True, slots=True, eq=False)
class ReduceHook:
    """One registration of what sees gradients on their way: ``meshard.register_reduce_hook``."""

    arrived: TensorHook | None = None  # whole gradients of one backward
    before: TensorHook | None = None  # whole gradients that are about to be reduced
    after: TensorHook | None = None  # what is about to be added to .grad
    wire_dtype: torch.dtype | None = None  # None: as the policy says
    is_all_reduce: bool = False  # set by set_all_reduce_hook, which replaces it

    @property
    def is_idle(self) -> bool:
        """Whether it does nothing."""
        return not (self.arrived or self.before or self.after or self.wire_dtype)


@dataclass(slots=True)
class UnitSettings:
    """What may change from step to step. Written by the setters of ``FSDPModule``."""

    reshard_after_forward: bool | int | None = None  # None: unless the unit is the root
    post_forward_group: dist.ProcessGroup | None = (
        None  # the neighbours, if reshard_after_forward is an int
    )
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    sync: GradientSync = GradientSync.FULL
    sync_when_on: GradientSync = GradientSync.FULL  # what set_requires_gradient_sync(True) means
    divide_factor: DivideFactor | None = None  # None: the number of ranks
    zero_unused: bool = False  # a gradient of zero for what no rank used
    max_input_buffers: int = 3  # whole gradients that may be on their way, the new ones included
    scatter_group: dist.ProcessGroup | None = None  # None: the one that gathers
    comm: CommSettings = field(default_factory=CommSettings)
    reduce_hooks: list[ReduceHook] = field(default_factory=list)
    unshard_on_access: bool = False  # when a unit around it reads a parameter: see on_access
    forward_prefetch: list[weakref.ref[Unit]] = field(default_factory=list)
    backward_prefetch: list[weakref.ref[Unit]] = field(default_factory=list)

    def resolve_divide_factor(self) -> float | None:
        """Return the factor of a reduction that starts now. A tensor is read, and waited for."""
        factor = self.divide_factor
        if factor is None or isinstance(factor, float):
            return factor
        return check_divide_factor(factor() if callable(factor) else factor)


@dataclass(frozen=True, slots=True)
class Casts:
    """What happens to the dtypes of a unit's inputs and outputs."""

    inputs: torch.dtype | None
    outputs: torch.dtype | None


@dataclass(slots=True)
class UnitStep:
    """Where a unit is in the present step."""

    arrived: set[int] = field(default_factory=set)  # parameters whose whole gradient is there
    awaits_gradients: bool = False  # a forward has run whose gradients have not been taken
    may_run_again: bool = False  # a forward made no graph: a reentrant checkpoint runs it again
    is_in_backward: bool = False  # its backward has begun and is not over
    is_ready: bool = False  # its gradients are complete, and wait for units inside it
    in_call: ForwardCall | None = None  # whose backward it is in, or was in last
    in_pass: ForwardPass | None = None  # whose backward it is in, or was in last
    is_retained: bool = False  # a graph may read its whole parameters again: see held
    modules_run: set[int] = field(default_factory=set)  # in this pass; for units of several

    def record_forward(self, *, with_graph: bool) -> None:
        """A forward of the unit has begun."""
        self.may_run_again = not with_graph
        if with_graph:
            self.awaits_gradients = True

    def end_backward(self) -> None:
        """Nothing of the unit is left to run, in this pass."""
        self.is_in_backward = self.may_run_again = False

    def record_taken(self) -> None:
        """The gradients are taken, to be reduced or kept."""
        self.is_ready = self.awaits_gradients = False
        self.arrived.clear()

    def has_all(self, num_trainable: int) -> bool:
        """Whether a gradient of every parameter is there, and no call of the unit is left.

        Gradients may all be there while an earlier call of the unit has its backward still to come:
        on a rank that used no parameter in that one. Others wait for it, and so must all.
        """
        if len(self.arrived) < num_trainable:
            return False
        return self.in_call is None or self.in_call.is_first


class Unit:
    """One group of parameters, with the modules that use them.

    Args:
        modules: The modules that were passed to ``fully_shard``.
        casts: dtypes of inputs and outputs.
        settings: What the user chose.
    """

    def __init__(self, modules: list[nn.Module], casts: Casts, settings: UnitSettings) -> None:
        self.modules = [weakref.ref(module) for module in modules]
        self.casts = casts
        self.settings = settings
        self.step = UnitStep()
        self.fqn = ""  # dotted name from the root; "" for the root itself
        self.number = 0  # place among the units of its root, in module order
        self.parent: weakref.ref[Unit] | None = None  # the innermost unit around this one
        self.children: list[weakref.ref[Unit]] = []  # the units directly inside
        self.siblings: list[Unit] = []  # of the same modules, on other meshes: see companions
        self.sibling_of: weakref.ref[Unit] | None = None
        self.mesh_name = ""  # to tell companions apart
        # Called once per window, when the gradient of all of it is in .grad, or on its way there
        # (``GradientState.settle``). All ranks call in the same order.
        self.on_reduced: list[Callable[[Unit], None]] = []
        self.reduced_in = -1  # the last backward in which they were
        self.group: ParamGroup | None = None  # None: no parameters of its own
        self.gradients: GradientState | None = None
        self.lifecycle: StepEvents

    @property
    def label(self) -> str:
        """The name to show: the root has no dotted name."""
        return (self.fqn or "(root)") + self.mesh_name

    @property
    def is_root(self) -> bool:
        """Whether no unit is around this one, or only the one that it accompanies."""
        outer = self if self.sibling_of is None else self.sibling_of()
        return outer is not None and outer.parent is None

    @property
    def reshards_after_forward(self) -> bool:
        """Whether the whole parameters are given back when forward ends.

        By default the root keeps them, if a backward may follow that needs them at once.
        """
        if self.step.is_retained:
            return False
        chosen = self.settings.reshard_after_forward
        if chosen is None:
            return not self.is_root or not torch.is_grad_enabled()
        return bool(chosen)

    @property
    def may_reshard(self) -> bool:
        """Whether the forward of all its modules has run, and it is resharded after that."""
        return self.reshards_after_forward and len(self.step.modules_run) == len(self.modules)

    @property
    def has_open_children(self) -> bool:
        """Whether gradients of a unit inside are, or may be, still to come."""
        for ref in self.children:
            child = ref()
            if child is None:
                continue
            if child.step.awaits_gradients or child.step.may_run_again:
                return True
            # Nothing of it may be trained, but something further inside.
            if child.children and child.has_open_children:
                return True
        return False

    def mark_leftover(self) -> None:
        """Note that the outermost forward, that of this unit, has left parameters whole."""
        for each in (self, *self.siblings):
            if each.group is not None:
                each.group.is_leftover = True

    def reset_step(self) -> None:
        """Be as between two steps."""
        self.step.awaits_gradients = False
        self.step.arrived.clear()
        self.step.end_backward()
        self.step.is_ready = False
        self.step.modules_run.clear()
        self.step.in_pass = self.step.in_call = None


def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit that ``fully_shard`` made for ``module``, if it did."""
    return module.__dict__.get("_meshard_unit")


def units_of(module: nn.Module) -> list[Unit]:
    """Return the unit of ``module``, if any, and its companions."""
    unit = unit_of(module)
    return [] if unit is None else [unit, *unit.siblings]


def units_in(module: nn.Module) -> Iterator[Unit]:
    """Iterate over the units of ``module`` and of everything inside it, each once."""
    seen: set[Unit] = set()
    for inner in module.modules():
        for unit in units_of(inner):
            if unit not in seen:
                seen.add(unit)
                yield unit


def own_class(module: nn.Module) -> type:
    """Return the class that ``module`` had before it was sharded."""
    classes = type(module).__mro__
    if TorchFSDPModule in classes:
        return classes[classes.index(TorchFSDPModule) + 1]
    return classes[0]


def link_siblings(units: list[Unit]) -> Unit:
    """Make the units after the first its companions, and return the first.

    Args:
        units: Made for the same modules, on different meshes, or of different kinds.
    """
    for unit in units[1:]:
        assert unit.group is not None
        unit.mesh_name = _name(unit.group.spec.mesh_info)
        if isinstance(unit.group.tensors, SubclassParams):
            unit.mesh_name += " (extended)"
    return nest(units)


def nest(units: list[Unit]) -> Unit:
    """Put each unit inside the one before, as companions of the first, and return that."""
    outer, *siblings = units
    around = outer
    for unit in siblings:
        unit.casts = Casts(None, None)
        unit.sibling_of = weakref.ref(outer)
        unit.parent = weakref.ref(around)
        around.children.append(weakref.ref(unit))
        around = unit
    outer.siblings = siblings
    return outer


def with_siblings(unit: Unit) -> list[Unit]:
    """Return a unit and its companions, outermost first."""
    return [unit, *unit.siblings]


def _name(mesh_info: MeshInfo) -> str:
    mesh = mesh_info.mesh
    how = " on" if mesh_info.shard_axis is not None else " whole on"
    if mesh.mesh_dim_names is None:
        return f"{how} {'x'.join(map(str, mesh.shape))}"
    pairs = zip(mesh.mesh_dim_names, mesh.shape, strict=True)
    return f"{how} {', '.join(f'{name}={size}' for name, size in pairs)}"
