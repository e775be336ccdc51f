"""Blocks of Python in a page, and a server that runs them.

``python -m tests.house.pages PAGE`` runs them in order, in one namespace. Without a page, it
reads requests from its input: see ``serve``.
"""

import gc
import json
import os
import re
import signal
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

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

    A line is ``[page, folder, output, seconds]`` in JSON. Every page has a process that begins as a
    copy of this one and ends as any other: all that they share is that torch is imported once.
    """
    import torch.distributed.tensor  # noqa: F401

    import meshard  # noqa: F401

    gc.freeze()  # else every copy ends by walking what was imported
    while request := sys.stdin.readline():
        page, folder, output, seconds = json.loads(request)
        child = os.fork()
        if not child:
            signal.alarm(seconds)
            os.chdir(folder)
            file = os.open(output, os.O_CREAT | os.O_WRONLY, 0o600)
            os.dup2(file, sys.stdout.fileno())
            os.dup2(file, sys.stderr.fileno())
            run(Path(page))
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    run(Path(sys.argv[1])) if sys.argv[1:] else serve()
