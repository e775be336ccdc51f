"""Which files, syntax trees and imports does the library have?"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "meshard"

FILES = sorted(SRC.rglob("*.py"))


def short(path: Path) -> str:
    """Return ``path`` as it is written in an error or a test's name."""
    return path.relative_to(SRC).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    """Return the parsed file."""
    return ast.parse(path.read_text(), filename=str(path))


def module_name(path: Path) -> str:
    """Return the dotted name under which ``path`` is imported."""
    parts = ["meshard", *path.relative_to(SRC).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports_at_run_time(node: ast.AST) -> Iterator[ast.AST]:
    """Iterate over all nodes but those under ``if TYPE_CHECKING:``."""
    if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _imports_at_run_time(child)


def imported_modules(path: Path) -> set[str]:
    """Return the absolute names of all that ``path`` imports: modules, and names in modules."""
    names = set()
    for node in _imports_at_run_time(tree(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def torch_names(path: Path) -> dict[str, str]:
    """Return what each name that ``path`` imports from torch stands for, as a dotted name."""
    names = {}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    names[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def torch_uses(path: Path) -> Iterator[tuple[str, int]]:
    """Yield every dotted torch name that ``path`` imports or reads, and its line."""
    names = torch_names(path)
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno
        elif isinstance(node, ast.Attribute):
            parts = []
            inner: ast.expr = node
            while isinstance(inner, ast.Attribute):
                parts.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id in names:
                yield ".".join([names[inner.id], *reversed(parts)]), node.lineno
