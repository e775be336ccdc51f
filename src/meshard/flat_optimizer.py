"""How does an optimizer step a unit in a few kernels instead of a few per parameter?

An ordinary optimizer on sharded parameters dispatches every operation of every parameter through
DTensor, which for small shards takes longer than the arithmetic. Pointwise optimizers do not care
where one parameter ends and the next begins: they step runs of a unit's flat shard as one tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshard._runtime.group_tensors import GroupTensors
from meshard._runtime.optimizer_steps import owner_of
from meshard._runtime.param_group import ParamGroup
from meshard._runtime.unit import units_in
from meshard.flat_run import Member, Run, State
from meshard.flat_snapshot import Snapshot

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
    if not any(True for _ in units_in(module)):
        raise ValueError(
            f"there is no unit in this {type(module).__name__}; apply fully_shard first."
        )
    if optimizer_kwargs.get("differentiable"):
        raise ValueError("flat_optimizer has no differentiable step; use the ordinary optimizer.")
    if param_groups is None:
        param_groups = [param for param in module.parameters() if param.requires_grad]
    make: Callable[..., Optimizer] = optimizer
    return FlatOptimizer(make(param_groups, **optimizer_kwargs))


_alive: weakref.WeakSet[FlatOptimizer] = weakref.WeakSet()


def forget_runs() -> None:
    """Have no flat shard held by an optimizer: their memory is about to move."""
    for optimizer in tuple(_alive):
        optimizer.forget_runs()


class FlatOptimizer(Optimizer):
    """Steps runs of flat shards: see ``flat_optimizer``.

    Parameters that are in no unit, or extended, are stepped one by one, as they are.

    Args:
        template: The ordinary optimizer, whose place this takes.
    """

    def __init__(self, template: Optimizer) -> None:
        self._class: Callable[..., Optimizer] = type(template)
        self.forget_runs()
        _alive.add(self)
        super().__init__(template.param_groups, template.defaults)
        self.state.update(template.state)

    def forget_runs(self) -> None:
        """Look at everything anew in the next step, and hold no flat shard until then."""
        self._inner: Optimizer | None = None
        self._runs: list[Run] = []
        self._loose: list[tuple[int, torch.Tensor]] = []
        self._numbers: list[int] = []  # for each group of the inner optimizer, which of ours
        self._left: Snapshot | None = None  # by the last step

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_class": self._class}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for each in self.state.values():
            if isinstance(each.get("step"), (int, float)):  # of a torch before 1.12
                each["step"] = torch.tensor(float(each["step"]))
        self.forget_runs()
        _alive.add(self)

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
        self._look()
        inner = self._made()
        left, self._left = self._left, None  # if this raises, the next step looks anew
        for number, own in zip(self._numbers, inner.param_groups, strict=True):
            group = self.param_groups[number]
            own.update((key, value) for key, value in group.items() if key != "params")
        _step_without_hooks(inner)
        for run in self._runs:
            run.flat.grad = None  # or it would keep the memory after zero_grad
        if left is not None and left.was_stepped_in_place():
            left.follow()
        else:
            left = self._show(inner)
        self._left = left
        return loss

    def _show(self, inner: Optimizer) -> Snapshot:
        """Have in ``state`` what the runs have."""
        for run in self._runs:
            state = inner.state.get(run.flat)
            if state:
                run.show(state, self.state)
        for _, param in self._loose:
            if param in inner.state:
                self.state[param] = inner.state[param]
        return Snapshot(self.param_groups, self.state, self._runs, inner.state)

    def _states(self, run: Run) -> list[State]:
        return [self.state.get(member.param, {}) for member in run.members]

    # --- which runs there are --------------------------------------------------------------

    def _look(self) -> None:
        """Have runs for what the param groups hold now, each with a gradient or without."""
        if self._left is None or not self._left.holds(self.param_groups, self.state):
            self.forget_runs()
            self._plan()
        # All of them, and not only up to the first that lacks some.
        if sum([run.take_gradient() for run in self._runs]) == len(self._runs):
            return
        # Never joined again: who is stepped less often has another history.
        self._runs = [each for run in self._runs for each in run.split_by_gradient()]
        self._inner = None
        for run in self._runs:
            run.take_gradient()

    def _plan(self) -> None:
        found: dict[ParamGroup, dict[int, int]] = {}  # the param group of each sharded parameter
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                owner = owner_of(param)
                if isinstance(owner, ParamGroup) and isinstance(owner.tensors, GroupTensors):
                    owner.adopt_edits()
                    place = next(i for i, p in enumerate(owner.params) if p.sharded is param)
                    found.setdefault(owner, {})[place] = number
                else:
                    self._loose.append((number, param))
        for owner, numbers in found.items():
            tensors = owner.tensors
            assert isinstance(tensors, GroupTensors)
            self._runs += _runs_of(tensors, numbers)

    def _made(self) -> Optimizer:
        """Return the optimizer of the runs."""
        if self._inner is not None:
            return self._inner
        self._runs = [
            each for run in self._runs for each in run.split_by_history(self._states(run))
        ]
        self._left = None
        groups = []
        self._numbers = []
        for number, group in enumerate(self.param_groups):
            loose = [param for other, param in self._loose if other == number]
            flat: list[torch.Tensor] = [run.flat for run in self._runs if run.number == number]
            flat += [param for param in loose if not isinstance(param, DTensor)]
            # torch's foreach kernels do not take the two kinds together.
            for params in (flat, [param for param in loose if isinstance(param, DTensor)]):
                if params or params is flat:
                    groups.append({**group, "params": params})
                    self._numbers.append(number)
        self._inner = self._class(groups)
        for run in self._runs:
            state = run.pull(self._states(run))
            if state:
                self._inner.state[run.flat] = state
            run.take_gradient()
        for _, param in self._loose:
            if self.state.get(param):
                self._inner.state[param] = self.state[param]
        return self._inner


def _step_without_hooks(inner: Optimizer) -> None:
    """Step an optimizer that only ``FlatOptimizer`` knows, whose own step has called the hooks."""
    step: Callable[[Optimizer], Any] = type(inner).step
    getattr(step, "__wrapped__", step)(inner)


def _runs_of(tensors: GroupTensors, numbers: dict[int, int]) -> list[Run]:
    """Return the longest runs of a unit whose members are in one param group each."""
    runs: list[Run] = []
    storage = tensors.storage
    for segment, flat in zip(storage.layout.segments, storage.segments, strict=True):
        ours = [numbers.get(slot.index) for slot in segment.slots]
        first = 0
        for place, number in enumerate(ours):
            if place + 1 < len(ours) and ours[place + 1] == number:
                continue
            if number is not None:
                slots = segment.slots[first : place + 1]
                members = [
                    Member(
                        tensors.params[slot.index].sharded,
                        slot.offset,
                        storage.locals[slot.index].numel(),
                    )
                    for slot in slots
                ]
                runs.append(Run(flat, members, number))
            first = place + 1
    return runs
