"""Flat optimizers: edits by users between two steps."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import meshard
from meshard import flat_optimizer
from tests.optim.test_flat_optimizer import assert_same_state, plain_state
from tests.support.models import seeded
from tests.support.parity import assert_same, full_state


class Net(nn.Module):
    """Square weights, an uneven one, one smaller than the number of ranks, one in no unit."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 1)
        self.loose = nn.Parameter(torch.empty(6))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.loose
        return self.head(x)


def make(foreach=False):
    """Return a model; foreach kernels of the ordinary optimizer take no loose parameters."""
    model = seeded(Net())
    mesh = init_device_mesh("cpu", (2,))
    meshard.fully_shard(model.layers[0], mesh)
    return meshard.fully_shard(model, mesh, ignored_params=set() if foreach else {model.loose})


def backward(model, step):
    model(torch.full((2, 6), 0.1 * step + 0.1)).square().sum().backward()


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def second(model, optimizer):
    """Return the state of a parameter that is not the first of its run."""
    return optimizer.state[model.layers[1].bias]


def halve_in_place(model, optimizer):
    second(model, optimizer)["exp_avg"].mul_(0.5)


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


def note(model, optimizer):
    """Entries of the user's own stay, and change nothing."""
    second(model, optimizer)["note"] = "mine"


EDITS = (
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
)


def state_of(optimizer):
    """Return the state by the number of the parameter; the user's entries are left out."""
    found = plain_state(optimizer)
    for state in found.values():
        state.pop("note", None)
    return found


def trained(edit, *, is_flat, options):
    model = make(options.get("foreach", False))
    params = list(model.parameters())
    cls = torch.optim.AdamW
    optimizer = flat_optimizer(model, cls, params, **options) if is_flat else cls(params, **options)
    for step in range(5):
        backward(model, step)
        if step in (1, 3):
            edit(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return full_state(model), state_of(optimizer)


def edited(edits, options):
    untouched = trained(lambda model, optimizer: None, is_flat=True, options=options)
    for edit in edits:
        ours, theirs = (trained(edit, is_flat=flat, options=options) for flat in (True, False))
        try:
            assert_same(ours[0], theirs[0], bitwise=True)
            assert_same_state(ours[1], theirs[1])
        except AssertionError as error:
            raise AssertionError(f"after {edit.__name__}: {error}") from error
        if edit not in (note, another_place_in_the_group):
            weights = (ours[0][name] for name in ours[0])
            same = [torch.equal(a, b) for a, b in zip(weights, untouched[0].values(), strict=True)]
            assert not all(same), f"{edit.__name__} changes nothing, so it shows nothing"


def test_edits_between_backward_and_step(run_ranks):
    run_ranks(edited, 2, EDITS, {"lr": 0.01})


def test_the_same_with_foreach_kernels(run_ranks):
    edits = (replace, count_on, replace_count, empty_one, no_gradient, transposed_gradients)
    run_ranks(edited, 2, edits, {"lr": 0.01, "foreach": True})
