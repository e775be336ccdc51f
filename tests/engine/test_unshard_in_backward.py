"""Units whose backward does not read their parameters."""

import pytest
import torch
from torch import nn

from meshard import CommLedger
from tests.support.against_plain import check_training, sharded_and_plain
from tests.support.models import Made
from tests.support.ranks import on_fake_ranks, on_threads


def add():
    """Return a module whose backward reads no parameter."""
    return Made(lambda m, x: x + m.bias, bias=nn.Parameter(torch.linspace(-1, 1, 6)))


@pytest.mark.parametrize(
    ("off", "reshard", "in_backward"),
    [
        ((), True, ["4", "3", "1", "0"]),
        (("0",), True, ["4", "3", "1"]),
        (("0", "3"), True, ["4", "1"]),
        (("0", "3"), False, []),
    ],
)
@on_threads(2)
def test_a_unit_that_needs_no_parameters_in_backward_is_not_gathered(off, reshard, in_backward):
    def step(model, rank):
        tokens = torch.randint(7, (2, 5), generator=torch.Generator().manual_seed(rank))
        return model(tokens).square().mean()

    units = ["0", "1", "3", "4"]  # of which only the linear layers need parameters in backward
    plain = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 6), nn.Tanh(), add(), nn.Linear(6, 6))
    model, _ = sharded_and_plain(plain, units, reshard_after_forward=reshard)
    for name in off:
        model.get_submodule(name).set_unshard_in_backward(False)
    events = check_training(model, plain, step).events
    gathered = [event.unit for event in events if event.op == "all_gather"]
    assert gathered == units + in_backward


@on_fake_ranks(2)
def test_it_may_change_between_steps_and_recurses_on_request_only():
    plain, counts = nn.Sequential(nn.Linear(6, 6), add(), nn.Linear(6, 6)), []
    model, _ = sharded_and_plain(plain, ("0", "1", "2"))
    for unit, flag, recurse in [
        (model[1], True, False),
        (model[1], False, False),
        (model[1], True, False),
        (model, False, False),  # does not reach the units inside
        (model[1], False, True),
    ]:
        unit.set_unshard_in_backward(flag, recurse=recurse)
        for _ in range(2):
            with CommLedger(model) as ledger:
                model(torch.ones(1, 6)).sum().backward()
        counts.append(ledger.counts["all_gather"])
    assert counts == [6, 5, 6, 6, 5]


@on_threads(2)
def test_a_wrong_promise_ends_in_an_error_and_the_next_step_is_right():
    model, _ = sharded_and_plain(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), ("0", "1"))
    model[1].set_unshard_in_backward(False)  # but it reads its weight
    with pytest.raises(RuntimeError, match="out of bounds for storage of size 0"):
        model(torch.ones(1, 6)).sum().backward()
    model[1].set_unshard_in_backward(True)
    model.zero_grad()
    model(torch.ones(1, 6)).sum().backward()
    assert model[1].bias.grad.full_tensor().tolist() == [1.0] * 6
