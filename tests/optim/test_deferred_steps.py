"""Is a step that waits for the norm of all gradients the ordinary one, clipped by that norm?"""

import gc
import weakref
from itertools import product

import pytest
import torch

import meshard
from meshard import overlap_optimizer
from tests.optim.test_flat_optimizer import MANY, assert_same_state, groups_of, plain_state
from tests.optim.test_overlapped_steps import DTYPES, SCHEDULES, batch, grads, make, window
from tests.optim.test_overlapped_use import SignDescent
from tests.optim.test_overlapped_windows import ADAMW, OPTIONS, train, trainable
from tests.support.covering import covering
from tests.support.parity import assert_same, full_state, own_state, whole

MAX_NORM = 0.5
DEFERRED = {"clip": "deferred", "max_norm": MAX_NORM}


def clipped(model, optimizer, windows, **kwargs):
    """Train in the ordinary way; return the norms."""
    norms = []
    for number in windows:
        window(model, number, **kwargs)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        norms.append(meshard.clip_grad_norm_(params, MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def deferred(model, optimizer, windows, **kwargs):
    norms = []
    for number in windows:
        window(model, number, **kwargs)
        assert grads(model) == []
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.total_norm)
    return norms


def compare(shape, name, dtype, schedule, grouped=False):
    cls, options = MANY.get(name, (SignDescent, {"lr": 0.01}))
    ours, theirs = make(shape, DTYPES[dtype]), make(shape, DTYPES[dtype])
    groups = [groups_of(model) if grouped else trainable(model) for model in (ours, theirs)]
    late = overlap_optimizer(ours, cls, groups[0], **options, **DEFERRED)
    plain = cls(groups[1], **options)
    norms = deferred(ours, late, range(5), schedule=schedule)
    assert norms == clipped(theirs, plain, range(5), schedule=schedule)
    assert max(norms) > MAX_NORM
    assert_same(own_state(ours), own_state(theirs), bitwise=True)
    assert_same_state(plain_state(late), plain_state(plain))


NAMES = ("adamw", "momentum", "another class")


@covering("shape, name, schedule", product([(2,), (2, 2)], NAMES, SCHEDULES))
def test_as_the_ordinary_one(run_ranks, shape, name, schedule):
    run_ranks(compare, torch.Size(shape).numel(), shape, name, "float32", schedule)


def test_mixed_precision_and_groups(run_ranks):
    run_ranks(compare, 2, (2,), "adamw", "bfloat16", "F", True)
    run_ranks(compare, 2, (2,), "adamw", "float32", "F", True)


def moments():
    """Each unit is stepped just before its next gather, or when it is read."""
    model = make((2,))
    optimizer = overlap_optimizer(model, torch.optim.SGD, lr=0.1, **DEFERRED)
    stepped = []
    run = meshard.optim.unit_step.UnitStepper.run

    def note(self, *args):
        stepped.append(self.unit.label)
        return run(self, *args)

    meshard.optim.unit_step.UnitStepper.run = note
    try:
        window(model, 0)
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
        assert stepped == []
        block = model.blocks[2]
        whole(block.up.weight)
        assert stepped == [block._meshard_unit.label]
        entered = []
        for each in (model, *model.blocks):
            each.register_forward_pre_hook(lambda *_: entered.append(len(stepped)))
        with torch.no_grad():
            model(batch(0))
        assert len(stepped) == 5  # each once
        assert entered != [5] * 5, "all were stepped before the first was gathered"
        window(model, 1)
        optimizer.state_dict()
        assert len(stepped) == 10
    finally:
        meshard.optim.unit_step.UnitStepper.run = run


def test_when_units_are_stepped(run_ranks):
    run_ranks(moments, 2)


def interrupted():
    """A window whose backward raises is void, and those around it count."""
    ours, theirs = make((2,)), make((2,))
    late = overlap_optimizer(ours, ADAMW, **OPTIONS, **DEFERRED)
    plain = ADAMW(trainable(theirs), **OPTIONS)

    def fail(*_):
        raise ValueError("on purpose")

    deferred(ours, late, range(2))
    hook = ours.blocks[0].register_full_backward_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        window(ours, 5)
    hook.remove()
    with pytest.raises(RuntimeError, match="the last backward through unit"):
        late.step()
    deferred(ours, late, range(2, 4))
    clipped(theirs, plain, range(4))
    assert_same(full_state(ours), full_state(theirs), bitwise=True)


def test_an_interrupted_window_is_void(run_ranks):
    run_ranks(interrupted, 2)


def around():
    """Checkpoints, offloading and detaching take the steps first."""
    ours, theirs = make((2,)), make((2,))
    late = overlap_optimizer(ours, ADAMW, **OPTIONS, **DEFERRED)
    plain = ADAMW(trainable(theirs), **OPTIONS)
    deferred(ours, late, range(2))
    meshard.offload(ours, late)
    meshard.onload(ours, late)
    deferred(ours, late, range(2, 3))
    late.load_state_dict(late.state_dict())
    deferred(ours, late, range(3, 4))
    late.detach()
    clipped(theirs, plain, range(4))
    for model, optimizer in ((ours, late), (theirs, plain)):
        train(model, optimizer, range(4, 6))
    assert_same(full_state(ours), full_state(theirs), bitwise=True)
    assert_same_state(plain_state(late), plain_state(plain))


def test_what_takes_the_steps_first(run_ranks):
    run_ranks(around, 2)


def refused():
    model = make((2,))
    for wrong in ({"clip": "deferred"}, {"max_norm": 1.0}):
        with pytest.raises(ValueError, match="max_norm go together"):
            overlap_optimizer(model, ADAMW, **wrong)
    with pytest.raises(ValueError, match='must be "deferred" or None'):
        overlap_optimizer(model, ADAMW, clip="norm", max_norm=1.0)
    params = trainable(model)
    overlap_optimizer(model, ADAMW, params[::2], **DEFERRED)
    with pytest.raises(ValueError, match="must be the only one that steps unit"):
        overlap_optimizer(model, ADAMW, params[1::2])


def test_errors(run_ranks):
    run_ranks(refused, 2)


def dropped():
    gc.collect()
    gc.disable()
    try:
        model = make((2,))
        overlap_optimizer(model, ADAMW, **DEFERRED)
        window(model, 0)
        alive = weakref.ref(model), weakref.ref(model.first.weight)
        del model
        assert [each() for each in alive] == [None, None]
    finally:
        gc.enable()


def test_a_deleted_model_is_gone(run_ranks):
    run_ranks(dropped, 2)
