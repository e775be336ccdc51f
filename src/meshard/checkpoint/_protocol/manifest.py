"""The manifest of a checkpoint: what is in it, where the bytes are, and their checksums."""

from __future__ import annotations

import bisect
import itertools
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from meshard._torch.private import dtype_of
from meshard.checkpoint._protocol.commits import FORMAT, NAME, VERSION, canonical, checksum_of
from meshard.checkpoint._protocol.plain import names_in, reference
from meshard.checkpoint._protocol.storage import CheckpointError

RANGE_BYTES = 2**25  # of a file: each such range has a checksum
_FILE = re.compile(r"[A-Za-z0-9_.-]+")


class Range(NamedTuple):
    """A range of a file with its checksum."""

    begin: int
    size: int  # bytes
    crc32: int
    first: tuple[int, int] = (0, 0)  # format 1 computed the checksum over this part first

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The parts of the file, as begin and end, in the order of the checksum."""
        begin, end = (self.begin + place for place in self.first)
        return [(begin, end), (self.begin, begin), (end, self.begin + self.size)]


class Chunk(NamedTuple):
    """A box of a tensor, and the bytes of a file that have its elements, in order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    num_bytes: int
    is_archive: bool = False  # the bytes are what torch.save has made of it: format 1, and torch


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
    rank_parts: dict[str, str] = field(default_factory=dict)  # kinds of parts that ranks have each
    ties: dict[str, str] = field(default_factory=dict)  # by further name of a tensor: its name
    files: dict[str, list[Range]] = field(default_factory=dict)  # cover each file; of torch: none
    about: dict[str, Any] = field(default_factory=dict)  # versions, ranks, mesh, date
    unreadable: list[str] = field(default_factory=list)  # of torch: needs classes of its own

    @property
    def num_ranks(self) -> int:
        """How many ranks have saved it; 0: it is of torch."""
        return int(self.about.get("num_ranks", 0))

    @property
    def has_each_name(self) -> bool:
        """Whether a tied tensor was saved under each of its names: by torch, or as a dict."""
        return bool(self.about.get("has_each_name", False))

    @property
    def num_bytes(self) -> int:
        return sum(each.size for ranges in self.files.values() for each in ranges)

    def ranges_of(self, chunk: Chunk) -> list[Range]:
        """Return the ranges with checksums that a chunk touches."""
        ranges = self.files.get(chunk.file, [])
        first = bisect.bisect_right(ranges, chunk.begin, key=lambda each: each.begin) - 1
        end = chunk.begin + chunk.num_bytes
        return list(itertools.takewhile(lambda each: each.begin < end, ranges[max(first, 0) :]))


def own_name(rank: int, name: str) -> str:
    """Return the name of rank ``rank``'s version of a tensor that differs between ranks."""
    return f"rank{rank}/{name}"


def own_part(rank: int, name: str) -> str:
    """Return the name of the tensor of bytes with rank ``rank``'s version of a part."""
    return f"rank{rank}/parts/{name}"


SMALL = 2**20  # bytes


def with_own_names(manifest: Manifest, rank: int) -> Manifest:
    """Return a manifest where a rank's own versions of tensors have their plain names too."""
    prefix = own_name(rank, "")
    own = {each.removeprefix(prefix): each for each in manifest.tensors if each.startswith(prefix)}
    ties = {alias: own.get(name, name) for alias, name in manifest.ties.items()}
    return replace(manifest, ties={**ties, **own})


def file_order(name: str, itemsize: int, num_bytes: int) -> tuple[int, bool, str]:
    """Return the key by which tensors follow each other in a file.

    Largest elements first, so that all are aligned; then small tensors, which other ranks may need
    too, in few ranges. Readers compute places from it: it never changes within a format.
    """
    return -itemsize, num_bytes > SMALL, name


# --- as text -------------------------------------------------------------------------------


class WrittenFile(NamedTuple):
    """A file of tensors that follow each other by ``file_order``."""

    name: str
    size: int  # bytes
    header_size: int  # bytes before the first tensor
    crcs: list[int]  # of each range

    def ranges(self) -> list[Range]:
        begins = range(0, self.size, RANGE_BYTES)
        return [
            Range(begin, min(RANGE_BYTES, self.size - begin), crc)
            for begin, crc in zip(begins, self.crcs, strict=True)
        ]


