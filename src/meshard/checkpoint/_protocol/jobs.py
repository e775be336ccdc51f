"""What one rank is to write for one step."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import meshard
from meshard._mesh.boxes import Box
from meshard._torch.dtensor import is_plain, plain_of
from meshard._torch.private import dtype_of, torch_version
from meshard.checkpoint._protocol import parts
from meshard.checkpoint._protocol.manifest import file_order
from meshard.checkpoint._protocol.parts import (
    MODEL,
    OPTIMIZER,
    PARAMETER,
    encode_part,
    join,
    model_state,
)
from meshard.checkpoint._protocol.plain import embedded, encode
from meshard.checkpoint.weights_layout import held_box


class Item(NamedTuple):
    """The box of a tensor that this rank holds."""

    name: str
    owner: str  # "parameter" or "model" (a buffer), "optimizer", or "extra": other things
    shape: tuple[int, ...]  # of the whole tensor
    dtype: str
    placements: tuple[str, ...]
    mesh_size: int  # 0: an ordinary tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.sizes).numel() * dtype_of(self.dtype).itemsize

    @property
    def order(self) -> tuple[int, bool, str]:
        """The key by which it is sorted in its file."""
        return file_order(self.name, dtype_of(self.dtype).itemsize, self.num_bytes)


@dataclass(slots=True)
class Job:
    """What one rank is to write for one step. Parts are encoded trees, by name."""

    step: int
    failed: Exception | None = None  # in the background, of which other ranks must hear
    metric: float | None = None
    per_rank: bool = False
    items: list[Item] = field(default_factory=list)
    # By position in ``items``; see ``Saver.begin``.
    sources: dict[int, torch.Tensor] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    optimizers: dict[str, Any] = field(default_factory=dict)  # ranks may have different parts
    others: dict[str, Any] = field(default_factory=dict)  # may differ between ranks
    random: Any = None  # the states of this rank's random number generators
    about: dict[str, Any] = field(default_factory=dict)


@torch.no_grad()
def job_of(
    step: int,
    model: nn.Module | dict[str, Any],
    optimizer: Optimizer | None,
    extra: dict[str, Any],
) -> Job:
    """Return the job of this rank.

    Raises:
        NotImplementedError: A DTensor is not one block on this rank.
        RuntimeError: Gradients are pending.
        TypeError: Something is neither a tensor nor plain.
        ValueError: An optimizer has a parameter that is not in the model.
    """
    job = Job(step, random=encode(parts.random_state(), lambda _, each: embedded(each)))
    tensors: dict[str, torch.Tensor] = {}
    owners: dict[str, str] = {}
    names: dict[int, str] = {}  # of parameters, by id. Names in the model are set last, and win.
    modules = {name: each for name, each in extra.items() if isinstance(each, nn.Module)}
    for name, module in {**modules, MODEL: model}.items():
        state = model_state(module)
        own = {join(name, key): value for key, value in state.tensors.items()}
        tensors |= own
        for key, value in own.items():
            owners[key] = PARAMETER if isinstance(value, nn.Parameter) else MODEL
        job.ties |= {join(name, key): join(name, tied) for key, tied in state.ties.items()}
        others = _add_other(job, name, "module", state.others)
        if twice := own.keys() & others.keys():
            raise ValueError(f"two tensors of a model are called {min(twice)!r}.")
        tensors |= others
        prefix = () if name == MODEL else (name,)
        names |= {key: join(*prefix, fqn) for key, fqn in state.names.items()}
    optimizers = {} if optimizer is None else {OPTIMIZER: optimizer}
    optimizers |= {name: each for name, each in extra.items() if isinstance(each, Optimizer)}
    for name, each in optimizers.items():
        job.optimizers[name], own = encode_part(
            name, parts.optimizer_tree(each, names), is_optimizer=True
        )
        tensors |= own
        owners |= dict.fromkeys(own, OPTIMIZER)
    for name, value in extra.items():
        if name not in optimizers and name not in modules:
            is_stateful = parts.is_stateful(value)
            kind, tree = ("stateful", value.state_dict()) if is_stateful else ("value", value)
            tensors |= _add_other(job, name, kind, tree)
    job.about = _about(tensors)
    if isinstance(model, dict):
        job.about["has_each_name"] = True
    for name, tensor in sorted(tensors.items()):
        box = held_box(name, tensor)
        if box is not None and (box.numel or not tensor.numel()):
            source = plain_of(tensor).detach()
            _check_has_memory(name, source)
            job.sources[len(job.items)] = source
            job.items.append(_item_of(name, tensor, box, owners.get(name, "extra")))
    return job


def _add_other(job: Job, name: str, kind: str, state: Any) -> dict[str, torch.Tensor]:
    """Add a part of ``others``, which is kept per rank if ranks differ; return its tensors."""
    tree, tensors = encode_part(name, state)
    job.others[name] = {"kind": kind, "tree": tree}
    return tensors


def _about(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    meshes = {
        (tuple(each.device_mesh.shape), each.device_mesh.mesh_dim_names)
        for each in tensors.values()
        if isinstance(each, DTensor)
    }
    return {
        "meshard": meshard.__version__,
        "torch": torch_version(),
        "meshes": sorted(
            ({"shape": list(shape), "names": list(names or ())} for shape, names in meshes),
            key=str,
        ),
        "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


# --- tensors -------------------------------------------------------------------------------


def _item_of(name: str, tensor: torch.Tensor, box: Box, owner: str) -> Item:
    placed = tensor if isinstance(tensor, DTensor) else None
    return Item(
        name,
        owner,
        tuple(tensor.shape),
        str(tensor.dtype).removeprefix("torch."),
        () if placed is None else tuple(map(str, placed.placements)),
        0 if placed is None else placed.device_mesh.size(),
        box.offsets,
        box.sizes,
    )


def _check_has_memory(name: str, local: torch.Tensor) -> None:
    if local.is_meta:
        raise TypeError(f"{name!r} is on the meta device, and has no values to be saved.")
    if not is_plain(local) or local.layout is not torch.strided:
        raise TypeError(
            f"{name!r} is a {type(local).__name__} of layout {local.layout}; a checkpoint stores "
            "ordinary tensors: convert it, or leave it out."
        )
