"""Private names of torch stand in ``_torch`` only, and exist."""

import ast
import importlib

import pytest

from tests.house.sources import FILES, SRC, short, torch_names, torch_uses, tree

OUTSIDE = [path for path in FILES if path.relative_to(SRC).parts[0] != "_torch"]
# Of tensors, meshes and process groups. Those of modules (``_parameters``) may be read anywhere.
PRIVATE_ATTRIBUTES = {
    "_allgather_base",
    "_backward_hooks",
    "_base",
    "_concatenate",
    "_execution_engine",
    "_flatten",
    "_get_backend",
    "_is_view",
    "_local_tensor",
    "_post_accumulate_grad_hooks",
    "_register_hook_dict",
    "_sequence_nr",
    "_use_count",
    "_version",
}
# Still to be moved.
REMAINING = {
    ("_comm/buffers.py", "torch._foreach_copy_"),
    ("_comm/communicator.py", "torch.autograd._profiler_enabled"),
    ("_comm/gradient_buffer.py", "torch._chunk_cat"),
    ("optim/flat_slices.py", "_base"),
    ("_engine/averages.py", "AveragedModel.update_parameters"),
    ("_engine/optimizer_hooks.py", "Optimizer.zero_grad"),
    ("_engine/optimizer_hooks.py", "nn.Module.zero_grad"),
}


def private_part(name):
    """Return ``name`` up to its first private part, or None."""
    parts = name.split(".")
    for length, part in enumerate(parts, 1):
        if part.startswith("_") and not part.startswith("__"):
            return ".".join(parts[:length])
    return None


def private_names(path):
    """Return the private names of torch in a file, each with its line."""
    names = [(private_part(name), line) for name, line in torch_uses(path)]
    return [
        (name, line)
        for name, line in names
        if name is not None and not name.startswith("torch.nn.Module.")
    ]


def private_attributes(path):
    """Return reads of private attributes of other objects than ``self``, each with its line."""
    return [
        (node.attr, node.lineno)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute)
        and node.attr in PRIVATE_ATTRIBUTES
        and not (isinstance(node.value, ast.Name) and node.value.id == "self")
    ]


def resolve(name):
    parts = name.split(".")
    value = importlib.import_module(parts[0])
    for length, part in enumerate(parts[1:], 2):
        if not hasattr(value, part):
            importlib.import_module(".".join(parts[:length]))
        value = getattr(value, part)
    return value


def test_private_names_are_used_in_one_folder_only():
    offenders = [
        f"{short(path)}:{line} {name}"
        for path in OUTSIDE
        for name, line in (*private_names(path), *private_attributes(path))
        if (short(path), name) not in REMAINING
    ]
    assert not offenders, "\n".join(offenders)


def root_of(node):
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def assigned_attributes(path):
    """Return assignments to attributes of what a file imports from torch."""
    for node in ast.walk(tree(path)):
        targets = []
        if isinstance(node, ast.Assign):
            targets = [each for each in node.targets if isinstance(each, ast.Attribute)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            targets = node.args[:1]
        for target in targets:
            if root_of(target) in torch_names(path):
                yield ast.unparse(target), node.lineno


def test_torch_is_changed_in_one_folder_only():
    offenders = [
        f"{short(path)}:{line} {name}"
        for path in OUTSIDE
        for name, line in assigned_attributes(path)
        if (short(path), name) not in REMAINING
    ]
    assert not offenders, "\n".join(offenders)


def test_the_private_names_exist():
    for path in set(FILES) - set(OUTSIDE):
        for name, _ in private_names(path):
            assert resolve(name) is not None, name


def test_a_name_that_is_gone_is_noticed():
    assert private_part("torch.utils._pytree.tree_map") == "torch.utils._pytree"
    assert private_part("torch.Tensor.__add__") is None
    with pytest.raises((AttributeError, ModuleNotFoundError)):
        resolve("torch.utils._never_there")
