"""Is the state of a flat optimizer that of the ordinary one, wherever it goes?"""

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

from meshard import flat_optimizer
from tests.ranks.test_flat_optimizer import backward, make, train
from tests.support.parity import assert_same, full_state


def interchange(way):
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


@pytest.mark.parametrize("way", ["to ordinary", "from ordinary", "to itself"])
def test_state_dicts_are_interchangeable(run_ranks, way):
    run_ranks(interchange, 2, way)


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


def test_through_a_distributed_checkpoint(run_ranks, tmp_path):
    run_ranks(through_checkpoint, 2, str(tmp_path))


def copied():
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
    optimizer.step()
    assert not torch.equal(late.weight, before)


def test_copies_and_groups_that_are_added_later(run_ranks):
    run_ranks(copied, 2)
