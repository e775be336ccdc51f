"""What one rank is to write for one step."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import meshard
from meshard._torch.dtensor import is_plain, plain_of
from meshard._torch.private import dtype_of, torch_version
from meshard.checkpoint._protocol import parts
from meshard.checkpoint._protocol.parts import (
    MODEL,
    OPTIMIZER,
    encode_part,
    join,
    model_state,
)
from meshard.checkpoint._protocol.plain import encode
from meshard.checkpoint.weights_layout import held_box

# Tensors are cut along their first dimension into chunks of about so many bytes. Each chunk has a
# checksum. A reader that verifies it reads the whole chunk.
CHUNK_BYTES = 2**25


class Item(NamedTuple):
    """A chunk of a tensor that this rank holds."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    dtype: str
    placements: tuple[str, ...]
    mesh_size: int  # 0: an ordinary tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.sizes).numel() * dtype_of(self.dtype).itemsize


@dataclass(slots=True)
class Job:
    """What one rank is to write for one step. Parts are encoded trees, by name."""

    step: int
    problem: str = ""  # why this rank refuses
    items: list[Item] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)  # of each item; see ``Saver.agree``
    ties: dict[str, str] = field(default_factory=dict)
    optimizers: dict[str, Any] = field(default_factory=dict)  # ranks may have different parts
    others: dict[str, Any] = field(default_factory=dict)  # may differ between ranks
    # Maps the name of each ordinary tensor in ``others`` to the name of the part that has it.
    part_of: dict[str, str] = field(default_factory=dict)
    random: Any = None  # the states of this rank's random number generators
    about: dict[str, Any] = field(default_factory=dict)


def job_of(step: int, model: nn.Module, optimizer: Optimizer | None, extra: dict[str, Any]) -> Job:
    """Return the job of this rank.

    Raises:
        NotImplementedError: A DTensor is not one block on this rank.
        RuntimeError: Gradients are pending.
        TypeError: Something is neither a tensor nor plain.
        ValueError: An optimizer has a parameter that is not in the model.
    """
    job = Job(step, about=_about(model), random=encode(parts.random_state(), lambda *_: None))
    tensors: dict[str, torch.Tensor] = {}
    names: dict[int, str] = {}  # of parameters, by id. Names in the model are set last, and win.
    modules = {name: each for name, each in extra.items() if isinstance(each, nn.Module)}
    for name, module in {**modules, MODEL: model}.items():
        state = model_state(module)
        tensors |= {join(name, key): value for key, value in state.tensors.items()}
        job.ties |= {join(name, key): join(name, tied) for key, tied in state.ties.items()}
        tensors |= _add_other(job, name, "module", state.others)
        prefix = () if name == MODEL else (name,)
        names |= {key: join(*prefix, fqn) for key, fqn in state.names.items()}
    optimizers = {} if optimizer is None else {OPTIMIZER: optimizer}
    optimizers |= {name: each for name, each in extra.items() if isinstance(each, Optimizer)}
    for name, each in optimizers.items():
        job.optimizers[name], own = encode_part(
            name, parts.optimizer_tree(each, names), is_optimizer=True
        )
        tensors |= own
    for name, value in extra.items():
        if name not in optimizers and name not in modules:
            is_stateful = parts.is_stateful(value)
            kind, tree = ("stateful", value.state_dict()) if is_stateful else ("value", value)
            tensors |= _add_other(job, name, kind, tree)
    job.items, job.sources = items_of(tensors)
    return job


def _add_other(job: Job, name: str, kind: str, state: Any) -> dict[str, torch.Tensor]:
    """Add a part of ``others``, which is kept per rank if ranks differ; return its tensors."""
    tree, tensors = encode_part(name, state)
    job.others[name] = {"kind": kind, "tree": tree}
    job.part_of |= {key: name for key, each in tensors.items() if not isinstance(each, DTensor)}
    return tensors


def _about(model: nn.Module) -> dict[str, Any]:
    meshes = {
        (tuple(param.device_mesh.shape), param.device_mesh.mesh_dim_names)
        for param in model.parameters()
        if isinstance(param, DTensor)
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


# --- chunks --------------------------------------------------------------------------------


@torch.no_grad()
def items_of(tensors: dict[str, torch.Tensor]) -> tuple[list[Item], list[torch.Tensor]]:
    """Return the chunks of tensors that this rank holds, by name, and a view of each.

    Raises:
        NotImplementedError: A tensor is not one block on this rank.
        TypeError: A tensor has no memory of its own that could be written.
    """
    items, sources = [], []
    for name, tensor in sorted(tensors.items()):
        box = held_box(name, tensor)
        if box is None:
            continue
        local = plain_of(tensor).detach()
        _check_has_memory(name, local)
        placements = map(str, tensor.placements) if isinstance(tensor, DTensor) else ()
        whole = Item(
            name,
            tuple(tensor.shape),
            str(local.dtype).removeprefix("torch."),
            tuple(placements),
            tensor.device_mesh.size() if isinstance(tensor, DTensor) else 0,
            box.offsets,
            box.sizes,
        )
        for first, part in _cut(local, is_empty=not tensor.numel()):
            at = (box.offsets[0] + first, *box.offsets[1:]) if box.offsets else ()
            items.append(whole._replace(offsets=at, sizes=tuple(part.shape)))
            sources.append(part)
    return items, sources


def _check_has_memory(name: str, local: torch.Tensor) -> None:
    if local.is_meta:
        raise TypeError(f"{name!r} is on the meta device, and has no values to be saved.")
    if not is_plain(local) or local.layout is not torch.strided:
        raise TypeError(
            f"{name!r} is a {type(local).__name__} of layout {local.layout}; a checkpoint stores "
            "ordinary tensors: convert it, or leave it out."
        )


def _cut(local: torch.Tensor, *, is_empty: bool) -> Iterable[tuple[int, torch.Tensor]]:
    """Iterate over parts of about ``CHUNK_BYTES``, with the first row of each."""
    if local.dim() == 0:
        yield 0, local
    elif not local.numel():
        if is_empty:  # the whole tensor is, not only this rank's part: it is one chunk
            yield 0, local
    else:
        rows = max(1, CHUNK_BYTES // (local.nbytes // local.size(0)))
        for first in range(0, local.size(0), rows):
            yield first, local.narrow(0, first, min(rows, local.size(0) - first))
