"""Blocks of Python in a page, and a server that runs them.

``python -m tests.house.pages PAGE`` runs them in order, in one namespace. Without a page, it
reads requests from its input: see ``serve``.
"""

import gc
import json
import os
import re
import signal
import socket
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"^(?P<indent> *)```python\b[^\n]*\n(?P<code>.*?)^ *```[ \t]*$", re.DOTALL | re.MULTILINE
)
NO_RUN = re.compile(r"<!-- no-run: \S[^>]*-->\s*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block of Python in a page."""

    code: str
    line: int  # of its first line of code, from 1
    runs: bool  # False after `<!-- no-run: reason -->`: then it is only compiled


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start("code")) + 1
        runs = NO_RUN.search(text[: match.start()]) is None
        found.append(Block(code=textwrap.dedent(match["code"]), line=line, runs=runs))
    return found


def run(page: Path) -> None:
    """Compile all blocks of ``page`` and run those that run."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        # Empty lines in front, so that a traceback names the line of the page.
        compiled = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
        if block.runs:
            exec(compiled, namespace)


def fork_ranks(ranks: int, be_rank: Callable[[int, dict[str, str]], None]) -> list[int] | None:
    """Call ``be_rank`` in a copy of this process for each rank, and return their exit codes.

    It gets the rank, and the environment that torchrun would set. In a copy this returns None: it
    is to end as any other process does.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(ranks):
        if not (child := os.fork()):
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "MASTER_PORT": port}
            numbers |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            found = {name: str(each) for name, each in numbers.items()}
            return be_rank(rank, {"MASTER_ADDR": "127.0.0.1", **found})
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def serve() -> None:
    """Run pages of which each is named in a line of the input, and print their exit codes.

    A line is ``[page, folder, output, seconds, ranks]`` in JSON. Every rank of a page has a process
    that begins as a copy of this one: all that they share is that torch is imported once. The
    output of rank r is in the file ``output`` with ``.r`` behind its name.
    """
    import torch.distributed.tensor  # noqa: F401

    import meshard  # noqa: F401

    gc.freeze()  # else every copy ends by walking what was imported
    while request := sys.stdin.readline():
        *given, ranks = json.loads(request)
        if (codes := fork_ranks(ranks, partial(_be_rank, *given))) is None:
            return
        print(next((code for code in codes if code), 0), flush=True)


def _be_rank(
    page: str, folder: str, output: str, seconds: int, rank: int, environment: dict[str, str]
) -> None:
    signal.alarm(seconds)
    os.chdir(folder)
    file = os.open(f"{output}.{rank}", os.O_CREAT | os.O_WRONLY, 0o600)
    os.dup2(file, sys.stdout.fileno())
    os.dup2(file, sys.stderr.fileno())
    if environment["WORLD_SIZE"] != "1":
        os.environ.update(environment)
    run(Path(page))


if __name__ == "__main__":
    run(Path(sys.argv[1])) if sys.argv[1:] else serve()
