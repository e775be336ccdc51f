"""Memory that must be given back, and when."""

import copy
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
from tests.support.sharding import padded, shard_blocks


def warm_up(model, x):
    model(x).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("case_name", "what", "reshard_after_forward"),
    [
        ("mlp_stack", "model", None),
        ("transformer_tied", "model", False),
        ("transformer_tied", "copy", None),
    ],
)
@on_ranks(2)
def test_deleting_a_model_frees_every_byte_without_the_garbage_collector(
    case_name, what, reshard_after_forward
):
    case, rank = CASES[case_name], torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", (2,))  # torch keeps some meshes in caches of its own

    def make():
        model = case.build()
        for unit in case.units(model):
            meshard.fully_shard(unit, mesh, reshard_after_forward=reshard_after_forward)
        return model

    # The first step and copy of a process import modules, whose frames only a collection frees.
    original = make() if what == "copy" else torch.nn.Linear(2, 2)
    warm_up(copy.deepcopy(make()), case.batch(0, rank))
    before = settled_tensor_bytes()
    gc.disable()
    try:
        model = make() if what == "model" else copy.deepcopy(original)
        watched = [weakref.ref(model), *insides.engine_refs(model)]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            case.loss(model(case.batch(step, rank))).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert live_tensor_bytes() > before
        del model, optimizer
        assert insides.left_alive(watched) == []
        torch.distributed.barrier()
        deadline = time.monotonic() + 10  # for gloo's threads to let go of works that are over
        while live_tensor_bytes() != before and time.monotonic() < deadline:
            time.sleep(0.2)
        assert live_tensor_bytes() == before
    finally:
        gc.enable()


def retained_after_a_microbatch(mode, mesh_shape, build):
    """Return the bytes that a microbatch leaves."""
    mesh, model = init_device_mesh("cpu", mesh_shape), build()
    for layer in model:
        meshard.fully_shard(layer, mesh)
    meshard.fully_shard(model, mesh)
    x = torch.ones(1, 16, dtype=model[0].weight.dtype)
    model.set_gradient_sync(mode)
    model(x).sum().backward()  # whatever is made once is made now
    model.zero_grad()
    before = settled_tensor_bytes()
    model(x).sum().backward()
    after = settled_tensor_bytes()
    meshard.finalize_gradients(model)
    values = [param.grad.full_tensor() for param in model.parameters()]
    assert all(value.shape[1] == 16 and value.isfinite().all() for value in values)
    return after - before


def square_layers():
    return torch.nn.Sequential(*[torch.nn.Linear(16, 16, bias=False) for _ in range(3)])


def narrow_layer():
    """15 rows of 16 over two shards: a slot has 8 rows, and rank 1 owns 7."""
    return torch.nn.Sequential(torch.nn.Linear(16, 15, bias=False, dtype=torch.bfloat16))


# Each row of what is reduced ends in a count for each parameter, and is padded to 8 elements.
ROW, SLOT = 16 * 16 // 2 + 8, 8 * 16 + 8  # elements
NARROW = [8 * 16 * 2, 7 * 16 * 2]  # .grad has the dtype of the shard


@pytest.mark.parametrize(
    ("build", "mode", "mesh_shape", "kept"),
    [
        (square_layers, GradientSync.NONE, (2, 2), [3 * 2 * ROW * 4] * 2),
        (square_layers, GradientSync.REDUCE_SCATTER, (2, 2), [3 * ROW * 4] * 2),
        (square_layers, GradientSync.FULL, (2,), [3 * ROW * 4] * 2),
        (narrow_layer, GradientSync.NONE, (2, 2), [2 * SLOT * 4] * 2),
        (narrow_layer, GradientSync.REDUCE_SCATTER, (2, 2), [SLOT * 4] * 2),
        (narrow_layer, GradientSync.REDUCE_SCATTER, (2,), NARROW),  # on one axis as FULL
    ],
)
def test_what_is_kept_between_microbatches_is_exact(run_ranks, build, mode, mesh_shape, kept):
    num_ranks = torch.Size(mesh_shape).numel()
    found = run_ranks(retained_after_a_microbatch, num_ranks, mode, mesh_shape, build)
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
    units = [[*each.parameters()] for each in model.blocks] + [(model.scale, model.shift)]
    # A count for each parameter follows its gradient.
    rows = [padded(sum(1 + param.to_local().numel() for param in unit), 8) for unit in units]
    assert held[0] - held[1] == 4 * sum(rows)


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
