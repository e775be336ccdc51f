"""Which blocks of Python does a page hold, and do they run?

``python -m tests.architecture.pages PAGE`` runs them in order, in one namespace.
"""

import re
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


if __name__ == "__main__":
    run(Path(sys.argv[1]))
