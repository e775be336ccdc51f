"""Parameters that some ranks or microbatches do not use."""

import copy
import gc
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import meshard
from tests.support.models import Made, seeded
from tests.support.ones import make
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import on_fake_ranks, on_ranks, on_threads


@pytest.mark.parametrize(
    "apply",
    [
        meshard.fully_shard,
        meshard.replicate,
        partial(meshard.fully_shard, reshard_after_forward=True),
    ],
)
@pytest.mark.parametrize("part", ["weight", "all"])
@on_ranks(2)
def test_a_module_may_be_frozen_between_forward_and_backward(apply, part):
    """What is frozen gets no gradient, also where it is gathered anew for the backward."""
    plain = seeded(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
    model, inputs = copy.deepcopy(plain), []
    apply(model[0])
    apply(model)
    for _ in range(2):
        for each in (model, plain):
            inputs.append(torch.ones(1, 4, requires_grad=True))
            loss = each(inputs[-1]).sum()
            (each[0].weight if part == "weight" else each[0]).requires_grad_(False)
            with meshard.CommLedger() as ledger:
                loss.backward()
            reduced = [event.unit for event in ledger.events if event.op != "all_gather"]
            assert len(reduced) == len(set(reduced)), "a unit was reduced twice"
            each.requires_grad_(True)
        assert_same(inputs[-2].grad, inputs[-1].grad)
        assert_same(full_grads(model), full_grads(plain))


@on_threads(2)
@pytest.mark.parametrize("rank_that_uses", [0, 1])
def test_a_sum_too_small_for_the_accumulate_dtype_was_still_used(rank_that_uses):
    policy = meshard.MixedPrecisionPolicy(accumulate_dtype=torch.float16)
    model = make((2,), mp_policy=policy)
    model(-1e-9 if dist.get_rank() == rank_that_uses else None, 1.0).backward()
    assert model.a.grad is not None


@on_threads(2)
def test_gradients_put_in_before_a_backward_are_added_to():
    """Put a gradient in after zero_grad, in the very memory that ours had."""
    model = make((2,))
    model(1.0).backward()
    mine = model.a.grad.to_local().detach()
    model.zero_grad()
    mine.fill_(100.0)
    model.a.grad = DTensor.from_local(mine, model.a.device_mesh, [Shard(0)])
    model(1.0).backward()
    assert model.a.grad.to_local().tolist() == [101.0] * 2


@on_fake_ranks(2)
def test_what_is_kept_for_sets_of_frozen_parameters_is_bounded():
    """Some users freeze parameters at random, so each step has another set."""
    vectors = {f"v{place}": nn.Parameter(torch.ones(4)) for place in range(7)}
    model = meshard.fully_shard(Made(lambda m: sum(m.parameters()), **vectors))

    def num_objects_after(sets):
        for number in sets:
            for place, param in enumerate(model.parameters()):
                param.requires_grad_(bool(number >> place & 1))
            model().sum().backward()
            model.zero_grad()
        gc.collect()
        return len(gc.get_objects())

    before = num_objects_after(range(1, 64))
    growth = num_objects_after(range(64, 127)) - before
    assert growth < 10 * 63, f"{growth / 63:.0f} objects for each set"
