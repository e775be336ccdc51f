"""Weights gathered in batches, on all ranks or on one, and agreement about going on.

The weights of a batch that are cut over the same axes are sent by one all-gather, or gather, for
each axis: every rank packs its boxes into one buffer of bytes. Before a batch the ranks agree that
all go on, so that no rank waits in a collective that another never enters.
"""

from __future__ import annotations

import contextlib
import enum
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshard._comm.blocking import agree_on_max, gather_from_all, gather_to
from meshard._comm.first_values import sum_of_samples
from meshard._mesh.boxes import coordinate_of, coordinates
from meshard._mesh.mesh_info import device_of
from meshard.checkpoint.weights_layout import (
    Weight,
    device_of_weights,
    own_rank,
)

_ALIGNMENT = 16  # bytes: of every box in a buffer, for any dtype


# --- agreement -------------------------------------------------------------------------------


class Intent(enum.IntEnum):
    """What a rank is about to do. The largest intent of all ranks decides."""

    GO_ON = 0
    STOP = 1  # the user has closed the stream
    FAIL = 2


class Verdict(NamedTuple):
    """What the ranks have agreed on."""

    intent: Intent
    rank: int  # the first rank with that intent


class Agreement:
    """The ranks of some meshes, which tell each other whether they go on."""

    def __init__(self, meshes: Sequence[DeviceMesh], label: str) -> None:
        groups = {
            mesh.get_group(axis): None
            for mesh in meshes
            for axis in range(mesh.ndim)
            if mesh.size(axis) > 1
        }
        self._groups: list[dist.ProcessGroup] = list(groups)
        self._device = device_of_weights(meshes)
        self._label = label

    def reach(self, intent: Intent) -> Verdict:
        """Return what the ranks do. **Collective:** all ranks of the meshes."""
        # Intent and rank are sent as one number. Its maximum has the largest intent, and the lowest
        # of the ranks with that intent.
        value = torch.tensor(intent * 2**32 + 2**31 - own_rank(), device=self._device)
        for group in self._groups:
            agree_on_max(value, group, self._label)
        largest, rank = divmod(int(value.item()), 2**32)
        return Verdict(Intent(largest), 2**31 - rank)

    def are_same(self, numbers: list[int]) -> list[bool]:
        """Return for each of ``numbers``, of at most 62 bits, whether all ranks have the same.

        **Collective:** all ranks of the meshes, with as many numbers.
        """
        own = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        both = torch.stack([own, -own])
        for group in self._groups:
            agree_on_max(both, group, self._label)
        return (both[0] == -both[1]).tolist()

    def check_same_tensors(self, weights: list[Weight], *, with_names: bool) -> None:
        """Raise if other ranks have other tensors, as with experts on meshes of their own.

        Without ``with_names``, ranks may have different tensors of the same shapes and dtypes: one
        gather brings to each what the ranks of its mesh hold.
        **Collective:** all ranks of the meshes.
        """
        rows = [f"{w.fqn if with_names else ''} {w.shape} {w.dtype}" for w in weights]
        if not all(self.are_same([zlib.crc32("\n".join(rows).encode())])):
            raise NotImplementedError(
                "the ranks have different tensors (experts on meshes of their own, or buffers of "
                "other shapes?), which one call cannot gather. Call it for each part of the module "
                "that is the same on all of its ranks. Experts with names of their own may be "
                "saved by Checkpointer, and then exported by python -m meshard.checkpoint export."
            )

    def check_copies(self, weights: list[Weight], num_ranks: int) -> None:
        """Raise if a weight whose mesh has only some ranks is another one on other ranks.

        With tensor parallelism, meshes side by side hold copies of such a weight. Experts on meshes
        of their own hold different weights, of which one would be taken for all. Some elements of
        each are compared.
        **Collective:** all ranks of the meshes, if there are such weights.
        """
        partial = [w for w in weights if w.mesh is not None and w.mesh.size() < num_ranks]
        if not partial or all(weight.local.is_meta for weight in partial):
            return
        same = self.are_same([_sample_of(weight) for weight in partial])
        if not all(same):
            weight = partial[same.index(False)]
            raise NotImplementedError(
                f"{weight.fqn!r} lies over {weight.mesh}, and other ranks have other values under "
                "that name (experts on meshes of their own?), so one rank cannot get all of them. "
                "Take the weights of each mesh from its own ranks, by stream_unsharded without "
                "rank0_only, or give each its own name, and save by Checkpointer."
            )


