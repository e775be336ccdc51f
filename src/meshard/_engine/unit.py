"""One unit: modules whose parameters are gathered and reduced together.

A unit has one mesh, and one all-gather gathers all of its parameters. A module needs several units
if its parameters lie on several meshes. The units of one module are *sibling units*. They are
nested as if the module had been wrapped once per unit: a forward enters the outermost sibling first
and leaves it last, and units of submodules are inside all siblings. Only the outermost sibling
casts inputs and outputs.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from meshard._comm.communicator import CommSettings
from meshard._comm.divergence import RootNames
from meshard._engine.param_group import ParamGroup
from meshard._gradients.accumulator import (
    GradientAccumulator,
    GradientRules,
    Gradients,
    ReduceSettings,
)
from meshard._gradients.buckets import BucketedGradients
from meshard._params.flat_params import FlatParams
from meshard._params.replicated_params import ReplicatedParams
from meshard._params.unit_params import UnitParam, UnitParams
from meshard._torch.private import graph_task_id
from meshard.policies import MixedPrecisionPolicy, check_bool

if TYPE_CHECKING:
    from meshard._engine.lifecycle import Lifecycle


@dataclass(slots=True)
class UnitSettings(ReduceSettings):
    """The settings of a unit, which setters of ``FSDPModule`` can change."""

    reshard_after_forward: bool | int | None = None  # None: True, except for a root with grad
    # If reshard_after_forward is an int, parameters are sharded over this group between forward and
    # backward.
    post_forward_group: dist.ProcessGroup | None = None
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    comm: CommSettings = field(default_factory=CommSettings)
    unshard_on_access: bool = False  # unshard it with the unit around it, which reads its weights
    forward_prefetch: list[weakref.ref[Unit]] = field(default_factory=list)
    backward_prefetch: list[weakref.ref[Unit]] = field(default_factory=list)


@dataclass(slots=True)
class UnitStep:
    """The progress of a unit in the present step."""

    # The unit must be reduced (under GradientSync.NONE: add up gradients), even if this rank has no
    # gradient. Set by a forward with grad, by its backward, and by a gradient.
    is_due: bool = False
    lost_unshard: bool = False  # the user called unshard(), and a forward has resharded since
    # The ids of the unit's modules that have run. When all have, the unit's forward has ended.
    modules_run: set[int] = field(default_factory=set)

    def record_taken(self) -> None:
        self.is_due = self.lost_unshard = False


class Unit:
    """One parameter group with the modules passed to ``fully_shard`` or ``replicate``.

    A module owns its unit, the unit its parameter group, and the group its parameters. References
    in the other direction are weak, so ``del model`` frees memory without the garbage collector.
    """

    def __init__(
        self, modules: list[nn.Module], settings: UnitSettings, policy: MixedPrecisionPolicy
    ) -> None:
        self.modules = [weakref.ref(module) for module in modules]
        self.settings = settings
        self.input_dtype = policy.param_dtype if policy.cast_forward_inputs else None
        self.output_dtype = policy.output_dtype  # outputs are cast to this dtype; None: no cast
        self.buffer_dtype = policy.buffer_dtype  # buffers are cast to this dtype; None: no cast
        self._reduce_dtype, self._accumulate_dtype = policy.reduce_dtype, policy.accumulate_dtype
        self.step = UnitStep()
        self.fqn = ""  # dotted name from the root; "" for the root itself
        self.number = 0  # position among the units of its root, in module order
        self.parent: weakref.ref[Unit] | None = None  # the innermost unit around this one
        self.siblings: list[Unit] = []  # in the outermost unit of some modules: their other units
        self.sibling_of: weakref.ref[Unit] | None = None
        self.mesh_name = ""  # suffix of ``label`` that tells apart the units of one module
        # Called with this unit once per window (the microbatches of one optimizer step), after the
        # unit's last reduction, in the same order on all ranks. By then ``.grad`` is set. But if
        # gradients live in host memory, call ``Gradients.settle`` before you read ``.grad``.
        self.on_reduced: list[Callable[[Unit], None]] = []
        self.reduced_in = -1  # number of the last backward that called ``on_reduced``
        self.params: Sequence[UnitParam]  # ``set_params`` sets this and the next two
        self.gradients: Gradients
        self.group: ParamGroup
        self.root: Root

    def set_params(self, unit_params: UnitParams) -> None:
        """Give this unit the parameters ``unit_params``, which have no gradients yet."""
        rules = GradientRules(unit_params, self._reduce_dtype, self._accumulate_dtype)
        self.params = unit_params.params
        if isinstance(unit_params, ReplicatedParams):
            self.gradients = BucketedGradients(unit_params, rules)
        else:
            assert isinstance(unit_params, FlatParams)
            self.gradients = GradientAccumulator(unit_params, rules)
        self.group = ParamGroup(unit_params, self.gradients)

    @property
    def lifecycle(self) -> Lifecycle:
        """The ``Lifecycle`` that all units of the root share. It is made when one is first used."""
        lifecycle = self.root.lifecycle
        return lifecycle if lifecycle is not None else self.root.make_lifecycle()

    @property
    def label(self) -> str:
        """The name in errors and tables. The root, whose dotted name is empty, is "(root)"."""
        return (self.fqn or "(root)") + self.mesh_name

    @property
    def is_root(self) -> bool:
        """Whether this unit, or the outermost of its siblings, is inside no other unit."""
        outer = self if self.sibling_of is None else self.sibling_of()
        return outer is not None and outer.parent is None

    @property
    def reshards_after_forward(self) -> bool:
        """Whether the unit is resharded when its forward ends.

        By default the root stays unsharded if grad is enabled: the backward begins with the root.
        """
        chosen = self.settings.reshard_after_forward
        if chosen is None:
            return not (self.is_root and torch.is_grad_enabled())
        return bool(chosen)

    def add_child(self, child: Unit) -> None:
        """Put ``child`` directly inside this unit."""
        child.parent = weakref.ref(self)


class Failure:
    """Whether a step of a root was cut off. If so, the next use of the root cleans up first.

    When a backward raises, autograd may call no hook of meshard. But autograd then frees the
    callback that meshard has queued for the end of the backward; a weak reference shows that.
    """

    def __init__(self) -> None:
        self.is_dirty = False  # a failure was seen, and no clean-up has followed yet
        self.generation = 0  # number of clean-ups that have dropped gradients
        self.end: weakref.ref[Any] | None = None  # while a backward runs: the callback for its end
        self.thread = 0  # id of the user's thread, in which the last forward of the root began

    def has_happened(self) -> bool:
        if self.is_dirty or self.end is None:
            return self.is_dirty
        # A device thread of autograd may free the callback late, after the user has caught the
        # exception. So also look whether the user's thread is no longer in any backward.
        is_users = threading.get_ident() == self.thread
        self.is_dirty = self.end() is None or (is_users and graph_task_id() < 0)
        return self.is_dirty

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record a failure if the ``with`` block raises (even Ctrl-C), with its work half done."""
        try:
            yield
        except BaseException:
            self.is_dirty = True
            raise


