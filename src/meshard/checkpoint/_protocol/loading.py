"""How a checkpoint is read into a model, an optimizer and what else was saved.

Nothing is changed before everything is known to fit: first names, shapes and dtypes are compared,
then the checksums of all chunks that this rank needs, and all ranks agree. Then each rank reads the
ranges that it holds, straight into its shards where these are in host memory.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from meshard._mesh.boxes import Box
from meshard._torch.dtensor import plain_of
from meshard._torch.private import dtype_of
from meshard.checkpoint._protocol.blobs import bytes_of
from meshard.checkpoint._protocol.manifest import (
    Blob,
    CheckpointError,
    Chunk,
    Manifest,
)
from meshard.checkpoint._protocol.ranks import Ranks
from meshard.checkpoint._protocol.storage import Range, Source, Storage
from meshard.checkpoint.weights_layout import held_box


class Read(NamedTuple):
    """A part of a chunk that is read into a part of a tensor of this rank."""

    chunk: Chunk
    dtype: torch.dtype  # of the chunk
    chunk_begin: tuple[int, ...]  # where the part begins in the chunk
    sizes: tuple[int, ...]
    target: torch.Tensor  # a view of the part


# The first bytes, in the file of a rank, of a part that is no plain value. ``_add_other`` in
# ``jobs`` makes the part, and ``Saver._write_file`` writes it as JSON.
_NO_VALUE = (b'{"kind": "stateful"', b'{"kind": "module"')


class Reader:
    """Reads the files of one checkpoint, and compares checksums, if it has any."""

    def __init__(self, storage: Storage, folder: str, manifest: Manifest) -> None:
        self._storage, self._folder = storage, folder
        self.manifest = manifest
        self._sources: dict[str, Source] = {}
        self._buffer = bytearray()  # reused, as new memory takes longer than reading

    def path_of(self, file: str) -> str:
        return f"{self._folder}/{file}".lstrip("/")

    def source(self, file: str) -> Source:
        if file not in self._sources:
            self._sources[file] = self._storage.open(self.path_of(file))
        return self._sources[file]

    def expect(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """Learn what will be read: ranges of files, so that neighbours may be read together."""
        by_file: dict[str, list[Range]] = {}
        for file, begin, size in ranges:
            by_file.setdefault(file, []).append((begin, begin + size))
        for file, own in by_file.items():
            self.source(file).expect(own)

    def read(self, blob: Blob) -> bytes:
        """Return a blob, checked."""
        data = self.source(blob.file).read(blob.begin, blob.size)
        self._compare(blob, memoryview(data))
        return data

    def check(self, blob: Blob) -> None:
        """Read a blob only to compare its checksum."""
        if blob.crc32 >= 0:
            if len(self._buffer) < blob.size:
                self._buffer = bytearray(blob.size)
            data = memoryview(self._buffer)[: blob.size]
            self.source(blob.file).read_into(data, blob.begin)
            self._compare(blob, data)

    def _compare(self, blob: Blob, data: memoryview) -> None:
        if blob.crc32 >= 0 and blob.checksum_of(data) != blob.crc32:
            raise CheckpointError(
                f"{self._storage.root}/{self.path_of(blob.file)} is not as it was written: its "
                f"checksum differs in bytes {blob.begin} to {blob.begin + blob.size}."
            )

    def tree_of(self, blob: Blob) -> Any:
        return json.loads(self.read(blob))

    def may_be_value(self, blob: Blob) -> bool:
        """Whether a part of one rank may be a plain value, by its first bytes."""
        with contextlib.suppress(EOFError, OSError):
            head = self.source(blob.file).read(blob.begin, min(blob.size, 20))
            return not head.startswith(_NO_VALUE)
        return True

    def close(self) -> None:
        for source in self._sources.values():
            source.close()


# --- what goes where -----------------------------------------------------------------------


@dataclass(slots=True)
class Comparison:
    """What of a checkpoint fits a model, and what does not."""

    missing: list[str] = field(default_factory=list)  # here, and not in the checkpoint
    unexpected: list[str] = field(default_factory=list)  # there, and not here
    wrong: list[str] = field(default_factory=list)  # texts about other shapes or dtypes


def compare(
    manifest: Manifest, targets: dict[str, torch.Tensor], *, cast: bool
) -> tuple[dict[str, torch.Tensor], Comparison]:
    """Return the targets that can be filled, and what does not fit."""
    found, fitting = Comparison(), dict[str, torch.Tensor]()
    for name, target in targets.items():
        entry = manifest.tensors.get(manifest.ties.get(name, name))
        if entry is None:
            found.missing.append(name)
            continue
        if entry.shape != tuple(target.shape):
            found.wrong.append(
                f"{name} has shape {list(entry.shape)} in the checkpoint and "
                f"{list(target.shape)} here"
            )
        elif dtype_of(entry.dtype) != target.dtype and not (
            cast and _can_cast(dtype_of(entry.dtype), target.dtype)
        ):
            advice = "no cast keeps its values" if cast else "pass cast=True to convert it"
            found.wrong.append(
                f"{name} is {entry.dtype} in the checkpoint and "
                f"{str(target.dtype).removeprefix('torch.')} here; {advice}"
            )
        elif (target.to_local() if isinstance(target, DTensor) else target).is_meta:
            found.wrong.append(
                f"{name} is on the meta device here; call to_empty(device=...) on the model first"
            )
        else:
            fitting[name] = target
    return fitting, found


def _can_cast(saved: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether a cast may round values, but does not wrap them or drop a part of them."""
    if wanted.is_floating_point and wanted.itemsize == 1:
        return False  # its scales would be lost
    if wanted.is_complex or wanted.is_floating_point:
        return wanted.is_complex or not saved.is_complex
    if saved.is_complex or saved.is_floating_point or wanted == torch.bool:
        return False
    if saved == torch.bool:
        return True
    there, here = torch.iinfo(saved), torch.iinfo(wanted)
    return here.min <= there.min and there.max <= here.max


