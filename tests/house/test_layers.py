"""Do imports point down, and do only the right files communicate?"""

import ast
import graphlib

import pytest

from tests.house.sources import (
    FILES,
    SRC,
    imported_modules,
    module_name,
    short,
    torch_uses,
    tree,
)

BELOW: dict[str, set[str]] = {
    "policies": set(),
    "_torch": set(),
    "_mesh": {"_torch"},
    "_comm": {"policies", "_mesh", "_torch"},
    "_shared_memory": {"_comm", "_torch"},
    "foreach_reduce": {"_comm", "_mesh"},
    "_params": {"policies", "_comm", "_mesh", "_torch"},
}
LAYERS = set(BELOW)
# The other files at the top may use one another, but never in a circle.
TOP = {path.stem for path in SRC.glob("*.py")} - LAYERS - {"__init__"}
TOP |= {"optim", "_gradients", "_engine"}

COLLECTIVES = {
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
}
# What a process group's own methods are called, where torch's functions are called otherwise.
GROUP_METHODS = {"allreduce", "allgather", "alltoall", "alltoall_base", "_allgather_base"}
MAY_COMMUNICATE = ("communicator", "streams", "blocking", "cpu")  # in the name of a file of _comm


def _home(path):
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def _used_homes(path):
    names = {name for name in imported_modules(path) if name.startswith("meshard.")}
    return {name.split(".")[1] for name in names}


@pytest.mark.parametrize("path", FILES, ids=short)
def test_imports_point_down(path):
    home = _home(path)
    if home == "__init__":
        return
    allowed = BELOW.get(home, LAYERS | TOP) | {home}
    assert not _used_homes(path) - allowed, f"{short(path)} imports from above"


def test_no_layer_is_missing_from_the_table():
    folders = {path.name for path in SRC.iterdir() if path.is_dir() and path.name[0] == "_"}
    assert folders - {"__pycache__"} <= LAYERS | TOP


def test_no_two_files_import_each_other_however_long_the_way():
    known = {module_name(path) for path in FILES} - {"meshard"}
    edges = {module_name(p): imported_modules(p) & known for p in FILES if p != SRC / "__init__.py"}
    list(graphlib.TopologicalSorter(edges).static_order())  # raises CycleError


@pytest.mark.parametrize("path", FILES, ids=short)
def test_imports_are_absolute_and_at_the_top(path):
    top, all_nodes = set(tree(path).body), list(ast.walk(tree(path)))
    # `if TYPE_CHECKING:` and `if hasattr(...)` at the top of a file count as its top.
    for node in tree(path).body:
        if isinstance(node, ast.If | ast.Try):
            top.update(ast.walk(node))
    for node in all_nodes:
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: a relative import"
        if isinstance(node, ast.Import | ast.ImportFrom):
            assert node in top, f"line {node.lineno}: an import that is not at the top"


@pytest.mark.parametrize("path", FILES, ids=short)
def test_only_the_communicator_calls_collectives(path):
    if _home(path) in ("_torch", "_shared_memory"):
        return
    if _home(path) == "_comm" and any(part in path.stem for part in MAY_COMMUNICATE):
        return
    for name, line in torch_uses(path):
        if name.startswith("torch.distributed."):
            assert name.rsplit(".", 1)[1] not in COLLECTIVES, f"line {line}: {name}"
            assert "_functional_collectives" not in name, f"line {line}: {name}"
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            assert node.func.attr not in GROUP_METHODS, f"line {node.lineno}: {node.func.attr}"
