"""How a checkpoint is read into a model, an optimizer and what else was saved.

Nothing is changed before everything is known to fit: first names, shapes and dtypes are compared,
then the checksums of all bytes that this rank needs, and all ranks agree. Then each rank reads the
ranges that it holds, straight into its shards where these are in host memory.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from meshard._mesh.boxes import Box
from meshard._torch.dtensor import plain_of
from meshard._torch.private import dtype_of
from meshard.checkpoint._protocol import commits, format_1
from meshard.checkpoint._protocol.manifest import (
    Chunk,
    Manifest,
    Range,
    from_content,
    own_name,
    own_part,
)
from meshard.checkpoint._protocol.storage import CheckpointError, Source, Storage
from meshard.checkpoint._protocol.tensor_file import PIECE_BYTES, bytes_of
from meshard.checkpoint.weights_layout import held_box


def read_manifest(storage: Storage, folder: str) -> Manifest:
    """Return the manifest in a folder, of any format, checked."""
    where = f"{storage.root}/{folder}"
    try:
        text = storage.read(f"{folder}/{commits.NAME}")
    except FileNotFoundError as error:
        raise CheckpointError(f"{where} was removed meanwhile, as by prune.") from error
    content = commits.content_of(text, where)
    is_old = content["format_version"] < commits.VERSION
    return (format_1.from_content if is_old else from_content)(content, where)


class Read(NamedTuple):
    """A part of a chunk that is read into a part of a tensor of this rank."""

    chunk: Chunk
    dtype: torch.dtype  # of the chunk
    begin: tuple[int, ...]  # where the part begins in the chunk
    target: torch.Tensor  # a view of the part


class Reader:
    """Reads the files of one checkpoint, and compares checksums, if it has any."""

    def __init__(self, storage: Storage, folder: str, manifest: Manifest) -> None:
        self._storage, self._folder = storage, folder
        self.manifest = manifest
        self._sources: dict[str, Source] = {}
        self._buffer = memoryview(bytearray(2**20))  # what fits into a cache is summed quickly

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """The sizes of the files in the folder."""
        return self._storage.files(self._folder)

    def path_of(self, file: str) -> str:
        return f"{self._folder}/{file}".lstrip("/")

    def source(self, file: str) -> Source:
        if file not in self._sources:
            self._sources[file] = self._storage.open(self.path_of(file))
        return self._sources[file]

    def check(self, file: str, part: Range) -> None:
        """Read a range of a file only to compare its checksum."""
        source, end = self.source(file), part.begin + part.size
        if end > self.sizes.get(file, 0):  # else a wrong size might take all memory
            raise EOFError(f"{file} ends before byte {end}")
        crc = 0
        for at, stop in part.spans:
            while at < stop:
                data = self._buffer[: stop - at]
                source.read_into(data, at)
                crc, at = zlib.crc32(data, crc), at + len(data)
        if crc != part.crc32:
            raise CheckpointError(
                f"{self._storage.root}/{self.path_of(file)} is not as it was written: its "
                f"checksum differs in bytes {part.begin} to {part.begin + part.size}."
            )

    def bytes_of(self, chunk: Chunk) -> bytes:
        """Return the bytes of a chunk, checked."""
        for part in self.manifest.ranges_of(chunk):
            self.check(chunk.file, part)
        return self.source(chunk.file).read(chunk.begin, chunk.num_bytes)

    def tree_of(self, name: str) -> Any:
        """Return the plain value that a tensor of bytes has as JSON."""
        chunk = self.manifest.tensors[name].chunks[0]
        data = self.bytes_of(chunk)
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            where = f"{self._storage.root}/{self.path_of(chunk.file)}"
            raise CheckpointError(f"{where} has no JSON text in {name!r}: {error}") from error

    def kind_of(self, part: str) -> str:
        """Return the kind of a part that each rank has of its own."""
        return self.manifest.rank_parts[part] or str(self.tree_of(own_part(0, part))["kind"])

    def tensor_of(self, name: str, advance: Callable[[int], Any] = lambda _: None) -> torch.Tensor:
        """Return a whole tensor, or the first rank's version, checked, in host memory."""
        name = name if name in self.manifest.tensors else own_name(0, name)
        entry = self.manifest.tensors[name]
        tensor = torch.empty(entry.shape, dtype=dtype_of(entry.dtype), device="cpu")
        reads = list(_reads_into(self.manifest, name, tensor, Box.of_all(entry.shape)))
        check(self, reads)
        fill(self, reads, advance)
        return tensor

    def close(self) -> None:
        for source in self._sources.values():
            source.close()


