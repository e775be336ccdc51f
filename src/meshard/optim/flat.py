"""An optimizer on flat shards.

The optimizer that users hold has ``param_groups`` and ``state`` as ever. Here is an inner one of
the same class, over one tensor per run, and what keeps the two alike.

An ordinary optimizer on sharded parameters dispatches every operation of every parameter through
DTensor, which for small shards takes longer than the arithmetic. Pointwise optimizers do not care
where one parameter ends and the next begins: they step runs of a unit's flat shard as one tensor.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshard._comm.gradient_buffer import FlatGradients
from meshard._engine.optimizer_hooks import owner_of
from meshard._engine.param_group import ParamGroup
from meshard._engine.unit import require_units
from meshard._params.flat_params import FlatParams
from meshard._torch.dtensor import local_of
from meshard.optim.flat_slices import FlatSlice, Groups, Member, Places, Snapshot, State

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
)
# Bytes of parameters that are stepped at once: torch's foreach kernels make one or two tensors as
# large as what they are given, and come back to it several times, so it should stay in a cache.
_PORTION = 2**20

States = MutableMapping[torch.Tensor, State]

_alive: weakref.WeakSet[FlatStepper] = weakref.WeakSet()


def forget_slices() -> None:
    """Have no flat shard held by an optimizer: their memory is about to move."""
    for stepper in tuple(_alive):
        stepper.forget_slices()


class FlatStepper:
    """Steps parameters as runs where it can, and one by one where not.

    One by one are stepped those that are in no unit, or extended, and all if the optimizer is not
    pointwise.

    Args:
        make: Makes an optimizer from param groups that have all hyperparameters.
        is_pointwise: Whether it does the same to an element whatever is around it.
    """

    def __init__(
        self, make: Callable[[list[dict[str, Any]]], Optimizer], *, is_pointwise: bool = True
    ) -> None:
        self._make = make
        self._is_pointwise = is_pointwise
        self.before_forgetting: Callable[[], object] | None = None
        self.on_replaced: Callable[[list[torch.Tensor]], None] | None = None  # given old state
        self.num_gradient_bytes = 0  # of the runs that have taken a gradient
        self.forget_slices()
        _alive.add(self)

    def forget_slices(self) -> None:
        """Look at everything anew in the next step, and hold no flat shard until then."""
        if self.before_forgetting is not None:
            self.before_forgetting()
            self.catch_up()
        self._inner: Optimizer | None = None
        self.slices: list[FlatSlice] = []
        self._loose: list[tuple[int, torch.Tensor]] = []
        self._numbers: list[int] = []  # for each group of the inner optimizer, which of ours
        self._left: Snapshot | None = None  # by the last step
        self._before: Snapshot | None = None  # what the last step had left, during a step
        self._places: Places | None = None
        self._is_behind = False  # members have not followed

    @property
    def is_flat(self) -> bool:
        """Whether all that was taken is in runs."""
        return not self._loose

    @property
    def is_steady(self) -> bool:
        """Whether all that was taken is in runs, which have state already."""
        return not self._loose and self._left is not None

    @property
    def numbers(self) -> list[int]:
        """For each param group of what ``begin_step`` returns, which of ours it is."""
        return self._numbers

    @property
    def gradients(self) -> list[torch.Tensor]:
        """What was taken, of runs."""
        return [
            flat_slice.flat.grad for flat_slice in self.slices if flat_slice.flat.grad is not None
        ]

    def take(self, groups: Groups, state: States, *, is_seen: bool = True) -> None:
        """Take gradients and hyperparameters as they are now; ``run`` steps by them.

        Args:
            groups: Param groups; those of their parameters that have a gradient are stepped.
            state: Of the optimizer that users hold.
            is_seen: Users may have edited ``state``, or replaced parameters of ``groups``.
        """
        self._look(groups, state, is_seen=is_seen)
        inner = self._made(groups, state)
        self.num_gradient_bytes = sum([grad.nbytes for grad in self.gradients])
        for number, own in zip(self._numbers, inner.param_groups, strict=True):
            group = groups[number]
            own.update((key, value) for key, value in group.items() if key != "params")

    def take_reduced(
        self,
        flat_grads: FlatGradients,
        group: ParamGroup,
        groups: Groups,
        state: States,
        *,
        is_seen: bool,
    ) -> bool:
        """Take the gradients of one unit as they lie in one tensor; False: they must be in .grad.

        That is so if some of them are not of our parameters, or if anything has changed since the
        last step. Hyperparameters are left to the caller.

        Args:
            held: The gradients.
            group: Of the unit; the shards of all of it are in runs.
            groups: As for ``take``; only what they hold counts.
            state: Likewise.
            is_seen: Likewise.
        """
        left = self._left
        if left is None or not (left.holds(groups, state) if is_seen else left.holds_params()):
            return False
        positions = self._places
        if positions is None or not positions.are_of(self.slices, flat_grads, group):
            positions = self._places = Places(self.slices, flat_grads, group)
        self.num_gradient_bytes = positions.num_bytes
        return positions.give(flat_grads.flat)

    def run(
        self,
        groups: Groups,
        state: States,
        *,
        is_seen: bool = True,
        by: Callable[[Optimizer], object] | None = None,
    ) -> None:
        """Step what has been taken. The gradients of loose parameters must still be there.

        Args:
            groups: As for ``take``.
            state: Likewise; written to.
            is_seen: Users may look at ``state`` before they call ``catch_up``.
            by: Steps the optimizer of the runs; None: it steps itself.
        """
        (by or self._step)(self.begin_step())
        self.end_step(groups, state)
        if is_seen:
            self.catch_up()

    def begin_step(self) -> Optimizer:
        """Return what has all gradients, hyperparameters and state, to be stepped at once."""
        assert self._inner is not None
        # If the step raises, the next one looks anew.
        self._before, self._left = self._left, None
        return self._inner

    def end_step(self, groups: Groups, state: States) -> None:
        """Note that it has been stepped; ``catch_up`` before users look at ``state``.

        Args:
            groups: As for ``take``; only what they hold counts.
            state: Likewise; written to.
        """
        inner, left = self._inner, self._before
        assert inner is not None
        for flat_slice in self.slices:
            flat_slice.flat.grad = None  # or it would keep the memory after zero_grad
        if left is not None and left.was_stepped_in_place():
            self._is_behind = True
        else:
            left = self._show(inner, groups, state)
        self._left, self._before = left, None

    def catch_up(self) -> None:
        """Have in the state of every parameter how often it has been stepped."""
        left = self._left or self._before  # the latter if the last step has raised
        if self._is_behind and left is not None:
            left.follow()
        self._is_behind = False

    def _show(self, inner: Optimizer, groups: Groups, state: States) -> Snapshot:
        """Have in ``state`` what the runs have."""
        for flat_slice in self.slices:
            own = inner.state.get(flat_slice.flat)
            if own:
                flat_slice.show(own, state)
        for _, param in self._loose:
            if param in inner.state:
                state[param] = inner.state[param]
        return Snapshot(groups, state, self.slices, inner.state)

    # --- which runs there are --------------------------------------------------------------

    def _look(self, groups: Groups, state: States, *, is_seen: bool) -> None:
        """Have runs for what the param groups hold now, each with a gradient or without."""
        left = self._left
        if left is None or not (left.holds(groups, state) if is_seen else left.holds_params()):
            self.forget_slices()
            self._plan(groups)
        # All of them, and not only up to the first that lacks some.
        if sum([flat_slice.take_gradient() for flat_slice in self.slices]) == len(self.slices):
            return
        self.catch_up()  # the new runs begin with what the members have
        # Never joined again: who is stepped less often has another history.
        self.slices = [
            each for flat_slice in self.slices for each in flat_slice.split_by_gradient()
        ]
        self._inner = None
        for flat_slice in self.slices:
            flat_slice.take_gradient()

    def _plan(self, groups: Groups) -> None:
        found: dict[ParamGroup, dict[int, int]] = {}  # the param group of each sharded parameter
        for number, group in enumerate(groups):
            for param in group["params"]:
                owner = owner_of(param) if self._is_pointwise else None
                if isinstance(owner, ParamGroup) and isinstance(owner.tensors, FlatParams):
                    owner.adopt_edits()
                    position = next(i for i, p in enumerate(owner.params) if p.sharded is param)
                    found.setdefault(owner, {})[position] = number
                else:
                    self._loose.append((number, param))
        for owner, numbers in found.items():
            tensors = owner.tensors
            assert isinstance(tensors, FlatParams)
            self.slices += _slices_of(tensors, numbers)

    def _made(self, groups: Groups, state: States) -> Optimizer:
        """Return the optimizer of the runs."""
        if self._inner is not None:
            return self._inner
        self.slices = [
            each
            for flat_slice in self.slices
            for each in flat_slice.split_by_history(_states_of(flat_slice, state))
        ]
        self._left = None
        made: list[dict[str, Any]] = []
        self._numbers = []
        for number, group in enumerate(groups):
            loose = [param for other, param in self._loose if other == number]
            flat: list[torch.Tensor] = [
                flat_slice.flat for flat_slice in self.slices if flat_slice.number == number
            ]
            flat += [param for param in loose if not isinstance(param, DTensor)]
            # torch's foreach kernels do not take the two kinds together.
            sharded = [param for param in loose if isinstance(param, DTensor)]
            portions = [*self._portions_of(flat), *self._portions_of(sharded)]
            for portion in portions or [[]]:
                made.append({**group, "params": portion})
                self._numbers.append(number)
        self._inner = self._make(made)
        step: Any = type(self._inner).step
        # Of torch's own, without what cares for graphs of the step, either.
        unwrap = inspect.unwrap if self._is_pointwise else _without_hooks
        self._step: Callable[[Optimizer], object] = unwrap(step)
        for flat_slice in self.slices:
            states = _states_of(flat_slice, state)
            if self.on_replaced is not None:
                self.on_replaced(list(_tensors_in(states)))
            own = flat_slice.pull(states)
            if own:
                self._inner.state[flat_slice.flat] = own
            flat_slice.take_gradient()
        for _, param in self._loose:
            known = state.get(param)
            if known:
                self._inner.state[param] = known
        return self._inner

    def _portions_of(self, params: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Iterate over neighbours that are stepped at once: see ``_PORTION``."""
        portion: list[torch.Tensor] = []
        room = _PORTION
        for param in params:
            num_bytes = local_of(param).nbytes if isinstance(param, DTensor) else param.nbytes
            # What else there is in its group may matter to an optimizer that is not pointwise.
            if portion and num_bytes > room and self._is_pointwise:
                yield portion
                portion, room = [], _PORTION
            portion.append(param)
            room -= num_bytes
        if portion:
            yield portion


