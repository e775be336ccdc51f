"""Use a sharded ``Ones`` for arithmetic by hand: two vectors whose gradients the call chooses."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from tests.support.models import Ones
from tests.support.parity import full_grads
from tests.support.strategies import MODES


def make(mesh_shape: tuple[int, ...] = (2, 2), dtype: Any = None, **kwargs: Any) -> Any:
    """Return a sharded model; ``model(a, b)`` gives the vectors gradients of these values."""
    return meshard.fully_shard(Ones(dtype=dtype), init_device_mesh("cpu", mesh_shape), **kwargs)


def values(model: nn.Module) -> dict[str, float | None]:
    """Return the first element of each gradient."""
    grads = full_grads(model)
    return {name: None if g is None else g[0].item() for name, g in grads.items()}


def run(model: Any, modes: str, *args: float | None) -> None:
    """Run a microbatch in the mode of each letter: N, R or F."""
    for mode in modes:
        model.set_gradient_sync(MODES[mode])
        model(*args).backward()
