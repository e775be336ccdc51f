"""The page for users of DDP: it names everything that torch's DDP has."""

import inspect
import re
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

PAGE = Path(__file__).parents[2] / "docs" / "migrate" / "from-ddp.md"
OF_JOIN = set(inspect.signature(DistributedDataParallel.join).parameters) - {"self"}
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


def test_every_argument_has_a_row():
    arguments = list(inspect.signature(DistributedDataParallel).parameters)
    assert sorted(set(arguments) - set(ROWS)) == []


def test_every_argument_of_join_has_a_row():
    assert sorted(OF_JOIN - set(ROWS)) == []


def test_every_public_method_has_a_row():
    names = [name for name in vars(DistributedDataParallel) if not name.startswith("_")]
    assert sorted(set(names) - set(ROWS)) == []


def test_every_row_is_about_something_that_is_there():
    known = {*inspect.signature(DistributedDataParallel).parameters, *dir(DistributedDataParallel)}
    for name, since in SINCE.items():
        assert (name in known) == (torch.__version__ >= since), name
    assert sorted(set(ROWS) - known - set(SINCE) - OF_JOIN) == []
    assert len(ROWS) == len(set(ROWS)), "a name is there twice"
