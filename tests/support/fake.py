"""One process that acts as one rank of any number, without the others."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from tests.support.torch_testing import FakeStore


@contextmanager
def fake_group(world_size: int, rank: int = 0) -> Iterator[None]:
    """Make the default group one that only pretends to communicate.

    Collectives return at once and leave their outputs as they are, or as torch's fake backend
    fills them: use it for counts, bytes, order and memory, never for values.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
