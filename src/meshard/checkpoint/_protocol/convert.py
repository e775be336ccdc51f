"""Whole checkpoints from one format to another, in one process, a tensor at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

import meshard
from meshard._torch.private import dtype_of
from meshard.checkpoint._protocol import commits
from meshard.checkpoint._protocol.loading import Reader
from meshard.checkpoint._protocol.manifest import (
    Chunk,
    Manifest,
    TensorEntry,
    file_order,
    to_text,
    with_own_names,
)
from meshard.checkpoint._protocol.plain import decode, names_in
from meshard.checkpoint._protocol.saving import file_of, write_tensors
from meshard.checkpoint._protocol.storage import CheckpointError, Storage
from meshard.checkpoint._protocol.tensor_file import Entry


def write_as_new(
    reader: Reader, storage: Storage, step: int, advance: Callable[[int], Any]
) -> None:
    """Write a checkpoint of any format as one of the present format, and commit it."""
    found = reader.manifest
    commit, name = commits.begin(storage, step, None), file_of(0)
    entries = sorted(
        (Entry(n, dtype_of(each.dtype), each.shape) for n, each in found.tensors.items()),
        key=lambda each: file_order(each.name, each.dtype.itemsize, each.num_bytes),
    )
    read = (reader.tensor_of(entry.name) for entry in entries)
    written = write_tensors(storage, commit, name, entries, read, {}, advance)
    tensors = {
        n: TensorEntry(each.shape, each.dtype, each.placements, [_whole(each, name)])
        for n, each in found.tensors.items()
    }
    kinds = {part: reader.kind_of(part) for part in found.rank_parts}
    about = {"meshard": meshard.__version__, "num_ranks": 1, **found.about}
    made = Manifest(step, tensors, found.parts, kinds, found.ties, about=about)
    storage.publish(commit.manifest, to_text(made, [written]))


def _whole(entry: TensorEntry, file: str) -> Chunk:
    return Chunk((0,) * len(entry.shape), entry.shape, file, 0, 0)


class _Planner(DefaultSavePlanner):
    """Reads each tensor when torch writes it. In the state dict they are on the meta device."""

    def __init__(self, reader: Reader, advance: Callable[[int], Any]) -> None:
        super().__init__()
        self._reader, self._advance = reader, advance

    def lookup_object(self, index: Any) -> Any:
        found = super().lookup_object(index)
        if isinstance(found, _Stored):
            return self._reader.tensor_of(found.stored_as, self._advance)
        return found


class _Stored(torch.Tensor):
    """A tensor on the meta device that stands for one of the checkpoint."""

    stored_as: str


def write_for_torch(reader: Reader, folder: str, advance: Callable[[int], Any]) -> None:
    """Write a folder that ``torch.distributed.checkpoint.load`` reads: models and optimizers."""
    found = with_own_names(reader.manifest, 0)

    def stored(name: str, local: object = None) -> torch.Tensor:
        if local is not None:
            raise CheckpointError(f"{name} is made of tensors that each rank has of its own.")
        entry = found.tensors[found.ties.get(name, name)]
        empty = torch.empty(entry.shape, dtype=dtype_of(entry.dtype), device="meta")
        tensor = empty.as_subclass(_Stored)
        tensor.stored_as = found.ties.get(name, name)
        return tensor

    state: dict[str, Any] = {"step": found.step}
    for part, tree in found.parts.items():
        if "param_groups" in tree:
            if any(name.startswith("#") for name in tree["state"]):
                raise CheckpointError(
                    f"{part} has numbers in the place of names, as in a raw state dict; load it "
                    "once, save it by Checkpointer, and export that."
                )
            state[part] = decode(tree, stored)
        elif tree["kind"] == "module":
            inner = names_in(tree["tree"])
            own = [
                name
                for name in dict.fromkeys((*found.tensors, *found.ties))
                if name.startswith(f"{part}.") and name not in inner
            ]
            state[part] = {name.removeprefix(f"{part}."): stored(name) for name in own}
            state[part] |= decode(tree["tree"], stored)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*single process")  # as it is meant to be
        planner = _Planner(reader, advance)
        save(state, storage_writer=FileSystemWriter(folder), planner=planner, no_dist=True)
