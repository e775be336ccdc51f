"""Are all ranks about to issue the same collective? The check behind ``MESHARD_DEBUG=1``.

Ranks that run different units issue different collectives: on gloo that aborts the process, on NCCL
it hangs, or sums what does not belong together. Here every rank first says what it is about to do,
in the store of the group, and compares. That costs a round trip to the store per collective.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import weakref
from typing import Any

import torch
import torch.distributed as dist

from meshard._comm.communicator import Communicator, Lane, Pending

_DEFAULT_SECONDS = 60.0


def is_debugging() -> bool:
    """Whether ``MESHARD_DEBUG`` asks for checks."""
    return os.environ.get("MESHARD_DEBUG", "0") not in ("", "0")


def _seconds() -> float:
    return float(os.environ.get("MESHARD_DEBUG_TIMEOUT", _DEFAULT_SECONDS))


# Collectives so far in each group, over all models: the ranks of a group count alike.
_sequences: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class CheckedCommunicator:
    """A communicator that compares notes with the other ranks before each collective.

    Args:
        inner: What does the work.
    """

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self.waits_block_host = inner.waits_block_host
        self.identity = inner.identity

    def lane(self, lane: Lane) -> contextlib.AbstractContextManager[None]:
        """See ``Communicator.lane``."""
        return self._inner.lane(lane)

    def queued(self, *keep: torch.Tensor) -> Pending:
        """See ``Communicator.queued``."""
        return self._inner.queued(*keep)

    def gather_after(self, event: Any) -> None:
        """See ``Communicator.gather_after``."""
        self._inner.gather_after(event)

    def allocate(
        self,
        numel: int,
        lane: Lane,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        """See ``Communicator.allocate``."""
        return self._inner.allocate(numel, lane, dtype=dtype, device=device, group=group)

    def all_gather(
        self, output: torch.Tensor, source: torch.Tensor, *, group: dist.ProcessGroup, label: str
    ) -> Pending:
        """See ``Communicator.all_gather``; raises if the ranks differ."""
        compare_notes("all_gather", label, output, group)
        return self._inner.all_gather(output, source, group=group, label=label)

    def reduce_scatter(
        self, output: torch.Tensor, source: torch.Tensor, *, group: dist.ProcessGroup, label: str
    ) -> Pending:
        """See ``Communicator.reduce_scatter``; raises if the ranks differ."""
        compare_notes("reduce_scatter", label, source, group)
        return self._inner.reduce_scatter(output, source, group=group, label=label)

    def all_reduce(self, buffer: torch.Tensor, *, group: dist.ProcessGroup, label: str) -> Pending:
        """See ``Communicator.all_reduce``; raises if the ranks differ."""
        compare_notes("all_reduce", label, buffer, group)
        return self._inner.all_reduce(buffer, group=group, label=label)


def compare_notes(op: str, label: str, payload: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Raise unless all ranks of ``group`` are about to do the same.

    **Collective:** all ranks of ``group``, through its store. Returns once all have said what they
    are about to do, or raises on every rank that came when the time is over.

    Raises:
        RuntimeError: What each rank is about to do, where they differ.
    """
    if group.size() == 1:
        return
    sequence = _sequences[group] = _sequences.get(group, -1) + 1
    ours = f"{op} of unit {label!r} ({payload.numel()} x {payload.dtype})"
    ranks = dist.get_process_group_ranks(group)
    prefix = f"meshard_debug/{group.group_name}"
    keys = [f"{prefix}/{sequence}/{rank}" for rank in ranks]
    store = group.get_group_store()
    store.set(keys[group.rank()], ours)
    said = _wait_for(store, keys)
    if any(other != ours for other in said):
        lines = [
            f"  rank {rank}: {other or f'nothing within {_seconds():g} s'}"
            for rank, other in zip(ranks, said, strict=True)
        ]
        raise RuntimeError(
            f"the ranks are about to issue different collectives (number {sequence} of this "
            "group):\n" + "\n".join(lines) + "\nEvery rank must run the same units in the "
            "same order; ranks may differ in which parameters of a unit they use."
        )
    if sequence > 1:  # all have gone past the one before the last
        store.delete_key(f"{prefix}/{sequence - 2}/{ranks[group.rank()]}")


def _wait_for(store: Any, keys: list[str]) -> list[str | None]:
    """Return what stands under each key; None where nothing came in time for all of them."""
    try:
        store.wait(keys, datetime.timedelta(seconds=_seconds()))
    except RuntimeError:  # DistStoreError: at least one did not come
        return [store.get(key).decode() if store.check([key]) else None for key in keys]
    return [store.get(key).decode() for key in keys]
