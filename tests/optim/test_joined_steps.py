"""Are small units that are stepped together stepped as each by itself?"""

import pytest
import torch

import meshard
from meshard import overlap_optimizer
from meshard._gradients.sharded_grads import ShardedGrads
from meshard.optim.joined_steps import JoinedSteps
from tests.engine.test_lifetime import settled_tensor_bytes
from tests.optim.test_flat_optimizer import MANY, assert_same_state, groups_of, plain_state
from tests.optim.test_overlapped_steps import DTYPES, make, window
from tests.optim.test_overlapped_windows import ADAMW, OPTIONS, train, trainable
from tests.support.parity import assert_same, full_state

MIN_BYTES = (0, 300, 2**20)


def log_steps(monkeypatch):
    """Return the list of how many units are stepped in each call from now on."""
    found, step = [], JoinedSteps._step

    def log_step(self, units):
        found.append(len(units))
        step(self, units)

    monkeypatch.setattr(JoinedSteps, "_step", log_step)
    return found


def compare(name, dtype):
    cls, options = MANY[name]
    theirs = make((2,), DTYPES[dtype])
    plain = cls(groups_of(theirs), **options)
    models = [make((2,), DTYPES[dtype]) for _ in MIN_BYTES]
    ours = [
        overlap_optimizer(model, cls, groups_of(model), **options, min_step_bytes=count)
        for model, count in zip(models, MIN_BYTES, strict=True)
    ]
    for number, schedule in enumerate(("F", "F", "NRF", "F", "RF")):
        for model, optimizer in zip((theirs, *models), (plain, *ours), strict=True):
            window(model, number, schedule, rest=number == 3)
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] *= 0.5
    for model, optimizer in zip(models, ours, strict=True):
        assert_same(full_state(model), full_state(theirs), bitwise=True)
        assert_same_state(plain_state(optimizer), plain_state(plain))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["adamw", "momentum", "adagrad"])
def test_as_the_ordinary_one(run_ranks, name, dtype):
    run_ranks(compare, 2, name, dtype)


