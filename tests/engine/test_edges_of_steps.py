"""Steps that begin or end where they seldom do: errors around, other roots, state of siblings."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import meshard
from meshard import GradientSync
from tests.support.models import seeded
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import on_threads


class ReturnsNothing(nn.Module):
    """Appends what it computes to a list, and returns None."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, into):
        into.append(self.linear(x))


@on_threads(2)
@pytest.mark.filterwarnings("ignore:unit .* returned a NoneType")
def test_a_forward_that_returns_none_while_an_error_is_handled_has_not_failed():
    model = meshard.fully_shard(seeded(ReturnsNothing()), reshard_after_forward=True)
    plain = seeded(ReturnsNothing())
    for each in (model, plain):
        outputs = []
        try:
            raise RuntimeError("out of memory, say")
        except RuntimeError:
            each(torch.ones(2, 4, requires_grad=True), outputs)
        outputs[0].sum().backward()
    assert_same(full_grads(model), full_grads(plain))


def two_kinds(param):
    """One unit for matrices, which are sharded, and one for vectors, which are replicated."""
    return Shard(0) if param.dim() > 1 else Replicate()


@on_threads(2)
def test_a_checkpoint_is_refused_while_gradients_of_any_unit_of_a_module_are_pending():
    model = meshard.fully_shard(seeded(nn.Linear(4, 4)), shard_placement_fn=two_kinds)
    model.weight.requires_grad_(False)  # only the second unit has gradients
    model.set_gradient_sync(GradientSync.NONE)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="holds gradients that are"):
        model.state_dict()
    meshard.finalize_gradients(model)
    model.state_dict()


@on_threads(2)
def test_a_flat_optimizer_does_not_step_inside_unsharded_params():
    model = meshard.fully_shard(seeded(nn.Linear(4, 4)))
    optimizer = meshard.flat_optimizer(model, torch.optim.SGD, lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    with (
        meshard.unsharded_params(model, writeback=False),
        pytest.raises(RuntimeError, match="inside unsharded_params"),
    ):
        optimizer.step()
    optimizer.step()  # and the optimizer still trains the model
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


@on_threads(2)
def test_a_root_that_is_sharded_in_a_window_loses_no_gradient():
    outer, plain = (seeded(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))) for _ in range(2))
    inner = meshard.fully_shard(outer[0])
    x = torch.ones(2, 4)
    inner.set_is_last_backward(False)
    inner(x).sum().backward()  # its reduction may still be in flight
    meshard.fully_shard(outer)
    outer.set_is_last_backward(True)
    plain[0](x).sum().backward()
    outer(x).sum().backward()
    plain(x).sum().backward()
    assert_same(full_grads(outer), full_grads(plain))
    torch.optim.SGD(outer.parameters(), lr=0.1).step()


class TwoInTurn(nn.Module):
    """Two modules that run several times, one after the other."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, times):
        for _ in range(times):
            x = self.second(self.first(x))
        return x


@on_threads(2)
def test_a_unit_of_several_modules_is_gathered_once_for_each_time_that_they_run():
    model, plain = seeded(TwoInTurn()), seeded(TwoInTurn())
    meshard.fully_shard([model.first, model.second])
    meshard.fully_shard(model)
    for times in (1, 2, 3):
        with meshard.CommLedger(model) as ledger:
            out = model(torch.ones(1, 3), times)
        assert [event.op for event in ledger.events] == ["all_gather"] * times
        out.sum().backward()
        plain(torch.ones(1, 3), times).sum().backward()
        assert_same(full_grads(model), full_grads(plain))
