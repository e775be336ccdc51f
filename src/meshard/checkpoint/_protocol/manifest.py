"""The manifest of a checkpoint: what is in it, where the bytes are, and their checksums.

A folder with a manifest is a checkpoint; a folder without one is not. The manifest is JSON text
without spaces, with a checksum over the rest of the text, so that every changed byte is noticed.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from meshard.checkpoint._protocol.storage import Storage

NAME = "manifest.json"
FORMAT = "meshard.checkpoint"
OF_TORCH = "torch.distributed.checkpoint"
VERSION = 1  # of the format; a reader refuses a higher one
MARKER = ".meshard"  # an empty file that marks folders of ours; others are never removed
_FOLDER = re.compile(r"step-(0|[1-9]\d*)(?:\.([1-9]\d*))?")
_FILE = re.compile(r"[A-Za-z0-9_.-]+")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved or loaded; nothing was changed, unless the text says so."""


class Blob(NamedTuple):
    """A range of a file, and in it, counted from its begin, the range of a tensor's elements.

    The checksum is over the elements, then the bytes before them, then the bytes after them.
    """

    file: str
    begin: int
    size: int  # bytes
    crc32: int
    data_begin: int = 0
    data_size: int = 0

    @property
    def span(self) -> tuple[str, int, int]:
        return self.file, self.begin, self.size

    def checksum_of(self, data: memoryview) -> int:
        """Return the checksum of the bytes of such a blob."""
        end = self.data_begin + self.data_size
        crc = zlib.crc32(data[self.data_begin : end])
        return zlib.crc32(data[end:], zlib.crc32(data[: self.data_begin], crc))


