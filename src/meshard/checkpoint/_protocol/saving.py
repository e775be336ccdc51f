"""How a checkpoint is written, and what commits it.

1. Every rank tells what it would write, and whether something is wrong. All ranks go on, or none.
   ``async_save`` returns after this step.
2. The first rank removes what a killed save has left, and makes the folder of the step.
3. Every rank writes one file: its chunks of tensors, then its own parts. The file is synced.
4. The first rank gathers the checksums, writes torch's metadata, and publishes the manifest. **That
   is the commit.** A folder without a manifest is no checkpoint.
5. Old steps are removed, the manifest of each first.

The first save plans which rank writes what several ranks hold. As long as all ranks hold the same
as then, the plan is used again, and saves exchange only the values of steps 1, 2 and 4.

An ordinary tensor that users pass along, or that is extra state of a module, may differ between
ranks. If it does, the part that it belongs to is stored for each rank: the tree of the part in the
file of the rank, and its tensors under names of their own (``manifest.own_name``).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import math
import uuid
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
from meshard.checkpoint._protocol.parts import NAMES, RANDOM
from meshard.checkpoint._protocol.ranks import Ranks
from meshard.checkpoint._protocol.storage import Sink, Storage

_SMALL = 2**20  # bytes
_MERGED = ("state", "param_groups")  # what is merged of the optimizers of all ranks
_SAMPLES = 16  # elements of a tensor that are compared with those of its copies
_DRIFT = 0.05  # by how much copies may differ, as a fraction of their greatest element


class _Written(NamedTuple):
    """What one rank has written: the checksums of its chunks, and its own parts."""

    crcs: list[int]
    own: dict[str, Blob]


class _Plan(NamedTuple):
    """Which rank writes what, in one save and those after it."""

    number: str  # of the first rank; after an interrupt a rank may have an older plan than others
    items: list[Item]  # of this rank
    different: list[str]  # parts that differ, so that each rank writes its own
    to_write: list[int]  # positions in ``items``
    written_by: list[list[Item]]  # by rank; only the first rank has it


class Agreed(NamedTuple):
    """What the ranks have agreed to write."""

    plan: _Plan
    is_merged: bool  # ranks have the state of different parameters, which are merged


class Saver:
    """Saves into one storage. All ranks have one, and call ``agree`` and ``write`` together."""

    def __init__(self, storage: Storage, ranks: Ranks) -> None:
        self.storage, self.ranks = storage, ranks
        self._plan: _Plan | None = None

    def write(self, job: Job, agreed: Agreed, tidy: Callable[[], None]) -> None:
        """Write a checkpoint and commit it; then the first rank calls ``tidy``.

        **Collective:** all ranks.

        Raises:
            CheckpointError: On all ranks, if anything is wrong on one; nothing was committed.
        """
        folder = self._make_folder(job)
        problem, late, written = job.problem, None, _Written([], {})
        try:
            if not problem:
                written = self._write_file(job, folder, agreed.plan)
        except Exception as error:  # the other ranks must know, whatever it is
            problem = self._problem(error, f"{self.storage.root}/{folder.name}")
        found = self.ranks.gather({"problem": problem, "written": written, "ties": job.ties})
        trees = self.ranks.gather(job.optimizers) if agreed.is_merged else [job.optimizers]
        if self.ranks.is_first:
            problem = _joined(each["problem"] for each in found)
            if not problem:
                problem = self._try_to_commit(job, folder, agreed.plan, found, trees)
            if problem:
                with contextlib.suppress(Exception):
                    manifest.remove(self.storage, folder)
            else:
                try:
                    tidy()
                except Exception as error:  # under ``-W error`` a warning
                    late = error
        self._refuse_if(job, self.ranks.broadcast(problem))
        if late is not None:  # last, once other ranks know of the commit
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
                f"{who}{where}, which the first rank has made, is not there. All ranks must see "
                "one folder: use a file system that they share, or an object store."
            )
        return f"{who}{type(error).__name__}: {error}"

    # --- 1. agreement ----------------------------------------------------------------------

    def agree(self, job: Job) -> Agreed:
        """Compare what the ranks are to write, and plan who writes what, unless it is known.

        Afterwards the job has the sources of what this rank writes, and no others.
        **Collective:** all ranks.

        Raises:
            CheckpointError: On all ranks, if one has a problem or they do not fit together.
        """
        plan = self._plan
        said = self.ranks.all_gather(
            {
                "step": job.step,
                "problem": job.problem,
                "plan": plan.number if plan is not None and plan.items == job.items else None,
                "optimizers": _hash(job.optimizers),
                "others": {} if job.problem else _hashes(job),
            }
        )
        self._refuse_if(job, _joined(each["problem"] for each in said))
        problems, different = [], []
        steps = sorted({each["step"] for each in said})
        if len(steps) > 1:
            problems.append(f"ranks save different steps: {steps}")
        for name in sorted({name for each in said for name in each["others"]}):
            hashes = [each["others"].get(name) for each in said]
            lacking = [rank for rank, each in enumerate(hashes) if each is None]
            if lacking:
                problems.append(f"rank(s) {lacking} do not save {name!r}, which other ranks do")
            elif len(set(hashes)) > 1:
                different.append(name)
        self._refuse_if(job, _joined(problems))
        plans = {each["plan"] for each in said}
        if plan is None or plan.different != different or len(plans) > 1 or None in plans:
            plan = self._plan = self._make_plan(job, different)
        job.sources = [job.sources[number] for number in plan.to_write]
        is_merged = any(each["optimizers"] != said[0]["optimizers"] for each in said)
        return Agreed(plan, is_merged)

    def _make_plan(self, job: Job, different: list[str]) -> _Plan:
        """Decide which rank writes what is on several, such that all write about as much."""
        gathered = self.ranks.gather(
            {
                "items": _named_apart(job, different, self.ranks.rank),
                "copies": _values_of_copies(job, self.ranks.size),
            }
        )
        held = [[_item(row) for row in each["items"]] for each in gathered]
        to_write: list[list[int]] = [[] for _ in held]
        problem = ""
        if self.ranks.is_first:
            holders: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
            for rank, items in enumerate(held):
                for number, item in enumerate(items):
                    # With shape and dtype, so that what differs in these is refused below.
                    key = item.name, item.shape, item.dtype, item.offsets
                    holders.setdefault(key, []).append((rank, number))
            load = [0] * len(held)
            for each in sorted(holders.values(), key=len):  # first what only one rank can write
                rank, number = each[0]
                # The first rank that has them writes all small ordinary tensors. Those that differ,
                # such as the statistics of a BatchNorm, are then all from one rank.
                if held[rank][number].placements or held[rank][number].num_bytes > _SMALL:
                    rank, number = min(each, key=lambda one: load[one[0]])
                to_write[rank].append(number)
                load[rank] += held[rank][number].num_bytes
            for numbers in to_write:
                numbers.sort()
            problem = _what_is_not_covered(
                held[rank][number] for rank, numbers in enumerate(to_write) for number in numbers
            ) or _what_differs(each["copies"] for each in gathered)
        plan_number = uuid.uuid4().hex
        said = self.ranks.broadcast(
            {"number": plan_number, "to_write": to_write, "problem": problem}
        )
        self._refuse_if(job, said["problem"])
        written_by = [
            [items[number] for number in numbers]
            for items, numbers in zip(held, to_write, strict=True)
        ]
        to_write_here = said["to_write"][self.ranks.rank]
        return _Plan(said["number"], job.items, different, to_write_here, written_by)

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

    def _write_file(self, job: Job, folder: StepFolder, plan: _Plan) -> _Written:
        written = _Written([], {})
        own = {RANDOM: job.random, **{name: job.others[name] for name in plan.different}}
        name = dcp_format.file_of(self.ranks.rank)
        sink = self.storage.create(f"{folder.name}/{name}")
        try:
            begin = 0
            for source in job.sources:
                crc, size = _write_tensor(sink, source)
                written.crcs.append(crc)
                begin += size
            for key, tree in sorted(own.items()):
                data = json.dumps(tree).encode()
                sink.write(data)
                written.own[key] = Blob(name, begin, len(data), zlib.crc32(data))
                begin += len(data)
        finally:
            sink.close()
        return written

    # --- 4. the commit ---------------------------------------------------------------------

    def _try_to_commit(
        self,
        job: Job,
        folder: StepFolder,
        plan: _Plan,
        found: list[dict[str, Any]],
        trees: list[dict[str, Any]],
    ) -> str:
        """Publish the manifest. Return the error if that has failed."""
        written = [_written(each["written"]) for each in found]
        others = {name: each for name, each in job.others.items() if name not in plan.different}
        try:
            tensors = _entries(plan.written_by, [each.crcs for each in written])
            made = Manifest(
                step=job.step,
                tensors=tensors,
                parts={**_merge(trees), **others},
                rank_parts=[each.own for each in written],
                ties=_joined_ties((each["ties"] for each in found), tensors),
                about={**job.about, "num_ranks": self.ranks.size},
            )
            flat = dcp_format.flattened(made)
            metadata = dcp_format.metadata_of(made, flat)
            for name, data in ((dcp_format.OBJECTS, flat.data), (dcp_format.METADATA, metadata)):
                sink = self.storage.create(f"{folder.name}/{name}")
                sink.write(data)
                sink.close()
                made.objects.append(Blob(name, 0, len(data), zlib.crc32(data)))
            self.storage.publish(folder.manifest, manifest.to_text(made))
        except CheckpointError as error:
            return str(error)
        except Exception as error:  # the other ranks must know, whatever it is
            return self._problem(error, f"{self.storage.root}/{folder.name}")
        return ""


def _joined(problems: Iterable[str]) -> str:
    return "\n".join(dict.fromkeys(each for each in problems if each))


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _hashes(job: Job) -> dict[str, str]:
    """Return for each part a hash, which differs if ranks have different values of the part."""
    own: dict[str, list[Any]] = {name: [] for name in job.others}
    for item, source in zip(job.items, job.sources, strict=True):
        if item.name in job.part_of:
            host = on_host(source)  # perhaps a copy, which must live until its bytes are read
            own[job.part_of[item.name]].append([*item, zlib.crc32(bytes_of(host))])
    return {name: _hash([tree, own[name]]) for name, tree in job.others.items()}


def _values_of_copies(job: Job, num_ranks: int) -> list[tuple[str, str, list[float]]]:
    """Return some values of each matrix of which other meshes may hold a copy.

    Gradients of vectors may be nothing but rounding noise, as those of a bias before a norm are.
    So copies of vectors may drift far apart, and neither they nor optimizer states are compared.
    """
    optimizers = tuple(f"{name}." for name in job.optimizers)
    found = []
    for item, source in zip(job.items, job.sources, strict=True):
        may_be_copied = 0 < item.mesh_size < num_ranks and not item.name.startswith(optimizers)
        if may_be_copied and len(item.shape) > 1 and source.is_floating_point():
            flat = source.detach().reshape(-1)
            values = flat[:: max(1, flat.numel() // _SAMPLES)].double().tolist()
            found.append((item.name, str(item.offsets), values))
    return found


def _what_differs(copies: Iterable[list[tuple[str, str, list[float]]]]) -> str:
    """Return a problem if meshes side by side hold different tensors of one name, or ""."""
    first: dict[tuple[str, str], tuple[int, list[float]]] = {}
    for rank, row in enumerate(copies):
        for name, offsets, values in row:
            other, known = first.setdefault((name, offsets), (rank, values))
            if _differ(values, known):
                return (
                    f"{name!r} has other values on rank {rank} than on rank {other}, and a "
                    "checkpoint keeps one tensor of a name. Give experts on meshes of their own "
                    "names of their own, such as the keys of a ModuleDict. If these are to be "
                    "copies, as beside tensor parallelism, they have drifted far apart."
                )
    return ""


def _differ(values: list[float], others: list[float]) -> bool:
    """Whether values differ by more than copies do that have drifted apart by rounding."""
    if len(values) != len(others):
        return False  # chunks of other sizes, which overlap only
    pairs = [(one, other) for one, other in zip(values, others, strict=True) if one != other]
    finite = [abs(each) for each in (*values, *others) if math.isfinite(each)]
    most = max(finite, default=0.0)
    return any(
        not abs(one - other) <= _DRIFT * most
        for one, other in pairs
        if not (math.isnan(one) and math.isnan(other))
    )


def _named_apart(job: Job, different: list[str], rank: int) -> list[Item]:
    """Return the items of this rank. Those of parts that differ get names of their own."""
    return [
        item._replace(name=manifest.own_name(rank, item.name))
        if job.part_of.get(item.name) in different
        else item
        for item in job.items
    ]


def _item(row: list[Any]) -> Item:
    name, shape, dtype, placements, mesh_size, *box = row
    return Item(name, tuple(shape), dtype, tuple(placements), mesh_size, *map(tuple, box))


def _written(row: list[Any]) -> _Written:
    crcs, own = row
    return _Written(crcs, {name: Blob(*blob) for name, blob in own.items()})


def _what_is_not_covered(items: Iterable[Item]) -> str:
    covered: dict[str, int] = {}
    known: dict[str, Item] = {}
    for item in items:
        covered[item.name] = covered.get(item.name, 0) + torch.Size(item.sizes).numel()
        one = known.setdefault(item.name, item)
        if (one.shape, one.dtype) != (item.shape, item.dtype):
            return (
                f"ranks hold {item.name!r} with shape {one.shape} in {one.dtype} and with shape "
                f"{item.shape} in {item.dtype}."
            )
    for name, numel in covered.items():
        whole = torch.Size(known[name].shape).numel()
        if numel != whole:
            return (
                f"the ranks hold {numel} elements of {name!r} together, which has {whole}; all "
                "ranks of its mesh must take part in the save."
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


def _entries(written_by: list[list[Item]], crcs: list[list[int]]) -> dict[str, TensorEntry]:
    """Return the tensors of a checkpoint. A chunk begins where the one before it ends."""
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


def _joined_ties(
    ties_of_ranks: Iterable[dict[str, str]], tensors: dict[str, TensorEntry]
) -> dict[str, str]:
    joined: dict[str, str] = {}
    for name, tied in (pair for ties in ties_of_ranks for pair in ties.items()):
        if name in tensors or joined.setdefault(name, tied) != tied:
            raise CheckpointError(
                f"{name!r} is tied to {tied!r} on some ranks and not on others, and a checkpoint "
                "keeps one tensor of a name; tie them on all ranks, or on none."
            )
    return joined


def _merge(trees: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the optimizers of all ranks: stages of a pipeline have different parameters."""
    if len(trees) == 1:
        return trees[0]
    merged: dict[str, Any] = {}
    for tree in trees:
        for name, each in tree.items():
            present = merged.setdefault(name, {**each, "state": {}, "param_groups": []})
            ours, theirs = (
                {k: v for k, v in one.items() if k not in _MERGED} for one in (present, each)
            )
            if ours != theirs:
                raise CheckpointError(f"ranks have different values of {name!r} beside its state.")
            for fqn, state in each["state"].items():
                if present["state"].setdefault(fqn, state) != state:
                    raise CheckpointError(f"ranks have different states of {name!r} for {fqn!r}.")
            present["param_groups"] += each["param_groups"]
    for name, each in merged.items():
        each["param_groups"] = _joined_groups(name, each["param_groups"])
    return merged


def _joined_groups(name: str, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups of all ranks, each without the parameters that an earlier one has.

    Groups of ranks with experts of their own have the other parameters in common.
    """
    joined: list[dict[str, Any]] = []
    known: dict[str, dict[str, Any]] = {}  # the hyperparameters of each parameter
    for group in groups:
        settings = {key: value for key, value in group.items() if key not in NAMES}
        if any(known.get(fqn, settings) != settings for fqn in group["params"]):
            raise CheckpointError(f"ranks have different hyperparameters in {name!r}.")
        is_new = [fqn not in known for fqn in group["params"]]
        if any(is_new) or (not is_new and group not in joined):
            own = {
                key: list(itertools.compress(group[key], is_new)) for key in NAMES if key in group
            }
            joined.append({**group, **own})
        known |= dict.fromkeys(group["params"], settings)
    return joined
