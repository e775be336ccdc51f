"""Examples in docstrings: they show what happens."""

import doctest
import importlib
import pkgutil

import pytest
import torch.distributed as dist

import meshard

NAMES = [each.name for each in pkgutil.walk_packages(meshard.__path__, "meshard.")]


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("__main__")])
def test_the_examples_of_a_module_run(name):
    try:
        result = doctest.testmod(importlib.import_module(name), verbose=False)
    finally:
        if dist.is_initialized():  # examples let meshard make a group of one rank
            dist.destroy_process_group()
    assert not result.failed  # what failed was printed
