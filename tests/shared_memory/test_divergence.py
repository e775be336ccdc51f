"""Ranks that hang, or issue different collectives, without MESHARD_DEBUG."""

import re
import time

import pytest
import torch
import torch.distributed as dist

import meshard
from meshard._shared_memory import channel as channel_module
from meshard._shared_memory.segment import WHY_UNSUPPORTED
from tests.support.models import ChosenBlocks, MlpStack, seeded
from tests.support.ranks import on_ranks
from tests.support.sharding import shard_blocks

pytestmark = pytest.mark.skipif(bool(WHY_UNSUPPORTED), reason=WHY_UNSUPPORTED)


PATIENCE = 2.0  # seconds


class Stop(Exception):
    """Raised in the middle of a forward."""


def stop(*_):
    raise Stop


def swallow():
    """Rank 1 catches an exception in the middle of a forward, and begins the next step."""
    model = shard_blocks(seeded(MlpStack()))
    model(torch.ones(2, 6)).sum().backward()
    if dist.get_rank() == 1:
        handle = model.blocks[1].register_forward_pre_hook(stop)
        with pytest.raises(Stop):
            model(torch.ones(2, 6))
        handle.remove()
    with pytest.raises(RuntimeError, match="have issued different collectives") as error:
        model(torch.ones(2, 6)).sum().backward()
    return str(error.value)


def names(message):
    """Return what the error says of each rank."""
    return dict(re.findall(r"  rank (\d) of the group: (.*)", message))


def test_a_rank_that_goes_on_after_an_exception_is_noticed_on_both_sides(run_ranks):
    first, second = run_ranks(swallow, 2)
    for message in (first, second):
        said = names(message)
        assert set(said) == {"0", "1"} and said["0"] != said["1"]
        assert all(
            re.fullmatch(r"all_gather of unit '.*' \(root \d+\)", text) for text in said.values()
        )
        assert "caught an exception" in message


def skip_a_unit():
    model = shard_blocks(seeded(ChosenBlocks()))
    chosen = [(0, 1), (0, 2)][dist.get_rank()]
    with pytest.raises(RuntimeError, match="have issued different collectives") as error:
        model(torch.ones(1, 6), chosen).sum().backward()
    return names(str(error.value))


def test_the_names_of_a_first_step_are_known(run_ranks):
    for said in run_ranks(skip_a_unit, 2):
        assert said["0"].startswith("all_gather of unit 'blocks.1' (")
        assert said["1"].startswith("all_gather of unit 'blocks.2' (")


def swap_roots(is_shared):
    """Run two models of one structure in another order on each rank."""
    models = [shard_blocks(seeded(MlpStack())) for _ in range(2)]
    if is_shared:
        meshard.share_comm_ctx(models)
    with pytest.raises(RuntimeError, match="have issued different collectives") as error:
        models[dist.get_rank()](torch.ones(1, 6))
    return names(str(error.value))


@pytest.mark.parametrize("is_shared", [False, True])
def test_roots_in_another_order_are_noticed(run_ranks, is_shared):
    first, second = run_ranks(swap_roots, 2, is_shared)
    assert first == second
    (unit, root), (other_unit, other_root) = (text.split(" (root") for text in first.values())
    assert unit == other_unit and root != other_root


@on_ranks(2)
def test_names_may_be_written_in_another_order():
    """The texts are at other places in the memory of each rank, and the last does not fit."""
    channel = channel_module.open_channel(dist.group.WORLD)
    other = 1 - dist.get_rank()
    order = [("all_gather", "a", 1), ("all_gather", "b", 1), ("all_reduce", "b" * 2**20, 2)]
    for name in order[:: 1 - 2 * other]:
        channel._make_word(name)
    for name in order:
        message = channel.publish(torch.ones(1), name)
        assert channel.receive(message, other, 1, torch.float32) == 1.0
        channel.acknowledge(message)
    message = channel.publish(torch.ones(1), order[dist.get_rank()])
    with pytest.raises(RuntimeError, match="different collectives"):
        channel.receive(message, other, 1, torch.float32)


def hang(when, shape):
    """The last rank sleeps; return how long the others wait, until they can go on alone."""
    mesh = dist.device_mesh.init_device_mesh("cpu", shape)
    model = shard_blocks(seeded(MlpStack()), mesh)
    batch = torch.ones(2, 6)
    model(batch).sum().backward()
    for channel in model._meshard_unit.lifecycle.comm._channels.values():
        channel._patience = PATIENCE
    dist.barrier()
    start = time.monotonic()
    if dist.get_rank() < dist.get_world_size() - 1:
        with pytest.raises(RuntimeError, match="did not join the collective"):
            model(batch).sum().backward()
        model.reset_iter_state()
    elif when == "forward":
        model.blocks[1].register_forward_pre_hook(stop)
        with pytest.raises(Stop):
            model(batch)
    else:
        model.blocks[1].register_full_backward_hook(stop)
        with pytest.raises(Stop):
            model(batch).sum().backward()
    return time.monotonic() - start


@pytest.mark.slow
@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_a_rank_that_hangs_costs_one_timeout(run_ranks, when, shape):
    ranks = 2 if len(shape) == 1 else 4
    *waited, _ = run_ranks(hang, ranks, when, shape)
    assert all(PATIENCE <= seconds < 2 * PATIENCE for seconds in waited), waited
