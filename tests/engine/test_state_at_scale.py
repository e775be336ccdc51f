"""State per rank of models that fit on no machine here: the table of docs/explanation/memory.md.

The modules, units and optimizer are real; their tensors are on the meta device, and the ranks are
those of a group that only pretends to communicate.
"""

import re

import pytest
import torch

from meshard import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    flat_optimizer,
    fully_shard_units,
)
from tests import ROOT
from tests.support.fake import fake_group
from tests.support.models import Transformer, TransformerBlock

ROW = re.compile(r"^\| (\d+ blocks of width \d+, \d+ tokens) \| (.+) \|$", re.MULTILINE)
ROWS = [(8, OffloadPolicy()), (128, OffloadPolicy()), (256, CPUOffloadPolicy(pin_memory=False))]


def rows_of_page():
    page = (ROOT / "docs" / "explanation" / "memory.md").read_text()
    return [(shape, cells.split(" | ")) for shape, cells in ROW.findall(page)]


def local_bytes(tensors):
    return sum(tensor.to_local().nbytes for tensor in tensors)


def measure(shape, rank, num_ranks, offload):
    """Return the cells of a row, as rank ``rank`` has them."""
    depth, dim, vocab = map(int, re.findall(r"\d+", shape))
    with fake_group(num_ranks, rank):
        with torch.device("meta"):
            model = Transformer(vocab=vocab, dim=dim, heads=dim // 128, depth=depth, tied=True)
        numel = sum(param.numel() for param in model.parameters())
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        units = fully_shard_units(
            model, units=TransformerBlock, mp_policy=policy, offload_policy=offload
        )
        assert len(units) == depth + 1
        params = list(model.parameters())
        optimizer = flat_optimizer(model, torch.optim.AdamW)
        for param in params:
            param.grad = torch.zeros_like(param)
        optimizer.step()
        moments = [
            each[name] for each in optimizer.state.values() for name in each if "exp" in name
        ]
        state = local_bytes([*params, *(param.grad for param in params), *moments])
        unsharded = 2 * sum(param.numel() for param in model.blocks[0].parameters())
    assert abs(state - 16 * numel / num_ranks) < 1e-3 * state  # 4 of weight, gradient, moments
    how = "" if offload == OffloadPolicy() else ", [offloaded](../how-to/offload.md)"
    billions, gigabytes = numel / 1e9, [f"{each / 1e9:.1f}" for each in (state, unsharded)]
    return [f"{billions:.1f}", f"{num_ranks}{how}", *gigabytes]


@pytest.mark.parametrize(
    "position", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 2))]
)
def test_the_table_is_what_the_modules_take(position):
    rows = rows_of_page()
    assert len(rows) == len(ROWS)
    shape, cells = rows[position]
    assert measure(shape, 0, *ROWS[position]) == cells
