"""A training script that moves over by changing one import: run with torch's library and ours."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import meshard
from tests.peers.both import mesh_of
from tests.support.collectives import Collectives
from tests.support.models import Made, MlpBlock, seeded
from tests.support.parity import assert_same
from tests.support.ranks import on_ranks
from tests.support.spread import slow


def recomputed(module, x):
    return checkpoint(module.inner, x, use_reentrant=False)


def train(lib, mesh, reshard, dtypes, recompute):
    """Return losses, gradients and parameters of two steps of three microbatches."""
    blocks = [MlpBlock(16, 32) for _ in range(3)]
    model = seeded(
        Made(
            lambda m, tokens: m.head(m.blocks[2](m.blocks[1](m.blocks[0](m.embed(tokens))))),
            embed=nn.Embedding(11, 16),
            blocks=[Made(recomputed, inner=block) for block in blocks] if recompute else blocks,
            head=nn.Linear(16, 11),
        )
    )
    for unit in (*model.blocks, model):
        policy = lib.MixedPrecisionPolicy(**dtypes)
        lib.fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    assert isinstance(model, lib.FSDPModule)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step in range(2):
        for number in range(3):
            is_last = number == 2
            model.set_is_last_backward(is_last)
            model.set_requires_all_reduce(is_last)
            seed = 100 * step + 10 * number + dist.get_rank()
            tokens = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(seed))
            logits = model(tokens).float()
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())
            loss.backward()
            found.append(loss.detach())
        found += [param.grad.full_tensor() for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found + [param.full_tensor().detach() for param in model.parameters()]


PADDING = 31  # bytes: rows are of 16 bytes, and those of gradients of 8 elements
BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


@pytest.mark.parametrize(
    ("mesh_shape", "sends", "reshard", "dtypes", "recompute"),
    [
        ((2, 2), True, 2, BF16, True),
        # Ranks that read one another's memory send nothing.
        slow((4,), False, True, {}, False),
        slow((2, 2), False, True, BF16, True),
        slow((4,), True, False, {}, True),
    ],
)
@on_ranks(4)
def test_one_changed_import_gives_the_same_training_with_no_more_communication(
    mesh_shape, sends, reshard, dtypes, recompute
):
    args = (mesh_of(*mesh_shape), reshard, dtypes, recompute)
    with warnings.catch_warnings(), Collectives() as peer:
        warnings.simplefilter("ignore")  # the peer warns of outputs that are views
        theirs = train(torch_fsdp, *args)
    with pytest.MonkeyPatch.context() as patch, Collectives() as mine:
        patch.setenv("MESHARD_SHARED_MEMORY", str(int(not sends)))
        ours = train(meshard, *args)
    dtype = torch.bfloat16 if dtypes else torch.float32
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert_same(one, other, dtype, what=f"value {number}")
    for kind, count in mine.counts.items():
        assert count <= peer.counts.get(kind, 0), f"{mine.counts} {peer.counts}"
        padding = PADDING * count * dist.get_world_size()
        assert mine.bytes[kind] <= peer.bytes[kind] + padding, f"{mine.bytes} {peer.bytes}"
    if sends:
        assert mine.counts["gather"] > 6
