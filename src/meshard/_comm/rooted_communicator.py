"""How do flat shards travel to one rank, and back?

Outside of a step, so these block: on the current stream, without lanes. The first rank of a group
is the root.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshard._comm.communicator import CommEvent, tell
from meshard._comm.notes import compare_notes, is_debugging


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


def _announce(op: str, label: str, payload: torch.Tensor, group: dist.ProcessGroup) -> None:
    if is_debugging():
        compare_notes(op, label, payload, group)
    tell(CommEvent(op, label, group.size(), group.size() * payload.nbytes, payload.dtype))
