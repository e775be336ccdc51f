"""How a checkpoint is written, and what commits it.

1. Every rank states what it would write and what speaks against it; all go on, or none.
2. The first rank removes what a killed save has left, and makes the folder of the step.
3. Every rank writes one file: its chunks of tensors, then its own parts. The file is synced.
4. The first rank gathers the checksums, writes torch's metadata, and publishes the manifest. **That
   is the commit.** A folder without a manifest is no checkpoint.
5. Old steps are removed, the manifest of each first.

Which rank writes what there is on several is planned in the first save. The plan is kept: as long
as all ranks hold what they held, later saves exchange only the values of steps 1 and 4.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from meshard._torch.private import dtype_of
from meshard.checkpoint._protocol import dcp_format, manifest
from meshard.checkpoint._protocol.blobs import bytes_of, frame_of, on_host
from meshard.checkpoint._protocol.jobs import Item, Job
from meshard.checkpoint._protocol.manifest import (
    Blob,
    CheckpointError,
    Chunk,
    Manifest,
    StepFolder,
    TensorEntry,
)
from meshard.checkpoint._protocol.ranks import Ranks
from meshard.checkpoint._protocol.storage import Sink, Storage

# --- what was written ----------------------------------------------------------------------


_SMALL = 2**20  # bytes


class _Written(NamedTuple):
    """What one rank has written: the checksums of its chunks, and its other blobs."""

    crcs: list[int]
    own: dict[str, Blob]
    objects: dict[str, Blob]


class _Plan(NamedTuple):
    """Who writes what, of one save and those after it."""

    fingerprint: str  # of this rank's items
    to_write: list[int]  # of these
    written_by: list[list[Item]]  # by rank; on the first one only


class Saver:
    """Saves into one storage. All ranks have one, and call ``save`` together."""

    def __init__(self, storage: Storage, ranks: Ranks) -> None:
        self.storage, self.ranks = storage, ranks
        self._plan: _Plan | None = None

    def save(self, job: Job, tidy: Callable[[], None]) -> None:
        """Write a checkpoint and commit it; then the first rank calls ``tidy``.

        **Collective:** all ranks.

        Raises:
            CheckpointError: On all ranks, if anything is wrong on one; nothing was committed.
        """
        own_parts = self._agree(job)
        folder = self._make_folder(job)
        problem, late, written = "", None, _Written([], {}, {})
        try:
            written = self._write(job, folder, own_parts)
        except Exception as error:  # the other ranks must know, whatever it is
            problem = self._problem(error, f"{self.storage.root}/{folder.name}")
        found = self.ranks.gather({"problem": problem, "written": written})
        trees = self.ranks.gather(job.merged) if own_parts.is_merged else [job.merged]
        if self.ranks.is_first:
            problem = "\n".join(dict.fromkeys(each["problem"] for each in found if each["problem"]))
            if not problem:
                problem = self._try_to_commit(job, folder, own_parts, found, trees)
            if problem:
                with contextlib.suppress(Exception):
                    manifest.remove(self.storage, folder)
            else:
                late = _error_of(tidy)
        self._refuse_if(job, self.ranks.broadcast(problem))
        if late is not None:  # not before the others know that the checkpoint is committed
            raise late

    def _refuse_if(self, job: Job, problem: str) -> None:
        if problem:
            raise CheckpointError(
                f"step {job.step} was not saved to {self.storage.root}:\n{problem}"
            )

    def _problem(self, error: Exception, where: str) -> str:
        who = f"rank {self.ranks.rank}: "
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"{who}no space is left for {where}; remove other checkpoints, or use keep=."
        if isinstance(error, FileNotFoundError) and self.ranks.size > 1:
            return (
                f"{who}{where}, which rank 0 has made, is not there. All ranks must see one "
                "folder: use a file system that they share, or an object store."
            )
        return f"{who}{type(error).__name__}: {error}"

    # --- 1. agreement ----------------------------------------------------------------------

    def _agree(self, job: Job) -> _Parts:
        """Compare what the ranks are to write, and plan who writes what, unless it is known."""
        fingerprint = hashlib.sha256(repr(job.items).encode()).hexdigest()
        is_known = self._plan is not None and self._plan.fingerprint == fingerprint
        said = self.ranks.all_gather(
            {
                "step": job.step,
                "problem": job.problem,
                "is_known": is_known,
                "merged": _hash(job.merged),
                "large": sorted(job.large),
                "plain": {name: _hash(tree) for name, tree in job.embedded.items()},
            }
        )
        problems = [each["problem"] for each in said if each["problem"]]
        steps = sorted({each["step"] for each in said})
        if len(steps) > 1:
            problems.append(f"ranks save different steps: {steps}")
        names = {name for each in said for name in each["plain"]}
        different = []
        for name in sorted(names):
            hashes = [each["plain"].get(name) for each in said]
            lacking = [rank for rank, each in enumerate(hashes) if each is None]
            if lacking:
                problems.append(f"rank(s) {lacking} do not save {name!r}, which other ranks do")
            elif len(set(hashes)) > 1:
                different.append(name)
                if any(name in each["large"] for each in said):
                    problems.append(
                        f"{name!r} differs between ranks and has more than 16 MiB of tensors, "
                        "which is too much to be kept for each rank; let each rank save it under "
                        "a name of its own on all ranks, or make DTensors of its tensors"
                    )
        self._refuse_if(job, "\n".join(dict.fromkeys(problems)))
        if not all(each["is_known"] for each in said):
            self._plan = self._make_plan(job, fingerprint)
        is_merged = any(each["merged"] != said[0]["merged"] for each in said)
        return _Parts(frozenset(different), is_merged)

    def _make_plan(self, job: Job, fingerprint: str) -> _Plan:
        """Decide which rank writes what is on several, such that all write about as much."""
        gathered = self.ranks.gather([list(item) for item in job.items])
        held = [[_item(row) for row in rows] for rows in gathered]
        to_write: list[list[int]] = [[] for _ in held]
        problem = ""
        if self.ranks.is_first:
            holders: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
            for rank, items in enumerate(held):
                for number, item in enumerate(items):
                    holders.setdefault((item.name, item.offsets), []).append((rank, number))
            load = [0] * len(held)
            for each in sorted(holders.values(), key=len):  # what one rank alone has comes first
                rank, number = each[0]
                # Small ordinary tensors come from the first rank that has them: the statistics of
                # a BatchNorm differ between ranks, and are to be those of one of them.
                if held[rank][number].placements or held[rank][number].num_bytes > _SMALL:
                    rank, number = min(each, key=lambda one: load[one[0]])
                to_write[rank].append(number)
                load[rank] += held[rank][number].num_bytes
            for numbers in to_write:
                numbers.sort()
            problem = _what_is_not_covered(
                held[rank][number] for rank, numbers in enumerate(to_write) for number in numbers
            )
        said = self.ranks.broadcast({"to_write": to_write, "problem": problem})
        self._refuse_if(job, said["problem"])
        written_by = [
            [items[number] for number in numbers]
            for items, numbers in zip(held, to_write, strict=True)
        ]
        return _Plan(fingerprint, said["to_write"][self.ranks.rank], written_by)

    # --- 2. the folder ---------------------------------------------------------------------

    def _make_folder(self, job: Job) -> StepFolder:
        folder, problem = StepFolder(job.step, 0), ""
        if self.ranks.is_first:
            try:
                folder = self._prepare(job.step)
            except Exception as error:
                problem = self._problem(error, self.storage.root)
        said = self.ranks.broadcast({"folder": folder, "problem": problem})
        self._refuse_if(job, said["problem"])
        return StepFolder(*said["folder"])

    def _prepare(self, step: int) -> StepFolder:
        attempt = 0
        for each in manifest.step_folders(self.storage):
            if manifest.is_leftover(self.storage, each):
                self.storage.remove_folder(each.name)
            elif each.step == step:
                attempt = each.attempt + 1
        folder = StepFolder(step, attempt)
        self.storage.make_folder(folder.name)
        self.storage.create(f"{folder.name}/{manifest.MARKER}").close()
        return folder

    # --- 3. files --------------------------------------------------------------------------

    def _write(self, job: Job, folder: StepFolder, parts: _Parts) -> _Written:
        plan = self._plan
        assert plan is not None
        written = _Written([], {}, {})
        own = {**job.of_rank, **{name: job.embedded[name] for name in parts.different}}
        name = dcp_format.file_of(self.ranks.rank)
        sink = self.storage.create(f"{folder.name}/{name}")
        try:
            begin = 0
            for number in plan.to_write:
                crc, size = _write_tensor(sink, job.sources[number])
                written.crcs.append(crc)
                begin += size
            for key, tree in sorted(own.items()):
                written.own[key] = blob = _write_bytes(sink, name, begin, _as_text(tree))
                begin += blob.size
            if self.ranks.is_first:
                for key, data in job.objects.items():
                    written.objects[key] = blob = _write_bytes(sink, name, begin, data)
                    begin += blob.size
        finally:
            sink.close()
        return written

    # --- 4. the commit ---------------------------------------------------------------------

    def _try_to_commit(
        self,
        job: Job,
        folder: StepFolder,
        parts: _Parts,
        found: list[dict[str, Any]],
        trees: list[dict[str, Any]],
    ) -> str:
        """Publish the manifest. Return what has prevented it, if anything has."""
        assert self._plan is not None
        written = [_written(each["written"]) for each in found]
        tensors = _entries(self._plan.written_by, [each.crcs for each in written])
        plain = {name: tree for name, tree in job.plain.items() if name not in parts.different}
        try:
            merged = _merge(trees)
        except ValueError as error:
            return str(error)
        made = Manifest(
            step=job.step,
            tensors=tensors,
            parts={**merged, **plain},
            rank_parts=[each.own for each in written],
            ties=job.ties,
            objects=list(written[0].objects.values()),
            about={**job.about, "num_ranks": self.ranks.size},
        )
        try:
            text = dcp_format.metadata_of(made, written[0].objects, job.paths)
            sink = self.storage.create(f"{folder.name}/{dcp_format.METADATA}")
            sink.write(text)
            sink.close()
            made.objects.append(Blob(dcp_format.METADATA, 0, len(text), zlib.crc32(text)))
            self.storage.publish(folder.manifest, manifest.to_text(made))
        except Exception as error:
            return self._problem(error, f"{self.storage.root}/{folder.name}")
        return ""


class _Parts(NamedTuple):
    """Which parts of the ranks differ."""

    different: frozenset[str]  # so each rank writes its own
    is_merged: bool  # ranks hold the optimizer's state of different parameters


def _error_of(call: Callable[[], None]) -> Exception | None:
    """Return what a call raises; under ``-W error`` that may be a warning."""
    try:
        call()
    except Exception as error:
        return error
    return None


def _hash(value: Any) -> str:
    return hashlib.sha256(_as_text(value)).hexdigest()


def _as_text(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _item(row: list[Any]) -> Item:
    name, shape, dtype, *boxes = row
    return Item(name, tuple(shape), dtype, *map(tuple, boxes))


def _written(row: list[Any]) -> _Written:
    crcs, own, objects = row
    return _Written(
        crcs,
        {name: Blob(*blob) for name, blob in own.items()},
        {name: Blob(*blob) for name, blob in objects.items()},
    )


def _what_is_not_covered(items: Iterable[Item]) -> str:
    covered: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for item in items:
        covered[item.name] = covered.get(item.name, 0) + torch.Size(item.sizes).numel()
        if shapes.setdefault(item.name, item.shape) != item.shape:
            return f"ranks hold {item.name!r} with shapes {shapes[item.name]} and {item.shape}."
    for name, numel in covered.items():
        if numel != torch.Size(shapes[name]).numel():
            return (
                f"the ranks hold {numel} elements of {name!r} together, which has "
                f"{torch.Size(shapes[name]).numel()}; all ranks of its mesh must take part in the "
                "save."
            )
    return ""


def _write_tensor(sink: Sink, source: torch.Tensor) -> tuple[int, int]:
    """Write a tensor; return the checksum of its blob, and its size."""
    host = on_host(source)
    data = bytes_of(host)
    crc = zlib.crc32(data)
    head, tail = frame_of(tuple(host.shape), host.dtype).around(crc)
    for piece in (head, data, tail):
        sink.write(piece)
    return zlib.crc32(tail, zlib.crc32(head, crc)), len(head) + len(data) + len(tail)


def _write_bytes(sink: Sink, file: str, begin: int, data: bytes) -> Blob:
    sink.write(data)
    return Blob(file, begin, len(data), zlib.crc32(data))


def _entries(written_by: list[list[Item]], crcs: list[list[int]]) -> dict[str, TensorEntry]:
    """Return the tensors of a checkpoint. Where a chunk begins follows from those before it."""
    entries: dict[str, TensorEntry] = {}
    for rank, (items, own_crcs) in enumerate(zip(written_by, crcs, strict=True)):
        begin = 0
        for item, crc in zip(items, own_crcs, strict=True):
            frame = frame_of(item.sizes, dtype_of(item.dtype))
            head, size = len(frame.head), len(frame.head) + item.num_bytes + len(frame.tail)
            blob = Blob(dcp_format.file_of(rank), begin, size, crc, head, item.num_bytes)
            new = TensorEntry(item.shape, item.dtype, list(item.placements))
            entry = entries.setdefault(item.name, new)
            entry.chunks.append(Chunk(item.offsets, item.sizes, blob))
            begin += size
    return entries


def _merge(trees: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the optimizers of all ranks as one: stages of a pipeline have different parameters."""
    merged: dict[str, Any] = {}
    for tree in trees:
        for name, each in tree.items():
            present = merged.setdefault(name, {**each, "state": {}, "param_groups": []})
            for fqn, state in each["state"].items():
                if present["state"].setdefault(fqn, state) != state:
                    raise ValueError(f"ranks have different states of {name!r} for {fqn!r}.")
            groups = present["param_groups"]
            groups += [group for group in each["param_groups"] if group not in groups]
            held = [fqn for group in groups for fqn in group["params"]]
            if len(set(held)) < len(held):
                raise ValueError(f"ranks have different hyperparameters in {name!r}.")
    return merged
