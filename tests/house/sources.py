"""The library's source files as text and syntax trees, which the rules of the house are held to.

A rule is a function from sources to a list of offenders, ``path:line: what``. A test of the rule
gives it ``SOURCES``; a second one gives it a planted source, to show that the rule can fail.
"""

import ast
import dataclasses
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "meshard"


@dataclasses.dataclass(frozen=True)
class Source:
    """One file of the library; ``path`` is relative to ``src/meshard``."""

    path: str
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.path)

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def room(self) -> str:
        """The folder, or the name of a file at the top."""
        return self.path.split("/")[0].removesuffix(".py")

    @property
    def module(self) -> str:
        """The dotted name under which the file is imported."""
        parts = ["meshard", *self.path.removesuffix(".py").split("/")]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def at(self, node: ast.AST, what: str) -> str:
        """Describe an offender."""
        return f"{self.path}:{getattr(node, 'lineno', 0)}: {what}"

    def imports(self) -> Iterator[tuple[str, ast.AST]]:
        """Yield the absolute name of all that is imported: modules, and names in modules."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.name, node
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module, node
                for alias in node.names:
                    yield f"{node.module}.{alias.name}", node

    @functools.cached_property
    def torch_names(self) -> dict[str, str]:
        """What each name that is imported from torch stands for, as a dotted name."""
        names = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] == "torch":
                        names[alias.asname or "torch"] = alias.name if alias.asname else "torch"
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                for alias in node.names:
                    names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        return names

    def torch_name_of(self, node: ast.AST) -> str | None:
        """Return the dotted torch name that an expression reads, or None."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id in self.torch_names:
            return ".".join([self.torch_names[node.id], *reversed(parts)])
        return None

    def torch_uses(self) -> Iterator[tuple[str, ast.AST]]:
        """Yield every dotted torch name that is imported or read."""
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                for alias in node.names:
                    yield f"{node.module}.{alias.name}", node
            elif isinstance(node, ast.Attribute) and (name := self.torch_name_of(node)):
                yield name, node


def read_sources() -> list[Source]:
    """Return every file below ``src/meshard``."""
    return [
        Source(path.relative_to(SRC).as_posix(), path.read_text())
        for path in sorted(SRC.rglob("*.py"))
    ]


SOURCES = read_sources()


def new(offenders: Iterable[str], known: Iterable[str] = ()) -> list[str]:
    """Return the offenders that ``known`` does not have; lines move, so they are not compared."""
    known = set(known)
    return [each for each in offenders if _without_line(each) not in known]


def _without_line(offender: str) -> str:
    path, line, what = offender.split(":", 2)
    return f"{path}:{what}" if line.isdigit() else offender
