"""Flat optimizers against the ordinary ones, bit for bit."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import GradientSync, MixedPrecisionPolicy, flat_optimizer
from meshard.optim.flat import FlatOptimizer
from tests.support.flat_models import Net, backward, make, train
from tests.support.models import seeded
from tests.support.optimizers import MANY, assert_same_state, groups_of, plain_state
from tests.support.parity import assert_same, full_state, own_state
from tests.support.ranks import on_ranks

STEPS = 5
FUSED = {"lr": 0.01, "fused": True}


def compare(shape, name, *, schedule=(GradientSync.FULL,), rests=False, grouped=False, **kwargs):
    cls, options = MANY[name]
    ours, theirs = make(shape, **kwargs), make(shape, **kwargs)
    flat = flat_optimizer(ours, cls, groups_of(ours) if grouped else None, **options)
    plain = cls(groups_of(theirs) if grouped else theirs.parameters(), **options)
    rest = (lambda step: step % 3) if rests else (lambda step: None)
    for model, optimizer in ((ours, flat), (theirs, plain)):
        train(model, optimizer, range(STEPS), schedule, rest)
    assert_same(own_state(ours), own_state(theirs), bitwise=True)
    assert_same_state(plain_state(flat), plain_state(plain))


@pytest.mark.default_rows(4)
@pytest.mark.parametrize("name", MANY)
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_as_the_ordinary_one(run_ranks, shape, name):
    run_ranks(compare, torch.Size(shape).numel(), shape, name)


def fused():
    ours, theirs = make((2,)), make((2,))
    flat = flat_optimizer(ours, torch.optim.AdamW, **FUSED)
    plain = torch.optim.AdamW(theirs.parameters(), **FUSED)
    for model, optimizer in ((ours, flat), (theirs, plain)):
        train(model, optimizer, range(STEPS))
    assert_same(full_state(ours), full_state(theirs))


def test_fused_kernels_agree_to_rounding(run_ranks):
    run_ranks(fused, 2)
    # Not to the bit: the same numbers give others at another place in a tensor, as torch's kernel
    # for the CPU rounds otherwise in the last few elements, which do not fill a vector.
    torch.manual_seed(0)
    values = torch.randn(16), torch.randn(16)
    long, short = (nn.Parameter(values[0][:n].clone()) for n in (16, 13))
    for param in (long, short):
        optimizer = torch.optim.AdamW([param], **FUSED)
        for _ in range(10 * STEPS):
            param.grad = values[1][: param.numel()].clone()
            optimizer.step()
    assert not torch.equal(long[:13], short), "compare fused ones bit for bit, too"


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("rests", [False, True])
@pytest.mark.parametrize("per_layer", [False, True])
def test_groups_units_and_parameters_that_rest(run_ranks, per_layer, rests, grouped):
    run_ranks(compare, 3, (3,), "adamw", rests=rests, grouped=grouped, per_layer=per_layer)


def test_accumulation(run_ranks):
    schedule = (GradientSync.NONE, GradientSync.REDUCE_SCATTER, GradientSync.FULL)
    run_ranks(compare, 4, (2, 2), "adam", schedule=schedule, per_layer=True)


@on_ranks(2)
def test_gradients_that_are_not_next_to_each_other():
    for _ in range(1):
        ours, theirs = (make((2,)) for _ in range(2))
        for model in (ours, theirs):
            model.to(torch.bfloat16)
        flat = flat_optimizer(ours, torch.optim.AdamW, lr=0.01)
        plain = torch.optim.AdamW(theirs.parameters(), lr=0.01)
        for model, optimizer in ((ours, flat), (theirs, plain)):
            for step in range(STEPS):
                model(torch.full((2, 7), 0.1 * step, dtype=torch.bfloat16)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_same(full_state(ours), full_state(theirs), bitwise=True)


@on_ranks(2)
def test_mixed_precision():
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    compare((2,), "adamw", mp_policy=policy)


@on_ranks(2)
def test_schedulers_offload_and_edits_of_the_state():
    cls = torch.optim.AdamW
    ours, theirs = make((2,)), make((2,))
    flat, plain = flat_optimizer(ours, cls, lr=0.1), cls(theirs.parameters(), lr=0.1)
    assert isinstance(flat, FlatOptimizer)
    for model, optimizer in ((ours, flat), (theirs, plain)):
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
        for step in range(4):
            train(model, optimizer, [step])
            scheduler.step()
            if step == 1:
                meshard.offload(model, optimizer)
                meshard.onload(model, optimizer)
            if step == 2:
                for state in optimizer.state.values():
                    state["exp_avg"].mul_(0.5)
    assert_same(full_state(ours), full_state(theirs), bitwise=True)
    assert_same_state(plain_state(flat), plain_state(plain))


@on_ranks(2)
def test_clipped_and_replaced_gradients():
    ours, theirs = make((2,), per_layer=True), make((2,), per_layer=True)
    flat = flat_optimizer(ours, torch.optim.SGD, lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    for model, optimizer in ((ours, flat), (theirs, plain)):
        for step in range(3):
            backward(model, step)
            meshard.clip_grad_norm_(model, 0.1)
            for param in list(model.parameters())[1:3]:
                param.grad = param.grad * 2  # one of the user's own
            optimizer.step()
            optimizer.zero_grad()
    assert_same(full_state(ours), full_state(theirs), bitwise=True)


@on_ranks(2)
def test_a_model_that_is_converted_between_steps():
    """Storage that is replaced between steps is stepped where it is now."""
    ours, theirs = make((2,)), make((2,))
    flat = flat_optimizer(ours, torch.optim.SGD, lr=0.1)
    plain = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for model, optimizer in ((ours, flat), (theirs, plain)):
        train(model, optimizer, range(2))
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        model.double()
        for step in range(2):
            model(torch.full((2, 7), 0.1 * step, dtype=torch.float64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(full_state(ours), full_state(theirs), bitwise=True)


@on_ranks(2)
def test_guards_hold_and_no_gradient_is_kept():
    model = make((2,))
    optimizer = flat_optimizer(model, torch.optim.AdamW)
    model.set_gradient_sync(GradientSync.NONE)
    backward(model, 0)
    before = full_state(model)
    with pytest.raises(RuntimeError, match="not reduced yet"):
        optimizer.step()
    assert_same(full_state(model), before, bitwise=True)
    optimizer.zero_grad()
    assert not meshard.pending_gradients(model)
    model.set_gradient_sync(GradientSync.FULL)
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    held = [run.flat.grad for run in optimizer._stepper.slices]
    assert held == [None] * len(held)


def test_others_are_refused(run_ranks):
    with pytest.raises(TypeError, match="none of them"):
        flat_optimizer(nn.Linear(2, 2), torch.optim.LBFGS)
    with pytest.raises(ValueError, match="no unit in this Linear"):
        flat_optimizer(nn.Linear(2, 2), torch.optim.SGD)


@on_ranks(2)
def test_parameters_of_no_unit():
    """A parameter of no unit is stepped as it is, and moves like the rest."""
    records = []
    for is_flat in (True, False):
        model = seeded(Net())
        ignored = {model.tiny}
        meshard.fully_shard(model, init_device_mesh("cpu", (2,)), ignored_params=ignored)
        if is_flat:
            optimizer = flat_optimizer(model, torch.optim.AdamW, lr=0.01)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(STEPS):
            model(torch.full((2, 7), 0.1 * step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        records.append((full_state(model), plain_state(optimizer)))
    assert_same(records[0][0], records[1][0], bitwise=True)
    assert_same_state(records[0][1], records[1][1])
