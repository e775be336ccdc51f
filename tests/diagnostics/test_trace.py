"""Traces of steps: lanes, exposed waits, and what a trace must not change."""

import json
import logging
import time
from datetime import timedelta
from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import meshard
from meshard import CommLedger
from meshard.timeline import Timeline
from meshard.tracing import Part, Piece, _events, clock_offset
from tests.support import insides
from tests.support.fake_device import FakeDevice
from tests.support.models import Made
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import fake_group, on_fake_ranks, on_ranks

DELAY = 0.1
WIDTH = 8
LANES = ("compute", "all-gather", "reduce-scatter", "all-reduce", "optimizer")


def sharded(mesh_shape=None, *, device=None, shares_memory=True, num_blocks=3):
    """Return a sharded model, which communicates on streams of ``device`` if there is one."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_blocks)]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks)
    mesh = init_device_mesh("cpu", mesh_shape or (dist.get_world_size(),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHARD_SHARED_MEMORY", str(int(shares_memory)))
        if device is not None:
            insides.use_streams(patch, device)
        for block in model[1:]:
            meshard.fully_shard(block, mesh)
        meshard.fully_shard(model, mesh)
        meshard.describe(model)  # a first use, which makes the communicator
    return model


def backward(model):
    model(torch.ones(2, WIDTH) * (1 + dist.get_rank())).sum().backward()


def lanes_of(path, rank):
    """Return the spans of a rank by lane, in order."""
    events = json.loads(path.read_text())["traceEvents"]
    own = [each for each in events if each["pid"] == rank]
    names = {each["tid"]: each["args"]["name"] for each in own if each["name"] == "thread_name"}
    lanes = {name: [] for name in names.values()}
    for each in own:
        if each["ph"] == "X":
            lanes[names[each["tid"]]].append(each)
    return lanes


def collectives(lanes):
    spans = [each for lane in lanes.values() for each in lane if each["cat"] == "communication"]
    return sorted(spans, key=lambda each: each["ts"])


@pytest.mark.parametrize("shares_memory", [True, False])
@on_ranks(4)
def test_a_file_has_every_lane_and_every_collective_of_the_ledger(tmp_path, shares_memory):
    path = tmp_path / "trace.json"
    model = sharded((2, 2), shares_memory=shares_memory)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model)
    with meshard.trace(path) as traced, CommLedger() as ledger:
        backward(model)
        meshard.clip_grad_norm_(model, 1.0)
        optimizer.step()
    dist.barrier()
    for rank in range(4):
        lanes = lanes_of(path, rank)
        assert set(LANES) <= set(lanes)
        found = [(each["args"]["op"], each["args"]["unit"]) for each in collectives(lanes)]
        assert found == [(event.op, event.unit) for event in ledger.events]
        for each, event in zip(collectives(lanes), ledger.events, strict=True):
            assert each["args"]["bytes"] == event.payload_bytes
            assert each["args"]["sent bytes"] == event.wire_bytes
            assert each["args"]["ranks"] == event.group_size
            assert each["args"]["dtype"] == "float32"
        assert [each["name"] for each in lanes["optimizer"]] == ["SGD"]
    kinds = traced.summary.kinds
    assert {kind.replace("-", "_"): each.num_bytes for kind, each in kinds.items()} == ledger.bytes


@pytest.mark.parametrize("shares_memory", [True, False])
@on_ranks(2)
def test_spans_of_a_lane_do_not_overlap_and_exposed_time_is_part_of_the_total(
    tmp_path, shares_memory
):
    path = tmp_path / "trace.json"
    model = sharded(shares_memory=shares_memory)
    optimizer = meshard.overlap_optimizer(model, torch.optim.SGD, lr=0.1)
    with meshard.trace(path) as traced:
        for _ in range(2):
            backward(model)
            optimizer.step()
    dist.barrier()
    lanes = lanes_of(path, dist.get_rank())
    for lane, spans in lanes.items():
        for before, after in pairwise(spans):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3, lane
    waits = [each for each in lanes["compute"] if each["cat"] == "wait"]
    for kind, summary in traced.summary.kinds.items():
        of_kind = [each["dur"] for each in waits if each["args"]["kind"] == kind]
        assert summary.exposed == pytest.approx(sum(of_kind) / 1e6, abs=1e-6)
        assert 0 <= summary.exposed <= summary.seconds
        assert summary.longest_wait == pytest.approx(max(of_kind, default=0) / 1e6)
    steps = [each["name"] for each in lanes["optimizer"] if each["args"] == {}]
    assert steps.count("1") >= 2  # in backward: the step of one unit


class LateGather:
    """A custom all-gather, to which rank 1 comes late."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output, source, group, async_op=False):
        time.sleep(DELAY * dist.get_rank())
        rows = list(output.chunk(group.size()))
        return dist.all_gather(rows, source, group=group, async_op=async_op)


