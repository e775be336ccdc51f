"""Check that all ranks are about to issue the same collective, under MESHARD_DEBUG=1.

If ranks run different units, they issue different collectives: gloo then aborts the process, NCCL
hangs or sums unrelated data. With the check, the ranks first compare a *fingerprint* of what each
is about to issue. They do so by an all-gather over gloo, with connections of its own for each
process group, because the group's own collectives may hang.

After an error a rank closes these connections for all groups. So ranks that wait for it in a
comparison of another group, or that come later, get an error too. The next comparison makes new
connections.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import weakref
from typing import Any

import torch
import torch.distributed as dist

from meshard._torch.private import all_gather_by_gloo, connect_by_gloo

_DEFAULT_SECONDS = 60.0
_LENGTH_BYTES = 8
REMEDY = (
    "The usual causes: a forward, an evaluation or generate() on one rank only, which all ranks "
    "must run; a unit or a tower that one rank has skipped, which it must run on a dummy input at "
    "the same place in the forward, with the result times zero added to the loss; or a rank with "
    "more batches or microbatches than another. GradientSync and divide factor must be the same on "
    "all ranks too; ranks may differ in which parameters of a unit they use."
)

# By group: its connections, since the last error of this rank.
_peers: weakref.WeakKeyDictionary[dist.ProcessGroup, _Peers] = weakref.WeakKeyDictionary()
# By default process group: how many errors this rank has had. Ranks that are to be compared again
# after an error have had equally many. The count is in the key under which they find each other in
# the store, so that none finds an address of a connection that is closed.
_num_errors: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def is_debugging() -> bool:
    """Whether ``MESHARD_DEBUG`` asks for checks."""
    return os.environ.get("MESHARD_DEBUG", "0") not in ("", "0")


RootNames = dict[dist.ProcessGroup, str]  # of one root


def check_fingerprint(ours: str, group: dist.ProcessGroup) -> None:
    """Raise unless all ranks of ``group`` have the fingerprint ``ours``.

    **Collective:** all ranks of ``group``. It waits for ``MESHARD_DEBUG_TIMEOUT`` seconds.

    Raises:
        RuntimeError: The fingerprints differ, or a rank did not come, has ended or has raised.
    """
    if group.size() == 1:
        return
    peers = _peers.get(group)
    if peers is None:
        peers = _peers[group] = _Peers(group)
    try:
        lines = peers.compare(ours, group)
    except RuntimeError as error:
        _close_all()
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RuntimeError(
            f"rank {peers.rank} is about to issue {ours} ({peers.position}), and not all of these "
            f"ranks have come to compare it: one did not within {_patience().total_seconds():g} s, "
            "or it has raised an error, or ended, which then is the first to look at.\n"
            f"{REMEDY}\n({reason})"
        ) from error
    if lines:
        _close_all()
        head = f"the ranks are about to issue different collectives ({peers.position}):"
        raise RuntimeError("\n".join([head, *lines, REMEDY]))


def explain_failure(error: RuntimeError, collective: str) -> None:
    """Add to ``error`` which collective has failed, and how to find the rank that differs."""
    if not is_debugging():
        error.args = (
            f"{error}\nThis rank waited for the {collective}. Do all ranks run as many batches, "
            "and the same units in the same order? MESHARD_DEBUG=1 names the rank and the unit "
            "where they part.",
        )


class _Peers:
    """Connections to the other ranks of a group, and the number of comparisons over them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._ranks = dist.get_process_group_ranks(group)
        self.rank, self._number = self._ranks[group.rank()], -1
        self._backend: Any = None  # the connections; None: not made yet, or closed

    @property
    def position(self) -> str:
        """Which comparison of which ranks it is, in words."""
        return f"number {self._number} among ranks {', '.join(map(str, self._ranks))}"

    def compare(self, ours: str, group: dist.ProcessGroup) -> list[str]:
        """Return a line per rank if the fingerprints differ, otherwise an empty list.

        Raises:
            RuntimeError: A rank did not come, or has closed its connections.
        """
        self._number += 1
        if self._backend is None:
            world = dist.group.WORLD
            assert world is not None  # because ``group`` exists
            place = f"meshard_debug/{group.group_name}/{_num_errors.get(world, 0)}"
            self._backend = connect_by_gloo(group, place, _patience())
        text = ours.encode()
        length = len(text).to_bytes(_LENGTH_BYTES, "little")
        heads = self._gather(length + hashlib.sha256(text).digest())
        if all(head == heads[0] for head in heads):
            return []
        lengths = [int.from_bytes(head[:_LENGTH_BYTES], "little") for head in heads]
        padded = self._gather(text.ljust(max(lengths)))
        texts = [each[:length].decode() for each, length in zip(padded, lengths, strict=True)]
        return [f"  rank {each}: {text}" for each, text in zip(self._ranks, texts, strict=True)]

    def _gather(self, sent: bytes) -> list[bytes]:
        """Return the bytes of every rank, which are equally many."""
        rows = torch.empty(len(self._ranks), len(sent), dtype=torch.uint8, device="cpu")
        own = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
        all_gather_by_gloo(self._backend, list(rows), own, _patience())
        return [bytes(row) for row in rows.tolist()]

    def close(self) -> None:
        """Close the connections. Ranks that wait in a comparison with this one get an error."""
        self._backend = None


def _close_all() -> None:
    world = dist.group.WORLD
    assert world is not None
    _num_errors[world] = _num_errors.get(world, 0) + 1
    for peers in _peers.values():
        peers.close()
    _peers.clear()


def _patience() -> datetime.timedelta:
    seconds = float(os.environ.get("MESHARD_DEBUG_TIMEOUT", _DEFAULT_SECONDS))
    return datetime.timedelta(seconds=seconds)
