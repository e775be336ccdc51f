"""Weights gathered in batches, on all ranks or on one, and agreement about going on.

The weights of a batch that are cut over the same axes are sent by one all-gather, or gather, for
each axis: every rank packs its boxes into one buffer of bytes. A large weight comes in parts, one
after the other. Before a batch the ranks agree that all go on, so that no rank waits in a
collective that another never enters.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshard._comm.blocking import agree_on_max, gather_from_all, gather_to
from meshard._comm.first_values import sum_of_samples
from meshard._mesh.boxes import Box, coordinate_of, coordinates
from meshard._mesh.mesh_info import device_of
from meshard._torch.user_line import listed
from meshard.checkpoint.weights_layout import (
    Weight,
    meshes_of,
    own_rank,
    ranks_of_meshes,
    weights_of,
)

T = TypeVar("T")

PART_BYTES = 64 * 2**20  # that one gather brings of a weight, from all ranks together
_ALIGNMENT = 16  # bytes: of every box in a buffer, for any dtype
_NO_BOX = Box((0,), (0,))


# --- agreement -------------------------------------------------------------------------------


class Intent(enum.IntEnum):
    """What a rank is about to do. The largest intent of all ranks decides."""

    GO_ON = 0
    STOP = 1  # the user has closed the stream
    FAIL = 2


class Agreement:
    """The ranks of a module's meshes, which tell each other whether they go on with a call."""

    def __init__(self, module: nn.Module, caller: str) -> None:
        meshes = meshes_of(module)
        groups = {
            mesh.get_group(axis): None
            for mesh in meshes
            for axis in range(mesh.ndim)
            if mesh.size(axis) > 1
        }
        self.ranks = ranks_of_meshes(meshes)  # global
        self.is_first = own_rank() == self.ranks[0]
        self.device = device_of(meshes[0]) if meshes else None
        self.caller = caller
        self._groups = list(groups)

    def reach(self, intent: Intent) -> tuple[Intent, int]:
        """Return what the ranks do, and the first rank that wants it. **Collective:** all ranks."""
        # Intent and rank are sent as one number. Its maximum has the largest intent, and the lowest
        # of the ranks with that intent.
        number = intent * 2**32 + 2**31 - own_rank()
        largest, rank = divmod(int(self._max([number]).item()), 2**32)
        return Intent(largest), 2**31 - rank

    def _max(self, numbers: list[int]) -> torch.Tensor:
        value = torch.tensor(numbers, device=self.device or "cpu")
        for group in self._groups:
            agree_on_max(value, group, f"({self.caller})")
        return value

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """Raise on all ranks if the block raises on one. **Collective:** all ranks, at its end."""
        try:
            yield
        except Exception:
            self.reach(Intent.FAIL)
            raise
        intent, rank = self.reach(Intent.GO_ON)
        if intent is not Intent.GO_ON:
            raise RuntimeError(f"{self.caller} failed on rank {rank}; see the error there.")

    def are_same(self, numbers: list[int]) -> list[bool]:
        """Return for each of ``numbers``, of at most 62 bits, whether all ranks have the same.

        **Collective:** all ranks, with as many numbers.
        """
        largest, negated = self._max([*numbers, *(-each for each in numbers)]).view(2, -1)
        same: list[bool] = (largest == -negated).tolist()
        return same


def readable_weights(module: nn.Module, agreement: Agreement, *, by_one: bool) -> list[Weight]:
    """Return the weights of a module, or raise on all ranks if they cannot be gathered.

    Ranks may have different tensors of the same shapes and dtypes, as with experts on meshes of
    their own: one gather brings to each what the ranks of its mesh hold. Not so if one rank is to
    get all of them (``by_one``). **Collective:** all ranks.
    """
    caller = agreement.caller
    with agreement.agreed():
        weights = weights_of(module, caller)
        meta = [weight.fqn for weight in weights if weight.local.is_meta]
        if meta:
            raise ValueError(
                f"{listed(meta)} are on the meta device and have no values for {caller}; call "
                "meshard.materialize or load_pretrained first."
            )
    rows = [f"{w.fqn if by_one else ''} {w.shape} {w.dtype}" for w in weights]
    if not all(agreement.are_same([zlib.crc32("\n".join(rows).encode())])):
        raise NotImplementedError(
            "the ranks have different tensors (experts on meshes of their own, or buffers of other "
            "shapes?), which one call cannot gather. Call it for each part of the module that is "
            "the same on all of its ranks, or save experts with names of their own by "
            "Checkpointer, and export them by python -m meshard.checkpoint export."
        )
    # With tensor parallelism, meshes side by side hold copies of a weight. Experts on meshes of
    # their own hold different ones, of which one would be taken for all.
    partial = [w for w in weights if w.mesh is not None and w.mesh.size() < len(agreement.ranks)]
    if by_one and partial:
        same = agreement.are_same([_sample_of(weight) for weight in partial])
        if not all(same):
            weight = partial[same.index(False)]
            raise NotImplementedError(
                f"{weight.fqn!r} lies over {weight.mesh}, and other ranks have other values under "
                "that name (experts on meshes of their own?), so one rank cannot get all of them. "
                "Call stream_unsharded without rank0_only on all ranks, or give each its own name, "
                "and save by Checkpointer."
            )
    return weights