def _states_of(flat_slice: FlatSlice, state: Mapping[torch.Tensor, State]) -> list[State]:
    return [state.get(member.param, {}) for member in flat_slice.members]


def _tensors_in(states: list[State]) -> Iterator[torch.Tensor]:
    for state in states:
        for value in state.values():
            if isinstance(value, torch.Tensor):
                yield local_of(value) if isinstance(value, DTensor) else value


def _without_hooks(step: Any) -> Any:
    """Return the step of an optimizer that only a stepper knows: that of users calls the hooks."""
    return getattr(step, "__wrapped__", step)


def _slices_of(tensors: FlatParams, numbers: dict[int, int]) -> list[FlatSlice]:
    """Return the longest runs of a unit whose members are in one param group each."""
    slices: list[FlatSlice] = []
    storage = tensors.storage
    for segment, flat in zip(storage.layout.segments, storage.segments, strict=True):
        ours = [numbers.get(param_range.index) for param_range in segment.ranges]
        first = 0
        for position, number in enumerate(ours):
            if position + 1 < len(ours) and ours[position + 1] == number:
                continue
            if number is not None:
                ranges = segment.ranges[first : position + 1]
                members = [
                    Member(
                        tensors.params[param_range.index].sharded,
                        param_range.offset,
                        storage.locals[param_range.index].numel(),
                    )
                    for param_range in ranges
                ]
                slices.append(FlatSlice(flat, members, number))
            first = position + 1
    return slices