@on_ranks(2)
def test_a_rank_that_comes_late_to_an_all_gather_exposes_it_on_the_other(tmp_path):
    model = sharded()
    model[2].set_custom_all_gather(LateGather())
    dist.barrier()
    with meshard.trace(tmp_path / "trace.json") as traced, torch.no_grad():
        model(torch.ones(2, WIDTH))
    gathers = traced.summary.kinds["all-gather"]
    if dist.get_rank() == 0:
        assert gathers.longest_unit == "2"
        assert 0.8 * DELAY < gathers.longest_wait <= gathers.exposed
        assert gathers.hidden_share < 0.5
    else:
        assert gathers.exposed < 0.8 * DELAY


@on_fake_ranks(1)
def test_an_optimizer_may_step_in_a_trace_before_the_model_was_used(tmp_path):
    """As when a checkpoint of an optimizer is loaded: DCP steps by zeros to make a state."""
    path, model = tmp_path / "trace.json", meshard.fully_shard(nn.Linear(2, 2))
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    with meshard.trace(path):
        torch.optim.AdamW(model.parameters()).step()
    assert [each["name"] for each in lanes_of(path, 0)["optimizer"]] == ["AdamW"]


def test_many_collectives_in_flight_stay_in_their_lanes():
    lanes = [*["all-gather"] * 102, "reduce-scatter"]
    pieces = [Piece(0.0, 1.0, lane, "communication", f"{lane} 0", {}) for lane in lanes]
    events = [*_events(Part(0.0, 1.0, pieces, [], ""), rank=0, offset=0.0, zero=0.0)]
    names = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    last = [each for each in events if each["ph"] == "X"][-2:]
    assert [names[each["tid"]] for each in last] == ["all-gather 102", "reduce-scatter"]


@on_ranks(2)
def test_phases_of_compute_are_those_of_the_units(tmp_path):
    path = tmp_path / "trace.json"
    model = sharded(num_blocks=2)
    backward(model)
    with meshard.trace(path):
        backward(model)
    dist.barrier()
    spans = [each for each in lanes_of(path, 0)["compute"] if each["cat"] != "wait"]
    names = [each["name"] for each in spans]
    found = [name for name, before in zip(names, ["", *names], strict=False) if name != before]
    assert found == [
        "forward (root)",
        "forward 1",
        "forward (root)",
        "forward 2",
        "forward (root)",
        "backward (root)",
        "backward 2",
        "backward 1",
    ]


@on_ranks(2)
def test_a_checkpoint_recomputes_in_a_phase_of_its_own(tmp_path):
    path = tmp_path / "trace.json"
    model = Made(
        lambda m, x: checkpoint(m.block, x, use_reentrant=False), block=nn.Linear(WIDTH, WIDTH)
    )
    meshard.fully_shard(model.block)
    meshard.fully_shard(model)
    with meshard.trace(path):
        backward(model)
    dist.barrier()
    assert "recompute block" in [each["name"] for each in lanes_of(path, 0)["compute"]]


@pytest.mark.parametrize("on_device", [False, True])
@on_ranks(2)
def test_gradients_are_those_without_a_trace_bit_for_bit(tmp_path, on_device):
    device = FakeDevice() if on_device else None
    plain, traced = sharded(device=device), sharded(device=device)
    backward(plain)
    with meshard.trace(tmp_path / "trace.json"):
        backward(traced)
    assert_same(full_grads(plain), full_grads(traced), bitwise=True)


@on_ranks(2)
def test_on_a_device_the_host_waits_only_as_the_trace_ends(tmp_path):
    path, device = tmp_path / "trace.json", FakeDevice()
    model = sharded(device=device)
    optimizer = meshard.overlap_optimizer(model, torch.optim.SGD, lr=0.1)
    with meshard.trace(path), CommLedger() as ledger:
        for _ in range(2):
            backward(model)
            optimizer.step()
        assert device.num_host_waits == 0
    assert device.num_host_waits == 1 and not device.races
    dist.barrier()
    lanes = lanes_of(path, dist.get_rank())
    assert {"compute", "all-gather", "reduce-scatter", "optimizer"} <= set(lanes)
    assert len(collectives(lanes)) == len(ledger.events)