# --- what goes where -----------------------------------------------------------------------


def compare(
    manifest: Manifest, targets: dict[str, torch.Tensor], *, cast: bool
) -> tuple[dict[str, torch.Tensor], list[str], list[str]]:
    """Return the targets that can be filled, names that are missing, and texts on what is wrong."""
    fitting, missing, wrong = dict[str, torch.Tensor](), list[str](), list[str]()
    for name, target in targets.items():
        entry = manifest.tensors.get(manifest.ties.get(name, name))
        if entry is None:
            missing.append(name)
            continue
        saved = dtype_of(entry.dtype)
        if entry.shape != tuple(target.shape):
            wrong.append(
                f"{name} has shape {list(entry.shape)} in the checkpoint and "
                f"{list(target.shape)} here"
            )
        elif saved != target.dtype and not (cast and _can_cast(saved, target.dtype)):
            advice = "no cast keeps its values" if cast else "pass cast=True to convert it"
            wrong.append(
                f"{name} is {entry.dtype} in the checkpoint and "
                f"{str(target.dtype).removeprefix('torch.')} here; {advice}"
            )
        elif (target.to_local() if isinstance(target, DTensor) else target).is_meta:
            wrong.append(
                f"{name} is on the meta device here; call to_empty(device=...) on the model first"
            )
        else:
            fitting[name] = target
    return fitting, missing, wrong


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
    reads = list[Read]()
    for name, target in targets.items():
        box = held_box(name, target)
        if box is not None and box.numel:
            local = plain_of(target).detach()
            reads += _reads_into(manifest, manifest.ties.get(name, name), local, box)
    return sorted(reads, key=lambda read: (read.chunk.file, read.chunk.begin))


def _reads_into(manifest: Manifest, name: str, local: torch.Tensor, box: Box) -> Iterator[Read]:
    """Iterate over what fills a box of a tensor, ``local``."""
    entry = manifest.tensors[name]
    dtype = dtype_of(entry.dtype)
    for chunk in entry.chunks:
        common = box.common(Box(chunk.offsets, chunk.sizes))
        if common.numel:
            part = local[common.relative_to(box.offsets).slices]
            yield Read(chunk, dtype, common.relative_to(chunk.offsets).offsets, part)


# --- reading -------------------------------------------------------------------------------


def check(
    reader: Reader, reads: Iterable[Read], advance: Callable[[int], Any] = lambda _: None
) -> None:
    """Compare the checksums of all ranges that ``reads`` touch.

    Raises:
        CheckpointError: One differs.
        EOFError, OSError: A file is too short, or is missing.
    """
    ranges = dict.fromkeys(
        (read.chunk.file, part) for read in reads for part in reader.manifest.ranges_of(read.chunk)
    )
    for file, part in ranges:
        reader.check(file, part)
        advance(part.size)


