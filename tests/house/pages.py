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
from dataclasses import dataclass
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
    """Return the blocks of ``page`` in order."""
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


def serve() -> None:
    """Run pages of which each is named in a line of the input, and print their exit codes.

    A line is ``[page, folder, output, seconds, ranks]`` in JSON. Every rank of a page has a process
    that begins as a copy of this one and ends as any other: all that they share is that torch is
    imported once. With more than one rank they find one another as under torchrun, and the output
    of rank r is in the file ``output`` with ``.r`` behind its name.
    """
    import torch.distributed.tensor  # noqa: F401

    import meshard  # noqa: F401

    gc.freeze()  # else every copy ends by walking what was imported
    while request := sys.stdin.readline():
        page, folder, output, seconds, ranks = json.loads(request)
        port = _free_port()
        children = []
        for rank in range(ranks):
            child = os.fork()
            if not child:
                signal.alarm(seconds)
                os.chdir(folder)
                name = output
                if ranks > 1:
                    name = f"{output}.{rank}"
                    os.environ.update(_environment(rank, ranks, port))
                file = os.open(name, os.O_CREAT | os.O_WRONLY, 0o600)
                os.dup2(file, sys.stdout.fileno())
                os.dup2(file, sys.stderr.fileno())
                run(Path(page))
                return
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(next((code for code in codes if code), 0), flush=True)


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return what torchrun sets."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    numbers["MASTER_PORT"] = port
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(each) for name, each in numbers.items()}}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


if __name__ == "__main__":
    run(Path(sys.argv[1])) if sys.argv[1:] else serve()