@contextlib.contextmanager
def agreed(agreement: Agreement, what: str) -> Iterator[None]:
    """Raise on all ranks if the block raises on one. **Collective:** all ranks, at its end."""
    try:
        yield
    except Exception:
        agreement.reach(Intent.FAIL)
        raise
    verdict = agreement.reach(Intent.GO_ON)
    if verdict.intent is not Intent.GO_ON:
        raise RuntimeError(f"{what} failed on rank {verdict.rank}; see the error there.")


@torch.no_grad()
def _sample_of(weight: Weight) -> int:
    """Return a number that depends on some elements of the unsharded weight.

    **Collective:** its mesh.
    """
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


def sent_dtype(weight: Weight, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a weight arrives. Only floating-point ones are cast."""
    return weight.dtype if dtype is None or not weight.dtype.is_floating_point else dtype


def unsharded_bytes(weight: Weight, dtype: torch.dtype | None = None) -> int:
    """Return the size of the whole tensor in ``dtype``."""
    return math.prod(weight.shape) * sent_dtype(weight, dtype).itemsize


def batches(
    weights: Iterable[Weight], max_bytes: int, dtype: torch.dtype | None = None
) -> Iterator[list[Weight]]:
    """Cut ``weights`` into lists of at most ``max_bytes``, or of one larger weight."""
    batch: list[Weight] = []
    num_bytes = 0
    for weight in weights:
        own = unsharded_bytes(weight, dtype)
        if batch and num_bytes + own > max_bytes:
            yield batch
            batch, num_bytes = [], 0
        batch.append(weight)
        num_bytes += own
    if batch:
        yield batch


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a weight lies in the buffer of every rank."""

    offset: int  # bytes
    num_bytes: int  # of the largest box
    dtype: torch.dtype


Unsharded = Callable[[], torch.Tensor]


class Packed:
    """The boxes of weights that are cut over the same axes of a mesh, in one buffer of bytes."""

    def __init__(
        self,
        mesh: DeviceMesh,
        axes: tuple[int, ...],
        weights: list[Weight],
        dtype: torch.dtype | None,
    ) -> None:
        self.weights = weights
        self._mesh, self._axes, self._dtype = mesh, axes, dtype
        self._places = [place for _, place in coordinates(mesh)]
        self._slots: list[_Slot] = []
        end = 0
        for weight in weights:
            wanted = sent_dtype(weight, dtype)
            # A weight is cast before it is sent only to a narrower dtype.
            sent = wanted if wanted.itemsize < weight.dtype.itemsize else weight.dtype
            largest = max(weight.box_at(place).numel for place in self._places) * sent.itemsize
            self._slots.append(_Slot(end, largest, sent))
            end += math.ceil(largest / _ALIGNMENT) * _ALIGNMENT
        self._buffer = torch.empty(end, dtype=torch.uint8, device=device_of(mesh))
        for weight, slot in zip(weights, self._slots, strict=True):
            local = weight.local
            own = _part(self._buffer, slot.offset, slot.dtype, local.shape)
            own.copy_(local)

    def gather(self, target: int | None, label: str) -> dict[str, Unsharded]:
        """Return for each fqn how to make the unsharded tensor; empty on ranks but ``target``.

        **Collective:** the ranks that the weights are cut over; with a ``target``, a global rank,
        those of its replica. **Lifetime:** the gathered bytes live as long as one of the functions.
        """
        to = None if target is None else dict(coordinates(self._mesh)).get(target)
        own = coordinate_of(self._mesh)
        gathered = self._buffer
        del self._buffer
        others = [axis for axis in range(self._mesh.ndim) if axis not in self._axes]
        if target is not None and (to is None or any(own[axis] != to[axis] for axis in others)):
            return {}  # a copy of what other ranks send
        for axis in reversed(self._axes):
            group = self._mesh.get_group(axis)
            if to is None:
                gathered = gather_from_all(gathered, group, label=label).view(-1)
                continue
            rows = gather_to(gathered, group, label, target=to[axis])
            if rows is None:
                return {}
            gathered = rows.view(-1)
        # Of the ranks that the rows came from, in order.
        places = [
            place for place in self._places if all(place[axis] == own[axis] for axis in others)
        ]
        return {
            weight.fqn: _Assembly(weight, slot, gathered.view(len(places), -1), places, self._dtype)
            for weight, slot in zip(self.weights, self._slots, strict=True)
        }


@dataclass(frozen=True, slots=True)
class _Assembly:
    """The gathered boxes of one weight. Calling it makes the unsharded tensor."""

    weight: Weight
    slot: _Slot
    gathered: torch.Tensor  # [ranks, bytes]
    places: list[tuple[int, ...]]
    dtype: torch.dtype | None

    def __call__(self) -> torch.Tensor:
        weight, slot = self.weight, self.slot
        dtype = sent_dtype(weight, self.dtype)
        if dtype == slot.dtype and self._is_in_order():  # a large one, gathered alone
            numel = math.prod(weight.shape)
            return self.gathered.view(-1).view(dtype)[:numel].view(weight.shape)
        unsharded = torch.empty(weight.shape, dtype=dtype, device=self.gathered.device)
        for row, place in zip(self.gathered, self.places, strict=True):
            box = weight.box_at(place)
            if box.numel:
                unsharded[box.slices].copy_(_part(row, slot.offset, slot.dtype, box.sizes))
        return unsharded

    def _is_in_order(self) -> bool:
        """Whether the gathered bytes begin with the elements of the unsharded tensor, in order."""
        if self.slot.num_bytes != self.gathered.shape[1]:
            return False  # other weights, or padding, lie between the boxes
        boxes = [self.weight.box_at(place) for place in self.places]
        chunk, others = boxes[0].sizes[0], tuple(self.weight.shape[1:])
        return all(
            not box.numel or (box.offsets[0] == row * chunk and box.sizes[1:] == others)
            for row, box in enumerate(boxes)
        )


def _part(
    buffer: torch.Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor:
    """Return a view of bytes as a tensor of ``shape``."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return buffer.new_empty(shape, dtype=dtype)
    return buffer[offset : offset + num_bytes].view(dtype).view(*shape)


@torch.no_grad()
def pack(batch: list[Weight], dtype: torch.dtype | None) -> list[Packed]:
    """Copy this rank's boxes of a batch into buffers. A gather sends nothing else."""
    keyed: dict[tuple[DeviceMesh, tuple[int, ...]], list[Weight]] = {}
    for weight in batch:
        if weight.sharded_axes and weight.mesh is not None:
            keyed.setdefault((weight.mesh, weight.sharded_axes), []).append(weight)
    return [Packed(mesh, axes, weights, dtype) for (mesh, axes), weights in keyed.items()]


def copies(batch: list[Weight], dtype: torch.dtype | None) -> dict[str, Unsharded]:
    """Return a function for each weight that this rank holds whole, which copies it."""

    def copy_of(weight: Weight) -> Unsharded:
        return lambda: weight.local.detach().to(sent_dtype(weight, dtype), copy=True)

    return {weight.fqn: copy_of(weight) for weight in batch if not weight.sharded_axes}
