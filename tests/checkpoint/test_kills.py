"""A save that is killed leaves the checkpoints before it, and the next save goes on."""

import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from meshard.checkpoint import Checkpointer
from tests.checkpoint.kills import SCENARIOS, Acts


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_kill_at_any_act_on_the_disk_leaves_the_newest_checkpoint(tmp_path, scenario):
    command = [sys.executable, "-m", "tests.checkpoint.kills", str(tmp_path), scenario]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=580, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) >= 60


def test_files_are_synced_before_the_manifest_appears_and_that_before_anything_goes(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=1)
    checkpointer.save(1, nn.Linear(1, 1))
    acts = Acts(checkpointer, None).seen
    checkpointer.save(2, nn.Linear(1, 1))
    checkpointer.wait()
    commit = acts.index("rename manifest.json.unfinished manifest.json")
    for file in ("__0_0.distcp", ".metadata", "manifest.json.unfinished"):
        last = max(n for n, act in enumerate(acts) if act == f"write {file}")
        assert last < acts.index(f"sync {file}") < commit
    assert acts[commit - 1] == "sync step-2"
    assert acts[commit + 1 : commit + 3] == ["sync step-2", f"sync {tmp_path.name}"]
    assert acts[commit + 3] == "unlink manifest.json"
    assert not any(act.startswith("unlink") for act in acts[:commit])
