"""How does a value get from one rank to the others before training starts?

Called once per model, not in a step, so these block until the data is there.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshard._comm.communicator import BaseCommunicator
from meshard._comm.communicator_calls import all_gather_single
from meshard._comm.notes import compare_notes, is_debugging

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
    _announce("broadcast", buffer, group, label)
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
    _announce("all_gather", gathered, group, label)
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


def _announce(op: str, payload: torch.Tensor, group: dist.ProcessGroup, label: str) -> None:
    if is_debugging():
        compare_notes(op, label, payload, group)
    _ISSUER.observe(op, payload, group, label)
