"""Check that all ranks are about to issue the same collective, under MESHARD_DEBUG=1.

If ranks run different units, they issue different collectives: gloo then aborts the process, NCCL
hangs or sums unrelated data. With the check, every rank first writes a *fingerprint* of the
collective to the store of the process group. The store keeps working while a collective hangs.

The exchanges of a group are numbered, and each has four keys:

    first     fingerprint of the first rank to arrive; the others compare theirs with it
    differs   present once a rank has another fingerprint
    came      how many ranks have arrived
    verdict   ``go``, or the text of the error

The verdict is written by the last rank to arrive, by a rank whose timeout ends, or by a rank that
finds an error of another group. Only the first verdict counts, also for ranks that arrive later.
After an error each rank begins a new *round*, in which numbers start at 0 again. So ranks that
raised in exchanges of different numbers can be compared again. The first error of a round is also
written to the store of the default group: ranks that wait in exchanges of other groups in that
round read it there. By two more keys, ``seen`` and ``all_seen``, a rank that is about to raise
learns that the others have read the error.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import time
import weakref
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

_DEFAULT_SECONDS = 60.0
# A rank first blocks this long in ``store.wait`` for the verdict of its exchange. After that it
# polls by ``store.check``, because torch would log each further ``wait`` that times out. It then
# also looks for errors of other groups.
_QUIET_SECONDS = 0.5
_POLL_SECONDS = 0.25
_FAREWELL_SECONDS = 2.0
_GO = "go"
REMEDY = (
    "The usual causes: a forward, an evaluation or generate() on one rank only, which all ranks "
    "must run; a unit or a tower that one rank has skipped, which it must run on a dummy input at "
    "the same place in the forward, with the result times zero added to the loss; or a rank with "
    "more batches or microbatches than another. GradientSync and divide factor must be the same on "
    "all ranks too; ranks may differ in which parameters of a unit they use."
)

# Key: a default process group. Value: how many rounds (see above) have ended in an error on this
# rank. Another default group, which the user has made later, begins at 0: its store is new.
_rounds: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
# By group: number of the last exchange of this round. All models count together.
_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
# By group of a mesh: how many roots over it were ever made. Copies are not counted.
# ``name_root`` numbers roots by this count, alike on all ranks.
_num_roots: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def is_debugging() -> bool:
    """Whether ``MESHARD_DEBUG`` asks for checks."""
    return os.environ.get("MESHARD_DEBUG", "0") not in ("", "0")


RootNames = dict[dist.ProcessGroup, str]


def name_root(groups: Iterable[dist.ProcessGroup]) -> RootNames:
    """Return the name of a new root in each of its groups.

    The name distinguishes units of two models that have the same dotted name. Roots are numbered
    per group, because a rank may have models that other ranks lack, such as a stage of a pipeline.
    All ranks of a group call ``fully_shard`` and ``replicate`` in the same order, so a root gets
    its number in that call. The order of first use would not do: it may differ between ranks, and
    the check is there to find such differences.

    A copy gets no number, because one rank alone may make copies, for example for a moving average
    of the weights. So two copies of one root have the same name.
    """
    names = {}
    for group in set(groups):
        _num_roots[group] = _num_roots.get(group, 0) + 1
        names[group] = f"root {_num_roots[group]}"
    return names


def name_copy(names: RootNames) -> RootNames:
    """Return the name of a copy of a root in each of its groups."""
    return {group: f"copy of {name}" for group, name in names.items()}


def check_fingerprint(ours: str, group: dist.ProcessGroup) -> None:
    """Raise unless all ranks of ``group`` have the fingerprint ``ours``.

    **Collective:** all ranks of ``group``, through its store. It returns once all have arrived. If
    ``MESHARD_DEBUG_TIMEOUT`` ends before that, it raises on the ranks that have arrived, and on the
    others when they arrive.

    Raises:
        RuntimeError: The fingerprints differ, a rank did not arrive, or the store does not answer.
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
        exchange.start_new_round()
        if _line(exchange.rank, ours) not in verdict:
            verdict += f"\nThis is rank {exchange.rank}, which came later: {ours}."
        raise RuntimeError(verdict)


