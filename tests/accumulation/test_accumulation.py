"""Accumulation over microbatches: nothing is lost, counted twice or stepped too early."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Shard

import meshard
from meshard import GradientSync, MixedPrecisionPolicy
from tests.support import insides
from tests.support.models import MlpStack, Ones, seeded
from tests.support.ones import make, run, values
from tests.support.parity import assert_same, full_grads
from tests.support.sharding import shard_blocks
from tests.support.spread import spread
from tests.support.threads import run_threads


def grow_and_shrink():
    rank = dist.get_rank()
    found = []
    for script in (
        [("R", 10.0 * rank, None), ("F", None, 25.0)],
        [("R", 10.0, None), ("F", 10.0, 1.0)],
        [("R", 10.0, 1.0), ("F", 10.0, None)],
        [("R", 2.5, None), ("F", None, None)],
        [("N", 2.5, None), ("R", None, 1.0), ("F", None, None)],
        [("N", None, None), ("F", None, 3.0)],
    ):
        model = make()
        for mode, a, b in script:
            run(model, mode, a, b)
        found.append(tuple(values(model).values()))
    return found


def test_the_set_of_used_parameters_may_change_in_a_window():
    expected = [(15, 25), (20, 1), (20, 1), (2.5, None), (2.5, 1), (None, 3)]
    assert run_threads(grow_and_shrink, 4) == [expected] * 4


def zero_in_window(how, schedule):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for mode in schedule:
        run(model, mode, 100.0, 7.0)
    if how == "module":
        model.zero_grad()
    else:
        optimizer.zero_grad(set_to_none=how == "none")
    assert not meshard.pending_gradients(model)
    run(model, "F", 2.5, None)
    return values(model)


@spread(how=["module", "none", "zeros"], schedule=["R", "N", "NR", "F"])
def test_zero_grad_clears_what_is_hidden(how, schedule):
    for found in run_threads(zero_in_window, 4, how, schedule):
        assert found["a"] == 2.5
        assert found["b"] == (0.0 if (how, schedule) == ("zeros", "F") else None)


def drop_grad_by_hand():
    model = make()
    run(model, "R", 100.0, 7.0)
    model.a.grad = model.b.grad = None
    run(model, "F", 2.5, None)
    return values(model)


def test_dropping_grad_by_hand_leaves_what_is_pending():
    assert run_threads(drop_grad_by_hand, 4) == [{"a": 102.5, "b": 7.0}] * 4


def zero_in_a_plain_parent():
    parent = nn.ModuleDict({"unit": make()})
    run(parent["unit"], "N", 100.0, 7.0)
    parent.zero_grad()
    run(parent["unit"], "F", 2.5, None)
    return values(parent["unit"])


def test_a_plain_module_around_units_clears_them_too():
    assert run_threads(zero_in_a_plain_parent, 4) == [{"a": 2.5, "b": None}] * 4


def change_use_in_bf16():
    model = make((2,), dtype=torch.bfloat16)
    for number in range(300):
        run(model, "F", 1.0, 1.0 if number in (0, 299) else None)
    return values(model)


def test_sums_stay_wide_when_the_set_of_used_parameters_changes():
    assert run_threads(change_use_in_bf16, 2) == [{"a": 300.0, "b": 2.0}] * 2


def zero_instead_of_none():
    model = make()
    model.set_reduce_scatter_unused_params(True)
    run(model, "F", 1.0, None)
    return values(model)


def test_unused_parameters_get_zeros_on_request():
    assert run_threads(zero_instead_of_none, 4) == [{"a": 1.0, "b": 0.0}] * 4


def drop_one_for_good():
    model = make()
    run(model, "R", 1.0, 7.0)
    torch.optim.SGD([model.b], lr=1.0).zero_grad()
    run(model, "R", 1.0, None)
    run(model, "F", None, None)
    return values(model)


def test_a_parameter_that_was_cleared_and_not_used_again_has_no_gradient():
    assert run_threads(drop_one_for_good, 4) == [{"a": 2.0, "b": None}] * 4


def overlap_partials():
    model = make()
    model.set_is_last_backward(False)
    for _ in range(3):
        run(model, "R", 1.0, 1.0)
    model.set_is_last_backward(True)
    run(model, "F", 1.0, None)
    return values(model)


def test_partials_on_their_way_are_added_up():
    assert run_threads(overlap_partials, 4) == [{"a": 4.0, "b": 3.0}] * 4


def zero_one_parameter():
    model = make()
    optimizer = torch.optim.SGD([model.a], lr=1.0)
    run(model, "R", 100.0, 7.0)
    optimizer.zero_grad()
    run(model, "F", 2.5, 1.0)
    return values(model)


def test_an_optimizer_clears_its_own_parameters_only():
    assert run_threads(zero_one_parameter, 4) == [{"a": 2.5, "b": 8.0}] * 4


def step_too_early(schedule, is_last=True):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    for mode in schedule:
        model.set_is_last_backward(is_last)
        run(model, mode, 1.0, 1.0)
    with pytest.raises(RuntimeError, match=r"unit '\(root\)' holds gradients that are") as error:
        optimizer.step()
    model.set_is_last_backward(True)
    meshard.finalize_gradients(model)
    optimizer.step()
    return str(error.value), values(model)["a"]


@pytest.mark.parametrize(
    ("schedule", "is_last", "text"),
    [
        ("N", True, "not reduced yet"),
        ("FR", True, "not reduced across the replicas yet"),
        ("F", False, "still in flight"),
    ],
)
def test_a_step_in_an_open_window_is_refused(schedule, is_last, text):
    for message, value in run_threads(step_too_early, 4, schedule, is_last):
        assert text in message
        assert "finalize_gradients" in message
        assert value == len(schedule)


def look_at_partials():
    model = make()
    rank = dist.get_rank()
    assert not meshard.pending_gradients(model)
    run(model, "R", float(rank), None)
    pending = meshard.pending_gradients(model)
    assert list(pending) == ["a"]
    assert pending["a"].placements == (Partial("avg"), Shard(0))
    assert model.a.grad is None
    mean_of_shard_group = {0: 0.5, 1: 0.5, 2: 2.5, 3: 2.5}[rank]
    assert pending["a"].to_local().tolist() == [mean_of_shard_group] * 2
    assert pending["a"].full_tensor().tolist() == [1.5] * 4
    run(model, "N", None, 1.0)
    assert dict(meshard.pending_gradients(model).items()).keys() == {"a", "b"}
    assert meshard.pending_gradients(model)["b"] is None
    meshard.finalize_gradients(model)
    assert not meshard.pending_gradients(model)
    return values(model)


def test_a_partial_is_the_mean_over_the_shard_group():
    assert run_threads(look_at_partials, 4) == [{"a": 1.5, "b": 1.0}] * 4


def thirty_two_ranks():
    mesh = init_device_mesh("cpu", (4, 8))
    model = meshard.fully_shard(Ones(8), mesh)
    run(model, "R", float(dist.get_rank()))
    run(model, "F", 0.0)
    return model.a.grad.to_local().item()


def test_thirty_two_ranks_average_to_15_5_on_every_replica():
    assert run_threads(thirty_two_ranks, 32) == [15.5] * 32


def with_microbatches(mesh_shape, until_last, num_batches):
    mesh = init_device_mesh("cpu", mesh_shape)
    model = seeded(MlpStack())
    plain = copy.deepcopy(model)
    shard_blocks(model, mesh)
    generator = torch.Generator().manual_seed(0)
    xs = torch.randn(dist.get_world_size(), num_batches, 3, 6, generator=generator)
    with meshard.CommLedger(model) as ledger:
        for x in meshard.microbatches(model, xs[dist.get_rank()], until_last=until_last):
            (model(x).square().mean() / num_batches).backward()
    plain(xs.reshape(-1, 6)).square().mean().backward()
    assert_same(full_grads(model), full_grads(plain))
    return ledger.counts


@spread(until_last=list(GradientSync), num_batches=[1, 3])
def test_a_window_in_every_mode_has_the_gradients_of_one_process(
    run_ranks, until_last, num_batches
):
    counts = run_ranks(with_microbatches, 4, (2, 2), until_last, num_batches)[0]
    early = num_batches - 1
    assert counts["reduce_scatter"] == 4 * (1 + early * (until_last is not GradientSync.NONE))
    assert counts["all_reduce"] == 4 * (1 + early * (until_last is GradientSync.FULL))


def modes_of(model):
    return [unit.settings.sync for unit in insides.units(model)]


def test_a_loop_that_is_left_restores_the_modes():
    try:
        model = meshard.fully_shard(Ones())
        model.set_gradient_sync(GradientSync.REDUCE_SCATTER)
        with meshard.no_sync(model):
            assert modes_of(model) == [GradientSync.NONE]
            with meshard.gradient_sync(model, GradientSync.FULL):
                assert modes_of(model) == [GradientSync.FULL]
            assert modes_of(model) == [GradientSync.NONE]
        assert modes_of(model) == [GradientSync.REDUCE_SCATTER]
        for _ in meshard.microbatches(model, iter("abc"), until_last=GradientSync.NONE):
            assert modes_of(model) == [GradientSync.NONE]
            break
        assert modes_of(model) == [GradientSync.REDUCE_SCATTER]
        assert insides.units(model)[0].lifecycle.is_last_backward
        assert list(meshard.microbatches(model, [])) == []
        model.set_gradient_sync(GradientSync.NONE)
        modes = [modes_of(model)[0] for _ in meshard.microbatches(model, "ab")]
        assert modes == [GradientSync.REDUCE_SCATTER, GradientSync.FULL]
        assert modes_of(model) == [GradientSync.NONE]
        with meshard.no_sync(model):
            model(1.0).backward()
        model.unshard()
        assert list(meshard.pending_gradients(model)) == ["a"]
        model.zero_grad()
        with pytest.raises(TypeError, match=r"must be a meshard.GradientSync, got 'none'"):
            meshard.microbatches(model, [1], until_last="none")
        with pytest.raises(ValueError, match="no unit in this Linear"):
            meshard.pending_gradients(nn.Linear(2, 2))
    finally:
        dist.destroy_process_group()


def edit_between(dtype, edit):
    model = make((2,), dtype=dtype, mp_policy=MixedPrecisionPolicy())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, foreach=True)
    run(model, "F", 3.0, 1.0)
    if edit == "mul":
        model.a.grad.mul_(0.5)
    elif edit == "foreach":
        torch._foreach_mul_([model.a.grad, model.b.grad], 0.5)
    elif edit == "replace":
        model.a.grad = model.a.grad * 0.5
    elif edit == "none":
        model.a.grad = None
    elif edit == "zero":
        optimizer.zero_grad(set_to_none=False)
    run(model, "F", 1.0, 1.0)
    run(model, "F", 1.0, 1.0)
    return values(model)


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
    assert run_threads(edit_between, 2, dtype, edit) == [{"a": a, "b": b}] * 2


def test_pending_gradients_print_their_names():
    model = meshard.fully_shard(nn.Linear(2, 2))
    try:
        assert repr(meshard.pending_gradients(model)) == "PendingGradients([], is_open=False)"
        with meshard.no_sync(model):
            model(torch.ones(1, 2)).sum().backward()
        pending = meshard.pending_gradients(model)
        assert repr(pending) == "PendingGradients(['weight', 'bias'], is_open=True)"
    finally:
        dist.destroy_process_group()
