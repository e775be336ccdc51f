"""How a situation runs with torch's fully_shard and with ours, on the same ranks."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import implicit_replication

import meshard
from tests.support.collectives import Collectives
from tests.support.models import MlpStack, seeded
from tests.support.parity import assert_same, full_grads, full_state, whole

LIBRARIES = {"torch": torch_fsdp, "meshard": meshard}


class Situation(NamedTuple):
    """What is done with a library, and what every rank has then with ours."""

    act: Callable[[ModuleType], Any]
    expected: Any  # of an exception, the name of its class
    num_ranks: int


SITUATIONS: dict[str, Situation] = {}


def situation(expected: Any, num_ranks: int = 2) -> Callable[[Any], Any]:
    """Make the function below one."""

    def register(act: Callable[[ModuleType], Any]) -> Any:
        SITUATIONS[act.__name__] = Situation(act, expected, num_ranks)
        return act

    return register


def run(act: Callable[[ModuleType], Any], name: str) -> Any:
    """Run one situation with one library. Of an exception, return the name of its class."""
    try:
        return act(LIBRARIES[name])
    except Exception as error:
        return type(error).__name__
    finally:
        dist.barrier()


def mesh_of(*shape: int) -> DeviceMesh:
    """Return a mesh, whose last axis shards; without a shape, of all ranks."""
    shape = shape or (dist.get_world_size(),)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def shard(lib: ModuleType, *modules: Any, mesh: DeviceMesh | None = None, **kwargs: Any) -> Any:
    """Make each a unit, bottom-up; on a mesh of all ranks by default. Return the last."""
    mesh = mesh or mesh_of()
    return [lib.fully_shard(module, mesh=mesh, **kwargs) for module in modules][-1]


def batch(number: int = 0) -> torch.Tensor:
    """Return the inputs of all ranks."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(dist.get_world_size(), 3, 6, generator=generator)


def compare_gradients(model: nn.Module, plain: nn.Module, act: Callable[[nn.Module], Any]) -> str:
    """Do the same with a sharded model and the plain one, and compare their gradients."""
    for each in (model, plain):
        act(each)
    assert_same(full_grads(model), full_grads(plain))
    return "right"


@contextlib.contextmanager
def counting_gathers(lib: ModuleType, model: nn.Module, into: list[int]) -> Iterator[None]:
    """Append to ``into`` how many gathers the block makes, with either library."""
    if lib is meshard:
        with meshard.CommLedger(model) as ledger:
            yield
        into.append(ledger.counts.get("all_gather", 0))
    else:
        with Collectives() as sent:
            yield
        into.append(sent.counts.get("gather", 0))


class Both:
    """A seeded model, sharded by one library, beside the plain one, and an optimizer of each.

    Sharded parameters are remembered: the peer does not show them while a unit is unsharded.

    Args:
        lib: The library.
        plain: An ``MlpStack`` by default.
        shard_by: Shards the model. By default its blocks become units, and it becomes one.
        policy: Of mixed precision.
        **kwargs: Of each unit, by default.
    """

    def __init__(
        self,
        lib: ModuleType,
        plain: nn.Module | None = None,
        shard_by: Callable[[nn.Module], Any] | None = None,
        policy: dict[str, torch.dtype] | None = None,
        **kwargs: Any,
    ) -> None:
        def shard_blocks(model: nn.Module) -> None:
            mp_policy = lib.MixedPrecisionPolicy(**(policy or {}))
            shard(lib, *model.blocks, model, mp_policy=mp_policy, **kwargs)

        self.lib = lib
        self.plain = seeded(MlpStack() if plain is None else plain)
        self.model = copy.deepcopy(self.plain)
        (shard_by or shard_blocks)(self.model)
        self.params = dict(self.model.named_parameters())
        self.optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in self.pair]
        self.dtype = torch.bfloat16 if policy else torch.float32

    @property
    def pair(self) -> tuple[nn.Module, nn.Module]:
        return self.model, self.plain

    def each(self, change: Callable[[nn.Module], Any]) -> None:
        """Do the same to both, without gradients."""
        with torch.no_grad():
            change(self.model), change(self.plain)

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Evaluate both on the same inputs."""
        with torch.no_grad():
            return self.model(batch()[0]), self.plain(batch()[0])

    def backward(self, number: int = 0, between: Callable[[], Any] = lambda: None) -> list[int]:
        """Add the gradient of this rank's inputs, and to the plain model that of all of them.

        Return how many gathers the sharded model makes in forward and in backward.
        """
        inputs, found = batch(number), []
        with counting_gathers(self.lib, self.model, found):
            loss = self.model(inputs[dist.get_rank()]).float().square().mean()
        between()
        with counting_gathers(self.lib, self.model, found):
            loss.backward()
        self.plain(inputs.flatten(0, 1)).square().mean().backward()
        return found

    def update(self) -> None:
        """Compare gradients, and step both."""
        for name, param in self.plain.named_parameters():
            ours = self.params[name].grad
            assert_same(None if ours is None else whole(ours), param.grad, what=name)
        for optimizer in self.optimizers:
            with implicit_replication():
                optimizer.step()
            optimizer.zero_grad()

    def train(self) -> str:
        """Train both by three steps, and compare gradients and parameters."""
        for number in range(3):
            self.backward(number)
            self.update()
        ours = {name: whole(param) for name, param in self.params.items()}
        assert_same(ours, dict(full_state(self.plain)))
        return "right"

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
