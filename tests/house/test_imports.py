"""Layers: imports point down by folder, in no circle, and stand at the top of a file."""

import ast
import graphlib

from tests.house.sources import SOURCES, Source

# From the bottom up. A room may import what is below it, and what is beside it without a circle.
LAYERS = [
    {"_torch", "policies", "_mesh"},
    {"_comm", "_shared_memory"},
    {"_communicators"},
    {"_params", "foreach_reduce"},
    {"_gradients"},
    {"_engine"},
]
HEIGHT = {room: height for height, rooms in enumerate(LAYERS) for room in rooms}
TOP = len(LAYERS)  # public modules and optim


def rooms_imported(source):
    for name, node in source.imports():
        if name.startswith("meshard."):
            yield name.split(".")[1], node


def upward_imports(sources):
    rooms = {source.room for source in sources} | set(HEIGHT)
    found = {}
    for source in sources:
        if source.path == "__init__.py":
            continue
        for room, node in rooms_imported(source):
            is_up = HEIGHT.get(room, TOP) > HEIGHT.get(source.room, TOP)
            if room in rooms and room != source.room and is_up:
                found.setdefault((source.path, room), source.at(node, f"imports {room}"))
    return list(found.values())


def circles(edges):
    try:
        list(graphlib.TopologicalSorter(edges).static_order())
    except graphlib.CycleError as error:
        return [" imports ".join(reversed(error.args[1]))]
    return []


def for_types_only(source):
    """Return the nodes under ``if TYPE_CHECKING:`` at the top of a file."""
    return {
        node
        for branch in source.tree.body
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for node in ast.walk(branch)
    }


def circles_of_files(sources):
    """Find circles; in one folder, a file may import the types of those above it."""
    rooms = {source.module: source.room for source in sources if source.path != "__init__.py"}
    edges = {}
    for source in sources:
        types = for_types_only(source)
        if source.path != "__init__.py":
            edges[source.module] = {
                name
                for name, node in source.imports()
                if name in rooms and not (rooms[name] == source.room and node in types)
            } - {source.module}
    return circles(edges)


def circles_of_rooms(sources):
    edges = {room: set() for room in HEIGHT}
    for source in sources:
        if source.room in HEIGHT:
            edges[source.room] |= {
                room
                for room, _ in rooms_imported(source)
                if HEIGHT.get(room) == HEIGHT[source.room] and room != source.room
            }
    return circles(edges)


def misplaced_imports(sources):
    found = []
    for source in sources:
        top = set(source.tree.body)
        # `if TYPE_CHECKING:` and `try:` at the top of a file count as its top.
        for node in source.tree.body:
            if isinstance(node, ast.If | ast.Try):
                top.update(ast.walk(node))
        for node in source.nodes:
            if isinstance(node, ast.ImportFrom) and node.level:
                found.append(source.at(node, "a relative import"))
            elif isinstance(node, ast.Import | ast.ImportFrom) and node not in top:
                found.append(source.at(node, "an import that is not at the top"))
    return found


def test_imports_point_down():
    assert upward_imports(SOURCES) == []


def test_every_folder_has_a_layer():
    folders = {source.room for source in SOURCES if source.room.startswith("_")}
    assert folders - {"__init__", "__main__"} <= set(HEIGHT)


def test_no_files_and_no_rooms_import_each_other_in_a_circle():
    assert circles_of_files(SOURCES) + circles_of_rooms(SOURCES) == []


def test_imports_are_absolute_and_at_the_top():
    assert misplaced_imports(SOURCES) == []


def test_planted_imports_are_found():
    up = Source("_mesh/layout.py", "from meshard._comm import cpu\nimport meshard.api\n")
    beside = Source("_torch/dtensor.py", "from meshard._mesh import layout\n")
    back = Source("_mesh/mesh_info.py", "from meshard._torch import dtensor\n")
    files = [
        Source("_mesh/a.py", "from meshard._mesh.b import x\n"),
        Source("_mesh/b.py", "import meshard._mesh.a\n"),
    ]
    types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import meshard._mesh.a\n"
    late = Source("api.py", "from . import x\ndef f():\n    import torch\nif 1:\n    import os\n")
    api = Source("api.py", "")
    assert upward_imports([up, api]) == [
        "_mesh/layout.py:1: imports _comm",
        "_mesh/layout.py:2: imports api",
    ]
    assert circles_of_rooms([beside]) == []
    assert len(circles_of_rooms([beside, back])) == 1
    assert len(circles_of_files(files)) == 1
    assert circles_of_files([files[0], Source("_mesh/b.py", types)]) == []
    assert misplaced_imports([late]) == [
        "api.py:1: a relative import",
        "api.py:3: an import that is not at the top",
    ]
