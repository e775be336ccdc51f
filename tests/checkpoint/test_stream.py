"""Unsharded weights as a stream, on all ranks or on one, also where a rank stops early."""

import copy
import gc
import json
import math
import random
import re
import time
from collections import deque
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import meshard
from meshard import CommLedger
from meshard.checkpoint import load_pretrained, save_pretrained, shard_table, stream_unsharded
from tests.benchmarks.memory import resident
from tests.benchmarks.rounds import on_ranks as benchmark_ranks
from tests.checkpoint.layouts import LAYOUTS, lay_out
from tests.mesh import expert_meshes
from tests.support import extensions
from tests.support.cases import CASES
from tests.support.models import seeded
from tests.support.parity import assert_same
from tests.support.ranks import on_fake_ranks, on_ranks, on_threads
from tests.support.sharding import shard_blocks
from tests.support.spread import slow, spread


def dict_of(stream):
    pairs = list(stream)
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def block_of(shard):
    pairs = zip(shard.offsets, shard.sizes, strict=True)
    return tuple(slice(offset, offset + size) for offset, size in pairs)


@pytest.mark.slow
@on_ranks(4)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_state_dict_of_the_plain_model_is_streamed_and_the_table_says_who_holds_what(name):
    model, plain = lay_out(name)
    expected, state, rank = plain.state_dict(), model.state_dict(), dist.get_rank()
    for max_bytes in (1, 300, 2**28):
        got = dict_of(stream_unsharded(model, max_bytes=max_bytes))
        assert_same(got, expected, bitwise=True)
        first = dict_of(stream_unsharded(model, max_bytes=max_bytes, rank0_only=True))
        assert_same(first, expected if rank == 0 else {}, bitwise=True)
    table = shard_table(model)
    assert [row.name for row in table] == list(expected)
    for row in table:
        assert row.shape == tuple(expected[row.name].shape)
        assert row.dtype == str(expected[row.name].dtype).removeprefix("torch.")
        counted = torch.zeros(row.shape, dtype=torch.int)
        for shard in row.shards:
            block = block_of(shard)
            counted[block] += 1
            if shard.rank == rank:
                value = state[row.name]
                local = value.to_local() if isinstance(value, DTensor) else value
                assert_same(local, expected[row.name][block], bitwise=True, what=row.name)
        assert counted.unique().numel() == 1 and counted.min() >= 1, row.name
    of_json = json.loads(json.dumps(table))
    assert of_json[0][:2] == [table[0].name, list(table[0].shape)]


def test_a_module_without_units_streams_without_a_process_group():
    model = CASES["tied_inside"].build()
    got = dict_of(stream_unsharded(model, rank0_only=True))
    assert_same(got, model.state_dict(), bitwise=True)
    got["blocks.0.first.weight"].zero_()
    assert model.blocks[0].first.weight.any()


@on_ranks(2)
def test_floating_point_tensors_are_cast_before_they_are_sent_and_others_are_not():
    model, plain = lay_out("buffers")
    payloads = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        with CommLedger(model) as ledger:
            got = dict_of(stream_unsharded(model, dtype=dtype))
        expected = {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in plain.state_dict().items()
        }
        assert_same(got, expected, bitwise=True)
        payloads[dtype] = sum(e.payload_bytes for e in ledger.events if e.op == "all_gather")
    assert payloads[torch.bfloat16] < 0.6 * payloads[torch.float32]


@on_ranks(2)
def test_names_of_a_module_in_ddp_are_its_own():
    layer = nn.Linear(2, 2)
    wrapped = nn.parallel.DistributedDataParallel(layer)
    assert [name for name, _ in stream_unsharded(wrapped)] == ["weight", "bias"]
    assert [row.name for row in shard_table(torch.compile(wrapped, backend="eager"))] == [
        "weight",
        "bias",
    ]


@on_ranks(2)
def test_units_stay_sharded_and_no_forward_hook_runs():
    model, _ = lay_out("sharded")
    calls = []
    for module in model.modules():
        module.register_forward_pre_hook(lambda *_: calls.append(1))
    held = dict(model.named_parameters())
    versions = {name: param.to_local()._version for name, param in held.items()}
    for _ in stream_unsharded(model, max_bytes=1000):
        assert all(isinstance(param, DTensor) for param in model.parameters())
    assert not calls
    for name, param in model.named_parameters():
        assert param is held[name] and param.to_local()._version == versions[name]


