"""How is each collective checked before it is issued, under ``MESHARD_DEBUG=1``?

Ranks that run different units issue different collectives: on gloo that aborts the process, on NCCL
it hangs, or sums what does not belong together. Here every rank first says what it is about to do
and compares (see ``notes``), which costs a few round trips to the store per collective.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from meshard._comm.communicator import Borrowed, Communicator, Lane, Pending, Queued, Rows
from meshard._comm.notes import compare_notes
from meshard._comm.parts import Part

# Of each group, how many roots were made that use it. Counted when they are made, not when they
# run: what runs in another order is what is to be found. Not over all groups: ranks may have models
# that other ranks have not, such as the stages of a pipeline.
_num_roots: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class CheckedCommunicator:
    """A communicator that compares notes with the other ranks before each collective.

    Args:
        inner: What does the work.
    """

    def __init__(self, inner: Communicator) -> None:
        self.inner = inner
        self._root_in: dict[dist.ProcessGroup, int] = {}
        self.waits_block_host = inner.waits_block_host
        self.may_keep_buffers = inner.may_keep_buffers
        self.identity = inner.identity

    def lane(self, lane: Lane) -> contextlib.AbstractContextManager[None]:
        """See ``Communicator.lane``."""
        return self.inner.lane(lane)

    def queued(self, *keep: torch.Tensor) -> Queued:
        """See ``Communicator.queued``."""
        return self.inner.queued(*keep)

    def gather_after(self, event: Any) -> None:
        """See ``Communicator.gather_after``."""
        self.inner.gather_after(event)

    def enter_after(self, lane: Lane, pending: Pending) -> None:
        """See ``Communicator.enter_after``."""
        self.inner.enter_after(lane, pending)

    def retire(self, tensors: Sequence[torch.Tensor]) -> None:
        """See ``Communicator.retire``."""
        self.inner.retire(tensors)

    def allocate(
        self,
        numel: int,
        lane: Lane,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup,
        is_sent: bool = False,
    ) -> torch.Tensor:
        """See ``Communicator.allocate``."""
        return self.inner.allocate(
            numel, lane, dtype=dtype, device=device, group=group, is_sent=is_sent
        )

    def borrow(
        self, source: torch.Tensor, *, group: dist.ProcessGroup, label: str
    ) -> Borrowed | None:
        """See ``Communicator.borrow``: never, so that there is one gather to check."""
        return None

    def all_gather(
        self, output: torch.Tensor, source: torch.Tensor, *, group: dist.ProcessGroup, label: str
    ) -> Pending:
        """See ``Communicator.all_gather``; raises if the ranks differ."""
        self.check("all_gather", label, output, group)
        return self.inner.all_gather(output, source, group=group, label=label)

    def trim(self, *, keep_for: Part | None) -> None:
        """See ``Communicator.trim``."""
        self.inner.trim(keep_for=keep_for)

    def lend_rows(
        self,
        numel: int,
        dtype: torch.dtype,
        *,
        group: dist.ProcessGroup,
        own: torch.Tensor | None = None,
    ) -> list[torch.Tensor] | None:
        """See ``Communicator.lend_rows``: never, likewise."""
        return None

    def reduce_scatter(
        self,
        output: torch.Tensor,
        source: Rows,
        *,
        group: dist.ProcessGroup,
        label: str,
        keep_signs: bool = True,
    ) -> Pending:
        """See ``Communicator.reduce_scatter``; raises if the ranks differ."""
        payload = source if isinstance(source, torch.Tensor) else source[0]  # of a group of one
        self.check("reduce_scatter", label, payload, group)
        return self.inner.reduce_scatter(
            output, source, group=group, label=label, keep_signs=keep_signs
        )

    def all_reduce(
        self,
        buffer: torch.Tensor,
        *,
        group: dist.ProcessGroup,
        label: str,
        output: torch.Tensor | None = None,
    ) -> Pending:
        """See ``Communicator.all_reduce``; raises if the ranks differ."""
        self.check("all_reduce", label, buffer, group)
        return self.inner.all_reduce(buffer, group=group, label=label, output=output)

    def sums_apart(self, group: dist.ProcessGroup) -> bool:
        """See ``Communicator.sums_apart``."""
        return self.inner.sums_apart(group)

    def check(self, op: str, label: str, payload: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Raise if the ranks of ``group`` differ; for a collective that is issued elsewhere."""
        compare_notes(op, label, payload, group, self._root_in.get(group))

    def number_root(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """Tell the root that talks through this from others that have units of the same names."""
        for group in set(groups):
            self._root_in[group] = _num_roots[group] = _num_roots.get(group, 0) + 1


def number_root(comm: Communicator, groups: Iterable[dist.ProcessGroup]) -> None:
    """Have the root that talks through ``comm`` told from others, if collectives are checked.

    Args:
        comm: Used by one root.
        groups: All that it communicates in.
    """
    if isinstance(comm, CheckedCommunicator):
        comm.number_root(groups)


def share(comm: Communicator, own: Communicator) -> Communicator:
    """Return ``comm`` for a root that has used ``own``, and is still told from the others."""
    if isinstance(comm, CheckedCommunicator) and isinstance(own, CheckedCommunicator):
        own.inner, own.identity = comm.inner, comm.identity
        return own
    return comm
