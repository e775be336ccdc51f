"""Checks that ranks agree, under MESHARD_DEBUG=1.

The exchange behind ``MESHARD_DEBUG=1``. It goes through the store of the group, which keeps working
while a collective hangs. Each exchange of a group has a number, and four keys under it:

    first     what the rank that came first is about to do; the others compare theirs with it
    differs   there once a rank is about to do something else
    came      how many ranks have come
    verdict   ``go``, or the text of the error

The verdict is written by the last rank to come, or by the first whose patience ends, with a
compare-and-set: whoever is first decides for all, also for a rank that comes later. So nobody goes
on alone. That takes a fixed number of requests per rank, however many ranks there are; only who
writes an error reads what every rank said last, which stands under a key of the default group.

The last to come deletes the keys of the exchange before: all that came had read that verdict. What
stays in the store is one exchange per group, one key per rank, and a few keys for each error.

An error opens a new *round*, in which numbers start again, so that ranks which were thrown out at
different places meet again. The first error of a round is known to the whole job. A rank of the old
round that waits for somebody finds it, and raises too.

Ranks that run different units issue different collectives: on gloo that aborts the process, on NCCL
it hangs, or sums what does not belong together. Here every rank first says what it is about to do
and compares (see ``notes``), which costs a few round trips to the store per collective.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from meshard._comm.communicator import (
    CommStream,
    Communicator,
    GatheredViews,
    InFlight,
    RecordedWork,
    Rows,
    StepPhase,
)

_DEFAULT_SECONDS = 60.0
_QUIET_SECONDS = 0.5  # before looking for errors elsewhere; torch logs a wait that timed out
_POLL_SECONDS = 0.25
_FAREWELL_SECONDS = 2.0
_GO = "go"
_REMEDY = (
    "Every rank must run the same units of the same models in the same order, with as many "
    "microbatches, the same GradientSync and the same divide factor; ranks may differ in which "
    "parameters of a unit they use."
)

# Of each default group, how many rounds have ended in an error on this rank.
_rounds: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
# Of each group, the round and the number of the last exchange, over all models.
_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[int, int]]
_numbers = weakref.WeakKeyDictionary()


def is_debugging() -> bool:
    """Whether ``MESHARD_DEBUG`` asks for checks."""
    return os.environ.get("MESHARD_DEBUG", "0") not in ("", "0")


def check_collective(
    op: str, label: str, payload: torch.Tensor, group: dist.ProcessGroup, root: int | None = None
) -> None:
    """Raise unless all ranks of ``group`` are about to issue the same collective.

    **Collective:** as ``check_fingerprint``.

    Args:
        op: Name of the collective.
        label: Name of the unit.
        payload: The larger of its two buffers.
        group: Who takes part.
        root: Tells apart models whose units have the same names.

    Raises:
        RuntimeError: As ``check_fingerprint``.
    """
    of_root = "" if root is None else f"root {root}, "
    check_fingerprint(
        f"{op} of unit {label!r} ({of_root}{payload.numel()} x {payload.dtype})", group=group
    )


def check_fingerprint(ours: str, group: dist.ProcessGroup) -> None:
    """Raise unless all ranks of ``group`` say the same.

    **Collective:** all ranks of ``group``, through its store. Returns once all have come, or raises
    when ``MESHARD_DEBUG_TIMEOUT`` is over, on those that came and on those that come later.

    Args:
        ours: What this rank is about to do.
        group: Who should be about to do the same.

    Raises:
        RuntimeError: The ranks differ, or one did not come; or the store does not answer.
    """
    if group.size() == 1:
        return
    exchange = _Exchange(ours, group)
    try:
        verdict = exchange.run()
    except RuntimeError as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RuntimeError(
            f"rank {exchange.rank} is about to issue {ours} ({exchange.position}), but the store "
            f"through which ranks compare that does not answer ({reason}); the rank or launcher "
            "that holds it has probably ended: look for its error first."
        ) from error
    if verdict != _GO:
        exchange.leave()
        if exchange.line not in verdict:
            verdict += f"\nThis is rank {exchange.rank}, which came later: {ours}."
        raise RuntimeError(verdict)


class _Exchange:
    """One thing that the ranks of a group should do together, as this rank sees it."""

    def __init__(self, ours: str, group: dist.ProcessGroup) -> None:
        world = dist.group.WORLD
        assert world is not None  # there is a group
        self._world = world
        self._world_store, self._store = _store_of(world), _store_of(group)
        self._round = _rounds.get(world, 0)
        last_round, last_number = _numbers.get(group, (self._round, -1))
        self._number = last_number + 1 if last_round == self._round else 0
        _numbers[group] = (self._round, self._number)
        self._of_group = f"meshard_debug/{group.group_name}/{self._round}"
        self._keys = f"{self._of_group}/{self._number}"
        self._error_key = f"meshard_debug/error/{self._round}"
        self._ranks = dist.get_process_group_ranks(group)
        self._ours = ours
        self.rank = self._ranks[group.rank()]
        self.position = f"number {self._number} among ranks {', '.join(map(str, self._ranks))}"
        self.line = f"  rank {self.rank}: {ours}"

    def run(self) -> str:
        """Return the verdict. Blocks until there is one."""
        self._world_store.set(_last_key(self.rank), f"{self._keys}\n{self.position}\n{self._ours}")
        first = self._store.compare_set(f"{self._keys}/first", "", self._ours).decode()
        if first != self._ours:
            self._store.set(f"{self._keys}/differs", "1")
        if self._store.add(f"{self._keys}/came", 1) < len(self._ranks):
            return self._wait()
        verdict = self._decide("nothing")
        if verdict == _GO and self._number > 0:
            for name in ("first", "came", "verdict"):
                self._store.delete_key(f"{self._of_group}/{self._number - 1}/{name}")
        return verdict

    def _wait(self) -> str:
        patience = float(os.environ.get("MESHARD_DEBUG_TIMEOUT", _DEFAULT_SECONDS))
        key, end = f"{self._keys}/verdict", time.monotonic() + patience
        is_there = _is_written_within(min(_QUIET_SECONDS, patience), self._store, key)
        while not is_there:
            if self._world_store.check([self._error_key]):
                elsewhere = self._world_store.get(self._error_key).decode()
                return self._decide("nothing yet", f"\nBefore that, among other ranks: {elsewhere}")
            if time.monotonic() >= end:
                return self._decide(f"nothing within {patience:g} s")
            time.sleep(min(_POLL_SECONDS, max(0.0, end - time.monotonic())))
            is_there = self._store.check([key])
        return str(self._store.get(key).decode())

    def _decide(self, missing: str, elsewhere: str = "") -> str:
        """Return the verdict, which is this rank's unless another one was faster."""
        all_came = self._store.add(f"{self._keys}/came", 0) >= len(self._ranks)
        verdict = _GO
        if not all_came or self._store.check([f"{self._keys}/differs"]):
            verdict = self._report(missing, elsewhere)
        verdict = str(self._store.compare_set(f"{self._keys}/verdict", "", verdict).decode())
        if verdict != _GO:
            self._world_store.compare_set(self._error_key, "", verdict)
        return verdict

    def _report(self, missing: str, elsewhere: str) -> str:
        lines = [f"the ranks are about to issue different collectives ({self.position}):"]
        for rank in self._ranks:
            said = missing
            if self._world_store.check([_last_key(rank)]):
                keys, position, text = (
                    self._world_store.get(_last_key(rank)).decode().split("\n", 2)
                )
                if keys == self._keys:
                    said = text
                elif not elsewhere:  # else it may have been thrown out, and begun anew
                    said = f"{missing}; its last was {text}, {position}"
            lines.append(f"  rank {rank}: {said}")
        return "\n".join([*lines, _REMEDY]) + elsewhere

    def leave(self) -> None:
        """Begin a new round, once the other ranks that came know the verdict, or soon."""
        _rounds[self._world] = self._round + 1
        # The store may be in this process, which may end now: see that the others have read it.
        with contextlib.suppress(RuntimeError):
            seen = self._store.add(f"{self._keys}/seen", 1)
            if seen >= self._store.add(f"{self._keys}/came", 0):
                self._store.set(f"{self._keys}/all_seen", "1")
            _is_written_within(_FAREWELL_SECONDS, self._store, f"{self._keys}/all_seen")


