"""Flat optimizers: their state is that of the ordinary one, wherever it goes."""

import copy
import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import meshard
from meshard import flat_optimizer
from tests.support.flat_models import backward, make, train
from tests.support.models import seeded
from tests.support.optimizers import assert_same_state, plain_state
from tests.support.parity import assert_same, full_state
from tests.support.ranks import on_ranks


@on_ranks(2)
@pytest.mark.default_rows(1)
@pytest.mark.parametrize("way", ["to ordinary", "from ordinary", "to itself"])
def test_state_dicts_are_interchangeable(way):
    """Train three steps with one, go on with the other by its state dict."""
    cls, options = torch.optim.AdamW, {"lr": 0.01}
    straight = make((2,))
    train(straight, cls(straight.parameters(), **options), range(6))
    model = make((2,))
    makers = [
        lambda: flat_optimizer(model, cls, **options),
        lambda: cls(model.parameters(), **options),
    ]
    first, second = (makers[0], makers[1]) if way == "to ordinary" else (makers[1], makers[0])
    if way == "to itself":
        first = second = makers[0]
    before = first()
    train(model, before, range(3))
    file = io.BytesIO()
    torch.save(before.state_dict(), file)
    file.seek(0)
    after = second()
    after.load_state_dict(torch.load(file, weights_only=False))
    train(model, after, range(3, 6))
    assert_same(full_state(model), full_state(straight), bitwise=True)


def through_checkpoint(folder):
    cls, options = torch.optim.AdamW, {"lr": 0.01}
    straight = make((2,))
    train(straight, cls(straight.parameters(), **options), range(6))
    saved = make((2,))
    before = flat_optimizer(saved, cls, **options)
    train(saved, before, range(3))
    state = {
        "model": saved.state_dict(),
        "optimizer": get_optimizer_state_dict(saved, before),
    }
    dcp.save(state, checkpoint_id=folder)
    for make_optimizer in (flat_optimizer, lambda model, cls, **kw: cls(model.parameters(), **kw)):
        loaded = make((2,))
        after = make_optimizer(loaded, cls, **options)
        state = {
            "model": loaded.state_dict(),
            "optimizer": get_optimizer_state_dict(loaded, after),
        }
        dcp.load(state, checkpoint_id=folder)
        loaded.load_state_dict(state["model"])
        set_optimizer_state_dict(loaded, after, state["optimizer"])
        train(loaded, after, range(3, 6))
        assert_same(full_state(loaded), full_state(straight), bitwise=True)


@pytest.mark.extras
def test_through_a_distributed_checkpoint(run_ranks, tmp_path):
    run_ranks(through_checkpoint, 2, str(tmp_path))


@on_ranks(2)
def test_copies_and_groups_that_are_added_later():
    model = make((2,))
    optimizer = flat_optimizer(model, torch.optim.AdamW, lr=0.01)
    train(model, optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    twin = copy.deepcopy(model)
    other = flat_optimizer(twin, torch.optim.AdamW, lr=0.01)
    other.load_state_dict(state)
    for each, steps in ((model, optimizer), (twin, other)):
        train(each, steps, range(2, 5))
    assert_same(full_state(model), full_state(twin), bitwise=True)
    # What was added later is stepped too.
    late = nn.Linear(2, 2)
    optimizer.add_param_group({"params": late.parameters(), "lr": 1.0})
    before = late.weight.detach().clone()
    backward(model, 0)
    late(torch.ones(1, 2)).sum().backward()
    with pytest.warns(UserWarning, match=r"are in no unit \(2 in all"):
        optimizer.step()
    assert not torch.equal(late.weight, before)


class Small(nn.Module):
    """Fewer rows than ranks, in a unit of its own."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def edit(optimizer, params, step):
    """Change the state of one parameter, and not of the first, in another way at each step."""
    param = params[1]
    if step == 1:
        optimizer.state.pop(param)
    elif step == 2:
        optimizer.state[param]["step"].zero_()
    elif step == 3:
        optimizer.state[param]["exp_avg"] = optimizer.state[param]["exp_avg"] * 0.5
    elif step == 4:
        optimizer.state[param] = {}
    elif step == 5:
        optimizer.state.clear()
    elif step == 6:
        for state in optimizer.state_dict()["state"].values():
            state["step"].add_(1)


@on_ranks(3)
def test_edits_of_the_state_where_a_rank_owns_nothing():
    records = []
    for is_flat in (True, False):
        model = seeded(Small())
        for layer in model.children():
            meshard.fully_shard(layer)
        meshard.fully_shard(model)
        cls, options = torch.optim.AdamW, {"lr": 0.01}
        params = list(model.parameters())
        optimizer = flat_optimizer(model, cls, **options) if is_flat else cls(params, **options)
        for step in range(8):
            edit(optimizer, params, step)
            model(torch.full((2, 4), 0.1 * step + 0.1)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        records.append((full_state(model), plain_state(optimizer)))
    assert_same(records[0][0], records[1][0], bitwise=True)
    assert_same_state(records[0][1], records[1][1])


@on_ranks(2)
def test_steps_that_are_numbers():
    straight, model = make((2,)), make((2,))
    cls = torch.optim.AdamW
    train(straight, cls(straight.parameters(), lr=0.01), range(4))
    before = cls(model.parameters(), lr=0.01)
    train(model, before, range(2))
    state = before.state_dict()
    for each in state["state"].values():
        each["step"] = int(each["step"])  # as torch saved them before 1.12
    after = flat_optimizer(model, cls, lr=0.01)
    after.load_state_dict(state)
    train(model, after, range(2, 4))
    assert_same(full_state(model), full_state(straight), bitwise=True)


@on_ranks(2)
def test_a_parameter_put_into_a_group():
    """Whoever puts another parameter into a group's list has that one stepped."""
    model, other = make((2,)), make((2,))
    optimizer = flat_optimizer(model, torch.optim.SGD, lr=0.1)
    train(model, optimizer, range(1))
    optimizer.param_groups[0]["params"][0] = next(other.parameters())
    before = full_state(model), full_state(other)
    for each in (model, other):
        backward(each, 1)
    optimizer.step()
    assert torch.equal(full_state(model)["tiny"], before[0]["tiny"])
    assert not torch.equal(full_state(other)["tiny"], before[1]["tiny"])
