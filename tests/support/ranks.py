"""Use these decorators to name the ranks of a test: each runs the body that stands below them.

They compose with ``parametrize``, with fixtures whose values can be pickled, and with Hypothesis
(``@given`` stands above them).
"""

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

from tests.support.rank_pool import shared_pool
from tests.support.threads import run_threads

Test = Callable[..., None]

_bodies: dict[tuple[str, str], Test] = {}  # by module and name: pickle would find the decorated one


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


def _each(around: Callable[..., Any]) -> Callable[[Test], Test]:
    """Decorate a test so that it is called by ``around(test, args, kwargs)``."""

    def decorate(test: Test) -> Test:
        _bodies[test.__module__, test.__qualname__] = test

        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            around(test, args, kwargs)

        return run

    return decorate


def on_ranks(num_ranks: int, *, timeout: float = 60) -> Callable[[Test], Test]:
    """Run the test on processes with gloo, as ``RankPool.run`` does.

    A failure shows each rank's traceback, and the variables of the innermost frame.
    """

    def run(test: Test, *given: Any) -> None:
        name = test.__module__, test.__qualname__
        shared_pool().run(_call_body, num_ranks, name, *given, timeout=timeout)

    return _each(run)


def on_threads(num_ranks: int, *, timeout: float = 60) -> Callable[[Test], Test]:
    """Run the test on threads of this process, as ``run_threads`` does: for numerics."""
    return _each(lambda f, args, kw: run_threads(f, num_ranks, *args, timeout=timeout, **kw))


def on_fake_ranks(num_ranks: int, *, rank: int = 0) -> Callable[[Test], Test]:
    """Run the test as one rank of ``num_ranks``, without the others: for counts and order."""

    def run(test: Test, args: Any, kwargs: Any) -> None:
        with fake_group(num_ranks, rank):
            test(*args, **kwargs)

    return _each(run)


def _call_body(name: tuple[str, str], args: Any, kwargs: Any) -> None:
    importlib.import_module(name[0])
    _bodies[name](*args, **kwargs)