@torch.no_grad()
def _sample_of(weight: Weight) -> int:
    """Return a number that depends on some elements of the weight. **Collective:** its mesh."""
    assert weight.mesh is not None
    own = sum_of_samples([weight.local.detach()])
    rows = torch.tensor(0 if own is None else int(own), device=device_of(weight.mesh)).view(1)
    for axis in range(weight.mesh.ndim):
        rows = gather_from_all(rows, weight.mesh.get_group(axis), label=weight.fqn).view(-1)
    return int(rows.sum()) % 2**62


# --- batches ---------------------------------------------------------------------------------


def check_dtype(dtype: object) -> None:
    """Raise if ``dtype`` is not what floating-point tensors may be cast to, or None."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating-point torch.dtype or None, got {dtype!r}.")


def cast_dtype(weight: Weight, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a weight arrives. Those of eight bits would lose their scales."""
    own = weight.dtype
    return own if dtype is None or not own.is_floating_point or own.itemsize == 1 else dtype


def unsharded_bytes(weight: Weight, dtype: torch.dtype | None = None) -> int:
    """Return the size of the whole tensor in ``dtype``."""
    return math.prod(weight.shape) * cast_dtype(weight, dtype).itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What one gather brings of a weight: a box of each rank that it is cut over."""

    weight: Weight
    dtype: torch.dtype  # of the unsharded tensor
    boxes: tuple[Box, ...]
    is_last: bool
    unsharded: list[torch.Tensor]  # the tensor, once begun; one list for all parts of a weight

    @property
    def num_bytes(self) -> int:
        """Bytes of the unsharded tensor that it brings."""
        return sum(box.numel for box in self.boxes) * self.dtype.itemsize

    @property
    def sent_dtype(self) -> torch.dtype:
        """A weight is cast before it is sent only to a narrower dtype."""
        own = self.weight.dtype
        return self.dtype if self.dtype.itemsize < own.itemsize else own

    @property
    def row_bytes(self) -> int:
        """What each rank sends."""
        largest = max(box.numel for box in self.boxes) * self.sent_dtype.itemsize
        return math.ceil(largest / _ALIGNMENT) * _ALIGNMENT

    def place(self, rows: Iterable[torch.Tensor]) -> None:
        """Copy the boxes into the unsharded tensor from the bytes of each rank."""
        if not self.weight.sharded_axes:
            self.unsharded.append(self.weight.local.detach().to(self.dtype, copy=True))
        for row, box in zip(rows, self.boxes, strict=False):
            if not self.unsharded:
                empty = torch.empty(self.weight.shape, dtype=self.dtype, device=row.device)
                self.unsharded.append(empty)
            if box.numel:
                self.unsharded[0][box.slices].copy_(_as(row, self.sent_dtype, box.sizes))


def _as(buffer: torch.Tensor, dtype: torch.dtype, sizes: Sequence[int]) -> torch.Tensor:
    """Return the first bytes as a tensor."""
    return buffer[: math.prod(sizes) * dtype.itemsize].view(dtype).view(*sizes)


def batches(
    weights: Iterable[Weight], max_bytes: int, dtype: torch.dtype | None
) -> Iterator[list[Part]]:
    """Yield all parts of ``weights`` in lists, whose gathers bring ``max_bytes`` at most.

    What is larger comes alone, in parts of ``max(max_bytes, PART_BYTES)`` at most.
    """
    largest = max(max_bytes, PART_BYTES)
    parts = (part for weight in weights for part in _parts_of(weight, largest, dtype))
    return in_lists(parts, lambda part: len(part.boxes) * part.row_bytes, max_bytes)


def in_lists(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yield lists whose sizes add up to ``most`` at most, or of one larger item."""
    found: list[T] = []
    total = 0
    for item in items:
        total += size(item)
        if found and total > most:
            yield found
            found, total = [], size(item)
        found.append(item)
    if found:
        yield found


def _parts_of(weight: Weight, max_bytes: int, dtype: torch.dtype | None) -> Iterator[Part]:
    boxes, wanted, unsharded = weight.boxes, cast_dtype(weight, dtype), list[torch.Tensor]()
    width = min(weight.dtype.itemsize, wanted.itemsize)
    # Each rank sends as much as the one with most, so of a tensor of few rows most is padding.
    most = max(1, max_bytes // len(boxes) // width) if weight.sharded_axes else boxes[0].numel
    rows = list(itertools.zip_longest(*(_cut(box, most) for box in boxes), fillvalue=_NO_BOX))
    for number, row in enumerate(rows, 1):
        yield Part(weight, wanted, row, number == len(rows), unsharded)


def _cut(box: Box, most: int) -> Iterator[Box]:
    """Yield boxes of at most ``most`` elements that make up ``box``."""
    if box.numel <= most:
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.sizes) if size > 1)
    length = max(1, most * box.sizes[dim] // box.numel)
    for begin in range(0, box.sizes[dim], length):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim] += begin
        sizes[dim] = min(length, sizes[dim] - begin)
        yield from _cut(Box(tuple(offsets), tuple(sizes)), most)


