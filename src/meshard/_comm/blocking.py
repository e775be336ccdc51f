"""Blocking collectives, for set-up and for use between steps.

Called once per model, not in a step, so these block until the data is there.

Outside of a step, so these block: on the current stream, without lanes. The first rank of a group
is the root.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshard._comm.communicator import BaseCommunicator, CommEvent, notify_observers
from meshard._comm.divergence import check_collective, is_debugging
from meshard._torch.versions import all_gather_single

_ISSUER = BaseCommunicator()


def broadcast_from_first(buffer: torch.Tensor, group: dist.ProcessGroup, *, label: str) -> None:
    """Overwrite ``buffer`` by that of the first rank of ``group``.

    **Collective:** all ranks of ``group``, with contiguous buffers of one size and dtype.
    **Stream:** the current one.
    """
    broadcast_from(0, buffer, group, label=label)


def broadcast_from(
    source: int, buffer: torch.Tensor, group: dist.ProcessGroup, *, label: str
) -> None:
    """Do what ``broadcast_from_first`` does, from rank ``source`` of ``group``."""
    if group.size() == 1 or not buffer.numel():
        return
    _announce_setup("broadcast", buffer, group, label)
    # As bytes: gloo knows neither int16 nor float8.
    dist.broadcast(buffer.view(-1).view(torch.uint8), group=group, group_src=source)


def gather_from_all(source: torch.Tensor, group: dist.ProcessGroup, *, label: str) -> torch.Tensor:
    """Return every rank's ``source [...]`` as ``[ranks, ...]``, in rank order.

    **Collective:** all ranks of ``group``, with contiguous tensors of one shape and dtype.
    **Stream:** the current one.
    """
    gathered = source.new_empty((group.size(), *source.shape))
    if group.size() == 1:
        return gathered.copy_(source)
    _announce_setup("all_gather", gathered, group, label)
    all_gather_single(gathered.view(-1), source.reshape(-1), group=group)
    return gathered


def exchange_numbers(numbers: list[int], group: dist.ProcessGroup) -> list[list[int]]:
    """Return the ``numbers`` of every rank.

    Observers are not told: like what makes a group, this is before any step, and of no unit.
    **Collective:** all ranks of ``group``, with as many numbers.
    """
    own = torch.tensor(numbers)
    gathered = own.new_empty(group.size() * len(numbers))
    all_gather_single(gathered, own, group=group)
    rows: list[list[int]] = gathered.view(group.size(), -1).tolist()
    return rows


def _announce_setup(op: str, payload: torch.Tensor, group: dist.ProcessGroup, label: str) -> None:
    if is_debugging():
        check_collective(op, label, payload, group)
    _ISSUER.observe(op, payload, group, label)


def gather_values(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the ``values [n]`` of every rank of ``group``, ``[ranks, n]``. Blocks a CPU host.

    **Collective:** all ranks of ``group``. **Stream:** the current one.
    """
    if group.size() == 1:
        return values.view(1, -1)
    gathered = values.new_empty(group.size(), values.numel())
    _announce_scalar("all_gather", "(norm)", gathered, group)
    all_gather_single(gathered.view(-1), values, group=group)
    return gathered


def agree_on_max(
    value: torch.Tensor, group: dist.ProcessGroup | None, label: str = "(scaler)"
) -> None:
    """Replace ``value`` by its maximum over ``group`` (None: the default group).

    **Collective:** all ranks of ``group``. **Stream:** the current one.
    """
    if not dist.is_initialized():
        return
    group = group if group is not None else dist.group.WORLD
    if group is not None and group.size() > 1:
        _announce_scalar("all_reduce", label, value, group)
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)


def _announce_scalar(op: str, label: str, payload: torch.Tensor, group: dist.ProcessGroup) -> None:
    if is_debugging():
        check_collective(op, label, payload, group)
    notify_observers(CommEvent(op, label, group.size(), payload.nbytes, payload.dtype))


def gather_to_first(
    source: torch.Tensor, group: dist.ProcessGroup, label: str
) -> torch.Tensor | None:
    """Return every rank's ``source [n]`` as ``[ranks, n]`` on the first rank, else None.

    **Collective:** all ranks of ``group``. **Stream:** the current one.
    """
    rows = None
    if group.rank() == 0:
        rows = source.new_empty(group.size(), source.numel())
    if group.size() == 1:
        return source.view(1, -1).clone()
    _announce_rooted("gather", label, source, group)
    dist.gather(source, None if rows is None else list(rows), group=group, group_dst=0)
    return rows


def scatter_from_first(
    output: torch.Tensor, rows: torch.Tensor | None, group: dist.ProcessGroup, label: str
) -> None:
    """Fill ``output [n]`` from the first rank's ``rows [ranks, n]``; others pass None.

    **Collective:** all ranks of ``group``. **Stream:** the current one.
    """
    if group.size() == 1:
        assert rows is not None
        output.copy_(rows[0])
        return
    _announce_rooted("scatter", label, output, group)
    dist.scatter(output, None if rows is None else list(rows), group=group, group_src=0)


def _announce_rooted(op: str, label: str, payload: torch.Tensor, group: dist.ProcessGroup) -> None:
    if is_debugging():
        check_collective(op, label, payload, group)
    notify_observers(
        CommEvent(op, label, group.size(), group.size() * payload.nbytes, payload.dtype)
    )
