"""Optimizers in backward: when they may step, and what is refused meanwhile."""

import gc
import io
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves

import meshard
from meshard import overlap_optimizer
from tests.optim.optimizers import (
    ADAMW,
    LAYOUTS,
    OPTIONS,
    batch,
    grads,
    make,
    overlapped_and_plain,
    train,
    trainable,
    window,
)
from tests.support.live_memory import settled_tensor_bytes
from tests.support.models import Made
from tests.support.parity import assert_same, full_state, own_state, whole
from tests.support.ranks import on_fake_ranks, on_ranks
from tests.support.replicated import bucket_sizes


@on_ranks(2)
def test_an_optimizer_is_taken_over_in_the_middle_of_training():
    straight, model = make(), make()
    train(straight, ADAMW(trainable(straight), **OPTIONS), range(9))
    plain = ADAMW(trainable(model), **OPTIONS)
    train(model, plain, range(3))
    # The optimizer that there is already: its state is taken over.
    overlapped = overlap_optimizer(model, lambda _: plain)
    scheduler = torch.optim.lr_scheduler.ConstantLR(overlapped, 1.0)
    for number in range(3, 9):
        train(model, overlapped, [number])
        scheduler.step()
    assert_same(full_state(model), full_state(straight), bitwise=True)


@on_ranks(2)
def test_an_optimizer_is_taken_over_in_the_middle_of_a_window():
    models = []
    for is_overlapped in (True, False):
        model = make()
        optimizer = ADAMW(trainable(model), **OPTIONS)
        window(model, 0, "R")
        window(model, 1, "N")
        if is_overlapped:
            optimizer = overlap_optimizer(model, lambda _, optimizer=optimizer: optimizer)
        train(model, optimizer, [2, 3])
        models.append(full_state(model))
    assert_same(*models, bitwise=True)


@on_ranks(2)
def test_two_optimizers_share_a_unit():
    models = ours, theirs = make(), make()
    (matrices, theirs_matrices), (rest, theirs_rest) = (
        [[p for p in trainable(model) if (p.dim() == 2) == is_matrix] for model in models]
        for is_matrix in (True, False)
    )
    pair = [
        overlap_optimizer(ours, torch.optim.SGD, matrices, lr=0.01),
        overlap_optimizer(ours, ADAMW, rest, **OPTIONS),
    ]
    for wrong in (
        lambda: overlap_optimizer(ours, ADAMW),
        lambda: pair[1].add_param_group({"params": matrices}),
    ):
        with pytest.raises(ValueError, match="by another optimizer of overlap_optimizer"):
            wrong()
    assert len(pair[1].param_groups) == 1
    plain = [torch.optim.SGD(theirs_matrices, lr=0.01), ADAMW(theirs_rest, **OPTIONS)]
    for model, optimizers in ((ours, pair), (theirs, plain)):
        for number in range(4):
            window(model, number, "RF")
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    assert_same(full_state(ours), full_state(theirs), bitwise=True)


@on_ranks(2)
def test_an_ordinary_optimizer_steps_what_is_left():
    models = ours, theirs = make(), make()
    matrices, rest = (
        [p for p in trainable(ours) if (p.dim() == 2) == each] for each in (True, False)
    )
    overlap_optimizer(ours, ADAMW, matrices, **OPTIONS)
    pairs = (ours, ADAMW(rest, **OPTIONS)), (theirs, ADAMW(trainable(theirs), **OPTIONS))
    for number in range(3):
        for model, optimizer in pairs:
            window(model, number)
            if model is ours:
                assert all(param.grad is None for param in matrices)
                assert all(param.grad is not None for param in rest[:3])
            optimizer.step()
            optimizer.zero_grad()
    assert_same(*map(full_state, models), bitwise=True)


