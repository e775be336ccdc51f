"""Use ``is_public`` to tell tests that use only public names of meshard: see the mark ``public``.

Sources are read, and nothing is run. The code of a test is its own text, decorators included, what
runs as its module is imported, and the text of every helper, constant and fixture that these name
in their module, in ``conftest``, or in what they import from ``tests``, in any depth. Strings and
comments count, because ``getattr``, ``usefixtures`` and scripts name things in strings.

A test is private if a word of its code begins with one underscore and is a name that
``src/meshard`` defines, or if a helper cannot be found. A module may use the same word for what it
defines itself, bare or after ``self``, and for what it imports from elsewhere.
"""

import ast
import builtins
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
CONFTEST = "tests.conftest"  # every module has its fixtures
AT_IMPORT, ALL = "<at import>", "<all>"  # what runs as a module is imported; everything in it


class Part(NamedTuple):
    """What a module has under a name at its top; or ``AT_IMPORT``, or ``ALL``."""

    module: str
    name: str


class Module(NamedTuple):
    """What is read of a module."""

    texts: dict[str, list[str]]  # statements at the top, by the names that they bind
    known: dict[str, Part]  # what names stand for
    own: set[str]  # what it defines, but not in classes that may inherit from meshard
    foreign: set[str]  # what it imports from neither tests nor meshard


def is_public(module: str, test: str) -> bool:
    """Whether the code of this test has no private name of meshard."""
    seen: set[Part] = set()
    pending = {Part(module, test), Part(module, AT_IMPORT), Part(CONFTEST, AT_IMPORT)}
    while pending:
        seen.add(part := pending.pop())
        used = _used_by(part)
        if used is None:
            return False
        pending |= used - seen
    return True


@functools.cache
def _used_by(part: Part) -> set[Part] | None:
    """Return the parts that the code of ``part`` names. None: it is private or cannot be found."""
    module = _read(part.module)
    if part.name not in module.texts:
        return None
    text = "\n".join(module.texts[part.name])
    if any(_is_private(dotted, module) for dotted in re.findall(r"['\"]?[\w.]+", text)):
        return None
    names = re.findall(r"(?<![\w.])[^\W\d]\w*", text)  # not those of attributes
    used = {module.known[name] for name in names if name in module.known}
    for script in re.findall(r"\btests(?:\.\w+)+", text):  # or the name of something in it
        inner = ALL
        while not _file_of(script):
            script, _, inner = script.rpartition(".")
        used.add(Part(script, inner))
    return used | {Part(each.module, AT_IMPORT) for each in used}


def _is_private(dotted: str, module: Module) -> bool:
    """Whether a name, or names with dots between them, perhaps after a quote, are meshard's own."""
    head, *rest = dotted.lstrip("'\"").split(".")
    if head in module.foreign:
        return False
    names = {head, *rest}
    first = rest[0] if head == "self" and rest else head
    if first in module.own and dotted.startswith(head):  # and not a quote
        names.remove(first)
    return any(name.startswith("_meshard") or name in _private_names() for name in names)


@functools.cache
def _read(name: str) -> Module:
    source = file.read_text() if (file := _file_of(name)) else ""
    tree, lines = ast.parse(source), source.splitlines()
    helpers: dict[str, Part] = {}
    foreign: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        for alias in node.names:
            source = getattr(node, "module", alias.name)
            bound = alias.asname or alias.name.split(".")[0]
            if source.startswith("tests"):
                inner = f"{source}.{alias.name}"
                helpers[bound] = Part(inner, ALL) if _file_of(inner) else Part(source, alias.name)
            elif not source.startswith("meshard"):
                foreign.add(bound)
    defined = {bound: Part(name, bound) for each in tree.body for bound in _bound_by(each)}
    fixtures = {} if name == CONFTEST else _read(CONFTEST).known
    known = {**fixtures, **defined, **helpers}
    own = _defined_in(tree, foreign | {*dir(builtins)})

    texts: dict[str, list[str]] = defaultdict(list, {AT_IMPORT: [], ALL: []})
    for statement in tree.body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # a docstring
        decorators = getattr(statement, "decorator_list", [])
        first = min(each.lineno for each in (statement, *decorators))
        text = "\n".join(lines[first - 1 : statement.end_lineno])
        names = [*_bound_by(statement)]
        for each in (*names, ALL):
            texts[each].append(text)
        # A decorator of tests/ may keep what it decorates in a list that others read.
        above = {node.id for d in decorators for node in ast.walk(d) if isinstance(node, ast.Name)}
        is_kept = above & (own | helpers.keys()) and not names[0].startswith("test")
        if not names or "pytestmark" in names or "autouse" in text or is_kept:
            texts[AT_IMPORT].append(text)
    return Module(dict(texts), known, own, foreign)


def _bound_by(statement: ast.AST) -> Iterator[str]:
    """Yield the names that a statement binds at the top of its module."""
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            yield from (alias.asname or alias.name.split(".")[0] for alias in names)
        case ast.Name(id=name, ctx=ast.Store()):
            yield name
        case _:
            for inner in ast.iter_child_nodes(statement):
                yield from _bound_by(inner)


def _defined_in(node: ast.AST, bases: set[str] | None = None) -> set[str]:
    """Return the names of functions, classes, variables and attributes of ``self`` in ``node``.

    If ``bases`` is given, what is inside of classes with other bases is left out: they may come
    from meshard, and have what is private there replaced. Classes that have none are added.
    """
    names: set[str] = set()
    match node:
        case ast.ClassDef(name=name) if bases is not None:
            names.add(name)
            of_class = {n.id for b in node.bases for n in ast.walk(b) if isinstance(n, ast.Name)}
            if not of_class <= bases:
                return names
            bases.add(name)
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            names.add(name)
        case ast.Name(id=name, ctx=ast.Store()):
            names.add(name)
        case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
            names.add(name)
    return names.union(*(_defined_in(each, bases) for each in ast.iter_child_nodes(node)))


@functools.cache
def _private_names() -> set[str]:
    """Return the names that begin with one underscore of what meshard defines, and of its files."""
    names: set[str] = set()
    for path in (ROOT / "src" / "meshard").rglob("*.py"):
        names.update(path.relative_to(ROOT).with_suffix("").parts)
        names |= _defined_in(ast.parse(path.read_text()))
    return {name for name in names if re.match("_[^_]", name)}


def _file_of(module: str) -> Path | None:
    path = ROOT / module.replace(".", "/")
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)
