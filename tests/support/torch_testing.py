"""Which parts of torch's own test support do we borrow?

``fake``: importing torch's module registers the backend that pretends to communicate.
``ThreadLocalWorld``: torch keeps the table of process groups in one global; ranks that are threads
need one table each. The fields of that table differ between torch versions, and this class always
has the fields of the torch that is installed, which a class of ours would not.
"""

from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.distributed.multi_threaded_pg import (
    ThreadLocalWorld,
)

__all__ = ["FakeStore", "ThreadLocalWorld", "swap_world"]


def swap_world(world: object) -> object:
    """Make ``world`` torch's table of process groups and return the one that was in place."""
    old = distributed_c10d._world
    distributed_c10d._world = world
    return old
