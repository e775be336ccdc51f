"""The pretended network: it takes the time that it should, and steps run on it."""

import time

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard._torch.private import all_gather_single
from tests.cuda.times import copying, overlapped
from tests.support.pretend_network import Network, pretend_group


def test_time_is_latency_plus_bytes_over_the_bandwidth_that_joins_the_ranks():
    network = Network(inside=100.0, across=10.0, latency=1.0, per_host=4)
    assert network.seconds(400, 4) == 2 * 1.0 + 300 / 100.0
    assert network.seconds(800, 8) == 3 * 1.0 + 700 / 10.0


def test_collectives_take_the_wire_in_turn_and_run_beside_the_host():
    with pretend_group(2, Network(latency=0.05)):
        start = time.monotonic()
        outputs = [torch.empty(2, 3) for _ in range(2)]
        works = [all_gather_single(o, torch.ones(3), async_op=True) for o in outputs]
        assert time.monotonic() - start < 0.04 and not works[0].is_completed()
        works[1].wait()
        assert 0.1 <= time.monotonic() - start < 0.5
        assert works[0].is_completed()


@pytest.mark.parametrize("ranks", [8, 64])
def test_a_sharded_step_runs_and_waits_for_what_it_cannot_hide(ranks):
    with pretend_group(ranks, Network(latency=0.01)):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        for layer in model:
            meshard.fully_shard(layer, init_device_mesh("cpu", (ranks,)))
        meshard.fully_shard(model, init_device_mesh("cpu", (ranks,)))
        model(torch.ones(1, 64)).sum().backward()
        with meshard.CommLedger(model) as ledger:
            start = time.monotonic()
            model(torch.ones(1, 64)).sum().backward()
            took = time.monotonic() - start
        # With next to no compute, everything is exposed.
        latency = 0.01 * {8: 3, 64: 6}[ranks]
        assert took >= sum(ledger.counts.values()) * latency


def kernel(begin, duration, stream, name="gemm"):
    return {"name": name, "ts": begin, "dur": duration, "args": {"stream": stream}}


def test_overlap_is_when_kernels_of_two_streams_run():
    events = [kernel(0, 10, 7), kernel(2, 4, 20), kernel(5, 3, 7), kernel(9, 9, 20, "Memcpy DtoD")]
    assert overlapped(events) == 4 + 1
    assert copying(events) == 9
    assert overlapped([]) == 0