@on_ranks(2)
def test_nothing_is_recorded_after_the_trace_and_two_at_once_are_refused(tmp_path):
    model = sharded()
    with meshard.trace(tmp_path / "first.json") as traced:
        with (
            pytest.raises(RuntimeError, match="a trace is active in this process already"),
            meshard.trace(tmp_path / "second.json"),
        ):
            pass
        with pytest.raises(RuntimeError, match="once its context was left"):
            _ = traced.summary
        backward(model)
    count = traced.summary.kinds["all-gather"].num_collectives
    backward(model)
    with meshard.trace(tmp_path / "third.json") as later:
        pass
    assert count == 7 and later.summary.kinds == {}
    assert not (tmp_path / "second.json").exists()


@on_ranks(2)
def test_collectives_that_began_before_the_trace_are_left_out(tmp_path):
    model = sharded()
    handle = model.unshard(async_op=True)
    with meshard.trace(tmp_path / "trace.json") as traced:
        handle.wait()
    assert traced.summary.kinds == {}
    model.reshard()


@pytest.mark.parametrize("raising", [(0, 1), (1,)])
@on_ranks(2)
def test_ranks_write_their_own_parts_if_one_of_them_raises(tmp_path, raising):
    path, rank = tmp_path / "trace.json", dist.get_rank()
    model = sharded()
    logging.getLogger("meshard").setLevel(logging.ERROR)
    try:
        with meshard.trace(path) as traced:
            backward(model)
            if rank in raising:
                raise KeyError("of the user")
    except KeyError:
        assert rank in raising
    finally:
        logging.getLogger("meshard").setLevel(logging.WARNING)
    assert traced.path == tmp_path / f"trace.rank{rank}.json" and not path.exists()
    assert set(Timeline.read(traced.path).ranks) == {rank}
    assert traced.summary.kinds["all-gather"].num_collectives == 7
    with meshard.trace(path) as traced:  # the next trace is whole again
        backward(model)
    dist.barrier()
    assert set(Timeline.read(path).ranks) == {0, 1}


@on_ranks(2)
def test_a_rank_that_comes_later_than_the_timeout_waits_for_none(tmp_path):
    path, rank = tmp_path / "trace.json", dist.get_rank()
    timeout = mock.patch("meshard.tracing.timeout_of", return_value=timedelta(seconds=0.1))
    dist.barrier()
    with timeout, meshard.trace(path) as traced:
        time.sleep(5 * DELAY * rank)
    rank_sum = torch.tensor(rank)
    dist.all_reduce(rank_sum)
    assert rank_sum == 1
    assert traced.path == tmp_path / f"trace.rank{rank}.json" and not path.exists()


def test_each_rank_writes_a_file_if_the_group_is_destroyed_inside_the_block(tmp_path):
    with (
        meshard.trace(tmp_path / "trace.json") as traced,
        fake_group(2, rank=1),
        mock.patch("meshard.tracing.all_ranks", return_value=dist.group.WORLD),
    ):
        meshard.fully_shard(nn.Linear(2, 2))(torch.ones(1, 2))
    assert traced.path == tmp_path / "trace.rank1.json"
    assert set(Timeline.read(traced.path).ranks) == {traced.summary.rank} == {1}


@on_ranks(2)
def test_the_file_bounds_the_error_of_clocks_of_other_hosts(tmp_path):
    path, boot = tmp_path / "trace.json", tmp_path / f"boot{dist.get_rank()}"
    boot.write_text(boot.name)
    model = sharded()
    with mock.patch("meshard.tracing._BOOT", boot), meshard.trace(path):
        backward(model)
    dist.barrier()
    errors = [each["clock error us"] for each in Timeline.read(path).ranks.values()]
    assert errors[0] == 0 < errors[1] < 1e6
    ours, theirs = (collectives(lanes_of(path, rank)) for rank in range(2))
    for our, their in zip(ours, theirs, strict=True):  # none ends before both have begun
        ends = min(our["ts"] + our["dur"], their["ts"] + their["dur"])
        assert ends >= max(our["ts"], their["ts"]) - errors[1]


def test_clocks_of_two_hosts_are_compared_within_the_stated_error():
    ahead = 5.0  # of the second clock
    ours = [(10.0, 10.004), (10.01, 10.012), (10.02, 10.05)]
    theirs = [(10.001 + ahead, 10.005 + ahead), (10.0105 + ahead, 10.0125 + ahead)]
    theirs.append((10.019 + ahead, 10.051 + ahead))
    offset = clock_offset(ours, theirs)
    assert abs(offset.seconds + ahead) <= offset.error < 0.002
