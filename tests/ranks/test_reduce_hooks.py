"""Do hooks see every gradient once, in order, and change what they say?"""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import DropRanks, GradientSync, WireRounding
from tests.ranks.test_accumulation import Ones, make, run, values
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


def drop_a_rank(bad_ranks):
    model = make()
    rank = dist.get_rank()
    drop = DropRanks(dist.all_reduce)
    meshard.register_reduce_hook(model, drop)
    loss = model(math.nan if rank in bad_ranks else float(rank))
    drop.decide(loss * math.nan if rank in bad_ranks else loss)
    loss.backward()
    return values(model)["a"]


@pytest.mark.parametrize(("bad_ranks", "mean"), [((), 1.5), ((3,), 1.0), ((0, 1), 2.5)])
def test_ranks_without_a_finite_loss_are_left_out_of_the_mean(bad_ranks, mean):
    assert run_threads(drop_a_rank, 4, bad_ranks) == [mean] * 4


def round_on_the_wire():
    model = make((2,))
    meshard.register_reduce_hook(model, WireRounding(torch.bfloat16))
    run(model, "F", 1.0009765625, None)
    return values(model)


def test_rounding_on_the_wire():
    assert run_threads(round_on_the_wire, 2) == [{"a": 1.0, "b": None}] * 2


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


def bad_hooks():
    model = meshard.fully_shard(Ones(), init_device_mesh("cpu", (2,)))
    with pytest.raises(TypeError, match=r"needs a method before\(tensor\)"):
        meshard.register_reduce_hook(model, lambda tensor: None)
    with pytest.raises(TypeError, match="hook must be callable, got 3"):
        model.set_all_reduce_hook(3)
    with pytest.raises(ValueError, match="no unit in this Ones"):
        meshard.register_reduce_hook(Ones(), WireRounding(torch.bfloat16))


def test_bad_hooks_are_refused():
    run_threads(bad_hooks, 2)
