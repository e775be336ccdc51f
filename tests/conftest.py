"""What every test finds in place: ranks to run on, seeds, and nothing left by the last test."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: it is read then
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

from tests.support.public import ROOT, is_public
from tests.support.rank_pool import shared_pool

SEED = 20

# How many examples Hypothesis tries: HYPOTHESIS_PROFILE=dev, ci or night.
common = settings(
    deadline=None,  # the first example of a run pays for imports
    print_blob=True,
    report_multiple_bugs=False,  # each would be shrunk
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("dev", common, max_examples=25, derandomize=True)
settings.register_profile("ci", common, max_examples=50, derandomize=True)
settings.register_profile("night", common, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Accept the setting of pytest-timeout where that is not installed."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini(
            "timeout", "seconds that a test may take; does nothing without pytest-timeout"
        )


def pytest_configure(config: pytest.Config) -> None:
    """Run a test that is asked for by its name, also a slow one."""
    if config.option.markexpr == "not slow" and any("::" in each for each in config.args):
        config.option.markexpr = ""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests that use public names of meshard only, if they are asked for.

    What decides stands in ``tests.support.public``. It reads the sources, which takes a second.
    """
    if "public" in item.config.option.markexpr and isinstance(item, pytest.Function):
        path = item.path.relative_to(ROOT).with_suffix("")
        name = item.nodeid.split("::")[1].partition("[")[0]
        if is_public(".".join(path.parts), name):
            item.add_marker("public")


def pytest_collection_finish() -> None:
    """Spare what is imported by now from garbage collection: it took 8 % of the CPU time."""
    gc.freeze()


@pytest.fixture(scope="session")
def run_ranks() -> Callable[..., list[Any]]:
    """``run_ranks(fn, n, *args, timeout=60, **kwargs)``: see ``RankPool.run``."""
    return shared_pool().run


def pytest_sessionfinish() -> None:
    """Let the processes of the pool end."""
    shared_pool().close()


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seed torch before each test, so that a test gives the same alone and among others."""
    torch.manual_seed(SEED)
    return SEED


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    """Fail a test that leaves a process group behind, and remove it for the next one."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left a process group initialised in the main process.")
