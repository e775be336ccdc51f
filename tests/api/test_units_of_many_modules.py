"""Units of many modules: the work grows with the number of modules, not with its square."""

import sys

from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from tests.support.ranks import on_fake_ranks


def python_events(run):
    """Return how many calls and returns of Python and C functions ``run()`` makes."""
    count = 0

    def profile(*_):
        nonlocal count
        count += 1

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


@on_fake_ranks(8)
def test_sharding_a_list_of_modules_is_linear_in_its_length():
    mesh = init_device_mesh("cpu", (8,))

    def events(num_modules):
        modules = [nn.Linear(2, 2, bias=False) for _ in range(num_modules)]
        return python_events(lambda: meshard.fully_shard(modules, mesh))

    events(2)  # imports and caches
    assert events(200) < 5 * events(50)
