"""Optimizers on flat shards.

An ordinary optimizer on sharded parameters dispatches every operation of every parameter through
DTensor, which takes longer than the arithmetic where shards are small. Pointwise optimizers do the
same to an element whatever lies around it, so they step slices of a unit's flat shard as one tensor
each. The optimizer that users hold has the ordinary ``param_groups`` and ``state``; an inner one of
the same class steps the slices, and ``FlatStepper`` keeps the two alike.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from meshard._engine.optimizer_hooks import owner_of
from meshard._engine.param_group import ParamGroup
from meshard._engine.unit import require_units
from meshard._params.flat_params import FlatParams
from meshard._torch.dtensor import plain_of, scalar_reads
from meshard.optim.flat_slices import FlatSlice, Member, OptimGroups, Snapshot, State
from meshard.policies import list_of

POINTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
# Bytes of parameters that are stepped at once: torch's foreach kernels make one or two tensors as
# large as what they are given and come back to it several times, so it should stay in a cache.
_PORTION = 2**20

Params = Iterable[nn.Parameter] | Iterable[dict[str, Any]]
States = MutableMapping[torch.Tensor, State]
MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizer]

_steppers: weakref.WeakSet[FlatStepper] = weakref.WeakSet()


def forget_slices() -> None:
    """Make every optimizer drop its slices of flat shards, whose memory is about to move."""
    for stepper in tuple(_steppers):
        stepper.forget_slices()


class FlatStepper:
    """An inner optimizer that steps parameters as slices where it can, one by one where not.

    Parameters in no unit, tensor subclasses, and all parameters of an optimizer that is not
    pointwise are *loose*: stepped one by one. ``group`` is the unit whose step may be pending.
    """

    def __init__(self, make: MakeOptimizer, group: ParamGroup | None = None) -> None:
        self._make = make  # from param groups that have all hyperparameters
        self._is_pointwise = make in POINTWISE
        self._group = (lambda: None) if group is None else weakref.ref(group)
        self._optim_groups: OptimGroups = []  # as they were when gradients were taken
        self._state: States = {}
        self.forget_slices()
        _steppers.add(self)

    def forget_slices(self) -> None:
        """Drop all slices; the next step finds them anew."""
        group = self._group()
        if group is not None:
            group.finish_pending_step()
        self._inner: Optimizer | None = None
        self.slices: list[FlatSlice] = []
        self._loose: list[tuple[int, torch.Tensor]] = []
        self._numbers: list[int] = []  # for each group of the inner optimizer, the index of ours
        self._left: Snapshot | None = None  # what the last step has left

    @property
    def is_flat(self) -> bool:
        """Whether all that was taken is in slices."""
        return not self._loose

    def take(self, optim_groups: OptimGroups, state: States) -> None:
        """Take gradients and hyperparameters as they are now; ``run`` steps by them.

        ``state`` is that of the optimizer that users hold, and ``run`` writes to it.
        """
        self._optim_groups, self._state = optim_groups, state
        if self._left is None or not self._left.holds(optim_groups, state):
            self.forget_slices()
            self._find_slices()
        # All of them, and not only up to the first that lacks some.
        if sum([each.take_gradient() for each in self.slices]) < len(self.slices):
            # Never joined again: what is stepped less often has another history.
            self.slices = [part for each in self.slices for part in each.split_by_gradient()]
            self._inner = None
        inner = self._inner or self._make_inner()
        for number, own in zip(self._numbers, inner.param_groups, strict=True):
            group = optim_groups[number]
            own.update((key, value) for key, value in group.items() if key != "params")

    def gradients(self, taken: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        """Return the plain tensors by which ``run`` steps; ``taken`` has those of parameters."""
        loose = {id(param) for _, param in self._loose}
        found = [plain_of(grad) for param, grad in taken if id(param) in loose]
        # Views of what was taken, or copies of it.
        return found + [each.flat.grad for each in self.slices if each.flat.grad is not None]

    def run(self) -> None:
        """Step what was taken. The gradients of loose parameters must still be there."""
        inner, left = self._inner, self._left
        assert inner is not None
        self._left = None  # if the step raises, the next one looks at everything anew
        (self._step_loose if self._loose else self._step)(inner)
        for flat_slice in self.slices:
            flat_slice.flat.grad = None  # or it would keep the memory after zero_grad
        if left is None or not left.follow():
            self._show(inner)
            left = Snapshot(self._optim_groups, self._state, self.slices, inner.state)
        self._left = left

    def _step_loose(self, inner: Optimizer) -> None:
        """Step tensors that may be DTensors, by an optimizer that may do anything with them."""
        given = [dict(group) for group in inner.param_groups]
        with scalar_reads.inside_step():
            self._step(inner)
        for before, group in zip(given, inner.param_groups, strict=True):
            written = [key for key in group if group[key] is not before.get(key)]
            if written:
                raise RuntimeError(
                    f"{type(inner).__name__} writes {written[0]!r} into its param groups; in "
                    "backward each unit has an optimizer of its own, so that this would be of one "
                    "unit only. Build it on module.parameters() as usual, and the module anew: one "
                    "unit has been stepped."
                )

    def _show(self, inner: Optimizer) -> None:
        """Put the state of the inner optimizer into that of the parameters."""
        for flat_slice in self.slices:
            own = inner.state.get(flat_slice.flat)
            if own:
                flat_slice.show(own, self._state)
        for _, param in self._loose:
            if param in inner.state:
                self._state[param] = inner.state[param]

    def _find_slices(self) -> None:
        found: dict[FlatParams, dict[int, int]] = {}  # the optim group of each sharded parameter
        for number, group in enumerate(self._optim_groups):
            for param in group["params"]:
                owner = owner_of(param) if self._is_pointwise else None
                storage = None if owner is None else owner.storage
                if owner is None or not isinstance(storage, FlatParams):
                    self._loose.append((number, param))
                    continue
                if storage not in found:
                    owner.adopt_edits()
                    found[storage] = {}
                index = owner.index_of(param)
                if index is None:  # it was replaced, and is no shard any more
                    self._loose.append((number, param))
                else:
                    found[storage][index] = number
        for storage, numbers in found.items():
            self.slices += _slices_of(storage, numbers)

    def _make_inner(self) -> Optimizer:
        self.slices = [
            part for each in self.slices for part in each.split_by_history(self._states_of(each))
        ]
        self._left = None
        made: list[dict[str, Any]] = []
        self._numbers = []
        for number, group in enumerate(self._optim_groups):
            loose = [param for other, param in self._loose if other == number]
            flat: list[torch.Tensor] = [each.flat for each in self.slices if each.number == number]
            flat += [param for param in loose if not isinstance(param, DTensor)]
            # torch's foreach kernels do not take the two kinds together.
            sharded = [param for param in loose if isinstance(param, DTensor)]
            for portion in [*self._portions_of(flat), *self._portions_of(sharded)] or [[]]:
                made.append({**group, "params": portion})
                self._numbers.append(number)
        inner = self._make(made)
        held = {id(param) for group in inner.param_groups for param in group["params"]}
        if any(id(param) not in held for group in made for param in group["params"]):
            raise RuntimeError(
                f"the {type(inner).__name__} that steps one unit does not hold the parameters it "
                "was to be made for; make it from the param groups that are passed, and not from "
                "module.parameters()."
            )
        self._inner = inner
        step: Any = type(inner).step
        # Without the hooks of optimizers, which the user's own step runs; of torch's optimizers
        # also without the decorators for a differentiable step.
        bare = inspect.unwrap(step) if self._is_pointwise else getattr(step, "__wrapped__", step)
        self._step: Callable[[Optimizer], object] = bare
        owner = self._group()
        for flat_slice in self.slices:
            states = self._states_of(flat_slice)
            if owner is not None:  # states are copied on the stream of the step
                values = [value for each in states for value in each.values()]
                tensors = [plain_of(each) for each in values if isinstance(each, torch.Tensor)]
                owner.comm.hold_until_done(tensors)
            own = flat_slice.pull(states)
            if own:
                inner.state[flat_slice.flat] = own
            flat_slice.take_gradient()
        for _, param in self._loose:
            known = self._state.get(param)
            if known:
                inner.state[param] = known
        return inner

    def _states_of(self, flat_slice: FlatSlice) -> list[State]:
        return [self._state.get(member.param, {}) for member in flat_slice.members]

    def _portions_of(self, params: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Iterate over neighbours that are stepped at once: see ``_PORTION``."""
        portion: list[torch.Tensor] = []
        room = _PORTION
        for param in params:
            num_bytes = plain_of(param).nbytes
            # An optimizer that is not pointwise may need all of its group.
            if portion and num_bytes > room and self._is_pointwise:
                yield portion
                portion, room = [], _PORTION
            portion.append(param)
            room -= num_bytes
        if portion:
            yield portion


