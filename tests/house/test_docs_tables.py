"""The page for users of FSDP1: it names everything that torch's FSDP1 takes."""

import inspect
import re

from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.api import ShardingStrategy, StateDictType

from tests.house.sources import ROOT

CELL = re.compile(r"^\| ([^|]+) \|", re.MULTILINE)


def first_column(page):
    """Return the names in the first column of every table."""
    return set(re.findall(r"`(\w+)", " ".join(CELL.findall(page))))


def asked_of(cls):
    return {name for name in inspect.signature(cls).parameters if not name.startswith("_")}


def test_every_argument_and_every_choice_of_fsdp1_has_a_row():
    rows = first_column((ROOT / "docs" / "from-fsdp1.md").read_text())
    asked = asked_of(FullyShardedDataParallel) | asked_of(MixedPrecision)
    asked |= {choice.name for kind in (ShardingStrategy, StateDictType) for choice in kind}
    assert len(asked) > 20 and sorted(asked - rows) == []


def test_a_missing_row_is_noticed():
    assert first_column("| `a`, `b(x)` | `c` |\n| `d_e` | |\n") == {"a", "b", "d_e"}