@on_ranks(2)
@pytest.mark.parametrize(
    ("layout", "clip_value"), [("one axis", None), ("one axis", 0.05), ("offloaded", None)]
)
def test_clipping_of_each_unit(layout, clip_value):
    (ours, overlapped), (theirs, plain) = overlapped_and_plain(
        make=LAYOUTS[layout], max_unit_norm=0.1, clip_value=clip_value
    )
    in_blocks = {id(param) for param in theirs.blocks.parameters()}
    root = [param for param in theirs.parameters() if id(param) not in in_blocks]
    for number in range(4):
        for model in (ours, theirs):
            window(model, number, "RF")
        overlapped.step()
        for unit in (*(list(block.parameters()) for block in theirs.blocks), root):
            if clip_value is not None:
                nn.utils.clip_grad_value_(unit, clip_value)
            before = meshard.clip_grad_norm_(unit, 0.1)
            assert before > 0.1 or number
        plain.step()
        plain.zero_grad()
    assert_same(full_state(ours), full_state(theirs), bitwise=True)


@on_ranks(2)
def test_errors_come_before_anything_is_touched():
    model = make()
    optimizer = overlap_optimizer(model, ADAMW, **OPTIONS)
    before = full_state(model)
    for clip in (meshard.clip_grad_norm_, nn.utils.clip_grad_norm_):
        with pytest.raises(RuntimeError, match=r"max_unit_norm=.*clip_value=.*ordinary optimizer"):
            clip(model.parameters(), 1.0)
    # What is pending would be missed.
    window(model, 1, "N")
    with pytest.raises(RuntimeError, match="not reduced yet"):
        optimizer.step()
    optimizer.zero_grad()
    assert not meshard.pending_gradients(model)
    optimizer.step()
    assert_same(full_state(model), before, bitwise=True)
    handle = model.blocks[1].register_forward_hook(lambda *_: overlap_optimizer(model, ADAMW))
    with pytest.raises(RuntimeError, match="inside the forward or backward of unit"):
        model(batch(0))
    handle.remove()
    with pytest.raises(TypeError, match="state_dict"):
        torch.save(optimizer, io.BytesIO())
    other = make()
    for clip in (meshard.clip_grad_norm_, nn.utils.clip_grad_norm_):
        clip(other.parameters(), 1.0)
    with pytest.raises(ValueError, match=r"shape \(3,\) in param group 0 is in no unit"):
        overlap_optimizer(model, ADAMW, [nn.Parameter(torch.ones(3))])
    with pytest.raises(TypeError, match="got a dict"):
        overlap_optimizer(model, lambda params: {})


@on_ranks(2)
def test_a_backward_that_fails():
    pairs = (ours, overlapped), (theirs, plain) = overlapped_and_plain(
        torch.optim.SGD, options={"lr": 0.1}
    )
    train(ours, overlapped, range(1))
    state = full_state(ours)

    def fail(*_):
        raise ZeroDivisionError

    hook = ours.blocks[0].register_full_backward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        window(ours, 1)
    hook.remove()
    with pytest.raises(RuntimeError, match="the last backward through unit"):
        overlapped.step()
    ours.load_state_dict(state, strict=False)  # tied weights are there under one name
    train(theirs, plain, range(1))
    for model, optimizer in pairs:
        train(model, optimizer, range(2, 4))
    assert_same(full_state(ours), full_state(theirs), bitwise=True)


@on_ranks(2)
def test_nothing_keeps_a_model_alive_and_a_model_keeps_its_optimizer():
    gc.collect()
    gc.disable()
    try:
        model = make()
        overlap_optimizer(model, ADAMW)
        before = whole(model.first.weight)
        window(model, 0)
        assert not torch.equal(whole(model.first.weight), before)
        module, alive = weakref.ref(model), weakref.ref(model.first.weight)
        del model
        assert module() is None and alive() is None
    finally:
        gc.enable()


@on_ranks(2)
def test_only_a_model_that_is_stepped_in_backward_refuses_a_scaled_loss():
    ours, other = make(), make()
    overlapped, plain = overlap_optimizer(ours, ADAMW, **OPTIONS), ADAMW(trainable(other))
    before, others = full_state(ours), full_state(other)
    scaler = meshard.ShardedGradScaler("cpu", init_scale=8.0)
    scaler.scale(other(batch(0)).sum()).backward()
    scaler.step(plain)
    scaler.update()
    assert not torch.equal(whole(other.first.weight), others["first.weight"])
    for several in (list, iter, next):
        (scaled,) = tree_leaves(scaler.scale(several(iter([ours(batch(0)).sum()]))))
        with pytest.raises(
            RuntimeError, match=r"steps unit .* could be unscaled .*ordinary optimizer"
        ):
            scaled.backward()
        ours.reset_iter_state()
    assert_same(full_state(ours), before, bitwise=True)
    # What failed is over, and a backward of another loss is not taken for one of a scaled loss.
    train(ours, overlapped, range(1))
    assert not torch.equal(whole(ours.first.weight), before["first.weight"])


