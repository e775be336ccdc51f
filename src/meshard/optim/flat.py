"""Names that ``owner.py`` imports, until it stands on ``mapping`` itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshard._engine.param_group import sharded_params_of
from meshard._torch.patches import params_in
from meshard._torch.user_line import listed, warn_user
from meshard.optim.local import POINTWISE as POINTWISE
from meshard.optim.local import LocalStep
from meshard.optim.local import MakeOptimizer as MakeOptimizer
from meshard.optim.local import check_is_no_instance as check_is_no_instance
from meshard.optim.mapping import MappedOptimizer
from meshard.optim.mapping import are_same as are_same
from meshard.optim.mapping import objects_in as objects_in

FlatStepper = LocalStep


def check_makes_optimizers(caller: str, optimizer: object) -> None:
    """Raise a TypeError unless ``optimizer`` is a class of optimizers, or a function like one."""
    check_is_no_instance(caller, optimizer)
    if not callable(optimizer) or isinstance(optimizer, nn.Module):
        raise TypeError(
            f"optimizer must be a class of optimizers or make one, got {type(optimizer).__name__}."
        )


class LeftOut:
    """The parameters that an optimizer would have taken, had they not been frozen.

    Modules are held weakly, and parameters by module and name: ``Module.to`` cannot swap a tensor
    that has a weak reference.
    """

    def __init__(
        self, module: nn.Module, is_wanted: Callable[[str, torch.Tensor], bool] = lambda *_: True
    ) -> None:
        self._places = [
            (f"{prefix}.{name}" if prefix else name, weakref.ref(each), name)
            for prefix, each in module.named_modules()
            for name, param in each._parameters.items()
            if param is not None
            and not param.requires_grad
            and is_wanted(f"{prefix}.{name}" if prefix else name, param)
        ]

    def warn_if_thawed(self, optimizer: Optimizer) -> None:
        """Warn once if one of them has a gradient, by which ``optimizer`` does not step it."""
        thawed = {
            fqn: param
            for fqn, module, name in self._places
            if (param := getattr(module(), "_parameters", {}).get(name)) is not None
            and param.requires_grad
        }
        if not thawed:
            return
        held = set(map(id, params_in(optimizer)))
        sharded = sharded_params_of(list(thawed.values()))
        missed = [
            fqn
            for fqn, param in zip(thawed, sharded, strict=True)
            if param.grad is not None and id(param) not in held
        ]
        if missed:
            self._places = []
            warn_user(
                f"parameters {listed(missed)} have gradients, and this {type(optimizer).__name__} "
                "neither steps them nor clears their gradients, because they were frozen when it "
                "was made; make the optimizer anew, or make it before you freeze parameters. "
                "Ignore this if another optimizer steps them."
            )


class StateOnRead(MappedOptimizer):
    """A ``MappedOptimizer`` that warns of thawed parameters."""

    _left_out: LeftOut | None = None  # None: the user has chosen the parameters

    @property
    def _flat_steppers(self) -> Sequence[FlatStepper]:
        raise NotImplementedError

    @_flat_steppers.setter
    def _flat_steppers(self, steppers: Sequence[FlatStepper]) -> None:
        self._private = steppers

    def _loss_of(self, closure: Callable[[], Any] | None) -> Any:
        """Begin a step: return what its closure returns, and warn of what is not stepped."""
        loss = super()._loss_of(closure)
        if self._left_out is not None:
            self._left_out.warn_if_thawed(self)
        return loss
