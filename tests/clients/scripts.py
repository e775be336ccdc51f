"""Scripts in the pages of clients, run on gloo ranks with either library.

A script is all blocks of Python of a page. It leaves a list ``losses``, and may print more. With
torch's own ``fully_shard``, the lines in which it names meshard are replaced by those of torch.
"""

import faulthandler
import gc
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests import ROOT
from tests.clients.surroundings import prepare
from tests.house.pages import blocks, fork_ranks

PAGES = ROOT / "docs" / "how-to"
SECONDS = 200
OF_TORCH = [
    (r"^from meshard\.compat import patch_torch\n", ""),
    (r"^patch_torch\(\).*\n", ""),
    (r"^from meshard import ", "from torch.distributed.fsdp import "),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a script left on each rank."""

    losses: list[list[float]]  # by rank
    printed: list[str]


def script(page: Path) -> str:
    """Return the program that ``page`` shows, with meshard."""
    return "\n".join(block.code for block in blocks(page))


def of_torch(code: str) -> str:
    """Return the same program with torch's own ``fully_shard``."""
    for pattern, replacement in OF_TORCH:
        code = re.sub(pattern, replacement, code, flags=re.MULTILINE)
    assert "meshard" not in code, "only imports may differ between the two libraries"
    return code


class Server:
    """A process that has imported torch, and forks the ranks of each script."""

    def __init__(self) -> None:
        paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        fixed = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.clients.scripts"],
            env={"GLOO_SOCKET_IFNAME": "lo"} | os.environ | fixed | offline,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str, num_ranks: int = 2) -> Run:
        """Run ``code`` on ranks, and return what it left.

        Raises:
            RuntimeError: A rank failed; with what all ranks have printed.
        """
        assert self._process.stdin and self._process.stdout
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "train.py").write_text(code)
            print(json.dumps([name, num_ranks]), file=self._process.stdin, flush=True)
            codes = json.loads(self._process.stdout.readline())
            printed = [(folder / f"printed-{rank}").read_text() for rank in range(num_ranks)]
            if any(codes):
                errors = [(folder / f"errors-{rank}").read_text() for rank in range(num_ranks)]
                raise RuntimeError("\n".join([f"exit codes {codes}", *printed, *errors]))
            losses = [
                json.loads((folder / f"losses-{rank}").read_text()) for rank in range(num_ranks)
            ]
            return Run(losses=losses, printed=printed)

    def close(self) -> None:
        self._process.communicate()


def serve() -> None:
    """Run the scripts of which each is named in a line of the input, and print their exit codes.

    A line is ``[folder, num_ranks]`` in JSON. Ranks begin as copies of this process, in which torch
    is imported. What imports ``fully_shard`` from torch they import after ``patch_torch``.
    """
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401

    gc.freeze()
    while request := sys.stdin.readline():
        folder, num_ranks = json.loads(request)
        if (codes := fork_ranks(num_ranks, partial(_be_rank, Path(folder)))) is None:
            return
        print(json.dumps(codes), flush=True)


def _be_rank(folder: Path, rank: int, environment: dict[str, str]) -> None:
    """Run a script as torchrun would, and write the losses that it leaves."""
    import torch

    faulthandler.dump_traceback_later(SECONDS - 10)
    signal.alarm(SECONDS)
    for stream, name in ((sys.stdout, "printed"), (sys.stderr, "errors")):
        os.dup2(
            os.open(folder / f"{name}-{rank}", os.O_CREAT | os.O_WRONLY, 0o600), stream.fileno()
        )
    os.environ |= environment
    own = folder / f"rank-{rank}"
    own.mkdir()
    os.chdir(own)
    path = folder / "train.py"
    prepare(path.read_text())
    sys.argv = [str(path)]
    namespace: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    if "meshard" in path.read_text():
        import meshard

        made = meshard.FSDPModule.__subclasses__()  # a class for each that was sharded
        assert any(issubclass(each, torch.nn.Module) for each in made), "torch has sharded"
    (folder / f"losses-{rank}").write_text(json.dumps(namespace["losses"]))


if __name__ == "__main__":
    serve()
