"""The table of docs/how-to/out-of-memory.md: plans of a model of 70 B parameters on 64 ranks."""

import re
from functools import partial

import pytest

from examples.plan_models import job
from meshard import GradientSync
from meshard.planning import plan
from tests import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PAGE = ROOT / "docs" / "how-to" / "out-of-memory.md"
BASE = {"replicas": 8, "microbatches": 2, "recompute": False}
PARTS = {"over_replicas": True}
MASTERS = {"masters": True, **PARTS}
ROWS = {  # by the beginning of a row
    "nothing": {},
    "from `reshard_after_forward=False`": {"reshard": False},
    "from `until_last=NONE`": {"until_last": GradientSync.NONE},
    "[recomputation]": {"recompute": True},
    "[state over replicas]": PARTS,
    "the same, and parameters in bfloat16": MASTERS,
    "[state in host memory]": {"state_on_host": True},
    "[parameters in host memory]": {"offload": True},
    "replicas, masters, host state": {**MASTERS, "state_on_host": True, "recompute": True},
}


def numbers(cell):
    return re.findall(r"\d+\.\d", cell)


def test_the_table_has_no_other_rows():
    text = PAGE.read_text().split("## Who holds what")[0]
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(ROWS)


@pytest.mark.parametrize("begin", ROWS)
def test_a_plan_has_what_the_table_says(begin):
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {begin}")]
    (line,) = lines
    peak, state, sent = line.strip("| ").split(" | ")[1:4]
    made = partial(job, "llama:70b", **(BASE | ROWS[begin]))
    planned = plan(made, world_size=64, steps=2)
    # Of a row that goes from one setting to another, the first number is that of the setting.
    assert numbers(peak)[0] == f"{planned.peak_bytes / 1e9:.1f}"
    assert numbers(state)[0] == f"{planned.state_bytes / 1e9:.1f}"
    assert numbers(sent)[0] == f"{planned.wire_bytes / 1e9:.1f}"
    if "of it on the host" in state:
        assert numbers(state)[1] == f"{planned.host_bytes / 1e9:.1f}"