@torch.no_grad()
def fill(
    reader: Reader, reads: Iterable[Read], advance: Callable[[int], Any] = lambda _: None
) -> None:
    """Read into the targets."""
    scratch = torch.empty(0, dtype=torch.uint8, device="cpu")
    for read in reads:
        source, target = reader.source(read.chunk.file), read.target
        if read.chunk.is_archive:
            target.copy_(_unpacked(source, read)[Box(read.begin, tuple(target.shape)).slices])
            advance(target.nbytes)
            continue
        for place, rows, begin, part in _rows(read):
            is_direct = (
                part.is_cpu
                and part.dtype == read.dtype
                and part.is_contiguous()
                and not (part.is_conj() or part.is_neg())
                and tuple(part.shape) == rows
            )
            if is_direct:
                source.read_into(bytes_of(part), place)
                increment_version(part)  # so that autograd and units notice the change
            else:
                num_bytes = math.prod(rows) * read.dtype.itemsize
                if scratch.numel() < num_bytes:
                    scratch = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
                buffer = scratch[:num_bytes].view(read.dtype).view(rows)
                source.read_into(bytes_of(buffer), place)
                part.copy_(buffer[Box(begin, tuple(part.shape)).slices])
            advance(part.nbytes)


def _unpacked(source: Source, read: Read) -> torch.Tensor:
    """Return a tensor that torch.save has written: torch alone knows in which order."""
    chunk = read.chunk
    data = io.BytesIO(source.read(chunk.begin, chunk.num_bytes))
    tensor: Any = None
    with contextlib.suppress(Exception):  # torch raises whatever wrong bytes lead to
        tensor = torch.load(data, weights_only=True, map_location="cpu")
    is_tensor = isinstance(tensor, torch.Tensor)
    if not is_tensor or (tensor.dtype, tuple(tensor.shape)) != (read.dtype, chunk.sizes):
        raise CheckpointError(
            f"{chunk.file} has no tensor of {read.dtype} and shape {chunk.sizes} at byte "
            f"{chunk.begin}."
        )
    found: torch.Tensor = tensor.detach()
    return found


Rows = tuple[int, tuple[int, ...], tuple[int, ...], torch.Tensor]


def _rows(read: Read) -> Iterator[Rows]:
    """Iterate over what is read at a time: consecutive rows of a chunk, in ``PIECE_BYTES`` at most.

    Each has the place of the rows in the file, their shape, where in them the part begins that is
    wanted, and the view of the target that gets it.
    """

    def of(
        place: int, sizes: tuple[int, ...], begin: tuple[int, ...], target: torch.Tensor
    ) -> Iterator[Rows]:
        if not sizes:
            yield place, (), (), target
            return
        row = math.prod(sizes[1:]) * read.dtype.itemsize
        count = max(1, PIECE_BYTES // row)
        for first in range(0, target.size(0), count):
            part = target[first : first + count]
            at = place + (begin[0] + first) * row
            if row > PIECE_BYTES:
                yield from of(at, sizes[1:], begin[1:], part[0])
            else:
                yield at, (part.size(0), *sizes[1:]), (0, *begin[1:]), part

    return of(read.chunk.begin, read.chunk.sizes, read.begin, read.target)


# --- verifying -----------------------------------------------------------------------------


class Damage(NamedTuple):
    """A file that is not as it was written."""

    file: str
    what: str


def damages(reader: Reader, advance: Callable[[int], Any]) -> list[Damage]:
    """Read a whole checkpoint, and return the files that are not as they were written."""
    found = []
    for file, ranges in sorted(reader.manifest.files.items()):
        num_bytes, written = sum(part.size for part in ranges), reader.sizes.get(file)
        if written is None:
            found.append(Damage(file, "is missing"))
            continue
        if written != num_bytes:
            found.append(Damage(file, f"has {written} bytes, and {num_bytes} were written"))
        wrong = []
        for part in ranges:
            try:
                reader.check(file, part)
            except (CheckpointError, EOFError):
                wrong.append(f"differs in bytes {part.begin} to {part.begin + part.size}")
            except OSError as error:  # the disk fails
                wrong.append(f"cannot be read: {error}")
            advance(part.size)
        found += [Damage(file, text) for text in wrong[:1]]
    return found
