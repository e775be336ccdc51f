"""Examples in docstrings: they show what happens."""

import doctest
import importlib
import types

import torch.distributed as dist

from tests.house.sources import SOURCES


def failing_examples(modules):
    found = []
    for module in modules:
        try:
            result = doctest.testmod(module, verbose=False)  # prints what failed
        finally:
            if dist.is_initialized():  # examples let meshard make a group of one rank
                dist.destroy_process_group()
        if result.failed:
            found.append(module.__name__)
    return found


def test_the_examples_of_every_module_run():
    modules = [importlib.import_module(source.module) for source in SOURCES]
    assert failing_examples(modules) == []


def test_an_example_that_shows_something_else_is_found():
    right = types.ModuleType("right", ">>> 1 + 1\n2\n")
    wrong = types.ModuleType("wrong", ">>> 1 + 1\n3\n")
    assert failing_examples([right, wrong]) == ["wrong"]
