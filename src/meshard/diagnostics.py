"""What is sharded where, what was sent, which rank disagrees?"""

from __future__ import annotations

from types import TracebackType

from torch import nn

from meshard._comm.communicator import CommEvent, add_observer, remove_observer
from meshard._runtime.unit import units_in


class CommLedger:
    """Counts every collective that meshard issues on this rank.

    A context manager; what it has seen may be read inside and afterwards. Groups of one rank issue
    nothing, so nothing is counted for them.

    Args:
        module: Count only the units in this module. None: everything in this process.

    Attributes:
        events: Every collective, in order: ``op`` (``"all_gather"``, ``"reduce_scatter"``,
            ``"all_reduce"`` or, before training, ``"broadcast"``), ``unit``, ``group_size``,
            ``payload_bytes``, ``dtype`` and ``wire_bytes``.

    >>> import torch, meshard
    >>> layer = meshard.fully_shard(torch.nn.Linear(4, 4))
    >>> with meshard.CommLedger() as ledger:
    ...     layer(torch.ones(1, 4)).sum().backward()
    >>> ledger.counts
    {}
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self.events: list[CommEvent] = []
        self._communicators: set[int] | None = None
        if module is not None:
            self._communicators = {
                id(unit.group.comm.identity) for unit in units_in(module) if unit.group is not None
            }

    def _observe(self, event: CommEvent, communicator: object) -> None:
        if self._communicators is None or id(communicator) in self._communicators:
            self.events.append(event)

    def __enter__(self) -> CommLedger:
        add_observer(self._observe)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        remove_observer(self._observe)

    @property
    def counts(self) -> dict[str, int]:
        """How many collectives of each kind."""
        counts: dict[str, int] = {}
        for event in self.events:
            counts[event.op] = counts.get(event.op, 0) + 1
        return counts

    @property
    def bytes(self) -> dict[str, int]:
        """Payload bytes of each kind: whole buffers, before they are spread over ranks."""
        totals: dict[str, int] = {}
        for event in self.events:
            totals[event.op] = totals.get(event.op, 0) + event.payload_bytes
        return totals

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank sends with ring algorithms: ``(n - 1) / n`` of each payload.

        An all-reduce counts twice (Patarasuk and Yuan, 2009).
        """
        return sum(event.wire_bytes for event in self.events)