Params = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


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
            ``Adadelta``, ``Adamax``, ``RMSprop``, ``NAdam``, ``RAdam``.
        param_groups: As for that optimizer; None: all trainable parameters of ``module``.
        **optimizer_kwargs: Passed on to ``optimizer``.

    Returns:
        A ``torch.optim.Optimizer`` whose ``param_groups``, ``state`` and ``state_dict`` are those
        of the ordinary one, in both directions.

    Raises:
        TypeError: ``optimizer`` is not one of these classes, or a subclass of one: what it does to
            a parameter may depend on other elements of that parameter.
        ValueError: There is no unit in ``module``, or ``differentiable=True``.

    >>> import torch, meshard
    >>> layer = meshard.fully_shard(torch.nn.Linear(2, 2))
    >>> optimizer = meshard.flat_optimizer(layer, torch.optim.AdamW, lr=1e-3)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.zero_grad()
    """
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
    if param_groups is None:
        param_groups = [param for param in module.parameters() if param.requires_grad]
    make: Callable[..., Optimizer] = optimizer
    return FlatOptimizer(make(param_groups, **optimizer_kwargs))


class FlatOptimizer(Optimizer):
    """Steps runs of flat shards: see ``flat_optimizer``.

    Parameters that are in no unit, or extended, are stepped one by one, as they are.

    Args:
        template: The ordinary optimizer, whose place this takes.
    """

    def __init__(self, template: Optimizer) -> None:
        self._class: Callable[..., Optimizer] = type(template)
        self._stepper = FlatStepper(self._class)
        super().__init__(template.param_groups, template.defaults)
        self.state.update(template.state)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_class": self._class}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for each in self.state.values():
            if isinstance(each.get("step"), (int, float)):  # of a torch before 1.12
                each["step"] = torch.tensor(float(each["step"]))
        self._stepper = FlatStepper(self._class)

    @property
    def is_in_portions(self) -> bool:
        """Whether the next step takes memory for a few runs at a time, and has all state."""
        return self._stepper.is_steady

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient.

        **Collective:** no, but every rank must step.

        Args:
            closure: Computes the loss anew, and is called first.

        Raises:
            RuntimeError: Gradients are pending: see ``meshard.pending_gradients``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._stepper.take(self.param_groups, self.state)
        self._stepper.run(self.param_groups, self.state)
        return loss