@on_ranks(2)
@pytest.mark.parametrize("by", ["forward", "unshard"])
def test_of_a_unit_that_is_unsharded_the_shards_are_read(by):
    plain = seeded(nn.Linear(4, 4))
    model = meshard.fully_shard(copy.deepcopy(plain), reshard_after_forward=False)
    model(torch.ones(1, 4)) if by == "forward" else model.unshard()
    assert not isinstance(model.weight, DTensor)
    for _ in stream_unsharded(model):
        pass
    (weight, _) = shard_table(model)
    assert [shard.sizes for shard in weight.shards] == [(2, 4), (2, 4)]
    assert_same(dict_of(stream_unsharded(model)), plain.state_dict(), bitwise=True)


@on_ranks(4)
def test_experts_are_streamed_and_to_one_rank_only_if_all_ranks_have_the_same():
    plain = expert_meshes.build()
    model = expert_meshes.shard(expert_meshes.build(), "flat")
    assert_same(dict_of(stream_unsharded(model)), plain.state_dict(), bitwise=True)
    got = dict_of(stream_unsharded(model, rank0_only=True))
    assert_same(got, plain.state_dict() if dist.get_rank() == 0 else {}, bitwise=True)
    with torch.no_grad():
        model.blocks[1].expert.weight.to_local().add_(dist.get_rank() // 2)
    with pytest.raises(NotImplementedError, match=r"'blocks\.1\.expert\.weight'.*rank0_only"):
        stream_unsharded(model, rank0_only=True)


@on_ranks(4)
def test_ranks_load_different_experts_and_say_that_these_are_not_gathered_together(tmp_path):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp"))
    number = dist.get_rank() // 2
    plain = seeded(nn.ModuleDict({name: nn.Linear(4, 4) for name in ("0", "1", "2", "dense")}))
    if dist.get_rank() == 0:
        save_pretrained(plain, tmp_path)
    dist.barrier()
    for own, sizes in ((["02", "1"][number], "differ"), (["0", "1"][number], "are equal")):
        model = nn.ModuleDict({name: nn.Linear(4, 4) for name in (*own, "dense")})
        for name in own:
            meshard.fully_shard(model[name], mesh["dp"])
        meshard.fully_shard(model["dense"])
        assert load_pretrained(model, tmp_path, strict=False).missing == []
        for name in own:
            assert_same(dict_of(stream_unsharded(model[name])), plain[name].state_dict())
        for call in (
            lambda model: save_pretrained(model, tmp_path),
            lambda model: stream_unsharded(model, rank0_only=True),
            stream_unsharded,
        ):
            if sizes == "are equal" and call is stream_unsharded:
                assert_same(dict_of(call(model))[f"{own}.weight"], plain[own].weight)
                continue
            with pytest.raises(NotImplementedError, match="the ranks have different tensors"):
                call(model)


@on_ranks(4)
def test_a_replicated_model_of_which_some_ranks_have_sharded_experts_is_refused_on_all():
    experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "edp"))["edp"]
    model = nn.ModuleDict({"dense": nn.Linear(4, 4)})
    if dist.get_rank() < 2:
        model["expert"] = meshard.fully_shard(nn.Linear(4, 4), experts)
    meshard.replicate(model["dense"])
    with pytest.raises(NotImplementedError, match="the ranks have different tensors"):
        list(stream_unsharded(model))


MIB = 2**20
PARTS = 64 * MIB  # what one gather brings at most


