"""What one rank is to write for one step."""

from __future__ import annotations

import functools
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshard._torch.dtensor import is_plain
from meshard._torch.private import dtype_of, torch_version
from meshard.checkpoint._protocol import dcp_format, parts
from meshard.checkpoint._protocol.blobs import copied_bytes
from meshard.checkpoint._protocol.parts import (
    MODEL,
    OPTIMIZER,
    RANDOM,
    encode_part,
    join,
    model_state,
)
from meshard.checkpoint._protocol.plain import embedded, encode, reference

# Tensors are cut along their first dimension into chunks of about so many bytes. A chunk is what
# has a checksum, and what is read whole to check it.
CHUNK_BYTES = 2**25
# A part of which ranks have different tensors is stored in text, for each rank.
_EMBEDDED_BYTES = 2**24


class Item(NamedTuple):
    """A chunk of a tensor that this rank holds."""

    name: str
    shape: tuple[int, ...]  # of the tensor
    dtype: str
    placements: tuple[str, ...]
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
    sources: list[torch.Tensor] = field(default_factory=list)  # of each item, on any device
    ties: dict[str, str] = field(default_factory=dict)
    merged: dict[str, Any] = field(default_factory=dict)  # optimizers, of which ranks have parts
    plain: dict[str, Any] = field(default_factory=dict)  # what may be the same on all ranks
    embedded: dict[str, Any] = field(default_factory=dict)  # the same with tensors in it
    large: set[str] = field(default_factory=set)  # of these, what has too many tensors for that
    of_rank: dict[str, Any] = field(default_factory=dict)  # what each rank has for itself
    objects: dict[str, bytes] = field(default_factory=dict)  # for torch's ``dcp.load``, as are ...
    paths: dict[str, Any] = field(default_factory=dict)  # ... the keys that lead to each name
    about: dict[str, Any] = field(default_factory=dict)


def job_of(
    step: int,
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: dict[str, Any],
    boxes: Boxes,
    *,
    is_first: bool,
) -> Job:
    """Return the job of this rank. ``boxes`` is for all jobs of one ``Checkpointer``;
    the first rank also makes what torch's ``dcp.load`` reads.

    Raises:
        RuntimeError: Gradients are pending.
        TypeError: Something is neither a tensor nor plain.
        ValueError: An optimizer has a parameter that is not in the model.
    """
    made = _Collecting(Job(step, about=_about(model)))
    names = made.add_module(MODEL, model)
    for name, value in extra.items():
        if isinstance(value, nn.Module):  # an optimizer beside may be that of this one
            inner = made.add_module(name, value)
            names = {**{key: join(name, fqn) for key, fqn in inner.items()}, **names}
    optimizers = {} if optimizer is None else {OPTIMIZER: optimizer}
    optimizers |= {name: each for name, each in extra.items() if isinstance(each, Optimizer)}
    for name, each in optimizers.items():
        made.add_optimizer(name, each, names)
    for name, value in extra.items():
        if name not in optimizers and not isinstance(value, nn.Module):
            made.add_value(name, value)
    return made.finished(boxes, is_first=is_first)


