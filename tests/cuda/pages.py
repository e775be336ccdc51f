"""The first day on a GPU: examples, pages and clients, as they stand, on one rank.

Each runs in a process of its own, with the environment that torchrun sets.
"""

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests import ROOT
from tests.clients.scripts import of_torch
from tests.cuda.device import NotRehearsed
from tests.house.pages import PAGES, blocks

JOBS, SECONDS = 8, 80
EXAMPLES = {  # with arguments
    "checkpoint_elsewhere": [],
    "drop_ranks": [],
    "fsdp": [],
    "hsdp": [],
    "huggingface_lora": [],
    "muon": [],
    "offload": [],
    "tensor_parallel": [],
    "train_gpt": ["--steps", "300", "--dtype", "bfloat16"],
}
# Pages of clients that need one rank, and whose packages most machines with GPUs have.
CLIENTS = ["transformers", "transformers-from-pretrained", "trainer", "accelerate", "peft",
           "cross-entropy", "state-dict-functions"]  # fmt: skip
# They use samplers of torch or generators that draw on the CPU.
NEED_CPU_FOR_DEFAULT = {"settings.md", "loops.md", "from-one-process-to-two-nodes.md"}
KEEP_LOSSES = """
import json as _json
with open("losses.json", "w") as _file:
    _json.dump([float(_loss) for _loss in globals().get("losses", [])], _file)
"""


def run_all(commands):
    """Run commands beside each other; return for each its exit code, output and losses."""

    def run(numbered):
        number, command = numbered
        paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29700 + number)}
        extra = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg"}
        with tempfile.TemporaryDirectory() as folder:
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=folder,
                env=os.environ | ranks | address | extra,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            try:
                output, _ = process.communicate(timeout=SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
                output += f"\nIt was killed after {SECONDS} seconds."
            losses = Path(folder) / "losses.json"
            found = json.loads(losses.read_text()) if losses.exists() else []
            return process.returncode, output, found

    with ThreadPoolExecutor(JOBS) as pool:
        return list(pool.map(run, enumerate(commands)))


def check_all(commands):
    """Run commands by name; raise with the names of those that failed, and print their output."""
    failed = []
    for name, (code, output, _) in zip(commands, run_all(commands.values()), strict=True):
        if code:
            failed.append(name)
            print(f"----- {name}: exit code {code}\n{output[-3000:]}", flush=True)
    assert not failed, f"{len(failed)} of {len(commands)} failed: {', '.join(failed)}"
    return f"{len(commands)} of them"


def pages(default_device=None):
    """Blocks of pages, in order; with a ``default_device``, after ``torch.set_default_device``."""
    begin = (
        f"import torch\ntorch.set_default_device({default_device!r})\n" if default_device else ""
    )
    found = {}
    for page in PAGES:
        parts = [each.code for each in blocks(page) if each.runs]
        if parts and not (default_device and page.name in NEED_CPU_FOR_DEFAULT):
            found[page.name] = ["-c", begin + "\n".join(parts)]
    return check_all(found)


def examples():
    path = ROOT / "examples"
    return check_all(
        {name: [str(path / f"{name}.py"), *options] for name, options in EXAMPLES.items()}
    )


def clients():
    """The same losses as with torch's ``fully_shard``, to the last bit."""
    scripts = {}
    for name in CLIENTS:
        code = "\n".join(each.code for each in blocks(ROOT / "docs" / "how-to" / f"{name}.md"))
        scripts[name] = ["-c", code + KEEP_LOSSES]
        scripts[f"{name}, torch"] = ["-c", of_torch(code) + KEEP_LOSSES]
    results = dict(zip(scripts, run_all(scripts.values()), strict=True))
    problems = []
    for name, (code, output, _) in results.items():
        if code:
            print(f"----- {name}: exit code {code}\n{output[-3000:]}", flush=True)
            problems.append(f"{name} failed")
    for name in CLIENTS:
        ours, of_peer = results[name][2], results[f"{name}, torch"][2]
        if ours != of_peer or not ours:
            problems.append(f"{name}: {ours} and {of_peer}")
    assert not problems, "; ".join(problems)
    return f"{len(CLIENTS)} of them, losses as with torch, to the last bit"


def checks(device):
    def only_on_a_device(check, *args):
        if not device.is_real:
            raise NotRehearsed  # tests/house and tests/clients run them on the CPU
        return check(*args)

    return {
        "pages": lambda: only_on_a_device(pages),
        "pages, after set_default_device": lambda: only_on_a_device(pages, "cuda"),
        "examples": lambda: only_on_a_device(examples),
        "clients": lambda: only_on_a_device(clients),
    }
