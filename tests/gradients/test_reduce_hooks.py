"""Reduce hooks: they see every gradient once, in order, and may change it."""

import types

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import GradientSync
from tests.support.models import Ones, seeded
from tests.support.ones import make, run, values
from tests.support.ranks import on_threads
from tests.support.spread import spread
from tests.support.threads import run_threads


class Log:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def before(self, whole):
        self.log.append((f"{self.name} before", tuple(whole.shape)))

    def after(self, shard):
        self.log.append((f"{self.name} after", tuple(shard.shape)))


def chain():
    model, log = make(), []
    handles = [meshard.register_reduce_hook(model, Log(name, log)) for name in "ab"]
    for mode in "NRF":
        run(model, mode, 1.0, 1.0)
    handles[0].remove()
    handles[0].remove()
    run(model, "F", 1.0, 1.0)
    return log


def test_hooks_are_a_chain_around_the_reduction():
    before = [("a before", (2, 4)), ("b before", (2, 4))]
    after = [("b after", (4,)), ("a after", (4,))]
    second = [("b before", (2, 4)), ("b after", (4,))]
    assert run_threads(chain, 4) == [before + before + after + second] * 4


def round_on_the_wire():
    model = make((2,))
    meshard.register_reduce_hook(model, wire_dtype=torch.bfloat16)
    run(model, "F", 1.0009765625, None)
    return values(model)


def test_rounding_on_the_wire():
    assert run_threads(round_on_the_wire, 2) == [{"a": 1.0, "b": None}] * 2


def hook_and_dtype_together():
    model, log = make((2,)), []
    handle = meshard.register_reduce_hook(model, Log("a", log), wire_dtype=torch.bfloat16)
    run(model, "F", 1.0009765625, None)
    handle.remove()
    rounded = values(model)
    model.zero_grad()
    run(model, "F", 1.0009765625, None)
    return rounded, values(model), [name for name, _ in log]


def test_a_hook_and_a_wire_dtype_are_registered_and_removed_together():
    expected = {"a": 1.0, "b": None}, {"a": 1.0009765625, "b": None}, ["a before", "a after"]
    assert run_threads(hook_and_dtype_together, 2) == [expected] * 2


def fsdp2_hook(with_all_reduce):
    model = make((2, 2) if with_all_reduce else (4,))
    seen = []
    model.set_all_reduce_hook(lambda shard: seen.append("replaced"))
    model.set_all_reduce_hook(lambda shard: seen.append(shard.clone()) or shard.mul_(2))
    model.set_gradient_sync(GradientSync.FULL)
    run(model, "F", float(dist.get_rank()), 1.0)
    assert len(seen) == 1
    assert sorted(set(seen[0].tolist())) == [1.0, 1.5]
    return values(model)


@pytest.mark.parametrize("with_all_reduce", [True, False])
def test_the_hook_of_fsdp2_gets_what_is_about_to_be_the_gradient(with_all_reduce):
    assert run_threads(fsdp2_hook, 4, with_all_reduce) == [{"a": 3.0, "b": 2.0}] * 4


@on_threads(2)
def test_bad_hooks_are_refused():
    model = meshard.fully_shard(Ones(), init_device_mesh("cpu", (2,)))
    for hook in ({}, {"hook": lambda tensor: None}, {"hook": 3, "wire_dtype": torch.bfloat16}):
        with pytest.raises(TypeError, match=r"needs a method arrived, before or after"):
            meshard.register_reduce_hook(model, **hook)
    with pytest.raises(TypeError, match="hook must be callable or None, got 3"):
        model.set_all_reduce_hook(3)
    for dtype, error in (
        ("half", TypeError),
        (torch.int32, ValueError),
        (torch.float8_e4m3fn, ValueError),
    ):
        with pytest.raises(error, match="wire_dtype"):
            meshard.register_reduce_hook(model, wire_dtype=dtype)
    with pytest.raises(TypeError, match="after of a reduce hook must be a method, got 3"):
        meshard.register_reduce_hook(model, types.SimpleNamespace(after=3))
    with pytest.raises(ValueError, match="no unit in this Ones"):
        meshard.register_reduce_hook(Ones(), wire_dtype=torch.bfloat16)


class LeaveOut:
    """Averages over some of the ranks only: ``bad`` contribute nothing."""

    bad = ()

    def arrived(self, unsharded):
        if dist.get_rank() in self.bad:
            unsharded.zero_()
        else:
            unsharded.mul_(4 / (4 - len(self.bad)))


def leave_out_in_a_window(mesh_shape, schedule, bad):
    model = make(mesh_shape)
    hook = LeaveOut()
    meshard.register_reduce_hook(model, hook)
    rank = dist.get_rank()
    for number, mode in enumerate(schedule):
        hook.bad = bad.get(number, ())
        run(model, mode, float("nan") if rank in hook.bad else float(rank), None)
    return values(model)


@spread(
    mesh_shape=[(4,), (2, 2)],
    schedule=["F", "FF", "RF", "NF", "NRF", "RRF"],
    bad=[{0: (3,)}, {1: (3,)}, {0: (1, 2), 1: (0,)}, {0: (0, 1, 2, 3)}],
)
def test_gradients_are_changed_as_they_arrive_in_each_microbatch(mesh_shape, schedule, bad):
    expected = 0.0
    for number in range(len(schedule)):
        good = [rank for rank in range(4) if rank not in bad.get(number, ())]
        expected += sum(good) / max(len(good), 1)
    for found in run_threads(leave_out_in_a_window, 4, mesh_shape, schedule, bad):
        assert found["a"] == pytest.approx(expected, rel=1e-6)
        assert found["b"] is None  # nobody used it: the hook must not make it a zero


class Twice:
    """Doubles what was reduced, and zeroes what was not used."""

    def before(self, whole):
        whole.neg_().neg_().add_(0.0)

    def after(self, shard):
        shard.mul_(2)


def hooks_in_flight():
    model = make()
    found = []
    model.set_is_last_backward(False)
    handle = meshard.register_reduce_hook(model, Twice())
    run(model, "F", 1.0, None)
    handle.remove()  # this reduction began with the hook
    run(model, "F", 1.0, None)
    meshard.register_reduce_hook(model, Twice())  # and this one without
    model.set_is_last_backward(True)
    meshard.pending_gradients(model)
    found.append(values(model))
    model.zero_grad()
    same = Twice()
    handles = [meshard.register_reduce_hook(model, same) for _ in range(2)]
    handles[0].remove()
    handles[0].remove()
    run(model, "F", 1.0, None)
    found.append(values(model))
    return found


def test_a_reduction_keeps_the_hooks_with_which_it_began():
    expected = [{"a": 3.0, "b": None}, {"a": 4.0, "b": None}]
    assert run_threads(hooks_in_flight, 4) == [expected] * 4


def hook_on_a_root_without_parameters():
    model, calls = seeded(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))), []
    mesh = init_device_mesh("cpu", (2, 2))
    for unit in model:
        meshard.fully_shard(unit, mesh)
    meshard.fully_shard(model, mesh)
    model.set_all_reduce_hook(lambda shard: calls.append(None))
    model(torch.ones(1, 2)).sum().backward()
    model.set_all_reduce_hook(None)
    model(torch.ones(1, 2)).sum().backward()
    return len(calls)


def test_the_all_reduce_hook_of_a_root_reaches_the_units_inside():
    assert run_threads(hook_on_a_root_without_parameters, 4) == [2] * 4
