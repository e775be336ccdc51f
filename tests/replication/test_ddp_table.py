"""The page for users of DDP: it names everything that torch's DDP has."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

PAGE = Path(__file__).parents[2] / "docs" / "migrate" / "from-ddp.md"
# There are rows for them, also where torch is older.
SINCE = {
    "batched_grad_copy": "2.12",
    "forward_sync_buffers": "2.13",
    "finalize_backward": "2.15",
    "lazy_bucket_allocation": "2.15",
    "require_manual_backward_finalization": "2.15",
    "should_finalize_after_backward": "2.15",
}
CELLS = re.findall(r"^\| ([^|]+) \|", PAGE.read_text(), re.MULTILINE)  # first columns
ROWS = re.findall(r"`(\w+)`", " ".join(CELLS))
ARGUMENTS = set(inspect.signature(DistributedDataParallel).parameters)
OF_JOIN = set(inspect.signature(DistributedDataParallel.join).parameters) - {"self"}
METHODS = {name for name in vars(DistributedDataParallel) if not name.startswith("_")}


@pytest.mark.parametrize("names", [ARGUMENTS, OF_JOIN, METHODS], ids=["of init", "join", "methods"])
def test_every_argument_and_public_method_has_a_row(names):
    assert sorted(names - set(ROWS)) == []


def test_every_row_is_about_something_that_is_there():
    known = {*ARGUMENTS, *dir(DistributedDataParallel)}
    for name, since in SINCE.items():
        assert (name in known) == (torch.__version__ >= since), name
    assert sorted(set(ROWS) - known - set(SINCE) - OF_JOIN) == []
    assert len(ROWS) == len(set(ROWS)), "a name is there twice"
