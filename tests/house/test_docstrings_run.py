"""Do the examples in docstrings show what happens?"""

import doctest
import importlib

import pytest
import torch.distributed as dist

from tests.house.sources import FILES, module_name


@pytest.mark.parametrize("name", [module_name(path) for path in FILES])
def test_the_examples_of_a_module_run(name):
    try:
        result = doctest.testmod(importlib.import_module(name), verbose=False)
        assert result.failed == 0, f"{name}: see the output of doctest above"
    finally:
        if dist.is_initialized():  # examples let meshard make a group of one rank
            dist.destroy_process_group()
