"""Flat optimizers: edits by users between two steps."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.support.flat_models import halve_in_place, local, note, second, trained
from tests.support.optimizers import assert_same_state
from tests.support.parity import assert_same
from tests.support.ranks import on_threads


def halve_locally(model, optimizer):
    local(second(model, optimizer)["exp_avg_sq"]).mul_(0.5)


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


def count_on(model, optimizer):
    second(model, optimizer)["step"].add_(7)


def count_behind_the_version(model, optimizer):
    second(model, optimizer)["step"].data.add_(7)


def replace_count(model, optimizer):
    second(model, optimizer)["step"] = torch.tensor(9.0)


def forget_one(model, optimizer):
    del optimizer.state[model.layers[1].bias]


def empty_one(model, optimizer):
    optimizer.state[model.layers[1].bias] = {}


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


def empty_loose(model, optimizer):
    optimizer.state[model.loose] = {}


def other_hyperparameters(model, optimizer):
    group = optimizer.param_groups[0]
    group["lr"], group["betas"], group["weight_decay"] = 0.03, (0.5, 0.6), 0.3
    group["maximize"] = True


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


def another_place_in_the_group(model, optimizer):
    optimizer.param_groups[0]["params"].reverse()


def one_less(model, optimizer):
    params = optimizer.param_groups[0]["params"]
    params[:] = [param for param in params if param is not model.layers[1].bias]
    optimizer.state.pop(model.layers[1].bias, None)


def no_gradient(model, optimizer):
    model.layers[1].bias.grad = None


def own_gradient(model, optimizer):
    param = model.layers[1].bias
    param.grad = param.grad * 3


def gradient_in_place(model, optimizer):
    local(model.layers[1].bias.grad).mul_(3)


def transposed_gradients(model, optimizer):
    """The same memory, in another order."""
    for layer in model.layers:
        param = layer.weight
        part = local(param.grad)
        turned = part.as_strided(part.shape, (1, part.shape[0]))
        param.grad = DTensor.from_local(turned, param.device_mesh, param.placements)


EDITS = [
    halve_in_place,
    halve_locally,
    replace,
    put_into_another,
    exchange,
    swap,
    swap_parameter,
    count_on,
    count_behind_the_version,
    replace_count,
    forget_one,
    empty_one,
    replace_dict,
    replace_all,
    edit_loose,
    empty_loose,
    other_hyperparameters,
    another_group,
    another_place_in_the_group,
    one_less,
    no_gradient,
    own_gradient,
    gradient_in_place,
    transposed_gradients,
    note,
]
WITH_FOREACH = [replace, count_on, replace_count, empty_one, no_gradient, transposed_gradients]


def compare(edit, options):
    """Train with a flat optimizer and the ordinary one; the edit must change what comes out."""
    ours, theirs = (trained(edit, is_flat=flat, options=options) for flat in (True, False))
    assert_same(ours[0], theirs[0], bitwise=True)
    assert_same_state(ours[1], theirs[1])
    if edit not in (note, another_place_in_the_group):
        untouched = trained(lambda *_: None, is_flat=True, options=options)[0]
        assert any(not torch.equal(ours[0][name], value) for name, value in untouched.items())


@on_threads(2)
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_edits_between_backward_and_step(edit):
    compare(edit, {"lr": 0.01})


@on_threads(2)
@pytest.mark.parametrize("edit", WITH_FOREACH, ids=lambda edit: edit.__name__)
def test_the_same_with_foreach_kernels(edit):
    compare(edit, {"lr": 0.01, "foreach": True})
