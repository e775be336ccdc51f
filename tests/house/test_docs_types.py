"""Documents and examples: a type checker finds nothing in them, as their readers run it."""

import os
import re
import subprocess
import sys

import pytest

from tests import ROOT
from tests.clients.peers import CLIENTS
from tests.house.pages import PAGES, blocks

pytestmark = [pytest.mark.slow, pytest.mark.extras, pytest.mark.timeout(900)]

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# What torch's types do not know: that a parameter or a gradient is a DTensor, and that a slice of a
# Sequential is one.
OF_TORCH = re.compile(
    r'"(Tensor|Parameter)" has no attribute '
    r'"(full_tensor|to_local|_local_tensor|placements|device_mesh)"'
    r'|Module has no attribute "__iter__"'
)

# Lines that end in `# error` are to be found; the others are not.
PROGRAM = """
from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from meshard import FSDPModule, GradientSync, fully_shard, replicate


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = fully_shard(nn.Linear(2, 2))

    def generate(self, count: int) -> list[int]:
        return [count]


def train(net: Net) -> None:
    assert isinstance(net, FSDPModule)
    net.set_gradient_sync(GradientSync.NONE)


def of_torch(module: TorchFSDPModule) -> None: ...


model = fully_shard(Net())
model.set_gradient_sync(GradientSync.NONE)
model.generate(3)
model.head.set_reshard_after_forward(False)
model(torch.ones(1, 2)).sum().backward()
optimizer = torch.optim.AdamW(model.parameters())
train(model)
of_torch(model)
net: Net = fully_shard(Net())
fully_shard([nn.Linear(2, 2), nn.ReLU()])[0].unshard()
fully_shard([nn.Linear(2, 2)])[0].reshard()
nn.Sequential(fully_shard(nn.Linear(2, 2)), nn.ReLU())
copy = replicate(Net())
copy.generate(2)
with copy.no_sync():
    copy.set_gradient_sync(GradientSync.FULL)

model.set_gradient_sync("none")  # error
model.set_gradient_sync()  # error
copy.set_is_last_backward(1.0)  # error
fully_shard(3)  # error
fully_shard(Net(), reshard_after_forward="yes")  # error
replicate(Net(), bucket_cap="big")  # error
parameters: int = model.parameters()  # error
"""


@pytest.fixture(scope="module")
def complaints(tmp_path_factory):
    """What mypy says, in one run: lines of ``file:line: text``, by the name of the file."""
    folder = tmp_path_factory.mktemp("checked") / "checked"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "program.py").write_text(PROGRAM)
    outdated = {each.page for each in CLIENTS if each.is_outdated}
    for page in PAGES:
        if page.stem in outdated:
            continue  # it calls what this release does not have
        lines = []
        for block in blocks(page):  # on the lines that they have in the page
            lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
        name = "_".join(page.relative_to(ROOT).with_suffix("").parts).replace("-", "_")
        (folder / f"{name}.py").write_text("\n".join(lines))
    options = [
        "--config-file=",
        "--allow-redefinition",  # a page is read like a notebook
        "--disable-error-code=no-redef",
        # torch says that `.grad` may be None, and that what a module holds may be a module; and a
        # sampler of unknown items wants a declaration.
        "--disable-error-code=union-attr",
        "--disable-error-code=var-annotated",
        "--ignore-missing-imports",
        "--no-error-summary",
        f"--cache-dir={ROOT / '.mypy_cache' / 'docs'}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(folder), *map(str, EXAMPLES)],
        env=os.environ | {"MYPYPATH": str(ROOT / "src")},
        cwd=folder.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode < 2 and not done.stderr, done.stdout + done.stderr
    found = {}
    for line in done.stdout.splitlines():
        if ": error: " in line and not OF_TORCH.search(line):
            path, _, rest = line.partition(":")
            found.setdefault(os.path.basename(path), []).append(rest)
    return found


def test_no_page_and_no_example_has_an_error(complaints):
    others = {name: each for name, each in complaints.items() if name != "program.py"}
    assert not others, "\n".join(f"{name}:{line}" for name in others for line in others[name])


def test_a_sharded_module_has_its_own_methods_and_ours(complaints):
    found = {int(line.partition(":")[0]) for line in complaints.get("program.py", [])}
    lines = enumerate(PROGRAM.splitlines(), start=1)
    assert found == {number for number, line in lines if line.endswith("# error")}, complaints