# --- gathers ---------------------------------------------------------------------------------


class Packed:
    """This rank's boxes of parts that are cut over the same axes of a mesh, in one buffer."""

    def __init__(self, mesh: DeviceMesh, axes: tuple[int, ...], parts: list[Part]) -> None:
        self._mesh, self._axes, self._parts = mesh, axes, parts
        ends = itertools.accumulate(part.row_bytes for part in parts)
        self._slots = [
            slice(end - part.row_bytes, end) for part, end in zip(parts, ends, strict=True)
        ]
        self._buffer = torch.empty(self._slots[-1].stop, dtype=torch.uint8, device=device_of(mesh))
        own, index = coordinate_of(mesh), 0
        for axis in axes:
            index = index * mesh.size(axis) + own[axis]
        for part, slot in zip(parts, self._slots, strict=True):
            box = part.boxes[index]
            if box.numel:
                held = part.weight.local[box.relative_to(part.weight.own_box.offsets).slices]
                _as(self._buffer[slot], part.sent_dtype, box.sizes).copy_(held)

    def gather(self, target: int | None, label: str) -> dict[Part, torch.Tensor]:
        """Return the bytes ``[ranks, bytes]`` of each part; nothing on ranks but ``target``.

        **Collective:** the ranks that the parts are cut over; with a ``target``, a global rank,
        those of its replica.
        """
        own = coordinate_of(self._mesh)
        to = None if target is None else dict(coordinates(self._mesh)).get(target)
        others = [axis for axis in range(self._mesh.ndim) if axis not in self._axes]
        if target is not None and (to is None or any(own[axis] != to[axis] for axis in others)):
            return {}  # a copy of what other ranks send
        rows: torch.Tensor | None = self._buffer
        del self._buffer
        for axis in reversed(self._axes):
            assert rows is not None
            group = self._mesh.get_group(axis)
            if to is None:
                rows = gather_from_all(rows.view(-1), group, label=label)
            else:
                rows = gather_to(rows.view(-1), group, label, target=to[axis])
            if rows is None:
                return {}
        assert rows is not None
        rows = rows.view(len(self._parts[0].boxes), self._slots[-1].stop)
        return {part: rows[:, slot] for part, slot in zip(self._parts, self._slots, strict=True)}


@torch.no_grad()
def pack(batch: list[Part]) -> list[Packed]:
    """Copy this rank's boxes of a batch into buffers. A gather sends nothing else."""
    keyed: dict[tuple[DeviceMesh, tuple[int, ...]], list[Part]] = {}
    for part in batch:
        if part.weight.sharded_axes and part.weight.mesh is not None:
            keyed.setdefault((part.weight.mesh, part.weight.sharded_axes), []).append(part)
    return [Packed(mesh, axes, parts) for (mesh, axes), parts in keyed.items()]


def gather(
    batch: list[Part], packed: list[Packed], target: int | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Send a batch, and return an iterator over the tensors that it completes, by fqn.

    There are none on ranks but ``target``, if that is a rank. **Collective:** all ranks.
    **Lifetime:** each tensor is new; what was gathered is kept until the iterator ends.
    """
    rows: dict[Part, torch.Tensor] = {}
    while packed:  # so that each buffer is freed once it is sent
        rows.update(packed.pop(0).gather(target, batch[0].weight.fqn))
    return _unsharded(batch, rows) if target in (None, own_rank()) else iter(())


def _unsharded(
    batch: list[Part], rows: dict[Part, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    for part in batch:
        with torch.no_grad():
            part.place(rows.pop(part, ()))
        if part.is_last:
            yield part.weight.fqn, part.unsharded.pop()


def gather_to_each(
    lists: Sequence[Sequence[Weight]], dtype: torch.dtype | None, agreement: Agreement
) -> Iterator[tuple[Iterator[tuple[str, torch.Tensor]], int]]:
    """Gather the first list to the first rank, the second to the second, in turns.

    Yield some tensors for this rank, to be used before the next ones, and the bytes of those for
    all ranks. **Collective:** all ranks.
    """
    for row in itertools.zip_longest(*(batches(each, PART_BYTES, dtype) for each in lists)):
        mine: Iterator[tuple[str, torch.Tensor]] = iter(())
        for target, batch in zip(agreement.ranks, row, strict=False):
            if batch is not None:
                with agreement.agreed():
                    packed = pack(batch)
                tensors = gather(batch, packed, target)
                mine = tensors if target == own_rank() else mine
        yield mine, sum(part.num_bytes for batch in row if batch for part in batch)
