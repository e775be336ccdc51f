"""Steps that begin or end where they seldom do: errors around, other roots, state of siblings."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import meshard
from tests.support.against_plain import check_gradients, sharded_and_plain
from tests.support.models import Made, seeded
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import on_threads


@on_threads(2)
@pytest.mark.filterwarnings("ignore:unit .* returned a NoneType")
def test_a_forward_that_returns_none_while_an_error_is_handled_has_not_failed():
    plain = Made(lambda m, x, into: into.append(m.linear(x)), linear=nn.Linear(4, 4))
    model, _ = sharded_and_plain(plain, (), reshard_after_forward=True)
    for each in (model, plain):
        outputs = []
        try:
            raise RuntimeError("out of memory, say")
        except RuntimeError:
            each(torch.ones(2, 4, requires_grad=True), outputs)
        outputs[0].sum().backward()
    assert_same(full_grads(model), full_grads(plain))


@on_threads(2)
def test_a_checkpoint_is_refused_while_gradients_of_any_unit_of_a_module_are_pending():
    def two_units(param):
        return Shard(0) if param.dim() > 1 else Replicate()

    model = meshard.fully_shard(seeded(nn.Linear(4, 4)), shard_placement_fn=two_units)
    model.weight.requires_grad_(False)  # only the second unit has gradients
    with meshard.no_sync(model):
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


@on_threads(2)
def test_a_unit_of_several_modules_is_gathered_once_for_each_time_that_they_run():
    def step(model, rank, times):
        x = torch.ones(1, 3)
        for _ in range(times):
            x = model[1](model[0](x))
        return x.sum()

    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model = copy.deepcopy(seeded(plain))
    meshard.fully_shard([model[0], model[1]])
    for times in (1, 2, 3):
        ledger = check_gradients(model, plain, functools.partial(step, times=times))
        gathers = [event.unit for event in ledger.events if event.op == "all_gather"]
        assert gathers == ["0"] * times
