"""Is each private name of torch used in one file only, and is it still there?"""

import importlib
from collections import defaultdict

import pytest

from tests.house.sources import FILES, short, torch_uses


def _private_part(name):
    """Return ``name`` up to its first private part, or None."""
    parts = name.split(".")
    for length, part in enumerate(parts, 1):
        if part.startswith("_") and not part.startswith("__"):
            return ".".join(parts[:length])
    return None


def _uses():
    """Return which files use which private name, cut at the first private part."""
    found = defaultdict(set)
    for path in FILES:
        for name, _ in torch_uses(path):
            private = _private_part(name)
            if private is not None:
                found[private].add(short(path))
    return found


USES = _uses()


def _resolve(name):
    parts = name.split(".")
    value = importlib.import_module(parts[0])
    for length, part in enumerate(parts[1:], 2):
        if not hasattr(value, part):
            importlib.import_module(".".join(parts[:length]))
        value = getattr(value, part)
    return value


def test_each_private_name_is_used_in_one_file():
    twice = {name: sorted(files) for name, files in USES.items() if len(files) > 1}
    assert not twice


def test_the_private_names_are_still_there():
    for name in USES:
        assert _resolve(name) is not None, name


def test_a_name_that_is_gone_is_noticed():
    assert _private_part("torch.utils._pytree.tree_map") == "torch.utils._pytree"
    assert _private_part("torch.Tensor.__add__") is None
    with pytest.raises((AttributeError, ModuleNotFoundError)):
        _resolve("torch.utils._never_there")