class Chunk(NamedTuple):
    """A box of a tensor, as one blob."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    blob: Blob
    is_in_order: bool = True  # False: written by torch, for example transposed


@dataclass(slots=True)
class TensorEntry:
    """A tensor of the checkpoint. Its chunks cover it, each element once."""

    shape: tuple[int, ...]
    dtype: str  # as in torch.<dtype>
    placements: list[str]  # of the DTensor that was saved; empty for an ordinary tensor
    chunks: list[Chunk] = field(default_factory=list)


@dataclass(slots=True)
class Manifest:
    """What is in one checkpoint."""

    step: int | None
    tensors: dict[str, TensorEntry]
    parts: dict[str, Any]  # plain values with references to tensors; without the model's
    rank_parts: list[dict[str, Blob]]  # by rank: its own versions of parts that differ
    ties: dict[str, str] = field(default_factory=dict)  # by further name of a tensor: its name
    objects: list[Blob] = field(default_factory=list)  # read by torch's ``dcp.load`` only
    about: dict[str, Any] = field(default_factory=dict)  # versions, ranks, mesh, date
    unreadable: list[str] = field(default_factory=list)  # of torch: needs classes of its own

    def blobs(self) -> list[Blob]:
        """Return all ranges of files. They cover each file, each byte once."""
        chunks = [chunk.blob for entry in self.tensors.values() for chunk in entry.chunks]
        own = [blob for parts in self.rank_parts for blob in parts.values()]
        return [*chunks, *own, *self.objects]

    def files(self) -> dict[str, list[Blob]]:
        """Return the blobs of each file, in their order."""
        found: dict[str, list[Blob]] = {}
        for blob in self.blobs():
            found.setdefault(blob.file, []).append(blob)
        return {name: sorted(found[name], key=lambda blob: blob.begin) for name in sorted(found)}

    @property
    def num_bytes(self) -> int:
        return sum(blob.size for blob in self.blobs())

    @property
    def is_of_torch(self) -> bool:
        """Whether ``torch.distributed.checkpoint.save`` has written it, without checksums."""
        return self.about.get("format") == OF_TORCH


# --- as text -------------------------------------------------------------------------------


def to_text(manifest: Manifest) -> bytes:
    """Return the manifest as it is written."""
    files = sorted({blob.file for blob in manifest.blobs()})
    number = {name: index for index, name in enumerate(files)}

    def row(blob: Blob) -> list[int]:
        return [number[blob.file], *blob[1:]]

    content = {
        "format": FORMAT,
        "format_version": VERSION,
        "step": manifest.step,
        "about": manifest.about,
        "files": files,
        "tensors": {
            name: {
                "shape": list(entry.shape),
                "dtype": entry.dtype,
                "placements": entry.placements,
                # A chunk: offsets, sizes, [file, begin, size, crc32, data_begin, data_size]
                "chunks": [
                    [list(each.offsets), list(each.sizes), row(each.blob)] for each in entry.chunks
                ],
            }
            for name, entry in manifest.tensors.items()
        },
        "ties": manifest.ties,
        "parts": manifest.parts,
        "rank_parts": [
            {name: row(blob) for name, blob in parts.items()} for parts in manifest.rank_parts
        ],
        "objects": [row(blob) for blob in manifest.objects],
    }
    text = _canonical(content)
    return _canonical({"checksum": _checksum(text), "content": content})


def _canonical(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _checksum(text: bytes) -> str:
    return "sha256:" + hashlib.sha256(text).hexdigest()


def from_text(text: bytes, where: str) -> Manifest:
    """Return the manifest that was written as ``text``; ``where`` is for messages.

    Raises:
        CheckpointError: It is damaged, of a newer format, or names a file outside of its folder.
    """
    try:
        outer = json.loads(text)
        content, checksum = outer["content"], outer["checksum"]
        is_whole = _canonical(outer) == text and _checksum(_canonical(content)) == checksum
    except (ValueError, KeyError, TypeError):
        is_whole = False
    if not is_whole:
        raise CheckpointError(
            f"{where}/{NAME} is not as it was written: a part of it was changed or is missing. "
            "Load another step, or copy the file from where the checkpoint came from."
        )
    if content.get("format") != FORMAT:
        raise CheckpointError(f"{where}/{NAME} is no manifest of meshard.checkpoint.")
    if content["format_version"] > VERSION:
        raise CheckpointError(
            f"{where} has format {content['format_version']} of a newer meshard "
            f"({content['about'].get('meshard')}); this one reads up to format {VERSION}. "
            "Update meshard."
        )
    for name in content["files"]:
        check_file_name(name, f"{where}/{NAME}")
    try:
        return _from_content(content)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(
            f"{where}/{NAME} has the right checksum and not the form of format {VERSION}: {error}."
        ) from error


def check_file_name(name: str, where: str) -> None:
    """Raise if a file that ``where`` names may be outside of its folder."""
    if not _FILE.fullmatch(name) or name in (".", ".."):
        raise CheckpointError(
            f"{where} names the file {name!r}, which is outside of its folder; do not use this "
            "checkpoint, that was not written by meshard or torch."
        )


def _from_content(content: dict[str, Any]) -> Manifest:
    files = content["files"]

    def blob(row: list[int]) -> Blob:
        return Blob(files[row[0]], *row[1:])

    tensors = {
        name: TensorEntry(
            tuple(each["shape"]),
            each["dtype"],
            each["placements"],
            [
                Chunk(tuple(offsets), tuple(sizes), blob(row))
                for offsets, sizes, row in each["chunks"]
            ],
        )
        for name, each in content["tensors"].items()
    }
    return Manifest(
        content["step"],
        tensors,
        content["parts"],
        [{name: blob(row) for name, row in parts.items()} for parts in content["rank_parts"]],
        ties=content["ties"],
        objects=[blob(row) for row in content["objects"]],
        about=content["about"],
    )


# --- folders of steps ----------------------------------------------------------------------


class StepFolder(NamedTuple):
    """The folder of one save. A step that is saved again gets another folder."""

    step: int
    attempt: int

    @property
    def name(self) -> str:
        return f"step-{self.step}" + (f".{self.attempt}" if self.attempt else "")

    @property
    def manifest(self) -> str:
        return f"{self.name}/{NAME}"


def step_folders(storage: Storage) -> list[StepFolder]:
    """Return the folders of saves, finished or not, by step and attempt."""
    found = (_FOLDER.fullmatch(name) for name in storage.folders())
    return sorted(StepFolder(int(match[1]), int(match[2] or 0)) for match in found if match)


def committed(storage: Storage) -> dict[int, StepFolder]:
    """Return the newest finished folder of each step, in the order of steps."""
    return {each.step: each for each in finished(storage)}


def finished(storage: Storage) -> list[StepFolder]:
    """Return all folders that are checkpoints, by step and attempt."""
    return [each for each in step_folders(storage) if storage.exists(each.manifest)]


def own_name(rank: int, name: str) -> str:
    """Return the name of rank ``rank``'s version of a tensor that differs between ranks."""
    return f"rank{rank}/{name}"


def remove(storage: Storage, folder: StepFolder) -> None:
    """Remove a folder, its manifest first, so that what is left if it is killed is no step."""
    storage.remove_file(folder.manifest)
    storage.remove_folder(folder.name)


def is_leftover(storage: Storage, folder: StepFolder) -> bool:
    """Whether a save or a removal that was killed has left a folder."""
    if storage.exists(folder.manifest):
        return False
    return storage.exists(f"{folder.name}/{MARKER}") or storage.is_empty(folder.name)


def read_manifest(storage: Storage, folder: StepFolder) -> Manifest:
    """Return the manifest in a folder, checked."""
    where = f"{storage.root}/{folder.name}"
    try:
        text = storage.read(folder.manifest)
    except FileNotFoundError as error:
        raise CheckpointError(f"{where} was removed meanwhile, as by prune.") from error
    return from_text(text, where)