class Root:
    """The outermost unit, its siblings, and all units inside. They share one lifecycle.

    A later ``fully_shard`` of a module around this root makes a new ``Root`` with all these units.
    """

    _first_use = threading.RLock()  # reentrant, for signal handlers that call a model meanwhile

    def __init__(
        self, units: Sequence[Unit], names: RootNames, make: Callable[[Root], Lifecycle]
    ) -> None:
        self.units = [weakref.ref(unit) for unit in units]  # in module order, outermost first
        self.names = names  # for each process group: this root's name, which only its copies share
        self.failure = Failure()
        self.lifecycle: Lifecycle | None = None  # None: no unit has been used yet
        self._make = make
        for number, unit in enumerate(units):
            unit.root, unit.number = self, number
            unit.reduced_in = unit.gradients.backward = -1  # a new root counts backwards anew
            unit.group.unit_params.label, unit.group.failure = unit.label, self.failure
            unit.group.modules = unit.modules

    def make_lifecycle(self) -> Lifecycle:
        """Return the lifecycle; make it if there is none. All threads get the same one."""
        with self._first_use:
            if self.lifecycle is None:
                self.lifecycle = self._make(self)
            return self.lifecycle


Referent = TypeVar("Referent")


def alive(refs: Iterable[weakref.ref[Referent]]) -> list[Referent]:
    """Return the objects that ``refs`` refer to, without those that were freed."""
    return [each for ref in refs if (each := ref()) is not None]


