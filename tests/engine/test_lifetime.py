"""Memory that must be given back, and when."""

import gc
import time
import weakref

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import GradientSync
from tests.support import insides
from tests.support.against_plain import check_gradients, mean_square, sharded_and_plain
from tests.support.cases import CASES
from tests.support.live_memory import live_tensor_bytes, settled_tensor_bytes
from tests.support.models import MlpStack, seeded
from tests.support.ranks import on_fake_ranks, on_ranks, on_threads
from tests.support.sharding import shard_blocks


def warm_up(model, x):
    model(x).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("case_name", "reshard_after_forward"), [("mlp_stack", None), ("transformer_tied", False)]
)
@on_ranks(2)
def test_deleting_a_model_frees_every_byte_without_the_garbage_collector(
    case_name, reshard_after_forward
):
    case, mesh = CASES[case_name], init_device_mesh("cpu", (2,))
    # The first step of a process imports modules, whose frames only a collection frees.
    warm_up(meshard.fully_shard(torch.nn.Linear(2, 2), mesh), torch.ones(1, 2))
    before = settled_tensor_bytes()
    gc.disable()
    try:
        model = case.build()
        for module in case.units(model):
            meshard.fully_shard(module, mesh, reshard_after_forward=reshard_after_forward)
        watched = [weakref.ref(model), *insides.engine_refs(model)]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            case.loss(model(case.batch(step, torch.distributed.get_rank()))).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert live_tensor_bytes() > before
        del model, module, optimizer
        assert insides.left_alive(watched) == []
        torch.distributed.barrier()
        deadline = time.monotonic() + 10  # for gloo's threads to let go of works that are over
        while live_tensor_bytes() != before and time.monotonic() < deadline:
            time.sleep(0.2)
        assert live_tensor_bytes() == before
    finally:
        gc.enable()


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


@on_threads(2)
def test_only_the_unit_that_computes_is_unsharded():
    model, seen = shard_blocks(seeded(MlpStack())), []

    def look(*_):
        seen.append([insides.unsharded_bytes(block) > 0 for block in model.blocks])

    for block in model.blocks:
        block.down.register_forward_hook(look)
    with torch.no_grad():
        for _ in range(2):
            model(torch.ones(2, 6))
    # While block i computes, it alone is unsharded: the next is on its way, not yet laid out.
    assert seen == [[i == j for j in range(3)] for i in range(3)] * 2
    assert insides.unsharded_bytes(model) == 0


@on_ranks(2)
def test_the_forward_after_zero_grad_frees_the_gradients():
    model = shard_blocks(seeded(MlpStack()))
    warm_up(model, torch.ones(2, 6))
    model(torch.ones(2, 6)).sum().backward()
    held = []
    for clear in (lambda: None, model.zero_grad):
        clear()
        with torch.no_grad():
            model(torch.ones(2, 6))
        held.append(settled_tensor_bytes())
    assert held[0] - held[1] == sum(param.to_local().nbytes for param in model.parameters())


@on_fake_ranks(1)
def test_forwards_without_a_backward_leave_nothing_behind():
    def step(model, rank):
        first, second = mean_square(model, rank), mean_square(model, rank)
        second.backward()
        return first

    model, plain = sharded_and_plain(MlpStack())
    mean_square(model, 0).backward()
    counts = []
    for _ in range(2):
        for _ in range(10):  # a rollout, whose outputs are dropped
            mean_square(model, 0)
        gc.collect()
        modules = [str(type(each).__module__) for each in gc.get_objects()]
        counts.append(sum(name.startswith("meshard") for name in modules))
    assert counts[0] == counts[1]
    check_gradients(model, plain, step)