def _slices_of(storage: FlatParams, numbers: dict[int, int]) -> Iterator[FlatSlice]:
    """Iterate over the longest slices of a unit whose members are in one optim group each.

    ``numbers`` has the optim group of each parameter that is in one, by its index in the unit.
    """
    shard = storage.flat_shard
    for segment, flat in zip(shard.layout.segments, shard.segments, strict=True):
        for number, ranges in groupby(segment.ranges, lambda each: numbers.get(each.index)):
            if number is not None:
                members = [
                    Member(storage.params[r.index].sharded, r.offset, shard.locals[r.index].numel())
                    for r in ranges
                ]
                yield FlatSlice(flat, members, number)


def flat_optimizer(
    module: nn.Module,
    optimizer: type[Optimizer],
    param_groups: Params | None = None,
    **optimizer_kwargs: Any,
) -> FlatOptimizer:
    """Return an optimizer that steps ``module`` as ``optimizer`` would, on its flat shards.

    The same numbers in a fraction of the host's time: one kernel sequence per unit and set of
    hyperparameters, where an ordinary optimizer has one per parameter.

    Args:
        module: With units in it. Build the optimizer after the last ``fully_shard``.
        optimizer: One of torch's pointwise optimizers: ``SGD``, ``Adam``, ``AdamW``, ``Adagrad``,
            ``Adadelta``, ``Adamax``, ``RMSprop``, ``NAdam``, ``RAdam``, ``ASGD``, ``Rprop``.
        param_groups: As for that optimizer; None: all trainable parameters of ``module``.
        **optimizer_kwargs: Passed on to ``optimizer``.

    Returns:
        An optimizer with the ``param_groups``, ``state`` and ``state_dict`` of the ordinary one.

    Raises:
        TypeError: ``optimizer`` is none of these classes; also a subclass of one is not.
        ValueError: There is no unit in ``module``, or ``differentiable=True``.

    >>> import torch, meshard
    >>> layer = meshard.fully_shard(torch.nn.Linear(2, 2))
    >>> optimizer = meshard.flat_optimizer(layer, torch.optim.AdamW, lr=1e-3)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    """
    check_is_no_instance("flat_optimizer", optimizer)
    if optimizer not in POINTWISE:
        names = ", ".join(each.__name__ for each in POINTWISE)
        raise TypeError(
            f"flat_optimizer steps many parameters as one tensor, which is right for {names}; "
            f"{getattr(optimizer, '__name__', optimizer)!r} is none of them: build it on "
            "module.parameters() as usual."
        )
    require_units(module)
    if optimizer_kwargs.get("differentiable"):
        raise ValueError("flat_optimizer has no differentiable step; use the ordinary optimizer.")
    make: Callable[..., Optimizer] = optimizer
    return FlatOptimizer(make(list_params(module, param_groups), **optimizer_kwargs))