def to_text(manifest: Manifest, files: Sequence[WrittenFile]) -> bytes:
    """Return the manifest as text. Where a tensor is in its file follows from the order."""
    number = {each.name: index for index, each in enumerate(files)}
    kinds: dict[str, int] = {}  # as text; tensors that are cut alike are many

    def kind_of(entry: TensorEntry) -> int:
        chunks = [
            number[each.file]
            if each.sizes == entry.shape
            else [number[each.file], each.offsets, each.sizes]
            for each in entry.chunks
        ]
        kind = json.dumps([entry.dtype, entry.shape, entry.placements, *chunks])
        return kinds.setdefault(kind, len(kinds))

    rows = {name: kind_of(entry) for name, entry in manifest.tensors.items()}
    content = {
        "format": FORMAT,
        "format_version": VERSION,
        "step": manifest.step,
        "about": manifest.about,
        "files": files,  # name, size, size of the header, checksum of each range
        # Of tensors: dtype, shape, placements, and chunks: the number of the file that has the
        # whole tensor, or [number, offsets, sizes].
        "kinds": [json.loads(kind) for kind in kinds],
        "tensors": rows,  # the number of the kind of each
        "ties": manifest.ties,
        "parts": {name: _shortened(name, part, rows) for name, part in manifest.parts.items()},
        "rank_parts": manifest.rank_parts,
    }
    return canonical({"checksum": checksum_of(canonical(content)), "content": content})


