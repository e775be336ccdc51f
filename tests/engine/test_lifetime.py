"""Memory that must be given back, and when."""

import gc
import time
import weakref

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import GradientSync
from meshard._engine.schedule import ForwardPass
from tests.support.cases import CASES
from tests.support.fake import fake_group
from tests.support.live_memory import live_tensor_bytes, settled_tensor_bytes
from tests.support.models import MlpStack, seeded
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import on_ranks
from tests.support.sharding import shard_blocks


def train_and_delete(case_name, **kwargs):
    case = CASES[case_name]
    mesh = init_device_mesh("cpu", (2,))
    rank = torch.distributed.get_rank()
    # The first DTensor of a process imports modules, whose frames only a collection frees.
    meshard.fully_shard(torch.nn.Linear(2, 2), mesh)(torch.ones(1, 2)).sum().backward()
    before = settled_tensor_bytes()
    gc.disable()
    try:
        model = case.build()
        for unit in case.units(model):
            meshard.fully_shard(unit, mesh, **kwargs)
        watched = [weakref.ref(model)]
        for module in model.modules():
            unit = vars(module).get("_meshard_unit")
            if unit is not None:
                watched += [weakref.ref(unit), weakref.ref(unit.lifecycle)]
                watched += [weakref.ref(unit.group), weakref.ref(unit.group.unit_params.flat_shard)]
                watched += [weakref.ref(param) for param in unit.group.params]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            case.loss(model(case.batch(step, rank))).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert live_tensor_bytes() > before
        del unit, model, module, optimizer
        survivors = [type(ref()).__name__ for ref in watched if ref() is not None]
        assert survivors == []
        torch.distributed.barrier()
        time.sleep(0.2)  # for gloo's threads to let go of works that are over
        assert live_tensor_bytes() == before
    finally:
        gc.enable()


def test_deleting_a_model_frees_every_byte_without_the_garbage_collector(run_ranks):
    run_ranks(train_and_delete, 2, "mlp_stack")
    run_ranks(train_and_delete, 2, "transformer_tied", reshard_after_forward=False)


def retained_after_a_microbatch(mode, mesh_shape):
    mesh = init_device_mesh("cpu", mesh_shape)
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16, bias=False) for _ in range(3)])
    for layer in model[:2]:
        meshard.fully_shard(layer, mesh)
    meshard.fully_shard(model, mesh)
    model(torch.ones(1, 16)).sum().backward()  # whatever is made once is made now
    model.zero_grad()
    before = settled_tensor_bytes()
    model.set_gradient_sync(mode)
    model(torch.ones(1, 16)).sum().backward()
    after = settled_tensor_bytes()
    meshard.finalize_gradients(model)
    values = [param.grad.full_tensor() for param in model.parameters()]
    assert all(value.shape == (16, 16) and value.isfinite().all() for value in values)
    return (after - before) / (3 * 16 * 16 * 4)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize(
    ("mode", "of_whole"),
    [
        (GradientSync.NONE, 1.0),
        (GradientSync.REDUCE_SCATTER, 0.5),
        (GradientSync.FULL, 0.5),
    ],
)
def test_what_is_kept_between_microbatches_is_exact(run_ranks, mode, of_whole):
    assert run_ranks(retained_after_a_microbatch, 2, mode, (2,)) == [of_whole] * 2
    assert run_ranks(retained_after_a_microbatch, 4, mode, (2, 2)) == [of_whole] * 4


def retained_of_a_narrow_parameter(mode, mesh_shape):
    """15 rows of 16 over two shards: a slot has 8 rows, and rank 1 owns 7."""
    mesh = init_device_mesh("cpu", mesh_shape)
    model = torch.nn.Linear(16, 15, bias=False, dtype=torch.bfloat16)
    meshard.fully_shard(model, mesh)
    x = torch.ones(1, 16, dtype=torch.bfloat16)
    model(x).sum().backward()
    model.zero_grad()
    before = settled_tensor_bytes()
    model.set_gradient_sync(mode)
    model(x).sum().backward()
    after = settled_tensor_bytes()
    meshard.finalize_gradients(model)
    assert (model.weight.grad.full_tensor() == 1).all()
    return after - before


@pytest.mark.default_rows(2)
@pytest.mark.parametrize(
    ("mode", "mesh_shape", "kept"),
    [
        (GradientSync.NONE, (2, 2), [2 * 8 * 16 * 4] * 2),
        (GradientSync.REDUCE_SCATTER, (2, 2), [8 * 16 * 4] * 2),
        (GradientSync.REDUCE_SCATTER, (2,), [8 * 16 * (4 + 2), 8 * 16 * 4 + 7 * 16 * 2]),
        (GradientSync.FULL, (2, 2), [8 * 16 * (4 + 2), 8 * 16 * 4 + 7 * 16 * 2]),
    ],
)
def test_padding_is_kept_and_narrow_gradients_beside_their_wide_sums(
    run_ranks, mode, mesh_shape, kept
):
    num_ranks = torch.Size(mesh_shape).numel()
    found = run_ranks(retained_of_a_narrow_parameter, num_ranks, mode, mesh_shape)
    assert found == kept * (num_ranks // 2)


def whole_bytes(unit):
    return sum(storage.nbytes() for storage, _ in unit.group.unit_params.unsharded._storages)


@on_ranks(2)
def test_only_the_unit_that_computes_is_whole():
    case = CASES["mlp_stack"]
    mesh = init_device_mesh("cpu", (2,))
    model = case.build()
    for unit in case.units(model):
        meshard.fully_shard(unit, mesh)
    seen = []

    def look(module, args, output):
        units = [vars(block)["_meshard_unit"] for block in model.blocks]
        seen.append([whole_bytes(unit) > 0 for unit in units])

    for block in model.blocks:
        block.down.register_forward_hook(look)
    with torch.no_grad():
        model(case.batch(0, 0))
        model(case.batch(0, 0))
    # While block i computes, it alone is whole; the next is on its way, not yet laid out.
    assert seen == [[i == j for j in range(3)] for i in range(3)] * 2
    after = [whole_bytes(vars(module)["_meshard_unit"]) for module in case.units(model)]
    assert after == [0] * 4


@on_ranks(2)
def test_cleared_gradients_are_not_kept_for_later():
    case = CASES["mlp_stack"]
    mesh = init_device_mesh("cpu", (2,))
    model = case.build()
    for unit in case.units(model):
        meshard.fully_shard(unit, mesh)
    rank = torch.distributed.get_rank()
    gc.collect()
    case.loss(model(case.batch(0, rank))).backward()
    model.zero_grad()
    with torch.no_grad():
        model(case.batch(1, rank))
    held = [
        vars(module)["_meshard_unit"].gradients.sharded._published for module in case.units(model)
    ]
    assert held == [None] * 4


def test_forwards_without_a_backward_leave_nothing_behind():
    with fake_group(1):
        model = shard_blocks(seeded(MlpStack()), init_device_mesh("cpu", (1,)))
        batch = torch.ones(2, 6)
        model(batch).sum().backward()
        counts = []
        for _ in range(2):
            for _ in range(10):  # a rollout, whose outputs are dropped
                model(batch)
            gc.collect()
            counts.append(sum(type(each) is ForwardPass for each in gc.get_objects()))
        assert counts[0] == counts[1]
        model.zero_grad()
        first, second = model(batch).sum(), model(batch).sum()
        second.backward()
        first.backward()
        plain = seeded(MlpStack())
        (2 * plain(batch).sum()).backward()
        assert_same(full_grads(model), full_grads(plain))
