"""What the ranks of a save or a load tell one another."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from meshard._comm.blocking import broadcast_object, gather_objects, gather_objects_to_first
from meshard._comm.stalls import Waiting

_LABEL = "(checkpoint)"


class Ranks:
    """The ranks that save and load together. All methods are collective if there are several."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """``group`` is for CPU tensors, and used for nothing else. None: there is one rank."""
        self._group = group
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Ranks:
        """Return the ranks of ``group`` (None: the default group, if any), with a gloo group.

        **Collective:** all ranks of ``group``.
        """
        if not dist.is_available() or not dist.is_initialized():
            return cls(None)
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        if len(ranks) == 1:
            return cls(None)
        # A new group, because a save in the background communicates while training does.
        with Waiting("process group of a checkpoint", group or dist.group.WORLD):
            is_part = len(ranks) < dist.get_world_size()
            own = dist.new_group(ranks, backend="gloo", use_local_synchronization=is_part)
        return cls(own)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        return [value] if self._group is None else gather_objects(value, self._group, label=_LABEL)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks on the first one, an empty list on the others."""
        if self._group is None:
            return [value]
        return gather_objects_to_first(value, self._group, label=_LABEL)

    def broadcast(self, value: Any) -> Any:
        """Return the value of the first rank."""
        return value if self._group is None else broadcast_object(value, self._group, label=_LABEL)