@on_ranks(2)
def test_the_scaler_of_torch():
    model = make()
    optimizer = overlap_optimizer(model, ADAMW, **OPTIONS)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(batch(0)).sum()).backward()
    with pytest.raises(RuntimeError, match=r"GradScaler cannot be used .*bfloat16.*ordinary"):
        scaler.step(optimizer)
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.scale(model(batch(0)).sum()).backward()
    off.step(optimizer)


@on_ranks(2)
def test_gradients_after_a_window_that_ends_in_the_middle_of_a_backward_are_refused():
    model = make()
    optimizer = overlap_optimizer(model, ADAMW, **OPTIONS)
    handle = model.blocks[2].register_full_backward_hook(
        lambda *_: meshard.finalize_gradients(model)
    )
    with pytest.raises(RuntimeError, match=r"unit 'blocks.\d' has got a gradient after its optim"):
        window(model, 0)
    handle.remove()
    train(model, optimizer, range(1, 3))


@on_ranks(2)
def test_a_gradient_from_outside_of_the_forward_is_refused_while_the_rest_is_reduced():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for layer in (*model, model):
        meshard.fully_shard(layer)
    model[0].requires_grad_(False)
    overlap_optimizer(model, ADAMW, **OPTIONS)
    model[1].unshard()
    penalty = model[1].weight.sum()  # its backward runs last
    loss = model(torch.ones(1, 4, requires_grad=True)).sum() + penalty
    with pytest.raises(RuntimeError, match=r"unit '1' has got a gradient after its optimizer"):
        loss.backward()


@on_ranks(2)
def test_a_gradient_that_the_user_sets_for_a_unit_that_the_loss_left_out_is_used():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in (*model, model):
        meshard.fully_shard(layer)
    optimizer = overlap_optimizer(model, torch.optim.SGD, lr=0.5)
    before = full_state(model)["1.weight"]
    model[0](torch.ones(1, 4)).sum().backward()
    model[1].weight.grad = torch.ones_like(model[1].weight)
    optimizer.step()
    assert_same({"w": full_state(model)["1.weight"]}, {"w": before - 0.5}, bitwise=True)


@on_ranks(2)
@pytest.mark.parametrize("has_own_backward", [False, True])
def test_a_gradient_that_comes_when_the_unit_was_stepped_is_refused(has_own_backward):
    """A penalty that was computed before the forward runs its backward last."""
    model = make()
    optimizer = overlap_optimizer(model, ADAMW, **OPTIONS)
    window(model, 0)
    optimizer.step()
    penalty = sum(param.square().sum() for param in model.parameters()).full_tensor()
    loss = model(batch(1)).sum()
    (loss if has_own_backward else loss + penalty).backward()
    if has_own_backward:
        penalty.backward()
    with pytest.raises(RuntimeError, match=r"was stepped in backward, and its parameters have got"):
        optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, range(2, 4))
    assert {int(state["step"]) for state in optimizer.state.values()} == {4}


@on_ranks(2)
def test_units_keep_an_optimizer_that_nobody_holds():
    model = make()
    overlap_optimizer(model, ADAMW, trainable(model)[:3], **OPTIONS)
    gc.collect()
    before = whole(model.first.weight)
    window(model, 0)
    assert not torch.equal(whole(model.first.weight), before)
    with pytest.raises(ValueError, match=r"for as long as its module lives"):
        overlap_optimizer(model, ADAMW)
    overlap_optimizer(model, ADAMW, trainable(model)[3:], **OPTIONS)