def _shortened(name: str, part: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    """Leave out of an optimizer's part what ``_lengthened`` adds again: references to tensors."""
    if "param_groups" not in part:
        return part
    state = {
        fqn: each
        for fqn, each in part["state"].items()
        if not each
        or any(
            value != reference(full) or "." in key or full not in tensors
            for key, value in each.items()
            for full in [f"{name}.state.{fqn}.{key}"]
        )
    }
    return {**part, "state": state}


def _lengthened(name: str, part: dict[str, Any], tensors: Iterable[str]) -> None:
    """Refer to the tensors ``optimizer.state.<parameter>.<key>`` in an optimizer's part."""
    params = {fqn for group in part["param_groups"] for fqn in group["params"]}
    state, prefix = part["state"], f"{name}.state."
    known = names_in(state)
    for full in tensors:
        if full.startswith(prefix) and full not in known:
            fqn, _, key = full.removeprefix(prefix).rpartition(".")
            if fqn in params:
                state.setdefault(fqn, {})[key] = reference(full)


def from_content(content: dict[str, Any], where: str) -> Manifest:
    """Return the manifest that was written as ``content``; ``where`` is for messages.

    Raises:
        CheckpointError: It has not the form of this format, names a file outside of its folder, or
            has tensors that are not covered.
    """
    at = [""]  # the field that is being read
    try:
        return _parsed(content, at)
    except CheckpointError as error:
        raise CheckpointError(f"{where}/{NAME}: {error}") from error
    except Exception as error:  # whatever a wrong form leads to
        raise CheckpointError(
            f"{where}/{NAME} has the right checksum, and its field {at[0]} has not the form of "
            f"format {VERSION}."
        ) from error


def _parsed(content: dict[str, Any], at: list[str]) -> Manifest:
    at[0] = "'step' or 'about'"
    step, about = integer(content["step"]), of(dict, content["about"])
    check_about(about)
    at[0] = "'files'"
    files = [
        WrittenFile(check_file_name(name), integer(size), integer(head), integers(crcs))
        for name, size, head, crcs in content["files"]
    ]
    ranges = {each.name: each.ranges() for each in files}
    kinds: list[tuple[TensorEntry, int]] = []  # and the bytes of an element
    for number, (dtype, shape, placements, *chunks) in enumerate(content["kinds"]):
        at[0] = f"'kinds', number {number},"
        size, whole = dtype_of(of(str, dtype)).itemsize, integers(shape)
        entry = TensorEntry(tuple(whole), dtype, [of(str, each) for each in placements])
        for each in chunks:
            file, offsets, sizes = [each, [0] * len(whole), whole] if type(each) is int else each
            box = tuple(integers(offsets)), tuple(integers(sizes))
            chunk = Chunk(*box, files[integer(file)].name, 0, math.prod(box[1]) * size)
            entry.chunks.append(chunk)
        kinds.append((entry, size))
    tensors, checked = dict[str, TensorEntry](), set[int]()
    held: dict[str, list[tuple[tuple[int, bool, str], TensorEntry, int]]]
    held = {each.name: [] for each in files}
    for name, number in of(dict, content["tensors"]).items():
        at[0] = f"'tensors' of {name!r}"
        kind, size = kinds[integer(number)]
        if number not in checked:
            checked.add(number)
            check_covered(name, kind)
        tensors[name] = entry = replace(kind, chunks=[*kind.chunks])
        for position, chunk in enumerate(entry.chunks):
            order = file_order(name, size, chunk.num_bytes)
            held[chunk.file].append((order, entry, position))
    for written in files:
        begin = written.header_size
        for _, entry, position in sorted(held[written.name], key=lambda row: row[0]):
            chunk = entry.chunks[position]
            entry.chunks[position] = chunk._replace(begin=begin)
            begin += chunk.num_bytes
        if begin != written.size:
            raise CheckpointError(
                f"the tensors in {written.name} end at byte {begin}, and it has {written.size}."
            )
    at[0] = "'ties'"
    ties = {name: of(str, tied) for name, tied in of(dict, content["ties"]).items()}
    rank_parts = {}
    for name, kind in of(dict, content["rank_parts"]).items():
        at[0] = f"'rank_parts' of {name!r}"
        if kind not in ("value", "stateful", "module", "random"):
            raise ValueError(f"{kind!r} is no kind of a part")
        rank_parts[name] = kind
    parts = of(dict, content["parts"])
    for name, part in parts.items():
        at[0] = f"'parts' of {name!r}"
        check_part(part)
        if "param_groups" in part:
            _lengthened(name, part, tensors)
        check_references(part, tensors)
    return Manifest(step, tensors, parts, rank_parts, ties, ranges, about)


def of(kind: type, value: Any) -> Any:
    """Return a value of this very type, or raise."""
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def integer(value: Any) -> int:
    if of(int, value) < 0:
        raise ValueError(f"{value!r} is no number of bytes, elements or files")
    return int(value)


def integers(values: Any) -> list[int]:
    return list(map(integer, of(list, values)))


def check_about(about: Any) -> None:
    integer(of(dict, about)["num_ranks"])
    for mesh in of(list, about.get("meshes", [])):
        integers(of(dict, mesh)["shape"])


def check_part(part: Any) -> None:
    """Raise unless a part has the form of an optimizer's, or has a kind and a tree."""
    if "param_groups" not in of(dict, part):
        of(str, part["kind"]), part["tree"]
        return
    for state in of(dict, part["state"]).values():
        of(dict, state)
    for group in of(list, part["param_groups"]):
        for name in of(list, of(dict, group)["params"]):
            of(str, name)


def check_references(part: Any, tensors: dict[str, TensorEntry]) -> None:
    """Raise if a part refers to a tensor that is not there."""
    for name in names_in(part):
        if name not in tensors and own_name(0, name) not in tensors:
            raise ValueError(f"there is no tensor {name!r}")


def check_file_name(name: Any) -> str:
    """Return the name of a file in a folder, or raise if it may be outside of the folder."""
    if not _FILE.fullmatch(name) or name in (".", ".."):
        raise CheckpointError(
            f"it names the file {name!r}, which is outside of its folder; do not use this "
            "checkpoint, that was not written by meshard or torch."
        )
    return str(name)


def check_covered(name: str, entry: TensorEntry) -> None:
    """Raise a CheckpointError unless the chunks of a tensor have each of its elements once."""
    covered = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
    if covered != math.prod(entry.shape) or not entry.chunks:
        raise CheckpointError(
            f"the chunks of {name!r} have {covered} elements, and its shape is {entry.shape}."
        )
    for chunk in entry.chunks:
        box = list(zip(chunk.offsets, chunk.sizes, entry.shape, strict=True))
        if any(begin + size > whole for begin, size, whole in box):
            raise CheckpointError(f"a chunk of {name!r} lies outside of the tensor: {chunk}.")
    if len(entry.chunks) > 1:
        # The edges of all chunks cut the tensor into cells. No cell may be in two chunks.
        edges = [
            sorted({*(c.offsets[dim] for c in entry.chunks), size})
            for dim, size in enumerate(entry.shape)
        ]
        corners = [_corners(each, edges) for each in entry.chunks]
        # Boxes of a mesh have one cell each; very many cells would take all memory.
        if sum(math.prod(map(len, own)) for own in corners) > 64 * len(corners):
            raise CheckpointError(f"the chunks of {name!r} are no boxes of a mesh.")
        cells = [cell for own in corners for cell in itertools.product(*own)]
        if len(set(cells)) < len(cells):
            raise CheckpointError(f"chunks of {name!r} overlap.")


def _corners(chunk: Chunk, edges: list[list[int]]) -> list[list[int]]:
    """Return where, on each dim, cells in a chunk begin."""
    return [
        own[bisect.bisect_left(own, begin) : bisect.bisect_left(own, begin + size)]
        for own, begin, size in zip(edges, chunk.offsets, chunk.sizes, strict=True)
    ]
