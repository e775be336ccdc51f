"""Decorators by which a test names its ranks: each rank runs the body that stands below them.

They compose with ``parametrize``, with fixtures whose values can be pickled, and with Hypothesis
(``@given`` stands above them).
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from tests.support.fake import fake_group
from tests.support.rank_pool import shared_pool
from tests.support.threads import run_threads

Test = Callable[..., None]

_bodies: dict[tuple[str, str], Test] = {}  # by module and name: pickle would find the decorated one


def on_ranks(num_ranks: int, *, timeout: float = 60) -> Callable[[Test], Test]:
    """Run the test on processes with gloo, as ``RankPool.run`` does.

    A failure shows each rank's traceback, and the variables of the innermost frame.
    """

    def decorate(test: Test) -> Test:
        name = test.__module__, test.__qualname__
        _bodies[name] = test

        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            shared_pool().run(_call_body, num_ranks, name, args, kwargs, timeout=timeout)

        return run

    return decorate


def on_threads(num_ranks: int, *, timeout: float = 60) -> Callable[[Test], Test]:
    """Run the test on threads of this process, as ``run_threads`` does: for numerics."""

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            run_threads(test, num_ranks, *args, timeout=timeout, **kwargs)

        return run

    return decorate


def on_fake_ranks(num_ranks: int, *, rank: int = 0) -> Callable[[Test], Test]:
    """Run the test as one rank of ``num_ranks``, without the others: for counts and order."""

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            with fake_group(num_ranks, rank):
                test(*args, **kwargs)

        return run

    return decorate


def _call_body(name: tuple[str, str], args: Any, kwargs: Any) -> None:
    importlib.import_module(name[0])
    _bodies[name](*args, **kwargs)
