"""Ranks that hang, or issue different collectives, without MESHARD_DEBUG."""

import re
import time
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed as dist

import meshard
from meshard._shared_memory.ring import WHY_UNSUPPORTED
from tests.support.models import ChosenBlocks, MlpStack, seeded
from tests.support.ranks import on_ranks
from tests.support.sharding import shard_blocks
from tests.support.spread import slow

pytestmark = pytest.mark.skipif(bool(WHY_UNSUPPORTED), reason=WHY_UNSUPPORTED)

PATIENCE = 4.0  # seconds; longer than ranks are held up on a busy machine


def stop(*_):
    raise ZeroDivisionError


@contextmanager
def different_collectives():
    """Yield a list, for the units and the numbers of the roots that the error has by rank."""
    found = []
    with pytest.raises(RuntimeError, match="have issued different collectives") as error:
        yield found
    line = r"  rank (\d) of the group: all_gather of unit '(.*)' \(root (\d+)\)"
    ranks, units, roots = zip(*re.findall(line, str(error.value)), strict=True)
    assert ranks == ("0", "1") and "caught an exception" in str(error.value)
    found += [units, [int(root) for root in roots]]


@on_ranks(2)
def test_a_rank_that_goes_on_after_an_exception_is_noticed_on_both_sides():
    model = shard_blocks(seeded(MlpStack()))
    model(torch.ones(2, 6)).sum().backward()
    if dist.get_rank() == 1:
        handle = model.blocks[1].register_forward_pre_hook(stop)
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(2, 6))
        handle.remove()
    with different_collectives() as found:
        model(torch.ones(2, 6)).sum().backward()
    units, roots = found
    assert units[0] != units[1] and roots[0] == roots[1]


@on_ranks(2)
def test_the_names_of_a_first_step_are_known():
    model = shard_blocks(seeded(ChosenBlocks()))
    with different_collectives() as found:
        model(torch.ones(1, 6), [(0, 1), (0, 2)][dist.get_rank()]).sum().backward()
    assert found[0] == ("blocks.1", "blocks.2")


@pytest.mark.parametrize("is_shared", [False, True])
@on_ranks(2)
def test_roots_in_another_order_are_noticed(is_shared):
    models = [shard_blocks(seeded(MlpStack())) for _ in range(2)]
    if is_shared:
        meshard.share_comm_ctx(models)
    with different_collectives() as found:
        models[dist.get_rank()](torch.ones(1, 6))
    units, roots = found
    assert units[0] == units[1] and roots[0] < roots[1]


def hang(when, shape):
    """The last rank stops in a step; return how often the others wait until the time is up."""
    model = shard_blocks(seeded(MlpStack()), dist.device_mesh.init_device_mesh("cpu", shape))
    batch = torch.ones(2, 6)
    model(batch).sum().backward()
    num_timeouts = 0

    def nap_until(original, *args):
        nonlocal num_timeouts
        start = time.monotonic()
        try:
            original(*args)
        except RuntimeError:
            num_timeouts += 1
            assert time.monotonic() - start >= PATIENCE
            raise

    for ring in model._meshard_unit.lifecycle.comm._rings.values():
        ring._patience = PATIENCE
        ring._nap_until = partial(nap_until, ring._nap_until)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    if is_last and when == "forward":
        model.blocks[1].register_forward_pre_hook(stop)
    elif is_last:
        model.blocks[1].register_full_backward_hook(stop)
    stops = pytest.raises(ZeroDivisionError)
    waits = pytest.raises(RuntimeError, match=r"rank \d of the group did not join the collective")
    with stops if is_last else waits:
        model(batch).sum().backward()
    if not is_last:
        model.reset_iter_state()
    return num_timeouts


@pytest.mark.parametrize(
    ("when", "shape"),
    [
        ("backward", (2,)),
        slow("forward", (2,)),
        slow("backward", (2, 2)),
        slow("forward", (2, 2)),
    ],
)
def test_a_rank_that_hangs_costs_one_timeout(run_ranks, when, shape):
    *counts, of_last = run_ranks(hang, 2 * len(shape), when, shape)
    assert of_last == 0 and set(counts) == {1}, counts