def peak_of_each_way_out(given):
    """Return the most bytes that a rank has held beside its shards, by the way out and the rank."""
    shape, folder = given
    found = {}
    for name, out in WAYS_OUT.items():
        for size in ((1, 16), shape):  # what the first call loads is nobody's
            model = nn.Module()
            model.weight = nn.Parameter(torch.zeros(size), requires_grad=False)
            meshard.fully_shard(model)
            before = resident("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
            out(model, f"{folder}/{name}")
            peaks = torch.zeros(dist.get_world_size(), dtype=torch.int64)
            peaks[dist.get_rank()] = resident("VmHWM") - before
            dist.all_reduce(peaks)
        found[name] = peaks.tolist()
    return found


WAYS_OUT = {
    "all": lambda model, _: deque(stream_unsharded(model), maxlen=0),
    "first": lambda model, _: deque(stream_unsharded(model, rank0_only=True), maxlen=0),
    "saved": save_pretrained,
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 2**25), (2**12, 2**13)])
def test_memory_is_that_of_the_tensor_and_of_a_part_whatever_its_shape(shape, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MMAP", "TRIM"):  # malloc gives back what is freed
            patch.setenv(f"MALLOC_{name}_THRESHOLD_", "65536")
        found = benchmark_ranks(peak_of_each_way_out, (shape, str(tmp_path)), 2)
    sends = PARTS / 2 + 12 * MIB
    gets = 4 * math.prod(shape) + PARTS + PARTS + sends  # gloo holds a part twice
    for name, (first, other) in found.items():
        assert first <= gets, (name, first / MIB, gets / MIB)
        assert other <= (gets if name == "all" else sends), (name, other / MIB)


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"dtype": torch.int8}, TypeError, "floating-point"),
        ({"dtype": "bfloat16"}, TypeError, "'bfloat16'"),
        ({}, ValueError, r"'weight', 'bias' are on the meta device.*load_pretrained"),
    ],
)
def test_wrong_arguments_and_what_has_no_values_are_refused(kwargs, error, text):
    with pytest.raises(error, match=text):
        stream_unsharded(nn.Linear(2, 2, device=None if kwargs else "meta"), **kwargs)


@on_ranks(2)
def test_it_is_refused_inside_unsharded_params_and_inside_a_forward_and_of_a_tensor_subclass():
    model = meshard.fully_shard(nn.Linear(2, 2))
    with (
        meshard.unsharded_params(model),
        pytest.raises(RuntimeError, match="inside unsharded_params"),
    ):
        stream_unsharded(model)
    refused = []

    def inside(module, args):
        with pytest.raises(RuntimeError, match="stream_unsharded was called inside"):
            stream_unsharded(model)
        refused.append(True)

    outer = meshard.fully_shard(nn.Sequential(nn.ReLU(), model))
    outer[0].register_forward_pre_hook(inside)
    outer(torch.ones(1, 2))
    assert refused
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    model[0].weight = nn.Parameter(extensions.Int8OnWire(model[0].weight.detach()))
    meshard.fully_shard(model)
    with pytest.raises(NotImplementedError, match=r"'0\.weight' is a Int8OnWire"):
        stream_unsharded(model)


def small_batches(**kwargs):
    return stream_unsharded(shard_blocks(CASES["mlp_stack"].build()), max_bytes=1, **kwargs)


def load_what_is_there(model, folder):
    own = f"{folder}/{dist.get_rank()}"
    save_pretrained(nn.Linear(4, 4), own)
    load_pretrained(model, own)


REFUSED = {
    "stream": lambda model, folder: stream_unsharded(model),
    "save": save_pretrained,
    "load": load_what_is_there,
}


@pytest.mark.parametrize("call", REFUSED)
@on_threads(2)
def test_what_one_rank_refuses_is_raised_on_all(tmp_path, call):
    model = meshard.fully_shard(nn.Linear(4, 4))
    with meshard.no_sync(model):
        loss = model(torch.ones(1, 4)).sum()
        if dist.get_rank() == 0:
            loss.backward()  # the other rank skips its batch
    text = "failed on rank 0; see the error there" if dist.get_rank() else "gradients"
    with pytest.raises(RuntimeError, match=text):
        REFUSED[call](model, tmp_path)


