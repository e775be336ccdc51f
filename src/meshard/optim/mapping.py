"""The param groups and the state of an optimizer around a private one.

Users hold a ``MappedOptimizer``, whose ``param_groups`` and ``state`` are those of the ordinary
optimizer, on their own parameters. A private optimizer has a *placeholder* for each parameter: an
ordinary tensor, which gets a value and a gradient for the time of a step. The state is that of the
placeholders. ``show_state`` writes it to the state that users see when they read it, and
``take_state`` reads it back before the next step.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from operator import is_
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from meshard._mesh.boxes import box_at, coordinate_of
from meshard._torch.dtensor import is_placed_like, local_of, place_like, plain_of
from meshard._torch.patches import params_in
from meshard.optim.replicas import cut_to_part, part_of

State = dict[str, Any]
States = MutableMapping[torch.Tensor, State]
OptimGroups = Sequence[dict[str, Any]]
Params = Iterable[nn.Parameter] | Iterable[dict[str, Any]]
MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizer]


def objects_in(optim_groups: OptimGroups) -> list[object]:
    """Return the parameters in order, with None after each group.

    So the list differs after a parameter has moved from one group to the next.
    """
    return [each for group in optim_groups for each in (*group["params"], None)]


def are_same(found: Sequence[object], before: Sequence[object]) -> bool:
    """Whether both have the same objects in the same order."""
    return len(found) == len(before) and all(map(is_, found, before))


def copy_options(group: dict[str, Any], to: dict[str, Any]) -> None:
    """Give the param group ``to`` the hyperparameters of ``group``, but not its parameters.

    Tensors are copied, because schedulers write to them, and a step may still have to read them.
    """
    for key, value in group.items():
        if key != "params":
            to[key] = value.clone() if isinstance(value, torch.Tensor) else value


@contextlib.contextmanager
def filled(
    placeholders: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
) -> Iterator[None]:
    """Give placeholders these values and gradients for the time of a step."""
    blanks = [placeholder.data for placeholder in placeholders]
    try:
        for placeholder, value, grad in zip(placeholders, values, grads, strict=True):
            placeholder.data, placeholder.grad = value, grad
        yield
    finally:
        for placeholder, blank in zip(placeholders, blanks, strict=True):
            placeholder.grad = None
            placeholder.data = blank


def check_gradient(grad: torch.Tensor, param: torch.Tensor, name: str) -> None:
    """Raise a RuntimeError unless the gradient of a sharded parameter is placed like it."""
    if isinstance(param, DTensor) and not is_placed_like(grad, param):
        kind = "an ordinary tensor"
        if isinstance(grad, DTensor):
            kind = f"a DTensor with placements {grad.placements} on {grad.device_mesh}"
        raise RuntimeError(
            f"the gradient of {name} is {kind}, and the parameter is a DTensor with placements "
            f"{param.placements} on {param.device_mesh}; make .grad a DTensor like the parameter."
        )


# A parameter of the user, with its placeholder, which may be the parameter itself.
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


def show_state(private: Optimizer, pairs: Pairs, states: States) -> None:
    """Write the state of the private optimizer to ``states``, which users see.

    A tensor of the shape of this rank's shard is shown as a DTensor over the same memory.
    """
    own = private.state
    for param, placeholder in pairs:
        if placeholder not in own:
            states.pop(param, None)
        elif placeholder is param:
            states[param] = own[param]
        else:
            shown, like = states.get(param, {}), part_of(param)
            states[param] = {
                key: _shown(like, value, shown.get(key)) for key, value in own[placeholder].items()
            }


def take_state(private: Optimizer, pairs: Pairs, states: States) -> None:
    """Read ``states``, which users may have changed, into the private optimizer."""
    own = private.state
    own.clear()
    for param, placeholder in pairs:
        if placeholder is param and param in states:
            own[param] = states[param]
        elif param in states:
            own[placeholder] = {
                key: _taken(part_of(param), cut_to_part(param, value, copies=True))
                for key, value in states[param].items()
            }


def _shown(param: torch.Tensor, value: Any, known: Any) -> Any:
    """Return ``value`` as users see it: ``known``, what they have seen before, if it is that."""
    if known is value or (isinstance(known, DTensor) and local_of(known) is value):
        return known
    is_shard = isinstance(value, torch.Tensor) and value.shape == plain_of(param).shape
    if isinstance(param, DTensor) and is_shard and not isinstance(value, DTensor):
        return place_like(param, value)
    return value


def _taken(param: torch.Tensor, value: Any) -> Any:
    is_shard = is_placed_like(value, param) and value.shape == param.shape
    return local_of(value) if is_shard else value


def cut_like(param: torch.Tensor | None, value: Any) -> Any:
    """Return this rank's shard if ``value`` is unsharded and ``param`` is a DTensor of its shape.

    Otherwise return ``value`` itself.
    """
    is_unsharded = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    if not isinstance(param, DTensor) or not is_unsharded or value.shape != param.shape:
        return value
    like = part_of(param)
    assert isinstance(like, DTensor)
    box = box_at(value.shape, like.device_mesh, like.placements, coordinate_of(like.device_mesh))
    return place_like(like, value[box.slices].to(plain_of(like).device, copy=True))


class PrivateStep(Protocol):
    """A step by a private optimizer, whose state a ``MappedOptimizer`` shows."""

    def show(self, states: States) -> None:
        """Write the state to ``states``, from where the next step reads it."""


class MappedOptimizer(Optimizer):
    """An optimizer that users hold, around private ones, which have its state.

    A subclass sets ``_private`` and writes ``step``. A step must get ``_state``.
    """

    _maker = ""  # the public function that makes it
    _state_dtype: torch.dtype | None = None  # of state tensors; None: that of the parameter
    _state: defaultdict[torch.Tensor, State]  # what users see, as the last ``show`` has left it

    def __init__(self, template: Optimizer) -> None:
        """Take over the param groups and the state of ``template``."""
        self._private: Sequence[PrivateStep] = ()
        super().__init__(template.param_groups, template.defaults)
        self._state.update(template.state)

    @property
    def state(self) -> defaultdict[torch.Tensor, State]:
        """The state of each parameter. Reading it waits for all steps that have been begun.

        The next step uses what you change in it. After that step, read ``state`` anew before you
        change it again.
        """
        for each in self._private:
            each.show(self._state)
        return self._state

    @state.setter
    def state(self, value: defaultdict[torch.Tensor, State]) -> None:
        for each in self._private:
            each.show(self._state)
        self._state = value

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of an optimizer with the same param groups, sharded or not.

        A tensor of the shape of a parameter is a DTensor that is placed like the parameter, or
        unsharded: then this rank's part is taken. Not a collective.
        """
        order = [each for group in state_dict["param_groups"] for each in group["params"]]
        params = dict(zip(order, params_in(self), strict=False))
        state = {
            key: {name: cut_like(params.get(key), value) for name, value in own.items()}
            for key, own in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": state})
        if self._state_dtype is None:
            return
        for key, own in state.items():  # torch has cast them to the dtypes of the parameters
            for name, value in own.items():
                if isinstance(value, torch.Tensor) and value.shape == params[key].shape:
                    self._state[params[key]][name] = value.to(self._state_dtype)

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse pickling and copying: units refer to this optimizer, or its state is spread."""
        raise TypeError(
            f"what {self._maker} returns can be neither pickled nor copied; save its state_dict()."
        )

    def _loss_of(self, closure: Callable[[], Any] | None) -> Any:
        """Return what the closure of a step returns, if there is one."""
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        given = dict(state)
        self.state = given.pop("state")
        for each in self._state.values():
            if isinstance(each.get("step"), (int, float)):  # saved by a torch before 1.12
                each["step"] = torch.tensor(float(each["step"]), device="cpu")
        super().__setstate__(given)


# --- what users pass ---------------------------------------------------------------------------


def params_of(module: nn.Module, param_groups: Params | None) -> Params:
    """Return ``param_groups``; None: all trainable parameters of ``module``."""
    if param_groups is None:
        return [param for param in module.parameters() if param.requires_grad]
    return param_groups


def check_wait(wait: str) -> None:
    """Raise a ValueError unless ``wait`` says when steps are over."""
    if wait not in ("step", "gather"):
        raise ValueError(f'wait must be "step" or "gather", got {wait!r}.')


def check_makes_optimizers(caller: str, optimizer: object) -> None:
    """Raise a TypeError unless ``optimizer`` is a class of optimizers, or a function like one."""
    if isinstance(optimizer, Optimizer):
        name = type(optimizer).__name__
        raise TypeError(
            f"{caller} builds the optimizer itself: pass the class and its arguments, as in "
            f"{caller}(module, {name}, lr=...), got {name}(...)."
        )
    if not callable(optimizer) or isinstance(optimizer, nn.Module):
        raise TypeError(
            f"optimizer must be a class of optimizers or make one, got {type(optimizer).__name__}."
        )


def check_template(caller: str, template: object) -> None:
    """Raise unless ``template``, which the user's function has made, can be stepped by ``caller``.

    Raises:
        TypeError: It is no optimizer, or takes sparse gradients, or needs a closure.
        ValueError: ``differentiable=True``.
    """
    name = type(template).__name__
    if not isinstance(template, Optimizer):
        raise TypeError(f"optimizer must be a class of optimizers or make one, got a {name}.")
    if isinstance(template, torch.optim.SparseAdam):
        raise TypeError(
            f"{name} takes sparse gradients, and reduced gradients are dense: use Adam."
        )
    closure = inspect.signature(type(template).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"the step of {name} needs a closure: it computes the loss anew, so all parameters "
            "must be there at once; build it on module.parameters()."
        )
    if any(group.get("differentiable") for group in template.param_groups):
        raise ValueError(f"{caller} has no differentiable step; use the ordinary optimizer.")
