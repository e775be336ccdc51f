"""Flat optimizers: edits by users between two steps."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.optim.flat_models import halve_in_place, local, note, second, trained
from tests.optim.optimizers import assert_same_state
from tests.support.parity import assert_same
from tests.support.ranks import on_threads
from tests.support.spread import spread


def replace(model, optimizer):
    state = second(model, optimizer)
    state["exp_avg"] = state["exp_avg"] * 0.5


def put_into_another(model, optimizer):
    state = second(model, optimizer)
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"].sqrt(), state["exp_avg"].square()


def exchange(model, optimizer):
    """Only the order tells: the objects are the same."""
    state = second(model, optimizer)
    state["exp_avg"].mul_(0.5)
    state["exp_avg_sq"].copy_(state["exp_avg"].square())
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"].square()


def swap(model, optimizer):
    state = second(model, optimizer)
    torch.utils.swap_tensors(state["exp_avg"], state["exp_avg"] * 0.5)


def swap_parameter(model, optimizer):
    param = model.layers[1].weight
    new = nn.Parameter((param * 0.5).detach())
    new.grad = param.grad
    torch.utils.swap_tensors(param, new)


def replace_dict(model, optimizer):
    state = second(model, optimizer)
    optimizer.state[model.layers[1].bias] = {**state, "exp_avg": state["exp_avg"] * 0.5}


def replace_all(model, optimizer):
    halved = {
        param: {**state, "exp_avg": state["exp_avg"] * 0.5}
        for param, state in optimizer.state.items()
    }
    optimizer.state = type(optimizer.state)(dict, halved)


def edit_loose(model, optimizer):
    optimizer.state[model.loose]["exp_avg"] = optimizer.state[model.loose]["exp_avg"] * 0.5


def other_hyperparameters(model, optimizer):
    other = {"lr": 0.03, "betas": (0.5, 0.6), "weight_decay": 0.3, "maximize": True}
    optimizer.param_groups[0].update(other)


def another_group(model, optimizer):
    """Move a parameter from the middle of a run into a group of its own, and back."""
    first = optimizer.param_groups[0]
    param = model.layers[1].bias
    if len(optimizer.param_groups) == 2:
        first["params"].append(param)
        optimizer.param_groups[1]["params"].clear()
        return
    first["params"] = [each for each in first["params"] if each is not param]
    optimizer.param_groups.append({**first, "params": [param], "lr": 0.2})


def one_less(model, optimizer):
    params = optimizer.param_groups[0]["params"]
    params[:] = [param for param in params if param is not model.layers[1].bias]
    optimizer.state.pop(model.layers[1].bias, None)


def own_gradient(model, optimizer):
    param = model.layers[1].bias
    param.grad = param.grad * 3


def transposed_gradients(model, optimizer):
    """The same memory, in another order."""
    for layer in model.layers:
        param = layer.weight
        part = local(param.grad)
        turned = part.as_strided(part.shape, (1, part.shape[0]))
        param.grad = DTensor.from_local(turned, param.device_mesh, param.placements)


EDITS = {
    "halve in place": halve_in_place,
    "halve locally": lambda m, o: local(second(m, o)["exp_avg_sq"]).mul_(0.5),
    "replace": replace,
    "put into another": put_into_another,
    "exchange": exchange,
    "swap": swap,
    "swap the parameter": swap_parameter,
    "count on": lambda m, o: second(m, o)["step"].add_(7),
    "count on behind the version": lambda m, o: second(m, o)["step"].data.add_(7),
    "replace the count": lambda m, o: second(m, o).update(step=torch.tensor(9.0)),
    "forget one": lambda m, o: o.state.pop(m.layers[1].bias),
    "empty one": lambda m, o: o.state.update({m.layers[1].bias: {}}),
    "replace a dict": replace_dict,
    "replace all": replace_all,
    "edit a loose one": edit_loose,
    "empty a loose one": lambda m, o: o.state.update({m.loose: {}}),
    "other hyperparameters": other_hyperparameters,
    "another group": another_group,
    "another place in the group": lambda m, o: o.param_groups[0]["params"].reverse(),
    "one less": one_less,
    "no gradient": lambda m, o: setattr(m.layers[1].bias, "grad", None),
    "own gradient": own_gradient,
    "gradient in place": lambda m, o: local(m.layers[1].bias.grad).mul_(3),
    "transposed gradients": transposed_gradients,
    "note": note,
}
WITH_FOREACH = [
    "replace",
    "count on",
    "replace the count",
    "empty one",
    "no gradient",
    "transposed gradients",
]


@on_threads(2)
@spread(
    name=[*EDITS, *WITH_FOREACH],
    foreach=[None] * len(EDITS) + [True] * len(WITH_FOREACH),
)
def test_edits_between_backward_and_step(name, foreach):
    """Train with a flat optimizer and the ordinary one; the edit must change what comes out."""
    edit, options = EDITS[name], {"lr": 0.01, "foreach": foreach}
    ours, theirs = (trained(edit, is_flat=flat, options=options) for flat in (True, False))
    assert_same(ours[0], theirs[0], bitwise=True)
    assert_same_state(ours[1], theirs[1])
    if name not in ("note", "another place in the group"):
        untouched = trained(lambda *_: None, is_flat=True, options=options)[0]
        assert any(not torch.equal(ours[0][name], value) for name, value in untouched.items())
