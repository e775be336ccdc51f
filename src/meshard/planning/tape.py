"""What a planned rank queues: a tape of its kernels, collectives and waits, stream by stream.

The *work* of a kernel is the bytes that it reads and writes, a byte more for every hundred
floating-point operations (every ten on a CPU), and 64 KiB more because it is launched. Work only
divides measured seconds among kernels, and scales them to other batches, so these numbers need not
be exact.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from meshard._comm.communicator import CommEvent
from meshard._comm.spans import HOST, Clock

_ON_DEVICE, _ON_CPU = 100, 10  # floating-point operations that take as long as a byte
_LAUNCH = 2**16
# The kernel of the CPU, for which torch counts no operations, computes what that of a device does.
_SAME_AS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        torch.ops.aten._scaled_dot_product_flash_attention
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}

Key = tuple[str, str]  # a phase and a unit


def work_of(
    func: Any, args: Any, kwargs: Any, result: Any, *, operations_per_byte: int = _ON_CPU
) -> float:
    """Return the work of a kernel, in bytes."""
    packet = func.overloadpacket
    if "empty" in packet.__name__:
        return 0.0  # no kernel
    tensors: list[torch.Tensor] = []
    for value in (*args, *kwargs.values(), result):  # of an operator: tensors, and lists of them
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += [each for each in value if isinstance(each, torch.Tensor)]
    if not tensors:
        return 0.0
    work: float = _LAUNCH + sum(each.numel() * each.itemsize for each in tensors)
    count = flop_registry.get(_SAME_AS.get(packet, packet))
    if count is not None:
        # torch 2.11 does not count attention in which several query heads share one key head.
        with contextlib.suppress(AssertionError):
            work += count(*args, **kwargs, out_val=result) / operations_per_byte
    return work


class WorkRecorder:
    """A recorder of ``spans`` that assigns the work of each kernel to what runs at the time.

    ``on_work`` gets the phase and the unit that run, and the work. Kernels on the streams of
    collectives are left out: their time is part of the collective.
    """

    def __init__(self, on_work: Callable[[Key, float], None]) -> None:
        self._on_work = on_work
        self._phase: Key = ("", "")
        self._span: list[Key | None] = []  # None: a collective
        self.clock: Clock | None = None  # of compute, once a unit has run

    def kernel(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record that a kernel was queued on the current stream."""
        if self._span:
            key = self._span[-1]
        elif self.clock is not None and self.clock.is_beside_compute:
            key = None
        else:
            key = self._phase
        if key is not None:
            rate = _ON_CPU if self.clock is HOST else _ON_DEVICE
            self._on_work(key, work_of(func, args, kwargs, result, operations_per_byte=rate))

    def span(
        self, what: str, label: str, clock: Clock, event: CommEvent | None
    ) -> AbstractContextManager[object]:
        """Return a context for the kernels of ``what``."""
        if event is None:
            return self._inside((what, label))
        return self._inside(None if clock.is_beside_compute else self._phase)

    @contextlib.contextmanager
    def _inside(self, key: Key | None) -> Iterator[None]:
        self._span.append(key)
        try:
            yield
        finally:
            self._span.pop()

    def issued(self) -> None:
        """Return nothing: no collective is timed."""

    def enter(self, phase: str, label: str, clock: Clock) -> None:
        """Record that compute begins a phase of a unit."""
        self._phase, self.clock = (phase, label), clock


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective that meshard issues, as ``CommLedger`` records it."""

    op: str
    unit: str
    group_size: int
    payload_bytes: int
    wire_bytes: int
    is_between_nodes: bool  # its group has ranks of several nodes

    @classmethod
    def of(cls, event: CommEvent, ranks: Sequence[int], ranks_per_node: int) -> Collective:
        """Return what is known of an event in a group of these global ranks."""
        nodes = {rank // ranks_per_node for rank in ranks}
        sizes = event.group_size, event.payload_bytes, event.wire_bytes
        return cls(event.op, event.unit, *sizes, len(nodes) > 1)

    @property
    def hops(self) -> int:
        """How often data goes from a rank to the next in a ring, one after the other."""
        return (self.group_size - 1) * (2 if self.op == "all_reduce" else 1)


class Work(NamedTuple):
    """Kernels that follow each other on a stream."""

    stream: int
    key: Key
    amount: float


class Sent(NamedTuple):
    """A collective on a stream."""

    stream: int
    collective: Collective


class Recorded(NamedTuple):
    """An event after what was queued on a stream."""

    stream: int
    event: int


class Waited(NamedTuple):
    """A stream waits for an event."""

    stream: int
    event: int


class StepBegins(NamedTuple):
    """The next entries are those of a step."""


Entry = Work | Sent | Recorded | Waited | StepBegins


class Tape:
    """What a rank queues, in order. Streams have numbers; compute, and a CPU, is number 0."""

    def __init__(self) -> None:
        self.stream = 0  # the current one
        self.sent = 0  # the event after the last collective of ``send_beside``
        self._num_streams = 1
        self._wires: dict[Any, int] = {}  # by group
        self._entries: list[Entry] = []
        self._num_events = 0
        self._end: int | None = None  # of the entries that count

    def new_stream(self) -> int:
        """Return the number of a new stream."""
        self._num_streams += 1
        return self._num_streams - 1

    def begin_step(self) -> None:
        """Record that a step begins."""
        self._entries.append(StepBegins())

    def end(self) -> None:
        """Let nothing count that is recorded from now on."""
        self._end = len(self._entries)
        self.begin_step()  # so that no kernel is added to the last one

    def work(self, key: Key, amount: float) -> None:
        """Record a kernel on the current stream."""
        last = self._entries[-1] if self._entries else None
        if isinstance(last, Work) and last.stream == self.stream and last.key == key:
            self._entries[-1] = last._replace(amount=last.amount + amount)
        elif amount:
            self._entries.append(Work(self.stream, key, amount))

    def send(self, collective: Collective) -> None:
        """Record a collective on the current stream."""
        self._entries.append(Sent(self.stream, collective))

    def send_beside(self, collective: Collective, group: object) -> None:
        """Record a collective of a rank without streams: those of a group follow each other."""
        if group not in self._wires:
            self._wires[group] = self.new_stream()
        wire = self._wires[group]
        self.wait(self.record(), stream=wire)
        self._entries.append(Sent(wire, collective))
        self.sent = self.record(stream=wire)

    def record(self, *, stream: int | None = None) -> int:
        """Return an event after what was queued on a stream; None: on the current one."""
        self._num_events += 1
        self._entries.append(Recorded(self.stream if stream is None else stream, self._num_events))
        return self._num_events

    def wait(self, event: int, *, stream: int | None = None) -> None:
        """Let a stream wait for an event; None: the current one."""
        self._entries.append(Waited(self.stream if stream is None else stream, event))

    def entries(self) -> list[Entry]:
        """Return what was recorded until ``end``."""
        return self._entries[: self._end]

    def collectives(self) -> list[Collective]:
        """Return the collectives of the last step, in order."""
        found: list[Collective] = []
        for entry in self.entries():
            if isinstance(entry, StepBegins):
                found.clear()
            elif isinstance(entry, Sent):
                found.append(entry.collective)
        return found
