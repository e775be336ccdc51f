"""How do flat shards travel to one rank, and back?

Outside of a step, so these block: on the current stream, without lanes. The first rank of a group
is the root.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshard._comm.checked import compare_notes, is_debugging
from meshard._comm.communicator import CommEvent, tell


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
    _announce("gather", label, source, group)
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
    _announce("scatter", label, output, group)
    dist.scatter(output, None if rows is None else list(rows), group=group, group_src=0)


def broadcast_from_first(buffer: torch.Tensor, group: dist.ProcessGroup, label: str) -> None:
    """Fill ``buffer`` from that of the first rank.

    **Collective:** all ranks of ``group``. **Stream:** the current one.
    """
    if group.size() > 1:
        _announce("broadcast", label, buffer, group)
        dist.broadcast(buffer, group=group, group_src=0)


def _announce(op: str, label: str, payload: torch.Tensor, group: dist.ProcessGroup) -> None:
    if is_debugging():
        compare_notes(op, label, payload, group)
    ranks = 1 if op == "broadcast" else group.size()
    tell(CommEvent(op, label, group.size(), ranks * payload.nbytes, payload.dtype))
