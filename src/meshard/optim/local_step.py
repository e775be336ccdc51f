"""The step of some parameters by a private optimizer, on tensors over this rank's shards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import starmap
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshard._torch.dtensor import is_placed_like, is_plain, local_of, plain_of
from meshard._torch.patches import params_in
from meshard._torch.private import without_torch_function
from meshard.optim.mapping import (
    MakeOptimizer,
    OptimGroups,
    State,
    States,
    are_same,
    check_gradient,
    copy_options,
    filled,
    objects_in,
    show_state,
    take_state,
)
from meshard.optim.replicas import cut_to_part, part_of

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
# Bytes of parameters that are stepped at once with foreach=True on CPU. The foreach kernels make
# one or two temporary tensors of that size and pass over all of it several times, so it should fit
# into a cache.
_PORTION = 2**20
_GRADIENT = attrgetter("grad")
MASTER = "master"  # a key of states


class LocalStep:
    """The step of some parameters by a private optimizer.

    If the optimizer is pointwise, the private one holds a placeholder for each sharded parameter,
    which is this rank's shard during a step and takes no memory between steps. *Loose* parameters
    it holds themselves: those that are not sharded, tensor subclasses, and all if the optimizer is
    not pointwise.
    """

    def __init__(
        self,
        make: MakeOptimizer,
        defaults: dict[str, Any],
        master_dtype: torch.dtype | None = None,  # None: parameters have no masters
    ) -> None:
        self._make = make  # called with param groups that have all hyperparameters
        self._master_dtype = master_dtype
        self._defaults = defaults  # of the user's optimizer: Adagrad reads one as it makes a state
        self._is_pointwise = make in POINTWISE
        self._planned: list[object] | None = None  # ``objects_in`` of the present plan
        self.is_shown = True  # users see the state and may change it; the next step reads it
        self._sharded: list[torch.Tensor] = []
        self._stepped: list[torch.Tensor] = []  # these, or this rank's parts of them
        self._has_parts = False
        self._placeholders: list[nn.Parameter] = []  # of these, in the same order
        self._grads: list[torch.Tensor | None] = []  # likewise, from ``take`` to ``run``
        self.has_loose = False  # whether a parameter is loose: ``run`` finds its gradient in .grad

    def take(self, optim_groups: OptimGroups, states: States) -> None:
        """Take gradients and hyperparameters as they are now; ``run`` steps by them.

        ``states`` is the state that users see.
        """
        if self._planned is None or not are_same(objects_in(optim_groups), self._planned):
            self._plan(optim_groups, states)
        if self.is_shown:
            take_state(self._optimizer, self._pairs, states)
            self.is_shown = False
        for number, own in zip(self._numbers, self._optimizer.param_groups, strict=True):
            copy_options(optim_groups[number], own)
        with without_torch_function():
            self._grads = list(map(_GRADIENT, self._sharded))
        self._stepped = self._sharded
        if self._has_parts:
            self._stepped = list(map(part_of, self._sharded))
            self._grads = list(map(cut_to_part, self._sharded, self._grads))
        pairs = zip(self._grads, self._stepped, strict=True)
        given = [(grad, param) for grad, param in pairs if grad is not None]
        if not all(starmap(is_placed_like, given)):
            for grad, param in given:
                check_gradient(grad, param, f"a parameter of shape {tuple(param.shape)}")

    def run(self) -> None:
        """Step by what ``take`` took."""
        grads, self._grads = self._grads, []
        values = [local_of(param) for param in self._stepped]
        own = [None if grad is None else local_of(grad) for grad in grads]
        if self._master_dtype is not None:
            self._step_masters(values, own, self._master_dtype)
            return
        with filled(self._placeholders, values, own):
            (self._step if self._is_pointwise else self._step_sharded)(self._optimizer)

    def _step_masters(
        self,
        values: list[torch.Tensor],
        grads: list[torch.Tensor | None],
        dtype: torch.dtype,
    ) -> None:
        """Step a copy of each value in ``dtype``, which is kept as the state "master"."""
        state = self._optimizer.state
        pairs = list(zip(self._placeholders, values, strict=True))
        masters = [state.get(own, {}).get(MASTER, value).to(dtype) for own, value in pairs]
        wide = [None if grad is None else grad.to(dtype) for grad in grads]
        with filled(self._placeholders, masters, wide):
            self._step(self._optimizer)
        for (own, value), master, grad in zip(pairs, masters, grads, strict=True):
            if grad is not None and master is not value:
                value.copy_(master)
                state[own][MASTER] = master

    def large_states(self) -> list[tuple[State, str]]:
        """Return where the state of the private optimizer has tensors of the shape of a shard."""
        states, pairs = self._optimizer.state, zip(self._placeholders, self._stepped, strict=True)
        return [
            (states[own], key)
            for own, like in pairs
            for key, value in states.get(own, {}).items()
            if isinstance(value, torch.Tensor) and value.shape == plain_of(like).shape
        ]

    def show(self, states: States) -> None:
        """Write the state to ``states``, from where the next step reads it."""
        if not self.is_shown:
            show_state(self._optimizer, self._pairs, states)
            self.is_shown = True

    def _step_sharded(self, optimizer: Optimizer) -> None:
        """Step DTensors.

        Raises a RuntimeError if the optimizer writes to its param groups.
        """
        given = [dict(group) for group in optimizer.param_groups]
        self._step(optimizer)
        for before, group in zip(given, optimizer.param_groups, strict=True):
            written = [key for key in group if group[key] is not before.get(key)]
            if written:
                raise RuntimeError(
                    f"{type(optimizer).__name__} writes {written[0]!r} into its param groups; in "
                    "backward each unit has an optimizer of its own, so that this would be of one "
                    "unit only. Build it on module.parameters() as usual, and the module anew: one "
                    "unit has been stepped."
                )

    def _plan(self, optim_groups: OptimGroups, states: States) -> None:
        """Make the private optimizer."""
        self.show(states)
        self._planned = None  # after an interrupt below, the next step plans again
        placeholders: dict[torch.Tensor, nn.Parameter] = {}
        loose: list[torch.Tensor] = []
        for param in (param for group in optim_groups for param in group["params"]):
            local = plain_of(param)
            if self._is_pointwise and isinstance(param, DTensor) and is_plain(local):
                blank = torch.empty(0, dtype=local.dtype, device=local.device)
                placeholders[param] = nn.Parameter(blank, requires_grad=False)
                placeholders[param].grad_dtype = None  # None: a .grad of any dtype is accepted
            else:
                loose.append(param)
        made: list[dict[str, Any]] = []
        self._numbers: list[int] = []  # for each private group, the index of the user's
        for number, group in enumerate(optim_groups):
            params = group["params"]
            is_cut = bool(group.get("foreach")) and all(param.is_cpu for param in params)
            for portion in _portions_of(params, is_cut) if self._is_pointwise else [params]:
                held = [placeholders.get(param, param) for param in portion]
                made.append({**group, "params": held})
                self._numbers.append(number)
        self._optimizer = self._make(made)
        self._optimizer.defaults.update(self._defaults)
        if set(map(id, params_in(self._optimizer))) != {id(p) for g in made for p in g["params"]}:
            raise RuntimeError(
                f"the {type(self._optimizer).__name__} that steps one unit does not hold the "
                "parameters it was to be made for; make it from the param groups that are passed, "
                "and not from module.parameters()."
            )
        step: Any = type(self._optimizer).step
        # The step without torch's wrappers. The first calls the hooks of ``step``, which the
        # user's optimizer has called already. Pointwise optimizers of torch have a second wrapper,
        # for differentiable steps.
        bare = inspect.unwrap(step) if self._is_pointwise else getattr(step, "__wrapped__", step)
        self._step: Callable[[Optimizer], object] = bare
        self._pairs = [*placeholders.items(), *((param, param) for param in loose)]
        self._sharded, self._placeholders = list(placeholders), list(placeholders.values())
        self._has_parts = any(part_of(param) is not param for param in placeholders)
        self.has_loose = bool(loose)
        self._planned = objects_in(optim_groups)


def _portions_of(params: Sequence[torch.Tensor], is_cut: bool) -> list[list[torch.Tensor]]:
    """Return the parameters that are stepped at once: all, or if ``is_cut``, portions of them.

    Tensor subclasses are apart from others: torch's foreach kernels do not take both together.
    """
    portions: dict[tuple[bool, int], list[torch.Tensor]] = {}
    num_bytes = 0
    for param in params:
        key = not is_plain(plain_of(param)), num_bytes // _PORTION if is_cut else 0
        portions.setdefault(key, []).append(param)
        num_bytes += plain_of(param).nbytes
    return list(portions.values()) or [[]]