class _Collecting:
    """A job that grows by parts."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._tensors: dict[str, torch.Tensor] = {}
        self._nested: dict[str, Any] = {"step": job.step}

    def add_module(self, name: str, module: nn.Module) -> dict[int, str]:
        """Add a module; return the names of its parameters by their ids."""
        state, job = model_state(module), self._job
        self._tensors |= {join(name, key): value for key, value in state.tensors.items()}
        job.ties |= {join(name, key): join(name, tied) for key, tied in state.ties.items()}
        others = encode(state.others, lambda _, tensor: embedded(tensor), (name,))
        job.plain[name] = job.embedded[name] = {"kind": "module", "tree": others}
        self._nested[name] = {**state.tensors, **state.others}
        return state.names

    def add_optimizer(self, name: str, optimizer: Optimizer, names: dict[int, str]) -> None:
        tree = parts.optimizer_tree(optimizer, names)
        encoded = encode_part(name, tree)
        self._job.merged[name], self._nested[name] = encoded.tree, tree
        self._tensors |= encoded.tensors

    def add_value(self, name: str, value: Any) -> None:
        """Add what has a ``state_dict``, or a plain value, perhaps with tensors in it."""
        is_stateful = parts.is_stateful(value)
        kind, tree = "stateful" if is_stateful else "value", value
        if is_stateful:
            tree = value.state_dict()
        encoded = encode_part(name, tree)
        self._job.plain[name] = {"kind": kind, "tree": encoded.tree}
        own = [each for each in encoded.tensors.values() if not isinstance(each, DTensor)]
        if sum(each.nbytes for each in own) > _EMBEDDED_BYTES:
            self._job.large.add(name)
            crcs = [zlib.crc32(copied_bytes(each)) for each in own]
            self._job.embedded[name] = {"kind": kind, "tree": encoded.tree, "crcs": crcs}
        else:
            self._job.embedded[name] = {"kind": kind, "tree": _with_own(name, tree)}
        self._tensors |= encoded.tensors
        self._nested[name] = tree

    def finished(self, boxes: Boxes, *, is_first: bool) -> Job:
        job = self._job
        job.of_rank[RANDOM] = encode(parts.random_state(), lambda *_: None)
        job.items, job.sources = items_of(self._tensors, boxes)
        if is_first:
            job.objects, job.paths = dcp_format.flattened(self._nested)
        return job


def _with_own(name: str, tree: Any) -> Any:
    """Encode a part with those tensors in it that are no DTensors, which ranks may not share."""
    return encode(
        tree,
        lambda path, each: reference(join(*path)) if isinstance(each, DTensor) else embedded(each),
        (name,),
    )


@functools.cache
def _own_version() -> str:
    try:
        return metadata.version("meshard")
    except metadata.PackageNotFoundError:  # run from its sources
        return "unknown"


def _about(model: nn.Module) -> dict[str, Any]:

    meshes = {
        (tuple(param.device_mesh.shape), param.device_mesh.mesh_dim_names)
        for param in model.parameters()
        if isinstance(param, DTensor)
    }
    return {
        "meshard": _own_version(),
        "torch": torch_version(),
        "meshes": sorted(
            ({"shape": list(shape), "names": list(names or ())} for shape, names in meshes),
            key=str,
        ),
        "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


# --- chunks --------------------------------------------------------------------------------


class Boxes:
    """Which boxes of tensors this rank holds, kept from save to save: torch takes time to tell."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[torch.Tensor, tuple[int, ...]]] = {}

    def update(self, tensors: dict[str, torch.Tensor]) -> None:
        """Find the boxes of ``tensors``, and forget others."""
        known = {
            name: self._known[name]
            for name, tensor in tensors.items()
            if name in self._known and self._known[name][0] is tensor
        }
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        unknown = {name: tensor for name, tensor in tensors.items() if name not in known}
        planner.set_up_planner(unknown, is_coordinator=True)
        for write in planner.create_local_plan().items:
            assert write.tensor_data is not None and write.tensor_data.chunk is not None
            name = write.index.fqn
            known[name] = tensors[name], tuple(write.tensor_data.chunk.offsets)
        self._known = known

    def offsets_of(self, name: str) -> tuple[int, ...] | None:
        """Return where the box of this rank begins; None: it has no part of the tensor."""
        return self._known[name][1] if name in self._known else None


@torch.no_grad()
def items_of(
    tensors: dict[str, torch.Tensor], boxes: Boxes
) -> tuple[list[Item], list[torch.Tensor]]:
    """Return the chunks of tensors that this rank holds, by name, and a view of each.

    Raises:
        TypeError: A tensor has no memory of its own that could be written.
    """
    items, sources = [], []
    boxes.update(tensors)
    for name, tensor in sorted(tensors.items()):
        offsets = boxes.offsets_of(name)
        if offsets is None:
            continue
        shape = tuple(tensor.shape)
        local, placements = _local_of(name, tensor)
        dtype = str(local.dtype).removeprefix("torch.")
        for first, part in _cut(local, is_empty=not tensor.numel()):
            at = (offsets[0] + first, *offsets[1:]) if offsets else ()
            items.append(Item(name, shape, dtype, placements, at, tuple(part.shape)))
            sources.append(part)
    return items, sources


def _local_of(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[str, ...]]:
    placements: tuple[str, ...] = ()
    if isinstance(tensor, DTensor):
        placements = tuple(map(str, tensor.placements))
        tensor = tensor.to_local()
    tensor = tensor.detach()
    if tensor.is_meta:
        raise TypeError(f"{name!r} is on the meta device, and has no values to be saved.")
    if not is_plain(tensor) or tensor.layout is not torch.strided:
        raise TypeError(
            f"{name!r} is a {type(tensor).__name__} of layout {tensor.layout}; a checkpoint stores "
            "ordinary tensors: convert it, or leave it out."
        )
    return tensor, placements


def _cut(local: torch.Tensor, *, is_empty: bool) -> Iterable[tuple[int, torch.Tensor]]:
    """Iterate over parts of about ``CHUNK_BYTES``, with the first row of each."""
    if local.dim() == 0:
        yield 0, local
    elif not local.numel():
        if is_empty:  # no rank has elements of it
            yield 0, local
    else:
        rows = max(1, CHUNK_BYTES // (local.nbytes // local.size(0)))
        for first in range(0, local.size(0), rows):
            yield first, local.narrow(0, first, min(rows, local.size(0) - first))
