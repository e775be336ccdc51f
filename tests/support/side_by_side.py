"""The same lines with torch's fully_shard and with ours, on the same ranks.

The peer is expected to do what was measured with each version of torch. When a test says that the
peer has changed, its row must say since when (``Changed``), and so must the documentation.
"""

import copy
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import meshard
from tests.support.models import MlpStack, seeded
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.torch_versions import on_torch

# What is done with the library that it is given, what torch's gives (``Changed``: by version), what
# ours gives. Of an exception, the name of its class.
Row = tuple[Callable[[ModuleType], Any], Any, Any]

BATCHES = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))


def parametrize_rows(rows: Sequence[Row]) -> pytest.MarkDecorator:
    """Run a test that takes ``row``, ``peer`` and ``ours`` once per row, under the row's name."""
    return pytest.mark.parametrize(
        ("row", "peer", "ours"), rows, ids=[row.__name__ for row, _, _ in rows]
    )


def run_row(row: Callable[[ModuleType], Any], lib: ModuleType) -> Any:
    """Run one row with one library: a function for ranks."""
    try:
        return row(lib)
    except Exception as error:
        return type(error).__name__
    finally:
        dist.barrier()


def run_both(row: Callable[[ModuleType], Any]) -> list[Any]:
    """Run one row with torch's library, then with ours: a function for ranks."""
    return [run_row(row, lib) for lib in (torch_fsdp, meshard)]


def run_ours(rows: Sequence[Callable[[ModuleType], Any]]) -> list[Any]:
    """Run all rows with our library: a function for ranks."""
    return [run_row(row, meshard) for row in rows]


def assert_row(found: Sequence[Sequence[Any]], peer: Any, ours: Any) -> None:
    """Compare what ``run_both`` found on every rank."""
    for found_peer, found_ours in found:
        assert found_ours == ours
        expected = on_torch(peer)
        assert found_peer == expected, "the peer has changed: update the row, and the documentation"


class CountOps(TorchDispatchMode):
    """Counts the operators with a word in their name."""

    def __init__(self, word):
        super().__init__()
        self.word, self.count = word, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += self.word in str(func)
        return func(*args, **(kwargs or {}))


class Both:
    """A model on two ranks, sharded by one library, beside the plain one."""

    def __init__(
        self,
        lib: ModuleType,
        change: Callable[[nn.Module], Any] = lambda model: None,
        policy: dict[str, torch.dtype] | None = None,
        **kwargs: Any,
    ) -> None:
        self.plain = seeded(MlpStack())
        change(self.plain)
        self.model = copy.deepcopy(self.plain)
        mesh = init_device_mesh("cpu", (2,))
        mp_policy = lib.MixedPrecisionPolicy(**(policy or {}))
        for unit in (*self.model.blocks, self.model):
            lib.fully_shard(unit, mesh=mesh, mp_policy=mp_policy, **kwargs)
        self.dtype = torch.bfloat16 if mp_policy.param_dtype else torch.float32

    @property
    def pair(self) -> tuple[nn.Module, nn.Module]:
        """The sharded model and the plain one."""
        return self.model, self.plain

    def each(self, change: Callable[[nn.Module], Any]) -> None:
        """Do the same to both, without gradients."""
        with torch.no_grad():
            change(self.model), change(self.plain)

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Evaluate both on the same batch."""
        with torch.no_grad():
            return self.model(BATCHES[0]), self.plain(BATCHES[0])

    def backward(self) -> None:
        """Add the gradient of this rank's batch, and to the plain model that of all of them."""
        self.model(BATCHES[dist.get_rank()]).float().square().mean().backward()
        self.plain(BATCHES.flatten(0, 1)).square().mean().backward()

    def is_right(self) -> str:
        """Say whether outputs, gradients and parameters of both are the same."""
        self.each(lambda model: model.zero_grad())
        self.backward()
        try:
            ours, theirs = self.forward()
            assert_same(ours.float(), theirs, self.dtype)
            assert_same(full_grads(self.model), full_grads(self.plain), self.dtype)
            assert_same(full_state(self.model), full_state(self.plain), self.dtype)
        except AssertionError:
            return "wrong"
        return "right"
