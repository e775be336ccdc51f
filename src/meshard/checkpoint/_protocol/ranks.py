"""What the ranks of a save or a load tell one another: small values, as JSON."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from meshard._comm.blocking import broadcast, gather_from_all, gather_to
from meshard._comm.stalls import Waiting
from meshard.checkpoint._protocol.tensor_file import copied_bytes

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
            own = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        return cls(own)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        if self._group is None:
            return [value]
        own, sizes = self._with_sizes(value)
        rows = gather_from_all(_padded(own, max(sizes)), self._group, label=_LABEL)
        return [_value_of(row, size) for row, size in zip(rows, sizes, strict=True)]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks on the first one, an empty list on the others."""
        if self._group is None:
            return [value]
        own, sizes = self._with_sizes(value)
        rows = gather_to(_padded(own, max(sizes)), self._group, _LABEL)
        if rows is None:
            return []
        return [_value_of(row, size) for row, size in zip(rows, sizes, strict=True)]

    def broadcast(self, value: Any) -> Any:
        """Return the value of the first rank."""
        if self._group is None:
            return value
        own = _as_bytes(value if self.is_first else None)
        size = torch.tensor([own.numel()], device="cpu")
        broadcast(size, self._group, label=_LABEL)
        buffer = own if self.is_first else torch.empty(int(size), dtype=torch.uint8, device="cpu")
        broadcast(buffer, self._group, label=_LABEL)
        return _value_of(buffer, int(size))

    def _with_sizes(self, value: Any) -> tuple[torch.Tensor, list[int]]:
        assert self._group is not None
        own = _as_bytes(value)
        sizes = gather_from_all(
            torch.tensor([own.numel()], device="cpu"), self._group, label=_LABEL
        )
        return own, sizes.flatten().tolist()


def _as_bytes(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _padded(data: torch.Tensor, size: int) -> torch.Tensor:
    return torch.nn.functional.pad(data, (0, size - data.numel()))


def _value_of(data: torch.Tensor, size: int) -> Any:
    return json.loads(copied_bytes(data[:size]))