@on_ranks(2)
def test_where_one_rank_stops_or_raises_the_others_raise_and_name_it():
    rank = dist.get_rank()
    if rank == 1:
        for name, _ in small_batches():
            if name == "blocks.0.up.bias":
                break
    else:
        with pytest.raises(RuntimeError, match=r"rank 1 stopped.*'blocks\.0\.down\.weight'.*4 of"):
            list(small_batches())
    dist.barrier()

    def raise_in_a_loop():
        for name, _ in small_batches():
            if rank == 0 and name == "blocks.1.up.weight":
                raise KeyError(name)

    def raise_in_a_block():  # in which only one rank reads
        with small_batches(rank0_only=True) as stream:
            for _ in stream:
                raise KeyError("no place")

    for consume in (raise_in_a_loop, raise_in_a_block):
        with pytest.raises(KeyError if rank == 0 else RuntimeError, match=r"weight|place|rank 0"):
            consume()
        dist.barrier()
    if rank == 0:
        stream = small_batches()  # dropped before it began
        del stream
        gc.collect()
    else:
        with pytest.raises(RuntimeError, match=r"rank 0 stopped.*'scale'.*0 of"):
            next(small_batches())
    dist.barrier()


@on_ranks(2)
def test_a_stream_that_is_over_stays_over():
    stream = small_batches()
    assert len(list(stream)) == 14
    assert list(stream) == []
    stream.close()
    stream = small_batches()
    next(stream)
    stream.close()
    stream.close()
    assert list(stream) == []
    dist.barrier()


@on_ranks(4, timeout=250)
@pytest.mark.parametrize(
    ("layout", "seed", "rounds"),
    [
        ("uneven", 0, 10),
        ("hsdp", 2, 6),
        ("tensor_parallel", 2, 6),
        slow("uneven", 1, 200),
    ],
)
def test_delays_and_stops_leave_no_rank_in_a_collective(layout, seed, rounds):
    """In each round some ranks stop somewhere, or none."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model, plain = lay_out(layout)
    expected = plain.state_dict()
    names = list(expected)
    shared, own = random.Random(seed), random.Random(1000 * seed + rank)
    for number in range(rounds):
        stops = [shared.choice([None, *range(len(names))]) for _ in range(num_ranks)]
        rank0_only = shared.random() < 0.3
        kwargs = {"max_bytes": shared.choice([1, 60, 2000]), "rank0_only": rank0_only}
        got, error = {}, None
        try:
            for name, tensor in stream_unsharded(model, **kwargs):
                time.sleep(own.choice([0, 0, 0.001, 0.004]))
                got[name] = tensor
                if stops[rank] == len(got) - 1:
                    break
        except RuntimeError as raised:
            error = str(raised)
        part = {name: expected[name] for name in names[: len(got)]}
        assert_same(got, part, bitwise=True, what=f"round {number}")
        if error is not None:
            named = int(re.match(r"rank (\d+) stopped", error)[1])
            assert named != rank and stops[named] is not None
            assert not rank0_only
        elif rank0_only and rank:
            assert not got
        else:
            assert len(got) == (len(names) if stops[rank] is None else stops[rank] + 1)
        # What comes next finds no collective that some ranks alone have entered.
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total == num_ranks


@on_threads(8)
@spread(
    placements=[(Shard(0), Shard(1)), (Shard(0), Shard(0))],
    shape=[(8, 4), (7, 3), (3, 5)],
    shard_dim=[0, 1],
)
def test_both_are_right_where_two_axes_have_cut_a_parameter_before(placements, shape, shard_dim):
    world = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    values = torch.arange(1.0, 1 + math.prod(shape)).view(shape)
    model = nn.Module()
    model.weight = nn.Parameter(distribute_tensor(values, world["cp", "tp"], placements))
    meshard.fully_shard(model, world["dp"], shard_placement_fn=lambda _: Shard(shard_dim))
    assert_same(dict_of(stream_unsharded(model)), {"weight": values}, bitwise=True)
    (row,) = shard_table(model)
    counted = torch.zeros(shape)
    for shard in row.shards:
        counted[block_of(shard)] += 1
        if shard.rank == dist.get_rank():
            assert_same(model.weight.to_local().detach(), values[block_of(shard)], bitwise=True)
    assert counted.eq(1).all()


@on_fake_ranks(4, rank=2)
def test_the_table_needs_neither_values_nor_communication():
    with torch.device("meta"):
        model = nn.Linear(3, 6, bias=False)
    meshard.fully_shard(model, init_device_mesh("cpu", (4,)))
    (row,) = shard_table(model)
    assert [(shard.rank, shard.offsets, shard.sizes) for shard in row.shards] == [
        (0, (0, 0), (2, 3)),
        (1, (2, 0), (2, 3)),
        (2, (4, 0), (2, 3)),
    ]
