"""Replicated modules with other features: meshes, sharding, tools, optimizers."""

import copy
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import CommLedger
from tests.support.integer_model import LEARNING_RATE, IntegerModel, integer_batch
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import on_ranks
from tests.support.replicated import SMALL, Pair, run
from tests.support.spread import spread


def test_one_rank_needs_no_process_group():
    try:
        pair = Pair()
        pair.steps(range(4))
        for number in (5, 6):
            with pair.ours.no_sync():
                pair.backward(number)
            pair.backward(number + 2)
            pair.compare()
        pair.assert_views()
        with CommLedger() as ledger:
            pair.backward(9)
        assert ledger.counts == {}
    finally:
        dist.destroy_process_group()


@on_ranks(4)
def test_a_part_of_a_mesh_replicates_and_the_other_axis_holds_other_models():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "data"))
    model, plain = (IntegerModel(seed=mesh["model"].get_local_rank()) for _ in range(2))
    meshard.replicate(model, mesh["data"], bucket_cap_mb=SMALL).set_gradient_divide_factor(1.0)
    for number in range(3):
        run(model, integer_batch(number, mesh["data"].get_local_rank()))
        for rank in range(2):
            run(plain, integer_batch(number, rank))
        assert_same(full_grads(model), full_grads(plain), bitwise=True)


def sharded_inside(model, mesh):
    """Shard two blocks, and return the names of the others, which stay unsharded."""
    for block in model.blocks[:2]:
        meshard.fully_shard(block, mesh)
    meshard.replicate(model, bucket_cap_mb=SMALL)
    return {"shift", "blocks.2.linear.weight", "blocks.2.linear.bias"}


def replicated_inside(model, mesh):
    """Replicate two blocks inside a sharded root, and return the names of their parameters."""
    meshard.replicate(model.blocks[0], bucket_cap_mb=2e-5)
    meshard.replicate(model.blocks[2])
    meshard.fully_shard(model.blocks[1], mesh)
    meshard.fully_shard(model, mesh)
    return {f"blocks.{n}.linear.{name}" for n in (0, 2) for name in ("weight", "bias")}


@on_ranks(4)
@spread(
    shape=[(4,), (2, 2), (2, 2)],
    how=[sharded_inside, replicated_inside],
    schedule=["F", "NRF", "RFF"],
)
def test_replicated_parameters_beside_sharded_ones(how, shape, schedule):
    replicated = set()

    def make(model):
        replicated.update(how(model, init_device_mesh("cpu", shape)))
        return model

    pair = Pair(make=make)
    for number in range(4):
        pair.window(schedule, number)
        pair.compare()
        named = pair.ours.named_parameters()
        assert {name for name, p in named if type(p.grad) is torch.Tensor} == replicated
        ours = meshard.clip_grad_norm_(pair.ours, 1e6)
        theirs = nn.utils.clip_grad_norm_(pair.plain.parameters(), 1e6)
        torch.testing.assert_close(ours, theirs)
        pair.update()
        with torch.no_grad():
            x = integer_batch(99, 0)
            assert torch.equal(pair.ours(x), pair.plain(x))


@on_ranks(2)
@mock.patch.dict(os.environ, MESHARD_DEBUG="1")
def test_under_debug():
    pair = Pair()
    pair.steps(range(3))
    with pair.ours.no_sync():
        pair.backward(3)
    pair.backward(4)
    pair.compare()


@on_ranks(2)
def test_describe_shows_buckets():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))
    text = meshard.describe(meshard.replicate(model, bucket_cap_mb=6e-5))
    assert [" ".join(line.split()) for line in text.splitlines()[:4]] == [
        "unit parameters dtype unsharded per rank padding mesh policies",
        "(root) bucket 1 16 float32 64 B 64 B 0 B replicate 2 x shard 1",
        "(root) bucket 0 8 float32 32 B 32 B 0 B replicate 2 x shard 1",
        "total 24 96 B 96 B 0 B",
    ]


@on_ranks(2)
def test_an_optimizer_may_go_to_backward_after_buckets_were_made_anew():
    pair = Pair()
    pair.steps(range(3))
    pair.optimizers[0] = meshard.overlap_optimizer(pair.ours, torch.optim.SGD, lr=LEARNING_RATE)
    for number in range(3, 6):
        pair.backward(number)
        pair.update()


@on_ranks(1)
def test_what_cannot_be_replicated_is_refused():
    with pytest.raises(ValueError, match="'weight' is on meta, but the mesh is on cpu"):
        meshard.replicate(nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match="complex parameters are not supported"):
        meshard.replicate(nn.Linear(2, 2, dtype=torch.complex64))
    with torch.inference_mode():
        made_inside = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"'weight' was made under torch\.inference_mode"):
        meshard.replicate(made_inside)
    meshard.replicate(copy.deepcopy(made_inside))  # the remedy that the error names
    layer = meshard.replicate(nn.Linear(2, 2))
    for apply in (meshard.replicate, meshard.fully_shard):
        with pytest.raises(ValueError, match=r"sharded or replicated already|is replicated; apply"):
            apply(layer)
    with pytest.raises(ValueError, match="sharded or replicated already"):
        meshard.replicate(meshard.fully_shard(nn.Linear(2, 2)))
    with pytest.raises(NotImplementedError, match="cannot be offloaded"):
        meshard.offload(layer)
    model = nn.Sequential(meshard.fully_shard(nn.Linear(2, 2)), layer)
    with pytest.raises(NotImplementedError, match="is replicated and cannot be"):
        meshard.offload(model)
    model(torch.ones(1, 2))


@on_ranks(1)
def test_options_that_cannot_be_are_refused_and_leave_the_module_as_it_was():
    layer, three_axes = nn.Linear(2, 2), init_device_mesh("cpu", (1, 1, 1))
    for kwargs, text in (
        ({"bucket_cap_mb": 0}, "bucket_cap_mb must be positive"),
        ({"mesh": three_axes}, "replicate needs a mesh of one or two axes"),
    ):
        with pytest.raises(ValueError, match=text):
            meshard.replicate(layer, **kwargs)
        assert type(layer) is nn.Linear


@on_ranks(2)
def test_ddp_around_it_is_refused():
    torch.manual_seed(0)
    model = meshard.replicate(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match="remove DistributedDataParallel"):
        nn.parallel.DistributedDataParallel(model)(torch.ones(1, 4))
    # A part that it leaves out is reduced by meshard alone.
    whole = nn.Sequential(meshard.replicate(nn.Linear(4, 4)), nn.Linear(4, 4))
    ddp = nn.parallel.DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(whole, ["0.weight", "0.bias"])
    wrapped = ddp(whole)
    wrapped(torch.full((1, 4), dist.get_rank() + 1.0)).sum().backward()
    for param in whole.parameters():
        first = param.grad.clone()
        dist.broadcast(first, 0)
        assert_same({"grad": param.grad}, {"grad": first}, bitwise=True)