def calls():
    """One call steps all that wait, and no ``.grad`` is made that nobody asks for."""
    model = make((2,))
    for param in model.parameters():
        param.requires_grad_(True)
    optimizer = overlap_optimizer(model, ADAMW, **OPTIONS)
    window(model, 0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        shown, show = [], ShardedGrads._show
        monkeypatch.setattr(ShardedGrads, "_show", lambda *args: shown.append(show(*args)))
        found = log_steps(monkeypatch)
        model.blocks[2].unused.requires_grad_(False)
        model.blocks[1].frozen.requires_grad_(False)
        for number in range(1, 4):
            window(model, number, "NF")
        assert found == [5] * 3 and shown == []
        model.blocks[1].up.bias.requires_grad_(False)  # it lies between others
        window(model, 4)
        assert found == [5] * 3 + [4] and len(shown) == 1
        window(model, 5)
        assert found == [5] * 3 + [4, 5] and len(shown) == 1
        assert optimizer.state
        window(model, 6)
        assert found == [5] * 3 + [4, 5, 5]


def test_all_of_them_in_one_call(run_ranks):
    run_ranks(calls, 2)


def hooked():
    """Who hooks a parameter sees its gradient, and what the hook does to it counts."""
    ours, theirs = make((2,)), make((2,))
    seen = {ours: [], theirs: []}
    overlapped, plain = overlap_optimizer(ours, ADAMW, **OPTIONS), ADAMW(trainable(theirs))
    plain.param_groups[0].update(OPTIONS)
    for model, optimizer in ((ours, overlapped), (theirs, plain)):
        train(model, optimizer, range(2))

        def halve(param, model=model):
            seen[model].append(param.grad.full_tensor())
            param.grad.mul_(0.5)

        handle = model.blocks[0].up.weight.register_post_accumulate_grad_hook(halve)
        train(model, optimizer, range(2, 4))
        handle.remove()
        model.blocks[3].up.bias.register_hook(lambda grad: grad * 2)
        train(model, optimizer, range(4, 6))
    assert len(seen[ours]) == 2
    for one, other in zip(seen[ours], seen[theirs], strict=True):
        assert torch.equal(one, other)
    assert_same(full_state(ours), full_state(theirs), bitwise=True)


def test_hooks_of_parameters(run_ranks):
    run_ranks(hooked, 2)


def asked_early():
    """Whoever asks in the middle of a backward gets what has been stepped by then."""
    model = make((2,))
    optimizer = overlap_optimizer(model, ADAMW, **OPTIONS)
    train(model, optimizer, range(2))
    counts = []

    def ask(*_):
        counts.append({int(state["step"]) for state in optimizer.state.values() if state})

    with pytest.MonkeyPatch.context() as monkeypatch:
        found = log_steps(monkeypatch)
        handle = model.blocks[0].register_full_backward_hook(ask)
        window(model, 2)
        handle.remove()
        assert sum(found) == 5 and len(found) == 2
        assert counts == [{2, 3}]
    window(model, 3)
    assert {int(state["step"]) for state in optimizer.state.values() if state} == {4}


def test_asked_for_in_the_middle_of_a_backward(run_ranks):
    run_ranks(asked_early, 2)


def interrupted():
    """What waits when a backward raises is void, also for a rank that asks for it."""
    model = make((2,))
    optimizer = overlap_optimizer(model, ADAMW, **OPTIONS)
    train(model, optimizer, range(2))
    before = full_state(model)

    def fail(*_):
        raise ValueError("on purpose")

    hook = model.blocks[0].register_full_backward_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        window(model, 2)
    hook.remove()
    if torch.distributed.get_rank() == 0:
        assert {float(each["step"]) for each in optimizer.state.values()} == {2.0}
    model.reset_iter_state()
    assert_same(full_state(model), before, bitwise=True)
    other = make((2,))
    plain = ADAMW(trainable(other), **OPTIONS)
    train(other, plain, range(2))
    train(model, optimizer, range(3, 5))
    train(other, plain, range(3, 5))
    assert_same(full_state(model), full_state(other), bitwise=True)


def test_a_backward_that_fails(run_ranks):
    run_ranks(interrupted, 2)


def frozen(name, min_bytes):
    """A parameter that is stepped less often than others of its unit, from some step on."""
    cls, options = MANY[name]
    theirs, ours = make((2,)), make((2,))
    plain = cls(trainable(theirs), **options)
    overlapped = overlap_optimizer(ours, cls, trainable(ours), **options, min_step_bytes=min_bytes)
    several = [param for model in (theirs, ours) for param in trainable(model)[::2]]
    for number in range(7):
        for param in several:
            param.requires_grad_(number not in (3, 4))
        for model, optimizer in ((theirs, plain), (ours, overlapped)):
            window(model, number)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(full_state(ours), full_state(theirs), bitwise=True)
    assert_same_state(plain_state(overlapped), plain_state(plain))


@pytest.mark.parametrize("min_bytes", MIN_BYTES)
@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_parameters_frozen_after_some_steps(run_ranks, name, min_bytes):
    run_ranks(frozen, 2, name, min_bytes)


def split():
    """Runs that are cut leave nothing behind."""
    model = make((2,))
    for param in model.parameters():
        param.requires_grad_(True)
    optimizer = overlap_optimizer(model, ADAMW, **OPTIONS, min_step_bytes=2**20)
    train(model, optimizer, range(3))
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


def test_parameters_frozen_between(run_ranks):
    run_ranks(split, 2)


def step_raises():
    """What has been stepped before a step that raises still counts."""
    model = make((2,))
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


def test_a_step_that_raises(run_ranks):
    run_ranks(step_raises, 2)


def replaced():
    """Shards that are replaced between two windows are those that are stepped."""
    ours, theirs = make((2,)), make((2,))
    overlapped, plain = overlap_optimizer(ours, ADAMW, **OPTIONS), ADAMW(trainable(theirs))
    plain.param_groups[0].update(OPTIONS)
    for model, optimizer in ((ours, overlapped), (theirs, plain)):
        train(model, optimizer, range(2))
        train(model, optimizer, range(2, 4))
        with meshard.offload(model, optimizer):
            pass
        train(model, optimizer, range(4, 6))
        model.double()
        model.float()
        train(model, optimizer, range(6, 8))
    assert_same(full_state(ours), full_state(theirs), bitwise=True)


def test_shards_that_move(run_ranks):
    run_ranks(replaced, 2)