def _last_key(rank: int) -> str:
    return f"meshard_debug/last/{rank}"


def _store_of(group: dist.ProcessGroup) -> Any:
    store = group.get_group_store()
    if store is None:
        raise RuntimeError(
            f"MESHARD_DEBUG compares through the store of a process group, and group "
            f"{group.group_name!r} has none; unset MESHARD_DEBUG."
        )
    return store


def _is_written_within(seconds: float, store: Any, key: str) -> bool:
    try:
        store.wait([key], datetime.timedelta(seconds=seconds))
    except RuntimeError as error:
        # Which class a timeout has depends on the store; all of them say "timeout". A lost
        # connection is a DistNetworkError.
        if isinstance(error, dist.DistNetworkError) or "timeout" not in str(error).lower():
            raise
        return False
    return True


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

    def on_stream(self, comm_stream: CommStream) -> contextlib.AbstractContextManager[None]:
        """See ``Communicator.on_stream``."""
        return self.inner.on_stream(comm_stream)

    def record(self, *keep: torch.Tensor) -> RecordedWork:
        """See ``Communicator.record``."""
        return self.inner.record(*keep)

    def gather_after(self, event: Any) -> None:
        """See ``Communicator.gather_after``."""
        self.inner.gather_after(event)

    def enter_after(self, comm_stream: CommStream, pending: InFlight) -> None:
        """See ``Communicator.enter_after``."""
        self.inner.enter_after(comm_stream, pending)

    def hold_until_done(self, tensors: Sequence[torch.Tensor]) -> None:
        """See ``Communicator.hold_until_done``."""
        self.inner.hold_until_done(tensors)

    def allocate(
        self,
        numel: int,
        comm_stream: CommStream,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup,
        is_sent: bool = False,
    ) -> torch.Tensor:
        """See ``Communicator.allocate``."""
        return self.inner.allocate(
            numel, comm_stream, dtype=dtype, device=device, group=group, is_sent=is_sent
        )

    def gather_views(
        self, source: torch.Tensor, *, group: dist.ProcessGroup, label: str
    ) -> GatheredViews | None:
        """See ``Communicator.gather_views``: never, so that there is one gather to check."""
        return None

    def all_gather(
        self, output: torch.Tensor, source: torch.Tensor, *, group: dist.ProcessGroup, label: str
    ) -> InFlight:
        """See ``Communicator.all_gather``; raises if the ranks differ."""
        self.check("all_gather", label, output, group)
        return self.inner.all_gather(output, source, group=group, label=label)

    def release_cached_memory(self, *, keep_for: StepPhase | None) -> None:
        """See ``Communicator.release_cached_memory``."""
        self.inner.release_cached_memory(keep_for=keep_for)

    def allocate_rows(
        self,
        numel: int,
        dtype: torch.dtype,
        *,
        group: dist.ProcessGroup,
        own: torch.Tensor | None = None,
    ) -> list[torch.Tensor] | None:
        """See ``Communicator.allocate_rows``: never, likewise."""
        return None

    def reduce_scatter(
        self,
        output: torch.Tensor,
        source: Rows,
        *,
        group: dist.ProcessGroup,
        label: str,
        keep_signs: bool = True,
    ) -> InFlight:
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
    ) -> InFlight:
        """See ``Communicator.all_reduce``; raises if the ranks differ."""
        self.check("all_reduce", label, buffer, group)
        return self.inner.all_reduce(buffer, group=group, label=label, output=output)

    def sums_apart(self, group: dist.ProcessGroup) -> bool:
        """See ``Communicator.sums_apart``."""
        return self.inner.sums_apart(group)

    def check(self, op: str, label: str, payload: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Raise if the ranks of ``group`` differ; for a collective that is issued elsewhere."""
        check_collective(op, label, payload, group, self._root_in.get(group))

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
