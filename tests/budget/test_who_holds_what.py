"""The table "Who holds what" of docs/how-to/out-of-memory.md, measured: bytes at rest and sent."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import CommLedger, fully_shard, local_optimizer, replicate
from tests.support.models import seeded
from tests.support.parity import own_part
from tests.support.ranks import on_ranks

ADAMW = torch.optim.AdamW
WIDTH, DEPTH, RANKS = 64, 3, 4
W = 4 * WIDTH * WIDTH * DEPTH  # bytes of all parameters


def make(shape, *, reshard=True, dtype=torch.float32):
    model = seeded(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))))
    model.to(dtype)
    if shape is None:
        return replicate(model)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for layer in model:
        fully_shard(layer, mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh)


def ordinary(model):
    return ADAMW(model.parameters())


def in_parts(model):
    return local_optimizer(model, ADAMW, over_replicas=True)


def with_masters(model):
    return local_optimizer(model, ADAMW, over_replicas=True, master_dtype=torch.float32)


def n(ranks):
    return (ranks - 1) / ranks


ROWS = {
    # parameters, gradients, state, sent
    "DDP": ((None,), {}, ordinary, (W, W, 2 * W, 2 * W * n(4))),
    "ZeRO-2": (((4, 1),), {}, in_parts, (W, W / 4, 2 * W / 4, 2 * W * n(4))),
    "FSDP": (((4,),), {}, ordinary, (W / 4, W / 4, 2 * W / 4, 3 * W * n(4))),
    "FSDP kept": (((4,),), {"reshard": False}, ordinary, (W / 4, W / 4, W / 2, 2 * W * n(4))),
    "HSDP": (
        ((2, 2),),
        {},
        ordinary,
        (W / 2, W / 2, 2 * W / 2, 3 * W * n(2) + 2 * W / 2 * n(2)),
    ),
    "HFSDP": (
        ((2, 2),),
        {},
        in_parts,
        (W / 2, W / 4, 2 * W / 4, 3 * W * n(2) + 2 * W / 2 * n(2)),
    ),
    # Parameters and what is sent take half, and float32 masters are a third part of the state.
    "HFSDP in bfloat16": (
        ((2, 2),),
        {"dtype": torch.bfloat16},
        with_masters,
        (W / 4, W / 4, 3 * W / 4, (3 * W * n(2) + 2 * W / 2 * n(2)) / 2),
    ),
}


@on_ranks(RANKS)
@pytest.mark.parametrize("row", ROWS)
def test_each_row_holds_and_sends_what_the_table_says(row):
    args, options, make_optimizer, expected = ROWS[row]
    model = make(*args, **options)
    optimizer = make_optimizer(model)
    dtype = options.get("dtype", torch.float32)

    def step():
        model(torch.ones(2, WIDTH, dtype=dtype)).sum().backward()
        grads = [own_part(param.grad).nbytes for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        return sum(grads)

    step()
    with CommLedger() as ledger:
        grads = step()
    params = sum(own_part(param).nbytes for param in model.parameters())
    states = [each for own in optimizer.state.values() for each in own.values()]
    state = sum(own_part(each).nbytes for each in states if each.dim())
    assert (params, grads, state) == expected[:3]
    # Counts of used parameters are sent too: 16 bytes, beside 16 KiB, in each row that is reduced.
    assert expected[3] <= sum(event.wire_bytes for event in ledger.events) <= 1.006 * expected[3]
    assert not meshard.pending_gradients(model)
