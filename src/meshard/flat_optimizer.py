"""How does an optimizer step a unit in a few kernels instead of a few per parameter?

An ordinary optimizer on sharded parameters dispatches every operation of every parameter through
DTensor, which for small shards takes longer than the arithmetic. Pointwise optimizers do not care
where one parameter ends and the next begins: they step runs of a unit's flat shard as one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshard._runtime.unit import units_in
from meshard.flat_stepper import POINTWISE, FlatStepper

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
            f"there is no unit in this {type(module).__name__}; apply fully_shard or replicate "
            "first."
        )
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