def check_is_no_instance(caller: str, optimizer: object) -> None:
    """Raise a TypeError if ``optimizer`` is an optimizer, where its class is asked for."""
    if isinstance(optimizer, Optimizer):
        name = type(optimizer).__name__
        raise TypeError(
            f"{caller} builds the optimizer itself: pass the class and its arguments, as in "
            f"{caller}(module, {name}, lr=...), got {name}(...)."
        )


def list_params(module: nn.Module, param_groups: Params | None) -> list[Any]:
    """Return what to build an optimizer from; None: all trainable parameters of ``module``."""
    if param_groups is None:
        return [param for param in module.parameters() if param.requires_grad]
    what = "an iterable of parameters or of dicts of optimizer arguments"
    # Tuples: module.named_parameters(), where torch takes that.
    return list_of("param_groups", param_groups, (torch.Tensor, dict, tuple), what)


class FlatOptimizer(Optimizer):
    """An optimizer on slices of flat shards: see ``flat_optimizer``.

    Parameters in no unit and tensor subclasses are stepped one by one.
    """

    def __init__(self, template: Optimizer) -> None:
        self._class: Callable[..., Optimizer] = type(template)
        self._stepper = FlatStepper(self._class)
        super().__init__(template.param_groups, template.defaults)
        self.state.update(template.state)

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_class": self._class}

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        count_in_tensors(self.state)
        self._stepper = FlatStepper(self._class)

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient. **Collective:** no, but every rank must step.

        ``closure`` computes the loss anew, and is called first.

        Raises:
            RuntimeError: Gradients are pending: see ``meshard.pending_gradients``.
        """
        loss = loss_of(closure)
        self._stepper.take(self.param_groups, self.state)
        self._stepper.run()
        return loss


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Return what the closure of an optimizer's step returns."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def count_in_tensors(states: Mapping[torch.Tensor, State]) -> None:
    """Make tensors of the counts of steps that torch before 1.12 has saved as numbers."""
    for each in states.values():
        if isinstance(each.get("step"), (int, float)):
            each["step"] = torch.tensor(float(each["step"]))
