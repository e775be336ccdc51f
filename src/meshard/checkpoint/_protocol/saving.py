"""How a checkpoint is written, and what commits it.

1. Every rank tells what it would write, and whether something is wrong. All ranks go on, or none.
   ``async_save`` copies what is needed and returns after this step.
2. Ranks compare checksums of what should be equal: ordinary tensors that several ranks hold, and
   plain values. What differs and may differ is written by each rank, under a name of its own.
3. The first rank makes the folder of the step, and removes what killed saves have left.
4. Every rank writes one file, which is synced.
5. The first rank gathers the checksums and publishes the manifest. **That is the commit.** A folder
   without a manifest is no checkpoint.
6. Old steps are removed, the manifest of each first.

The first save plans which rank writes what several ranks hold. As long as all ranks hold the same
as then, the plan is used again.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import time
import uuid
import zlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from meshard._torch.private import dtype_of
from meshard._torch.user_line import listed, warn_user
from meshard.checkpoint._protocol import commits
from meshard.checkpoint._protocol.commits import Commit
from meshard.checkpoint._protocol.jobs import Item, Job
from meshard.checkpoint._protocol.manifest import (
    RANGE_BYTES,
    SMALL,
    Chunk,
    Manifest,
    TensorEntry,
    WrittenFile,
    check_covered,
    own_name,
    own_part,
    to_text,
)
from meshard.checkpoint._protocol.parts import MODEL, NAMES, OPTIMIZER, PARAMETER, RANDOM
from meshard.checkpoint._protocol.ranks import Ranks
from meshard.checkpoint._protocol.storage import CheckpointError, Storage
from meshard.checkpoint._protocol.tensor_file import Entry, bytes_of, header, pieces
from meshard.checkpoint.progress import log_summary

_MERGED = ("state", "param_groups")  # what is merged of the optimizers of all ranks
_SHOULD_BE_EQUAL = (MODEL, PARAMETER, OPTIMIZER)
_SAMPLES = 16  # elements of a tensor that are compared with those of its copies
_DRIFT = 0.05  # by how much copies may differ, as a fraction of their greatest element


class _Row(NamedTuple):
    """What a rank does with an item that it holds."""

    item: Item
    writes: bool
    compares: bool  # other ranks hold the same ordinary tensor
    is_first: bool  # of those who hold it


class _Claim(NamedTuple):
    """What a rank says of its job."""

    step: int
    parts: list[str]
    per_rank: bool
    plan: str | None  # the number of its plan, if that fits


class _Written(NamedTuple):
    """What a rank has written, for the manifest."""

    file: WrittenFile
    trees: dict[str, int]  # sizes of plain values of its own, in bytes
    ties: dict[str, str]
    optimizers: dict[str, Any]  # of other ranks than the first only if they differ


_Copies = list[tuple[str, Any, torch.Tensor]]  # names, places and some values


class _Plan(NamedTuple):
    """Which rank writes what, in one save and those after it."""

    number: str  # of the first rank; after an interrupt a rank may have an older plan than others
    per_rank: bool
    rows: list[list[_Row]]  # rows[0] are this rank's; the first rank has those of all, in order
    unequal: frozenset[str]  # tensors whose shapes differ between ranks: each writes its own


def file_of(rank: int) -> str:
    return f"rank-{rank:05}.safetensors"


class Saver:
    """Saves into one storage. All ranks have one, and call ``begin`` and ``write`` together."""

    def __init__(self, storage: Storage, ranks: Ranks) -> None:
        self.storage, self.ranks = storage, ranks
        self._plan: _Plan | None = None
        self._told: set[str] = set()  # names that were warned of

    # --- 1. agreement ----------------------------------------------------------------------

    def begin(self, step: int, make: Callable[[], Job]) -> tuple[Job, _Plan]:
        """Let each rank make its job, and plan who writes what, unless that is known.

        The job has the sources that this rank writes or compares, and no others.
        **Collective:** all ranks.

        Raises:
            CheckpointError: On all ranks, if one cannot make its job, or they do not fit together.
        """
        what, jobs, plan = self._not_saved(step), list[Job](), self._plan

        def claim() -> _Claim:
            job = make()
            jobs.append(job)
            is_known = (
                plan is not None
                and plan.per_rank == job.per_rank
                and [row.item for row in plan.rows[0]] == job.items
            )
            number = plan.number if plan is not None and is_known else None
            return _Claim(job.step, sorted(job.others), job.per_rank, number)

        per_rank, is_known = self.ranks.together(what, claim, _agreed)
        (job,) = jobs
        job.per_rank = per_rank
        if plan is None or not is_known:
            plan = self._plan = self._make_plan(what, job)
        job.sources = {
            number: job.sources[number]
            for number, row in enumerate(plan.rows[0])
            if row.writes or row.compares or row.item.name in plan.unequal
        }
        return job, plan

    def _make_plan(self, what: str, job: Job) -> _Plan:
        """Decide which rank writes what is on several, such that all write about as much."""
        rows = list[list[_Row]]()

        def made(said: list[tuple[list[Item], _Copies]]) -> tuple[str, list[Any], list[str]]:
            _refuse_what_differs(copies for _, copies in said)
            planned, unequal = _planned([items for items, _ in said], per_rank=job.per_rank)
            rows.extend(planned)
            return uuid.uuid4().hex, [[row[1:] for row in own] for own in planned], unequal

        number, flags, unequal = self.ranks.together(
            what, lambda: (job.items, _values_of_copies(job, self.ranks.size)), made
        )
        if not self.ranks.is_first:
            own = zip(job.items, flags[self.ranks.rank], strict=True)
            rows.append([_Row(item, *each) for item, each in own])
        return _Plan(number, job.per_rank, rows, frozenset(unequal))

    # --- all of a save after that ----------------------------------------------------------

    def write(
        self,
        job: Job,
        plan: _Plan,
        tidy: Callable[[], None],
        advance: Callable[[int], Any] = lambda _: None,
    ) -> None:
        """Write a checkpoint and commit it; then the first rank calls ``tidy``.

        ``advance`` is called with numbers of bytes that are written.

        **Collective:** all ranks.

        Raises:
            CheckpointError: On all ranks, if anything is wrong on one; nothing was committed.
        """
        began, what = time.perf_counter(), self._not_saved(job.step)
        differ = self._compare(what, job, plan)
        commit: Commit = self.ranks.together(what, lambda: None, lambda _: self._made_folder(job))
        late = list[Exception]()

        def write() -> _Written:
            parts = {name: each for name, each in job.others.items() if f"{name}/" in differ}
            sources: dict[Any, torch.Tensor] = {**job.sources}
            for name, tree in {RANDOM: job.random, **parts}.items():
                text = bytearray(json.dumps(tree).encode())
                sources[name] = torch.frombuffer(text, dtype=torch.uint8)
            sizes = {name: sources[name].numel() for name in (RANDOM, *parts)}
            own = _to_write(plan.rows[0], self.ranks.rank, differ, sizes)
            file = self._write_file(commit, own, sources, advance)
            has_own = "/" in differ or self.ranks.is_first
            return _Written(file, sizes, job.ties, job.optimizers if has_own else {})

        def publish(written: list[_Written]) -> None:
            text = _manifest_of(job, plan, differ, written)
            self.storage.publish(commit.manifest, text)
            try:
                num_bytes = sum(each.file.size for each in written)
                where = f"{self.storage.root}/{commit.folder}"
                log_summary(f"saved {where}", num_bytes, len(written), began)
                tidy()
                self._warn_of([name for name, kind in differ.items() if kind == MODEL])
            except Exception as error:  # under ``-W error`` a warning
                late.append(error)

        def withdraw() -> None:
            self.storage.remove_file(commit.manifest)
            self.storage.remove_folder(commit.folder)

        self.ranks.together(what, write, publish, undo=withdraw)
        for error in late:  # now that other ranks know of the commit
            raise error

    def _not_saved(self, step: int) -> str:
        return f"step {step} was not saved to {self.storage.root}"

    # --- 2. what differs -------------------------------------------------------------------

    def _compare(self, what: str, job: Job, plan: _Plan) -> dict[str, str]:
        """Compare checksums of what should be equal, or may be; return what differs, by name.

        "extra": a tensor that each rank writes under a name of its own. "model": one of which the
        first rank writes its own. "part": plain values that each rank writes. "optimizers": ranks
        have the state of different parameters.
        """
        digests: dict[str, list[Any]] = {}  # by name: what it belongs to, and a checksum

        def own() -> str:
            if job.failed is not None:
                raise job.failed
            if self.ranks.size > 1:
                digests.update(_digests(job, plan.rows[0]))
            return _hash(digests)

        differ: dict[str, str] = {}
        if self.ranks.together(what, own, lambda hashes: len(set(hashes)) > 1):
            differ = self.ranks.together(what, lambda: digests, _differing)
        if plan.per_rank:
            differ |= {n: "extra" for n, kind in differ.items() if kind in _SHOULD_BE_EQUAL}
        refused = sorted(n for n, kind in differ.items() if kind in (PARAMETER, OPTIMIZER))
        if refused:
            raise CheckpointError(
                f"{what}:\n"
                f"  {listed(refused)} differ between ranks, and a checkpoint keeps one tensor of a "
                "name. If each rank has its own, as an expert, or the state of an optimizer that "
                "works on local shards, pass per_rank=True to save(), or give them names of their "
                "own."
            )
        return {**differ, **dict.fromkeys(plan.unequal, "extra")}

    def _warn_of(self, names: Iterable[str]) -> None:
        new = sorted({*names} - self._told)
        if new:
            self._told.update(new)
            warn_user(
                f"{listed(new)} differ between ranks, and the first rank's were saved; "
                "pass per_rank=True to save() if each rank is to get its own back."
            )

    # --- 3. the folder ---------------------------------------------------------------------

    def _made_folder(self, job: Job) -> Commit:
        self.storage.lock()
        return commits.begin(self.storage, job.step, job.metric)

    # --- 4. files --------------------------------------------------------------------------

    def _write_file(
        self,
        commit: Commit,
        own: list[tuple[Item, Any]],
        sources: dict[Any, torch.Tensor],
        advance: Callable[[int], Any],
    ) -> WrittenFile:
        offsets = {item.name: {"saved_offsets": _offsets(item)} for item, _ in own}
        # torch's HuggingFaceStorageReader finds here where a box begins in its tensor.
        has_boxes = any(any(each["saved_offsets"]) for each in offsets.values())
        about = {"DCP_SHARDING_INFO": json.dumps(offsets)} if has_boxes else {}
        entries = [Entry(item.name, dtype_of(item.dtype), item.sizes) for item, _ in own]
        tensors = (sources[key] for _, key in own)
        name = file_of(self.ranks.rank)
        return write_tensors(self.storage, commit, name, entries, tensors, about, advance)


def _manifest_of(job: Job, plan: _Plan, differ: dict[str, str], written: list[_Written]) -> bytes:
    made = Manifest(
        step=job.step,
        tensors=_entries(plan.rows, differ, [each.trees for each in written]),
        parts={n: each for n, each in job.others.items() if f"{n}/" not in differ},
        rank_parts={n: each["kind"] for n, each in job.others.items() if f"{n}/" in differ},
        about={**job.about, "num_ranks": len(written)},
    )
    made.parts |= _merge([each.optimizers for each in written])
    made.rank_parts[RANDOM] = RANDOM
    made.ties = _joined_ties((each.ties for each in written), made.tensors)
    return to_text(made, [each.file for each in written])


# --- what the first rank decides -----------------------------------------------------------


def _agreed(claims: list[_Claim]) -> tuple[bool, bool]:
    """Return whether ranks write their own, and whether all know the plan; or raise."""
    problems = []
    steps = sorted({each.step for each in claims})
    if len(steps) > 1:
        problems.append(f"ranks save different steps: {steps}")
    for name in sorted({name for each in claims for name in each.parts}):
        lacking = [rank for rank, each in enumerate(claims) if name not in each.parts]
        if lacking:
            problems.append(f"rank(s) {lacking} do not save {name!r}, which other ranks do")
    if problems:
        raise CheckpointError(*problems)
    plans = {each.plan for each in claims}
    return any(each.per_rank for each in claims), None not in plans and len(plans) == 1


def _differing(digests: list[dict[str, list[Any]]]) -> dict[str, str]:
    known: dict[str, list[Any]] = {}
    differ = {}
    for name, digest in (pair for own in digests for pair in own.items()):
        if known.setdefault(name, digest) != digest:
            differ[name] = digest[0]
    return differ


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# --- who writes what -----------------------------------------------------------------------


def _planned(held: list[list[Item]], *, per_rank: bool) -> tuple[list[list[_Row]], list[str]]:
    """Return what each rank does with what it holds, and tensors whose shapes differ."""
    holders: dict[tuple[Any, ...], list[tuple[int, int]]] = {}  # of each box: rank and number
    first: dict[str, Item] = {}
    unequal = set[str]()
    for rank, items in enumerate(held):
        for number, item in enumerate(items):
            one = first.setdefault(item.name, item)
            if (one.shape, one.dtype) != (item.shape, item.dtype):
                is_own = not one.mesh_size and not item.mesh_size
                if not is_own or (item.owner in _SHOULD_BE_EQUAL and not per_rank):
                    raise CheckpointError(
                        f"ranks hold {item.name!r} with shape {one.shape} in {one.dtype} and with "
                        f"shape {item.shape} in {item.dtype}. If each has one of its own, pass "
                        "per_rank=True to save()."
                    )
                unequal.add(item.name)
            holders.setdefault((item.name, item.offsets, item.sizes), []).append((rank, number))
    load, replica = [0] * len(held), dict[str, int]()
    flags = [[(False, False, False)] * len(items) for items in held]
    for each in sorted(holders.values(), key=len):  # first what only one rank can write
        item = held[each[0][0]][each[0][1]]
        writer = each[0]  # of small ordinary tensors: all ranks that load find them in one file
        if item.mesh_size or item.num_bytes > SMALL:
            best = min(range(len(each)), key=lambda n: load[each[n][0]])
            # All boxes of a tensor come from one replica, should replicas have drifted.
            writer = each[replica.setdefault(item.name, best) % len(each)]
        load[writer[0]] += item.num_bytes
        compares = len(each) > 1 and not item.mesh_size and item.name not in unequal
        for rank, number in each:
            is_writer, is_first = (rank, number) == writer, (rank, number) == each[0]
            flags[rank][number] = (is_writer, compares, is_first)
    entries: dict[str, TensorEntry] = {}
    for name, offsets, sizes in holders:
        entry = entries.setdefault(name, TensorEntry(first[name].shape, first[name].dtype, []))
        entry.chunks.append(Chunk(offsets, sizes, "", 0, 0))
    for name in entries.keys() - unequal:  # all ranks of a mesh must take part
        check_covered(name, entries[name])
    rows = [
        [_Row(item, *each) for item, each in zip(items, own, strict=True)]
        for items, own in zip(held, flags, strict=True)
    ]
    return rows, sorted(unequal)


def _to_write(
    rows: list[_Row], rank: int, differ: dict[str, str], trees: dict[str, int]
) -> list[tuple[Item, Any]]:
    """Return what a rank writes, in the order of its file, and the key of each source.

    ``trees`` has the sizes of the plain values that it writes for itself, by their keys.
    """
    found: list[tuple[Item, Any]] = []
    for number, (item, writes, _, is_first) in enumerate(rows):
        kind = differ.get(item.name)
        if kind == "extra":
            found.append((item._replace(name=own_name(rank, item.name)), number))
        elif is_first if kind == MODEL else writes:
            found.append((item, number))
    for name, size in trees.items():
        whole = (size,)
        tree = Item(own_part(rank, name), "part", whole, "uint8", (), 0, (0,), whole)
        found.append((tree, name))
    return sorted(found, key=lambda one: one[0].order)


def _entries(
    rows: list[list[_Row]], differ: dict[str, str], trees: list[dict[str, int]]
) -> dict[str, TensorEntry]:
    """Return the tensors of a checkpoint."""
    entries: dict[str, TensorEntry] = {}
    for rank, (own, own_trees) in enumerate(zip(rows, trees, strict=True)):
        for item, _ in _to_write(own, rank, differ, own_trees):
            new = TensorEntry(item.shape, item.dtype, [*item.placements])
            entry = entries.setdefault(item.name, new)
            entry.chunks.append(Chunk(item.offsets, item.sizes, file_of(rank), 0, item.num_bytes))
    return entries


# --- what differs --------------------------------------------------------------------------


def _digests(job: Job, rows: list[_Row]) -> dict[str, list[Any]]:
    """Return what each value that should be equal belongs to, and a checksum, by name."""
    found = {
        row.item.name: [row.item.owner, _crc_of(job.sources[number])]
        for number, row in enumerate(rows)
        if row.compares
    }
    for name, tree in job.others.items():
        found[f"{name}/"] = ["part", zlib.crc32(json.dumps(tree, sort_keys=True).encode())]
    found["/"] = ["optimizers", zlib.crc32(json.dumps(job.optimizers, sort_keys=True).encode())]
    return found


def _crc_of(tensor: torch.Tensor) -> int:
    crc = 0
    for piece in pieces(tensor):
        crc = zlib.crc32(bytes_of(piece), crc)
    return crc


def _values_of_copies(job: Job, num_ranks: int) -> _Copies:
    """Return some values of each matrix of which other meshes may hold a copy.

    Gradients of vectors may be nothing but rounding noise, as those of a bias before a norm are.
    So copies of vectors may drift far unequal, and neither they nor optimizer states are compared.
    """
    found = []
    for number, item in enumerate(job.items):
        source = job.sources[number]
        may_be_copied = 0 < item.mesh_size < num_ranks and item.owner != OPTIMIZER
        if may_be_copied and len(item.shape) > 1 and source.is_floating_point() and source.numel():
            flat = source.detach().reshape(-1)
            values = flat[:: max(1, flat.numel() // _SAMPLES)].double().cpu()
            found.append((item.name, item.offsets, values))
    return found


def _refuse_what_differs(copies: Iterable[_Copies]) -> None:
    """Raise if meshes side by side hold different tensors of one name."""
    first: dict[tuple[str, Any], tuple[int, torch.Tensor]] = {}
    for rank, row in enumerate(copies):
        for name, offsets, values in row:
            other, known = first.setdefault((name, offsets), (rank, values))
            if _differ(values, known):
                raise CheckpointError(
                    f"{name!r} has other values on rank {rank} than on rank {other}, and a "
                    "checkpoint keeps one tensor of a name. Give experts on meshes of their own "
                    "names of their own, such as the keys of a ModuleDict. If these are to be "
                    "copies, as beside tensor parallelism, they have drifted far unequal."
                )


def _differ(values: torch.Tensor, others: torch.Tensor) -> bool:
    """Whether values differ by more than copies do that have drifted unequal by rounding."""
    if values.shape != others.shape:
        return False  # chunks of other sizes, which overlap only
    most = torch.cat([values, others]).nan_to_num(0, 0, 0).abs().amax()
    return not torch.allclose(values, others, rtol=0, atol=_DRIFT * float(most), equal_nan=True)


# --- files and manifests -------------------------------------------------------------------


def _offsets(item: Item) -> list[int]:
    """Return where a box begins. What safetensors has no dtype for has a dimension more there."""
    sizes = Entry(item.name, dtype_of(item.dtype), item.sizes).stored_sizes
    return [*item.offsets, *[0] * (len(sizes) - len(item.sizes))]


def write_tensors(
    storage: Storage,
    commit: Commit,
    name: str,
    entries: list[Entry],
    tensors: Iterable[torch.Tensor],
    about: dict[str, str],
    advance: Callable[[int], Any],
) -> WrittenFile:
    """Write a file of tensors, which follow each other by ``file_order``."""
    head = header(entries, about)
    with contextlib.closing(storage.create(f"{commit.folder}/{name}")) as sink:
        file = _SummedFile(sink)
        file.write(head)
        for tensor in tensors:
            for piece in pieces(tensor):
                file.write(bytes_of(piece))
                advance(piece.nbytes)
    return WrittenFile(name, file.size, len(head), file.crcs)


class _SummedFile:
    """A file with the checksums of its ranges."""

    def __init__(self, sink: Any) -> None:
        self._sink = sink
        self.size, self.crcs = 0, list[int]()

    def write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while len(rest):
            if self.size % RANGE_BYTES == 0:
                self.crcs.append(0)
            part = rest[: RANGE_BYTES - self.size % RANGE_BYTES]
            self.crcs[-1] = zlib.crc32(part, self.crcs[-1])
            self._sink.write(part)
            self.size += len(part)
            rest = rest[len(part) :]


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
