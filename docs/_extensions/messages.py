"""Directive ``{messages}``: every text that meshard raises or warns with, read from its sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

SOURCES = Path(__file__).resolve().parents[2] / "src" / "meshard"
# Calls with a name like these raise or warn with one of their arguments.
WARNS = ("warnings.warn", "warn_user", "_logger.warning")


@dataclass(frozen=True)
class Message:
    """One text, with the class of the error, or "Warning"."""

    kind: str
    text: str  # what a program fills in is in braces


def text_of(node: ast.expr, constants: dict[str, ast.expr]) -> str:
    """Return the text of an expression; "" if it has none of its own."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        parts = [
            each.value if isinstance(each, ast.Constant) else _slot(each) for each in node.values
        ]
        return "".join(str(part) for part in parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left, constants) + text_of(node.right, constants)
    if isinstance(node, ast.Name) and node.id in constants:
        return text_of(constants[node.id], {})
    return ""


def _slot(node: ast.expr) -> str:
    value = node.value if isinstance(node, ast.FormattedValue) else node
    return "{" + (value.attr if isinstance(value, ast.Attribute) else _name_of(value)) + "}"


def _name_of(value: ast.expr) -> str:
    names = [each.attr for each in ast.walk(value) if isinstance(each, ast.Attribute)]
    names += [each.id for each in ast.walk(value) if isinstance(each, ast.Name)]
    return next((name.strip("_") for name in names if name != "self"), "...")


def messages_of(tree: ast.Module) -> Iterator[Message]:
    """Yield the texts that a file raises or warns with, from top to bottom."""
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        call: Any = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call):
            continue
        name = ast.unparse(call.func)
        is_warning = name in WARNS
        if not is_warning and not isinstance(node, ast.Raise):
            continue
        text = max((text_of(each, constants) for each in call.args), key=len, default="")
        if " " in text:  # else it is a word that another text is made of
            yield Message("Warning" if is_warning else name, text)


def all_messages() -> dict[str, list[Message]]:
    """Return the texts by the subject of the file: the first sentence of its docstring."""
    found: dict[str, list[Message]] = {}
    for path in sorted(SOURCES.rglob("*.py")):
        tree = ast.parse(path.read_text())
        texts = list(dict.fromkeys(messages_of(tree)))
        if texts:
            subject = (ast.get_docstring(tree) or path.stem).split("\n\n")[0].replace("\n", " ")
            found.setdefault(subject.rstrip("."), []).extend(texts)
    return found


class Messages(Directive):
    """A section for each subject, with a definition list of its texts."""

    has_content = False

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        sections: list[nodes.Node] = []
        for subject, texts in sorted(all_messages().items()):
            section = nodes.section(ids=[nodes.make_id(subject)])
            section += nodes.title(text=subject)
            entries = nodes.definition_list()
            for each in texts:
                entry = nodes.definition_list_item()
                entry += nodes.term("", "", nodes.literal(text=each.kind))
                entry += nodes.definition("", nodes.paragraph(text=each.text))
                entries += entry
            section += entries
            sections.append(section)
        return sections


def setup(app: Any) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("messages", Messages)
    return {"parallel_read_safe": True}