def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit of ``module`` (the outermost, if it has siblings); None if it has none."""
    return module.__dict__.get("_meshard_unit")


def units_of(module: nn.Module) -> list[Unit]:
    """Return the unit of ``module``, if any, and its siblings."""
    return with_siblings(unit) if (unit := unit_of(module)) is not None else []


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected an nn.Module, got {type(module).__name__}.")


def units_in(module: nn.Module) -> Iterator[Unit]:
    """Iterate over the units of ``module`` and of everything inside it, each once."""
    _check_module(module)
    yield from dict.fromkeys(unit for inner in module.modules() for unit in units_of(inner))


def outside_units(
    prefix: str, module: nn.Module, seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield ``module`` and its submodules, with names; do not enter submodules that have a unit."""
    seen.add(module)
    yield prefix, module
    for name, child in module.named_children():
        if child not in seen and unit_of(child) is None:
            yield from outside_units(joined(prefix, name), child, seen)


def require_units(module: nn.Module, *, recurse: bool = True) -> list[Unit]:
    """Return the units of ``module`` (``recurse``: and of its submodules). Raise if it has none."""
    check_bool("recurse", recurse)
    _check_module(module)
    units = list(units_in(module)) if recurse else units_of(module)
    if not units:
        raise ValueError(
            f"there is no unit in this {type(module).__name__}; apply fully_shard or replicate "
            "first, or pass a module around one that they were applied to (with recurse=True)."
        )
    return units


def owned_names(module: nn.Module) -> set[tuple[nn.Module, str]]:
    """Return every ``(module, attribute)`` that holds a parameter of a unit in ``module``."""
    return {owner for unit in units_in(module) for param in unit.params for owner in param.owners}


def joined(prefix: str, name: str) -> str:
    """Return the dotted name of ``name`` in the module named ``prefix`` (the root's name is "")."""
    return f"{prefix}.{name}" if prefix else name


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that ``module`` had before it was sharded or replicated."""
    classes = type(module).__mro__
    # A module with a unit has a class that ``adopt_module`` has made; skip that one. The next
    # subclass of nn.Module is the original class: FSDPModule and ReplicateModule are no subclasses.
    first = 0 if unit_of(module) is None else 1
    return next(each for each in classes[first:] if issubclass(each, nn.Module))


def without_compile(module: nn.Module) -> nn.Module:
    """Return the module that was passed to torch.compile(); ``module`` itself if none was."""
    inner = module._modules.get("_orig_mod")
    return module if inner is None else inner


def nest(units: list[Unit]) -> Unit:
    """Nest the units of one module, each inside the one before it. Return the outermost."""
    outer, *siblings = units
    around = outer
    for unit in siblings:
        unit.input_dtype = unit.output_dtype = None
        unit.sibling_of = weakref.ref(outer)
        around.add_child(unit)
        around = unit
    outer.siblings = siblings
    return outer


def with_siblings(unit: Unit) -> list[Unit]:
    """Return ``unit``, which must be the outermost of its siblings, followed by the others."""
    return [unit, *unit.siblings]
