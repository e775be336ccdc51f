"""Accumulation over microbatches: nothing is lost, counted twice or stepped too early."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Partial, Shard

import meshard
from meshard import GradientSync, MixedPrecisionPolicy
from tests.support import insides
from tests.support.models import Ones
from tests.support.ones import make, run, values
from tests.support.ranks import on_threads
from tests.support.spread import spread

CLEARS = {
    "module": lambda model: model.zero_grad(),
    "plain parent": lambda model: nn.ModuleDict({"unit": model}).zero_grad(),
    "none": lambda model: torch.optim.SGD(model.parameters()).zero_grad(),
    "zeros": lambda model: torch.optim.SGD(model.parameters()).zero_grad(set_to_none=False),
}


@on_threads(4)
@pytest.mark.parametrize("schedule", ["R", "N", "NR", "F"])
@pytest.mark.parametrize("how", CLEARS)
def test_zero_grad_clears_what_is_hidden(how, schedule):
    model = make()
    run(model, schedule, 100.0, 7.0)
    CLEARS[how](model)
    assert not meshard.pending_gradients(model)
    run(model, "F", 2.5, None)
    assert values(model) == {"a": 2.5, "b": 0.0 if (how, schedule) == ("zeros", "F") else None}


@on_threads(4)
@pytest.mark.parametrize("again", [1.0, None])
def test_an_optimizer_clears_its_own_parameters_only(again):
    model = make()
    run(model, "R", 1.0, 7.0)
    torch.optim.SGD([model.b], lr=1.0).zero_grad()
    run(model, "R", 1.0, again)
    run(model, "F", None, None)
    assert values(model) == {"a": 2.0, "b": again}


@on_threads(4)
@pytest.mark.parametrize("mode", "NR")
def test_sums_stay_wide_when_the_set_of_used_parameters_changes(mode):
    model = make((2, 2), dtype=torch.bfloat16)
    for number in range(300):
        run(model, mode if number < 299 else "F", 1.0, 1.0 if number in (0, 299) else None)
    assert values(model) == {"a": 300.0, "b": 2.0}


@on_threads(2)
def test_a_reduction_is_added_to_a_gradient_in_the_dtype_of_the_gradient():
    model = make((2,), dtype=torch.bfloat16)
    run(model, "F", 256.0, None)
    run(model, "F", 1.0, None)  # 257 is no bfloat16
    run(model, "F", 3.0, 1.0)
    assert values(model) == {"a": 260.0, "b": 1.0}


@on_threads(4)
def test_unused_parameters_get_zeros_on_request():
    model = make()
    model.set_reduce_scatter_unused_params(True)
    run(model, "F", 1.0, None)
    assert values(model) == {"a": 1.0, "b": 0.0}


@on_threads(4)
def test_a_partial_is_the_mean_over_the_shard_group():
    model = make()
    rank = dist.get_rank()
    assert not meshard.pending_gradients(model)
    run(model, "R", float(rank), None)
    pending = meshard.pending_gradients(model)
    assert list(pending) == ["a"]
    assert pending["a"].placements == (Partial("avg"), Shard(0))
    assert model.a.grad is None
    assert pending["a"].to_local().tolist() == [0.5 if rank < 2 else 2.5] * 2
    assert pending["a"].full_tensor().tolist() == [1.5] * 4
    run(model, "N", None, 1.0)
    assert dict(meshard.pending_gradients(model).items()).keys() == {"a", "b"}
    assert meshard.pending_gradients(model)["b"] is None
    meshard.finalize_gradients(model)
    assert not meshard.pending_gradients(model)
    assert values(model) == {"a": 1.5, "b": 1.0}


@on_threads(1)
def test_a_loop_that_is_left_restores_the_modes():
    def mode():
        return insides.units(model)[0].settings.sync

    model = meshard.fully_shard(Ones())
    model.set_gradient_sync(GradientSync.REDUCE_SCATTER)
    with meshard.no_sync(model):
        assert mode() is GradientSync.NONE
        with meshard.gradient_sync(model, GradientSync.FULL):
            assert mode() is GradientSync.FULL
        assert mode() is GradientSync.NONE
    assert mode() is GradientSync.REDUCE_SCATTER
    for _ in meshard.microbatches(model, iter("abc"), until_last=GradientSync.NONE):
        assert mode() is GradientSync.NONE
        break
    assert mode() is GradientSync.REDUCE_SCATTER
    assert insides.units(model)[0].lifecycle.is_last_backward
    model.set_gradient_sync(GradientSync.NONE)
    modes = [mode() for _ in meshard.microbatches(model, "ab")]
    assert modes == [GradientSync.REDUCE_SCATTER, GradientSync.FULL]
    assert mode() is GradientSync.NONE


EDITS = {
    "nothing": lambda model: None,
    "mul": lambda model: model.a.grad.mul_(0.5),
    "foreach": lambda model: torch._foreach_mul_([model.a.grad, model.b.grad], 0.5),
    "replace": lambda model: setattr(model.a, "grad", model.a.grad * 0.5),
    "none": lambda model: setattr(model.a, "grad", None),
    "zero": lambda model: torch.optim.SGD(model.parameters(), foreach=True).zero_grad(False),
}


@on_threads(2)
@spread(
    dtype=[torch.float32, torch.bfloat16],
    **{
        "edit, a, b": [
            ("nothing", 5, 3),
            ("mul", 3.5, 3),
            ("foreach", 3.5, 2.5),
            ("replace", 3.5, 3),
            ("none", 2, 3),
            ("zero", 2, 2),
        ]
    },
)
def test_edits_of_grad_between_microbatches_hold(dtype, edit, a, b):
    model = make((2,), dtype=dtype, mp_policy=MixedPrecisionPolicy())
    run(model, "F", 3.0, 1.0)
    EDITS[edit](model)
    run(model, "FF", 1.0, 1.0)
    assert values(model) == {"a": a, "b": b}


@on_threads(1)
def test_pending_gradients_print_their_names_also_while_unsharded():
    model = meshard.fully_shard(nn.Linear(2, 2))
    assert repr(meshard.pending_gradients(model)) == "PendingGradients([], is_open=False)"
    with meshard.no_sync(model):
        model(torch.ones(1, 2)).sum().backward()
    for prepare in (model.reshard, model.unshard):
        prepare()
        pending = meshard.pending_gradients(model)
        assert repr(pending) == "PendingGradients(['weight', 'bias'], is_open=True)"