@torch.no_grad()
def reads_of(manifest: Manifest, targets: dict[str, torch.Tensor]) -> list[Read]:
    """Return what this rank has to read to fill ``targets``."""
    reads = []
    for name, target in targets.items():
        entry = manifest.tensors[manifest.ties.get(name, name)]
        box = held_box(name, target)
        if box is None or not box.numel:
            continue
        local = plain_of(target).detach()
        for chunk in entry.chunks:
            common = box.common(Box(chunk.offsets, chunk.sizes))
            if common.numel:
                inside = common.relative_to(chunk.offsets)
                part = local[common.relative_to(box.offsets).slices]
                dtype = dtype_of(entry.dtype)
                reads.append(Read(chunk, dtype, inside.offsets, inside.sizes, part))
    return sorted(reads, key=lambda read: (read.chunk.blob.file, read.chunk.blob.begin))


# --- reading -------------------------------------------------------------------------------


def check(reader: Reader, reads: Iterable[Read]) -> None:
    """Compare the checksums of all chunks that ``reads`` touch.

    Raises:
        CheckpointError: One differs.
        EOFError, OSError: A file is too short, or is missing.
    """
    blobs = dict.fromkeys(read.chunk.blob for read in reads)
    reader.expect(blob.span for blob in blobs)
    for blob in blobs:
        reader.check(blob)


@torch.no_grad()
def fill(reader: Reader, reads: Iterable[Read]) -> None:
    """Read into the targets."""
    reads = list(reads)
    reader.expect(_needed(read) for read in reads)
    for read in reads:
        dtype, target = read.dtype, read.target
        if not read.chunk.is_in_order:
            whole = torch.load(
                io.BytesIO(reader.read(read.chunk.blob)), weights_only=True, map_location="cpu"
            )
            target.copy_(whole[Box(read.chunk_begin, read.sizes).slices])
            continue
        begin, rows = _range_of(read)
        source = reader.source(read.chunk.blob.file)
        is_direct = (
            target.is_cpu
            and target.dtype == dtype
            and target.is_contiguous()
            and not (target.is_conj() or target.is_neg())
            and rows == read.sizes
        )
        if is_direct:
            source.read_into(bytes_of(target), begin)
            increment_version(target)  # so that autograd and units notice the change
            continue
        buffer = torch.empty(rows, dtype=dtype, device="cpu")
        source.read_into(bytes_of(buffer), begin)
        for dim, (first, size) in enumerate(zip(read.chunk_begin, read.sizes, strict=True)):
            buffer = buffer.narrow(dim, first if dim else 0, size)
        target.copy_(buffer)


def _needed(read: Read) -> tuple[str, int, int]:
    """Return the file, the first byte and the number of bytes that ``fill`` reads."""
    blob = read.chunk.blob
    if not read.chunk.is_in_order:
        return blob.span
    begin, rows = _range_of(read)
    return blob.file, begin, torch.Size(rows).numel() * read.dtype.itemsize


def _range_of(read: Read) -> tuple[int, tuple[int, ...]]:
    """Return where in the file the rows begin that a read needs, and their shape."""
    place = read.chunk.blob.begin + read.chunk.blob.data_begin
    if not read.sizes:
        return place, ()
    row = read.chunk.sizes[1:]
    num_bytes = torch.Size(row).numel() * read.dtype.itemsize
    return place + read.chunk_begin[0] * num_bytes, (read.sizes[0], *row)


def agree(ranks: Ranks, problems: list[str], what: str) -> None:
    """Raise on all ranks if there is a problem on one.

    **Collective:** all ranks.
    """
    said = ranks.all_gather(problems)
    found = list(dict.fromkeys(text for each in said for text in each))
    if found:
        shown = [f"  {text}" for text in found[:20]]
        more = [f"  and {len(found) - 20} more"] if len(found) > 20 else []
        raise CheckpointError("\n".join([what, *shown, *more]))


# --- verifying -----------------------------------------------------------------------------


class Damage(NamedTuple):
    """A file that is not as it was written."""

    file: str
    what: str


def damages(reader: Reader, sizes: dict[str, int]) -> Iterator[tuple[int, Damage | None]]:
    """Read a whole checkpoint. After each part, yield how many bytes it had, and what is wrong.

    ``sizes`` has the sizes of the files in the folder.
    """
    for file, blobs in reader.manifest.files().items():
        num_bytes = sum(blob.size for blob in blobs)
        if file not in sizes:
            yield num_bytes, Damage(file, "is missing")
            continue
        if sizes[file] != num_bytes:
            yield 0, Damage(file, f"has {sizes[file]} bytes, and {num_bytes} were written")
        wrong = None
        reader.expect((file, blob.begin, blob.size) for blob in blobs)
        for blob in blobs:
            try:
                reader.check(blob)
            except (CheckpointError, EOFError):
                end = blob.begin + blob.size
                wrong = wrong or Damage(file, f"differs in bytes {blob.begin} to {end}")
            except OSError as error:  # the disk fails
                wrong = wrong or Damage(file, f"cannot be read: {error}")
            yield blob.size, None
        if wrong is not None:
            yield 0, wrong
