"""How do ranks agree on one number?"""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshard._comm.communicator import CommEvent, tell
from meshard._comm.communicator_calls import all_gather_single
from meshard._comm.notes import compare_notes, is_debugging


def gather_values(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the ``values [n]`` of every rank of ``group``, ``[ranks, n]``. Blocks a CPU host.

    **Collective:** all ranks of ``group``. **Stream:** the current one.
    """
    if group.size() == 1:
        return values.view(1, -1)
    gathered = values.new_empty(group.size(), values.numel())
    _announce("all_gather", "(norm)", gathered, group)
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
        _announce("all_reduce", label, value, group)
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)


def _announce(op: str, label: str, payload: torch.Tensor, group: dist.ProcessGroup) -> None:
    if is_debugging():
        compare_notes(op, label, payload, group)
    tell(CommEvent(op, label, group.size(), payload.nbytes, payload.dtype))
