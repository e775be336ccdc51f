"""Units whose backward does not read their parameters."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import CommLedger
from tests.support.parity import assert_same, full_grads


class Add(nn.Module):
    """Its backward reads no parameter."""

    def __init__(self, dim):
        super().__init__()
        self.bias = nn.Parameter(torch.linspace(-1, 1, dim))

    def forward(self, x):
        return x + self.bias


class Embedded(nn.Module):
    """Embeddings and additions need no parameters in backward; the linear layers do."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.add = Add(6)

    def forward(self, tokens):
        x = self.first(self.embedding(tokens))
        return self.second(self.add(torch.tanh(x)))


def train(off, reshard_after_forward):
    """``off``: the units that are not gathered in backward."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    plain = Embedded()
    model = copy.deepcopy(plain)
    for name in ("embedding", "first", "add", "second"):
        meshard.fully_shard(getattr(model, name), mesh, reshard_after_forward=reshard_after_forward)
    meshard.fully_shard(model, mesh)
    for name in off:
        getattr(model, name).set_unshard_in_backward(False)
    tokens = torch.randint(0, 7, (3, 2, 5), generator=torch.Generator().manual_seed(0))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for batch in tokens:
        with CommLedger(model) as ledger:
            model(batch[dist.get_rank() : dist.get_rank() + 1]).square().mean().backward()
        plain(batch).square().mean().backward()
        assert_same(full_grads(model), full_grads(plain))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [event.unit for event in ledger.events if event.op == "all_gather"]


FORWARD = ["embedding", "first", "add", "second"]


@pytest.mark.parametrize(
    ("off", "in_backward"),
    [
        ((), ["second", "add", "first", "embedding"]),
        (("embedding",), ["second", "add", "first"]),
        (("embedding", "add"), ["second", "first"]),
    ],
)
def test_a_unit_that_needs_no_parameters_in_backward_is_not_gathered(run_ranks, off, in_backward):
    gathers = run_ranks(train, 2, off, True)
    assert gathers == [FORWARD + in_backward] * 2


def test_units_that_are_kept_are_gathered_once_either_way(run_ranks):
    assert run_ranks(train, 2, ("embedding", "add"), False) == [FORWARD] * 2


def set_again():
    """The setting is the unit's own, and may change between steps."""
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Linear(6, 6), Add(6), nn.Linear(6, 6))
    for layer in model:
        meshard.fully_shard(layer, mesh)
    meshard.fully_shard(model, mesh)
    counts = []
    for flag in (True, False, True):
        model[1].set_unshard_in_backward(flag)
        for _ in range(2):
            with CommLedger(model) as ledger:
                model(torch.ones(1, 6)).sum().backward()
        counts.append(ledger.counts["all_gather"])
    model.set_unshard_in_backward(False)  # does not reach the units inside
    with CommLedger(model) as ledger:
        model(torch.ones(1, 6)).sum().backward()
    counts.append(ledger.counts["all_gather"])
    model[1].set_unshard_in_backward(False, recurse=True)
    with CommLedger(model) as ledger:
        model(torch.ones(1, 6)).sum().backward()
    return [*counts, ledger.counts["all_gather"]]


def test_it_may_change_between_steps_and_recurses_on_request_only(run_ranks):
    assert run_ranks(set_again, 2) == [[6, 5, 6, 6, 5]] * 2


def wrong_setting():
    """A linear layer does read its weight in backward: an error, and the next step is right."""
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    for layer in model:
        meshard.fully_shard(layer, mesh)
    meshard.fully_shard(model, mesh)
    model[1].set_unshard_in_backward(False)
    with pytest.raises(RuntimeError, match="out of bounds for storage of size 0"):
        model(torch.ones(1, 6)).sum().backward()
    model[1].set_unshard_in_backward(True)
    model.zero_grad()
    model(torch.ones(1, 6)).sum().backward()
    return model[1].bias.grad.full_tensor().tolist()


def test_a_wrong_promise_ends_in_an_error(run_ranks):
    assert run_ranks(wrong_setting, 2) == [[1.0] * 6] * 2