def explain_failure(error: RuntimeError, collective: str) -> None:
    """Add to ``error`` which collective has failed, and how to find the rank that differs."""
    if not is_debugging():
        error.args = (
            f"{error}\nThis rank waited for the {collective}. Do all ranks run as many batches, "
            "and the same units in the same order? MESHARD_DEBUG=1 names the rank and the unit "
            "where they part.",
        )


class _Exchange:
    """One numbered comparison among the ranks of a group, as seen by this rank."""

    def __init__(self, ours: str, group: dist.ProcessGroup) -> None:
        world = dist.group.WORLD
        assert world is not None  # because ``group`` exists
        self._world, self._ours = world, ours
        self._world_store, self._store = _store_of(world), _store_of(group)
        self._ranks = dist.get_process_group_ranks(group)
        self.rank = self._ranks[group.rank()]
        self._number = _numbers[group] = _numbers.get(group, -1) + 1
        self.position = f"number {self._number} among ranks {', '.join(map(str, self._ranks))}"
        this_round = _rounds.get(world, 0)
        self._error_key = f"meshard_debug/error/{this_round}"
        self._of_group = f"meshard_debug/{group.group_name}/{this_round}"
        self._keys = f"{self._of_group}/{self._number}"

    def run(self) -> str:
        """Return the verdict. Blocks until it is written."""
        self._world_store.set(_last_key(self.rank), f"{self._keys}\n{self.position}\n{self._ours}")
        first = self._store.compare_set(f"{self._keys}/first", "", self._ours).decode()
        if first != self._ours:
            self._store.set(f"{self._keys}/differs", "1")
        if self._store.add(f"{self._keys}/came", 1) < len(self._ranks):
            return self._wait()
        verdict = self._decide("nothing")
        # All ranks have come to this exchange, so none still reads the keys of the previous one.
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
        """Write a verdict unless another rank was faster; return what is written."""
        verdict = _GO
        all_came = self._store.add(f"{self._keys}/came", 0) >= len(self._ranks)
        if not all_came or self._store.check([f"{self._keys}/differs"]):
            verdict = self._report(missing, elsewhere)
        verdict = str(self._store.compare_set(f"{self._keys}/verdict", "", verdict).decode())
        if verdict != _GO:
            self._world_store.compare_set(self._error_key, "", verdict)
        return verdict

    def _report(self, missing: str, elsewhere: str) -> str:
        lines = [f"the ranks are about to issue different collectives ({self.position}):"]
        for rank in self._ranks:
            said, key = missing, _last_key(rank)
            if self._world_store.check([key]):
                keys, position, last = self._world_store.get(key).decode().split("\n", 2)
                if keys == self._keys:
                    said = last
                elif not elsewhere:  # after an error elsewhere, that rank may be in a new round
                    said = f"{missing}; its last was {last}, {position}"
            lines.append(_line(rank, said))
        return "\n".join([*lines, REMEDY]) + elsewhere

    def start_new_round(self) -> None:
        _rounds[self._world] = _rounds.get(self._world, 0) + 1
        _numbers.clear()
        # The caller raises next, which may end this process. If the process hosts the store, the
        # store ends too. So wait a moment for the other ranks to read the verdict.
        with contextlib.suppress(RuntimeError):
            seen = self._store.add(f"{self._keys}/seen", 1)
            if seen >= self._store.add(f"{self._keys}/came", 0):
                self._store.set(f"{self._keys}/all_seen", "1")
            _is_written_within(_FAREWELL_SECONDS, self._store, f"{self._keys}/all_seen")


def _line(rank: int, text: str) -> str:
    return f"  rank {rank}: {text}"


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
        # The class of a timeout depends on the kind of store, but its message always has the word
        # "timeout". A DistNetworkError is a lost connection, whatever its message says.
        if isinstance(error, dist.DistNetworkError) or "timeout" not in str(error).lower():
            raise
        return False
    return True
