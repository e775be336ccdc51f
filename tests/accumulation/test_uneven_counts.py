"""Ranks that have accumulated different numbers of microbatches before they reduce."""

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import GradientSync
from tests.support.models import Ones
from tests.support.parity import full_grads
from tests.support.ranks import on_ranks, on_threads
from tests.support.spread import mostly_slow

SMALL, LARGE = 3, 300_000  # a unit with a LARGE parameter is packed as gradients arrive
NAMES = ("a", "b")


def wrapped(layout, numel):
    """Return a model that stays unsharded, so that ``GradientSync.NONE`` needs no collective."""
    model = Ones(numel)
    if layout == "replicate":
        return meshard.replicate(model)
    size = dist.get_world_size()
    shapes = {"shard": (size,), "hsdp": (2, size // 2), "one shard": (size, 1)}
    mesh = init_device_mesh("cpu", shapes[layout])
    meshard.fully_shard(model, mesh, reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    return model


def check(model, windows):
    num_ranks = dist.get_world_size()
    for window in windows:
        *first, last = window[dist.get_rank()]
        for factors in first:
            with meshard.gradient_sync(model, GradientSync.NONE):
                model(**factors).backward()
        model(**last).backward()
        gradients = full_grads(model)
        for name in NAMES:
            used = [f[name] for own in window for f in own if name in f]
            expected = sum(used) / num_ranks if used else None
            found = gradients[name]
            where = f"parameter {name} on rank {dist.get_rank()}: expected {expected}, got {found}"
            assert (found is None) is (expected is None), where
            assert found is None or bool((found == expected).all()), where
        model.zero_grad()


def microbatches():
    factors = st.integers(-4, 4).map(float)
    return st.dictionaries(st.sampled_from(NAMES), factors, max_size=2)


@st.composite
def cases(draw):
    """Draw windows of all ranks: their own numbers of microbatches, each with its own set."""
    num_ranks = draw(st.sampled_from([2, 4]))
    window = st.lists(
        st.lists(microbatches(), min_size=1, max_size=3), min_size=num_ranks, max_size=num_ranks
    )
    return num_ranks, draw(st.lists(window, min_size=1, max_size=2))


@pytest.mark.parametrize("layout", ["replicate", "shard"])
@on_ranks(2)
def test_two_microbatches_more_on_one_rank_count_as_they_should(layout):
    one = {"a": 1.0, "b": 1.0}
    check(wrapped(layout, LARGE), [[[one], [one, one, one]], [[one, one], [one]]])


@pytest.mark.parametrize("numel", [SMALL, LARGE])
@pytest.mark.parametrize("layout", ["replicate", "shard", "one shard"])
@on_threads(2)
def test_a_gradient_of_negative_zero_counts_as_one(layout, numel):
    check(wrapped(layout, numel), [[[{"a": -0.0, "b": 1.0}], [{"b": 1.0}]]])


@on_threads(4)
def test_a_gradient_that_underflows_between_shards_and_replicas_counts_as_one():
    tiny = -(2.0**-149)
    check(wrapped("hsdp", SMALL), [[[{"a": tiny, "b": 1.0}], *[[{"b": 1.0}]] * 3]])


@pytest.mark.parametrize("numel", mostly_slow([SMALL, LARGE], SMALL))
@pytest.mark.parametrize("layout", ["replicate", "shard", "hsdp", "one shard"])
@settings(max_examples=12)
@given(case=cases())
def test_any_number_of_microbatches_gives_the_gradient_of_one_process(layout, numel, case):
    num_ranks, windows = case

    @on_threads(num_ranks)
    def on_each_rank():
        check(wrapped(layout, numel), windows)

    on_each_rank()
