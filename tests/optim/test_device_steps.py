"""Are shards that live in host memory, and are stepped on the device, stepped as ever?

Here the device is the CPU, too; ``test_device_step_streams.py`` tests what is copied where.
"""

import copy
import weakref

import pytest
import torch

from meshard import CPUOffloadPolicy, overlap_optimizer
from meshard._params.storage import MemoryLocation
from meshard.optim.device_steps import DeviceSteps
from tests.optim.test_deferred_steps import DEFERRED, clipped, deferred
from tests.optim.test_flat_optimizer import MANY, assert_same_state, plain_state
from tests.optim.test_overlapped_steps import DTYPES, grads, make, train_both
from tests.optim.test_overlapped_use import SignDescent
from tests.optim.test_overlapped_windows import ADAMW, OPTIONS, train, trainable
from tests.support.parity import assert_same, full_state

OFFLOAD = CPUOffloadPolicy(pin_memory=False)


def make_offloaded(shape=(2,), dtype="float32"):
    """What a mesh of another device makes of ``step_device``: it may not be that of the host."""
    cpu = torch.device("cpu")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(
            MemoryLocation, "host_memory", lambda device, *, pin: MemoryLocation(cpu, False, cpu)
        )
        return make(shape, DTYPES[dtype], offload_policy=OFFLOAD)


def compare(shape, name, dtype):
    cls, options = MANY.get(name, (SignDescent, {"lr": 0.01}))
    stepped, step = [], DeviceSteps.step
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(DeviceSteps, "step", lambda *args: stepped.append(step(*args)))
        for schedule in ("F", "NRF"):
            train_both(lambda: make_offloaded(shape, dtype), cls, options, schedule=schedule)
        assert len(stepped) == (0 if name == "another class" else 2 * 5 * 5)


@pytest.mark.parametrize("name", ["adamw", "momentum", "another class"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_as_the_ordinary_one(run_ranks, name, dtype):
    run_ranks(compare, 2, (2,), name, dtype)


def test_beside_replicas(run_ranks):
    run_ranks(compare, 4, (2, 2), "adamw", "float32")


def one_at_a_time():
    """What one unit has taken of the device is given back before the next one takes any."""
    model = make_offloaded()
    optimizer = overlap_optimizer(model, ADAMW, **OPTIONS)
    taken, most = [], []
    fetch, step = DeviceSteps._fetch, DeviceSteps.step

    def note(self, tensor):
        fetched = fetch(self, tensor)
        taken.append(weakref.ref(fetched.untyped_storage()))
        return fetched

    def count(self, inner):
        assert not any(ref() is not None for ref in taken)
        taken.clear()
        step(self, inner)
        most.append(len(taken))

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(DeviceSteps, "_fetch", note)
        monkeypatch.setattr(DeviceSteps, "step", count)
        train(model, optimizer, range(3))
    assert len(most) == 15 and grads(model) == []
    assert max(most) > 3  # a shard, its gradient and two moments


def test_one_unit_at_a_time(run_ranks):
    run_ranks(one_at_a_time, 2)


def interchanged():
    """States go from one way of stepping to another, and clipping works beside it."""
    ours, theirs = make_offloaded(), make((2,))
    overlapped, plain = (
        overlap_optimizer(ours, ADAMW, **OPTIONS),
        ADAMW(trainable(theirs), **OPTIONS),
    )
    for model, optimizer in ((ours, overlapped), (theirs, plain)):
        train(model, optimizer, range(3))
    fresh = overlap_optimizer(make_offloaded(), ADAMW, **OPTIONS)
    fresh.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert_same_state(plain_state(fresh), plain_state(overlapped))
    overlapped.load_state_dict(copy.deepcopy(plain.state_dict()))
    for model, optimizer in ((ours, overlapped), (theirs, plain)):
        train(model, optimizer, range(3, 5))
    overlapped.detach()
    again = ADAMW(trainable(ours), **OPTIONS)
    again.load_state_dict(copy.deepcopy(overlapped.state_dict()))
    for model, optimizer in ((ours, again), (theirs, plain)):
        train(model, optimizer, range(5, 7))
    assert_same(full_state(ours), full_state(theirs), bitwise=True)
    for limits in ({"max_unit_norm": 0.5}, {"clip_value": 0.01}):
        ours, theirs = make_offloaded(), make((2,))
        for model in (ours, theirs):
            train(model, overlap_optimizer(model, ADAMW, **OPTIONS, **limits), range(3))
        assert_same(full_state(ours), full_state(theirs), bitwise=True)
    ours, theirs = make_offloaded(), make((2,))
    late = overlap_optimizer(ours, ADAMW, **OPTIONS, **DEFERRED)
    norms = deferred(ours, late, range(4))
    assert norms == clipped(theirs, ADAMW(trainable(theirs), **OPTIONS), range(4))
    assert_same(full_state(ours), full_state(theirs), bitwise=True)


def test_states_and_clipping(run_ranks):
    run_ranks(interchanged, 2)
