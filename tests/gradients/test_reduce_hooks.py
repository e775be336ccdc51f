"""Reduce hooks: they see every gradient once, in order, and may change it."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from tests.support.models import Made, seeded
from tests.support.ones import make, run, values
from tests.support.ranks import on_ranks, on_threads
from tests.support.sharding import shard_blocks
from tests.support.spread import spread

ROUNDED = 1.0009765625  # to 1.0 in bfloat16


class Log:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def before(self, whole):
        self.log.append((f"{self.name} before", tuple(whole.shape)))

    def after(self, shard):
        self.log.append((f"{self.name} after", tuple(shard.shape)))


@on_threads(4)
def test_hooks_are_a_chain_around_the_reduction():
    model, log = make(), []
    handles = [meshard.register_reduce_hook(model, Log(name, log)) for name in "ab"]
    run(model, "NRF", 1.0, 1.0)
    before = [("a before", (2, 4)), ("b before", (2, 4))]
    assert log == [*before, *before, ("b after", (4,)), ("a after", (4,))]
    log.clear()
    handles[0].remove()
    handles[0].remove()
    run(model, "F", 1.0, 1.0)
    assert log == [("b before", (2, 4)), ("b after", (4,))]


@on_threads(2)
@pytest.mark.parametrize("with_hook", [False, True])
def test_a_wire_dtype_rounds_until_it_is_removed_with_its_hook(with_hook):
    model, log = make((2,)), []
    hook = [Log("a", log)] if with_hook else []
    handle = meshard.register_reduce_hook(model, *hook, wire_dtype=torch.bfloat16)
    run(model, "F", ROUNDED, None)
    assert values(model) == {"a": 1.0, "b": None}
    handle.remove()
    model.zero_grad()
    run(model, "F", ROUNDED, None)
    assert values(model) == {"a": ROUNDED, "b": None}
    assert [name for name, _ in log] == ["a before", "a after"] * with_hook


@on_threads(4)
@pytest.mark.parametrize("mesh_shape", [(2, 2), (4,)])
def test_the_hook_of_fsdp2_gets_what_is_about_to_be_the_gradient(mesh_shape):
    model, seen = make(mesh_shape), []
    model.set_all_reduce_hook(lambda shard: seen.append("replaced"))
    model.set_all_reduce_hook(lambda shard: seen.append(shard.clone()) or shard.mul_(2))
    run(model, "F", float(dist.get_rank()), 1.0)
    (shard,) = seen
    assert sorted(set(shard.tolist())) == [1.0, 1.5]
    assert values(model) == {"a": 3.0, "b": 2.0}


@on_threads(4)
def test_the_all_reduce_hook_of_a_root_reaches_the_units_inside():
    """The root has no parameters of its own."""
    blocks = [nn.Linear(2, 2), nn.Linear(2, 2)]
    model = seeded(Made(lambda module, x: module.blocks[1](module.blocks[0](x)), blocks=blocks))
    shard_blocks(model, init_device_mesh("cpu", (2, 2)))
    calls = []
    for hook in (lambda shard: calls.append(None), None):
        model.set_all_reduce_hook(hook)
        model(torch.ones(1, 2)).sum().backward()
        assert len(calls) == 2


@on_threads(2)
def test_bad_hooks_are_refused():
    model = make((2,))
    for hook in ({}, {"hook": lambda tensor: None}, {"hook": 3, "wire_dtype": torch.bfloat16}):
        with pytest.raises(TypeError, match=r"needs a method arrived, before or after"):
            meshard.register_reduce_hook(model, **hook)
    for dtype in (torch.int32, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match="wire_dtype"):
            meshard.register_reduce_hook(model, wire_dtype=dtype)
    with pytest.raises(TypeError, match="after of a reduce hook must be a method, got 3"):
        meshard.register_reduce_hook(model, SimpleNamespace(after=3))


@on_threads(4)
@spread(
    mesh_shape=[(4,), (2, 2)],
    schedule=["F", "FF", "RF", "NF", "NRF", "RRF"],
    bad=[{0: (3,)}, {1: (3,)}, {0: (1, 2), 1: (0,)}, {0: (0, 1, 2, 3)}],
)
def test_gradients_are_changed_as_they_arrive_in_each_microbatch(mesh_shape, schedule, bad):
    """Average over some of the ranks only: those that are bad contribute nothing."""
    rank, model, expected = dist.get_rank(), make(mesh_shape), 0.0

    def arrived(unsharded):
        if rank in good:
            unsharded.mul_(4 / len(good))
        else:
            unsharded.zero_()

    meshard.register_reduce_hook(model, SimpleNamespace(arrived=arrived))
    for number, mode in enumerate(schedule):
        good = [each for each in range(4) if each not in bad.get(number, ())]
        run(model, mode, float(rank) if rank in good else float("nan"), None)
        expected += sum(good) / max(len(good), 1)
    # No rank has used b: the hook must not make it a zero.
    assert values(model) == {"a": pytest.approx(expected, rel=1e-6), "b": None}


class Twice:
    """Doubles what was reduced, and zeroes what was not used."""

    def before(self, whole):
        whole.neg_().neg_().add_(0.0)

    def after(self, shard):
        shard.mul_(2)


@on_threads(4)
def test_a_reduction_keeps_the_hooks_with_which_it_began():
    model = make()
    model.set_is_last_backward(False)
    handle = meshard.register_reduce_hook(model, Twice())
    run(model, "F", 1.0, None)
    handle.remove()  # this reduction began with the hook
    run(model, "F", 1.0, None)
    meshard.register_reduce_hook(model, Twice())  # and this one without
    model.set_is_last_backward(True)
    meshard.pending_gradients(model)
    assert values(model) == {"a": 3.0, "b": None}


@on_threads(4)
def test_a_hook_that_is_registered_three_times_and_removed_once_is_called_twice():
    model, twice = make(), Twice()
    handle, *_ = [meshard.register_reduce_hook(model, twice) for _ in range(3)]
    handle.remove()
    handle.remove()
    run(model, "F", 1.0, None)
    assert values(model) == {"a": 4.0, "b": None}


@pytest.mark.parametrize("moment", ["arrived", "before"])
@on_ranks(2)
def test_a_hook_may_communicate_rows_that_have_padding(moment):
    def average(gradients):
        dist.all_reduce(gradients)
        gradients.div_(2)

    model = meshard.fully_shard(nn.Linear(3, 4, bias=False))  # 6 numbers a row, padded to 8
    meshard.register_reduce_hook(model, SimpleNamespace(**{moment: average}))
    model(torch.tensor([[1.0, 2.0, 3.0]]) * (1 + 2 * dist.get_rank())).sum().backward()
    assert model.weight.grad.full_tensor().tolist() == [[2.0, 4.0, 6.0]] * 4