@on_ranks(2)
def test_whoever_asks_in_the_middle_of_a_backward_gets_what_has_been_stepped():
    model = make()
    optimizer = overlap_optimizer(model, ADAMW, **OPTIONS)
    train(model, optimizer, range(2))
    counts = []

    def ask(*_):
        counts.append({int(state["step"]) for state in optimizer.state.values() if state})

    handle = model.blocks[0].register_full_backward_hook(ask)
    window(model, 2)
    handle.remove()
    assert counts == [{2, 3}]
    window(model, 3)
    assert {int(state["step"]) for state in optimizer.state.values() if state} == {4}


@on_ranks(2)
def test_runs_that_are_cut_by_frozen_parameters_leave_nothing_behind():
    model = make()
    for param in model.parameters():
        param.requires_grad_(True)
    optimizer = overlap_optimizer(model, ADAMW, **OPTIONS)
    train(model, optimizer, range(3))
    assert len(optimizer.state) > 0  # reading it makes views for each parameter, here and below
    before = settled_tensor_bytes()
    for name, param in model.named_parameters():
        param.requires_grad_(not name.endswith("bias"))
    train(model, optimizer, range(3, 6))
    state = sum(
        value.to_local().nbytes
        for each in optimizer.state.values()
        for value in each.values()
        if value.dim()
    )
    assert settled_tensor_bytes() - before < state // 4


@on_ranks(2)
def test_what_was_stepped_before_a_step_that_raises_still_counts():
    model = make()
    optimizer = overlap_optimizer(model, ADAMW, **OPTIONS)
    train(model, optimizer, range(3))
    lr, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], "0.1"
    with pytest.raises(TypeError):
        window(model, 3)
    model.reset_iter_state()
    optimizer.param_groups[0]["lr"] = lr
    train(model, optimizer, range(4, 6))
    # AdamW counts a step before it reads lr; units that it has not come to were not stepped.
    assert {float(each["step"]) for each in optimizer.state.values()} <= {5.0, 6.0}


@on_fake_ranks(1)  # of more ranks, a fake group leaves garbage in what it gathers
@pytest.mark.parametrize("apply", [meshard.fully_shard, meshard.replicate])
def test_parameters_are_stepped_when_backward_returns(apply):
    model = apply(nn.Linear(3, 3))
    overlap_optimizer(model, torch.optim.SGD, lr=0.1)
    for _ in range(3):  # the buckets of replicas are made anew after the first step
        before = {name: value.clone() for name, value in own_state(model).items()}
        model(torch.ones(1, 3)).sum().backward()
        for name, value in own_state(model).items():
            assert (value != before[name]).all(), name
        assert not grads(model)


@on_ranks(2)
def test_the_buckets_of_replicas_are_rebuilt_whichever_optimizer_steps_them():
    """A use in another order than listed, in which the parameters fit into fewer buckets."""

    def forward(model, x):
        for index in (0, 2, 1, 3):
            x = torch.tanh(x * model.weights[index].sum())
        return x

    results = []
    for way in ("ordinary", "in backward"):
        weights = nn.ParameterList(torch.full((n,), 0.1) for n in (10, 10, 15, 15))
        model = meshard.replicate(Made(forward, weights=weights), bucket_cap_mb=100 / 2**20)
        if way == "ordinary":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        else:
            optimizer = overlap_optimizer(model, torch.optim.SGD, lr=0.1)
        counts = []
        for _ in range(3):
            model(torch.ones(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
            counts.append(sum(size > 0 for size in bucket_sizes(model).values()))
        assert counts == [3, 2, 2]
        results.append(full_state(model))
    assert_same(*results, bitwise=True)


@on_fake_ranks(2)
@pytest.mark.parametrize("make", [overlap_optimizer, meshard.local_optimizer])
def test_a_parameter_that_moves_to_the_next_group_has_the_hyperparameters_of_that(make):
    layer = nn.Linear(4, 4)
    meshard.fully_shard(layer, init_device_mesh("cpu", (2,)))
    groups = [{"params": [layer.weight, layer.bias], "lr": 0.0}, {"params": [], "lr": 1.0}]
    optimizer = make(layer, torch.optim.SGD, groups)
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = layer.bias.to_local().clone()
    groups = optimizer.param_groups
    groups[1]["params"].append(groups[0]["params"].pop())  # in the order of before
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(layer.bias.to_local(), before)
