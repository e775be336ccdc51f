"""``local_optimizer(state_device="cpu")``: state rests in host memory, and steps are the same."""

import copy

import pytest
import torch
from torch import nn

from meshard import CPUOffloadPolicy, fully_shard, local_optimizer, overlap_optimizer
from meshard.checkpoint import Checkpointer
from tests.optim.optimizers import MANY
from tests.optim.test_over_replicas import backward, make, mesh_of, states_of, train
from tests.support.parity import assert_same, full_state
from tests.support.ranks import on_ranks, on_threads

ADAMW = torch.optim.AdamW


def both(mesh, cls=ADAMW, dtype=torch.float32, chunk_bytes=None, **options):
    ours, theirs = make(mesh, dtype), make(mesh, dtype)
    options = {"lr": 0.01} | options
    one = local_optimizer(ours, cls, state_device="cpu", chunk_bytes=chunk_bytes, **options)
    return (ours, one), (theirs, local_optimizer(theirs, cls, **options))


def check(pairs):
    (ours, one), (theirs, other) = pairs
    assert_same(full_state(ours), full_state(theirs), bitwise=True)
    assert_same(states_of(one), states_of(other), bitwise=True)


@on_threads(2)
@pytest.mark.parametrize("name", MANY)
@pytest.mark.parametrize("chunk_bytes", [None, 1, 300])
def test_numbers_are_those_of_state_on_the_device(name, chunk_bytes):
    cls, options = MANY[name]
    pairs = both(mesh_of(1, 2), cls, chunk_bytes=chunk_bytes, **options)
    for model, optimizer in pairs:
        train(model, optimizer)
    check(pairs)


@on_ranks(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_over_replicas_and_masters(dtype):
    options = {"over_replicas": True, "master_dtype": torch.float32}
    pairs = both(mesh_of(2, 2), dtype=dtype, **options)
    for model, optimizer in pairs:
        train(model, optimizer)
    check(pairs)


@on_ranks(4)
@pytest.mark.parametrize("over_replicas", [False, True])
def test_steps_in_backward(over_replicas):
    mesh, found = mesh_of(2, 2), []
    for state_device in ("cpu", None):
        model = make(mesh)
        options = {"lr": 0.01, "over_replicas": over_replicas, "state_device": state_device}
        optimizer = overlap_optimizer(model, ADAMW, **options)
        train(model, optimizer, [0, 1, 2], schedule="scatter")
        optimizer.state[next(model.parameters())]["exp_avg"].mul_(0.5)
        train(model, optimizer, [3], schedule="scatter")
        found.append((full_state(model), states_of(optimizer)))
    assert_same(found[0], found[1], bitwise=True)


@on_threads(2)
def test_groups_hyperparameters_and_edits():
    """A group that is added later, a scheduler, an edit of the state, a frozen parameter."""
    mesh, found = mesh_of(1, 2), []
    for state_device in ("cpu", None):
        model = make(mesh)
        params = list(model.parameters())
        optimizer = local_optimizer(model, ADAMW, params[:4], lr=0.1, state_device=state_device)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(4):
            if step == 1:
                optimizer.add_param_group({"params": params[4:], "lr": 0.02})
                schedule.base_lrs.append(0.02)
            if step == 2:
                optimizer.state[params[0]]["exp_avg"].mul_(0.5)
                params[1].requires_grad_(False)
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        found.append((full_state(model), states_of(optimizer)))
    assert_same(found[0], found[1], bitwise=True)


@on_ranks(2)
def test_state_dicts_and_checkpoints(tmp_path):
    pairs = both(mesh_of(1, 2))
    (ours, one), (theirs, other) = pairs
    train(theirs, other)
    ours.load_state_dict(theirs.state_dict())
    one.load_state_dict(copy.deepcopy(other.state_dict()))
    check(pairs)
    for model, optimizer in pairs:
        train(model, optimizer, [3])
    check(pairs)
    store = Checkpointer(tmp_path / "checkpoints")
    store.save(1, ours, one)
    (fresh, new), _ = both(mesh_of(1, 2))
    store.load(fresh, new)
    train(fresh, new, [4])
    train(theirs, other, [4])
    check(((fresh, new), (theirs, other)))


@on_threads(2)
def test_a_step_that_raised_may_be_taken_again():
    (model, optimizer), _ = both(mesh_of(1, 2))
    train(model, optimizer, [0])
    backward(model, 1)
    optimizer.param_groups[0]["betas"] = (0.9, None)
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    optimizer.step()
    optimizer.zero_grad()
    assert all(value.isfinite().all() for value in states_of(optimizer).values())


@on_threads(2)
def test_what_is_refused():
    model = fully_shard(nn.Linear(2, 2))
    with pytest.raises(ValueError, match='state_device must be "cpu" or None'):
        local_optimizer(model, ADAMW, state_device="meta")
    with pytest.raises(ValueError, match="chunk_bytes must be"):
        local_optimizer(model, ADAMW, state_device="cpu", chunk_bytes=0)
    with pytest.raises(TypeError, match="can be neither pickled nor copied"):
        copy.deepcopy(local_optimizer(model, ADAMW, state_device="cpu"))
    offloaded = fully_shard(nn.Linear(2, 2), offload_policy=CPUOffloadPolicy(pin_memory=False))
    with pytest.raises(ValueError, match=r"are in host memory .*, and so is their state"):
        local_optimizer(offloaded, ADAMW, state_device="cpu")
