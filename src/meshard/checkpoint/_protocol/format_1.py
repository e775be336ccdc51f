"""Manifests of format 1, whose tensors ``torch.save`` has packed: read, and not written."""

from __future__ import annotations

from typing import Any

from meshard._torch.private import dtype_of
from meshard.checkpoint._protocol.commits import NAME
from meshard.checkpoint._protocol.manifest import (
    Chunk,
    Manifest,
    Range,
    TensorEntry,
    check_about,
    check_covered,
    check_file_name,
    check_part,
    check_references,
    integer,
    integers,
    of,
    own_part,
)
from meshard.checkpoint._protocol.parts import RANDOM
from meshard.checkpoint._protocol.storage import CheckpointError


def from_content(content: dict[str, Any], where: str) -> Manifest:
    """Return the manifest that was written as ``content``; ``where`` is for messages.

    Raises:
        CheckpointError: It has not the form of format 1.
    """
    try:
        return _parsed(content)
    except CheckpointError as error:
        raise CheckpointError(f"{where}/{NAME}: {error}") from error
    except Exception as error:  # whatever a wrong form leads to
        raise CheckpointError(
            f"{where}/{NAME} has the right checksum, and not the form of format 1."
        ) from error


def _parsed(content: dict[str, Any]) -> Manifest:
    names = [check_file_name(name) for name in content["files"]]
    files: dict[str, list[Range]] = {name: [] for name in names}

    def add(row: list[int], offsets: Any, sizes: Any, *, is_archive: bool) -> Chunk:
        number, begin, size, crc32, data_begin, data_size = integers(row)
        files[names[number]].append(Range(begin, size, crc32, (data_begin, data_begin + data_size)))
        return Chunk(
            tuple(integers(offsets)), tuple(integers(sizes)), names[number], begin, size, is_archive
        )

    tensors: dict[str, TensorEntry] = {}
    for name, each in content["tensors"].items():
        shape, placements = (
            tuple(integers(each["shape"])),
            [of(str, name) for name in each["placements"]],
        )
        entry = TensorEntry(shape, each["dtype"], placements)
        dtype_of(of(str, each["dtype"]))
        for offsets, sizes, row in each["chunks"]:
            entry.chunks.append(add(row, offsets, sizes, is_archive=True))
        check_covered(name, entry)
        tensors[name] = entry
    kinds: dict[str, str] = {}
    for rank, rows in enumerate(content["rank_parts"]):
        for name, row in rows.items():
            size = (row[2],)
            chunk = add(row, [0], [*size], is_archive=False)
            tensors[own_part(rank, name)] = TensorEntry(size, "uint8", [], [chunk])
            kinds[name] = RANDOM if name == RANDOM else ""  # its own text tells
    for row in content["objects"]:
        add(row, [], [], is_archive=False)
    for ranges in files.values():
        ranges.sort()
    step, about = integer(content["step"]), of(dict, content["about"])
    check_about(about)
    for part in of(dict, content["parts"]).values():
        check_part(part)
        check_references(part, tensors)
    ties = {name: of(str, tied) for name, tied in of(dict, content["ties"]).items()}
    return Manifest(step, tensors, content["parts"], kinds, ties, files, about)
