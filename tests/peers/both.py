"""How a situation runs with torch's fully_shard and with ours, on the same ranks."""

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import meshard
from tests.support.models import MlpStack, seeded
from tests.support.parity import assert_same, full_grads, full_state

BATCHES = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))


def mesh_of(*shape: int) -> DeviceMesh:
    """Return a mesh, whose last axis shards; without a shape, of all ranks."""
    shape = shape or (dist.get_world_size(),)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def compare_gradients(model: nn.Module, plain: nn.Module, run: Callable[[nn.Module], Any]) -> str:
    """Do the same with a sharded model and the plain one, and compare their gradients."""
    for each in (model, plain):
        run(each)
    assert_same(full_grads(model), full_grads(plain))
    return "right"


LIBRARIES = {"torch": torch_fsdp, "meshard": meshard}


def run(situation: Callable[[ModuleType], Any], name: str) -> Any:
    """Run one situation with one library. Of an exception, return the name of its class."""
    try:
        return situation(LIBRARIES[name])
    except Exception as error:
        return type(error).__name__
    finally:
        dist.barrier()


def run_both(situation: Callable[[ModuleType], Any]) -> list[Any]:
    """Run one situation with torch's library, then with ours."""
    return [run(situation, name) for name in LIBRARIES]


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
        mesh = mesh_of(2)
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
