"""Blocking collectives, for set-up and for use between steps.

All ranks of ``group`` must call them, with tensors of one shape and dtype. Each call, except that
of ``send_max``, waits for the result. If that is a tensor on a device, the current stream waits,
otherwise the host. If one rank sends to the others, or receives from them, it is by default the
first rank of the group. Calls that only move a caller's tensor, except ``full_tensor``, send it as
bytes, because gloo supports neither int16 nor float8.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshard._comm.communicator import announced
from meshard._comm.stalls import Waiting, stall_seconds
from meshard._torch.dtensor import plain_of
from meshard._torch.private import all_gather_single


@contextlib.contextmanager
def _waiting(
    op: str,
    payload: torch.Tensor,
    group: dist.ProcessGroup,
    label: str,
    *,
    rows: int = 1,
    numel: int | None = None,
) -> Iterator[None]:
    """Announce the collective in the block (see ``announced``), and warn if it takes too long."""
    with announced(op, payload, group, label, rows=rows, numel=numel), Waiting((op, label), group):
        yield


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def broadcast(buffer: torch.Tensor, group: dist.ProcessGroup, *, label: str) -> None:
    """Overwrite ``buffer``, which is contiguous, with that of the first rank of ``group``."""
    if group.size() > 1 and buffer.numel():
        with _waiting("broadcast", buffer, group, label):
            dist.broadcast(_bytes(buffer.view(-1)), group=group, group_src=0)


def gather_from_all(source: torch.Tensor, group: dist.ProcessGroup, *, label: str) -> torch.Tensor:
    """Return every rank's ``source [...]`` as ``[ranks, ...]``, in rank order."""
    gathered = source.new_empty((group.size(), *source.shape))
    if group.size() == 1:
        return gathered.copy_(source)
    with _waiting("all_gather", gathered, group, label):
        all_gather_single(_bytes(gathered.view(-1)), _bytes(source.reshape(-1)), group=group)
    return gathered


def full_tensor(tensor: DTensor, *, label: str) -> torch.Tensor:
    """Return the unsharded tensor, on all ranks of its mesh, by the collectives of DTensor."""
    local, numel = plain_of(tensor), tensor.numel()
    with contextlib.ExitStack() as stack:
        for axis, placement in enumerate(tensor.placements):
            group = tensor.device_mesh.get_group(axis)
            if placement.is_shard() and group.size() > 1:
                stack.enter_context(_waiting("all_gather", local, group, label, numel=numel))
                numel //= group.size()  # an axis that comes later is gathered first
        return tensor.full_tensor()


def gather_objects(value: Any, group: dist.ProcessGroup, *, label: str) -> list[Any]:
    """Return the values of all ranks, in rank order. They must be picklable."""
    if group.size() == 1:
        return [value]
    gathered: list[Any] = [None] * group.size()
    with Waiting(("all_gather", label), group):
        dist.all_gather_object(gathered, value, group=group)
    return gathered


def gather_objects_to_first(value: Any, group: dist.ProcessGroup, *, label: str) -> list[Any]:
    """Return the values of all ranks on the first rank of ``group``, and [] on the others."""
    if group.size() == 1:
        return [value]
    gathered = [None] * group.size() if group.rank() == 0 else None
    with Waiting(("gather", label), group):
        dist.gather_object(value, gathered, group=group, group_dst=0)
    return gathered or []


def broadcast_object(value: Any, group: dist.ProcessGroup, *, label: str) -> Any:
    """Return the value of the first rank of ``group``. It must be picklable."""
    box = [value]
    if group.size() > 1:
        with Waiting(("broadcast", label), group):
            dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]


def exchange_numbers(
    numbers: list[int], group: dist.ProcessGroup, device: torch.device, *, purpose: str
) -> list[list[int]]:
    """Return the ``numbers`` of every rank. If a rank waits long, its warning names ``purpose``.

    The exchange is part of a set-up or of a check, so observers are not told of it. It raises a
    ValueError if ``MESHARD_STALL_SECONDS`` is not a number.
    """
    stall_seconds()
    own = torch.tensor(numbers, device=device)
    gathered = own.new_empty(group.size() * len(numbers))
    with Waiting(purpose, group):
        all_gather_single(gathered, own, group=group)
    rows: list[list[int]] = gathered.view(group.size(), -1).tolist()
    return rows


def ranks_that_differ(
    value: object, group: dist.ProcessGroup, device: torch.device, *, purpose: str
) -> list[int]:
    """Return the positions in ``group`` of ranks whose value differs from the first rank's.

    Values are compared by a digest of their ``repr``. The result is the same on every rank.
    """
    digest = hashlib.sha256(repr(value).encode()).digest()
    number = int.from_bytes(digest[:7], "little")  # an int64 holds it
    rows = exchange_numbers([number], group, device, purpose=purpose)
    return [rank for rank, row in enumerate(rows) if row != rows[0]]


def agree_on_max(
    value: torch.Tensor, group: dist.ProcessGroup | None, label: str = "(scaler)"
) -> None:
    """Replace ``value`` by its maximum over ``group``; None: the default group, if any."""
    group = dist.group.WORLD if group is None else group
    if group is not None and group.size() > 1:
        with _waiting("all_reduce", value, group, label):
            dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)


def send_max(value: torch.Tensor, group: dist.ProcessGroup, label: str) -> None:
    """Send ``value`` to the ranks that call ``agree_on_max``, without waiting for the result.

    Only the check of ``MESHARD_DEBUG=1`` waits for the other ranks.
    """
    if group.size() > 1:
        with announced("all_reduce", value, group, label):
            dist.all_reduce(value.clone(), op=dist.ReduceOp.MAX, group=group, async_op=True)


def gather_to(
    source: torch.Tensor, group: dist.ProcessGroup, label: str, *, target: int = 0
) -> torch.Tensor | None:
    """Return every rank's ``source [n]`` as ``[ranks, n]`` on rank ``target``, else None."""
    if group.size() == 1:
        return source.view(1, -1).clone()
    rows = source.new_empty(group.size(), source.numel()) if group.rank() == target else None
    with _waiting("gather", source, group, label, rows=group.size()):
        received = None if rows is None else list(_bytes(rows))
        dist.gather(_bytes(source), received, group=group, group_dst=target)
    return rows


def scatter_from_first(
    output: torch.Tensor, rows: torch.Tensor | None, group: dist.ProcessGroup, label: str
) -> None:
    """Fill ``output [n]`` from the first rank's ``rows [ranks, n]``; others pass None."""
    if group.size() == 1:
        assert rows is not None
        output.copy_(rows[0])
        return
    with _waiting("scatter", output, group, label, rows=group.size()):
        sent = None if rows is None else list(_bytes(rows))
        dist.scatter(_bytes(output), sent, group=group, group_src=0)
