"""Use this device, or ``stream_steps``, to check that streams order all reads and writes.

Tensors live on the CPU, but every operator is taken to run on the stream that is current, and two
operators on different streams are ordered only by events. Each stream has a vector clock. For each
storage the last write and the reads since are kept; an access that is not ordered after what it
depends on is a race. Memory is taken to be reused by the next allocation on the stream that
allocated it, as a caching allocator does without ``record_stream``.

Host memory is what has been passed to ``add_host_memory``, and what is computed from it. Operators
on it run on the host, which is a queue of its own: it is ahead of everything that it launches, and
behind a device only by ``Event.synchronize``, a blocking copy, or reading a number. An operator
that takes both, and does not copy, is an error as on a real device.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Clock = dict[int, int]


class Stream:
    """A queue with a vector clock."""

    def __init__(self, device: "FakeDevice", number: int) -> None:
        self.device = device
        self.number = number
        self.clock: Clock = {number: 0}

    def tick(self) -> int:
        self.clock[self.number] += 1
        return self.clock[self.number]

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event({}, self.device)
        event.clock = dict(self.clock)
        event.recorded_at = time.monotonic()
        return event

    def wait_event(self, event: "Event") -> None:
        self.device.num_waits += 1
        self.catch_up(event.clock)

    def wait_stream(self, stream: "Stream") -> None:
        self.device.num_waits += 1
        self.catch_up(stream.clock)

    def catch_up(self, clock: Clock) -> None:
        for number, ticks in clock.items():
            self.clock[number] = max(self.clock.get(number, 0), ticks)

    def has_seen(self, number: int, ticks: int) -> bool:
        return self.clock.get(number, 0) >= ticks


@dataclass
class Event:
    """A moment on a stream."""

    clock: Clock
    device: "FakeDevice"
    recorded_at: float = 0.0

    def record(self, stream: Stream | None = None) -> "Event":
        return (stream or self.device.current_stream()).record_event(self)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.device.current_stream()).wait_event(self)

    def elapsed_time(self, end: "Event") -> float:
        """Return milliseconds, as if the device were as fast as the host."""
        return 1000 * (end.recorded_at - self.recorded_at)

    def synchronize(self) -> None:
        self.device.num_host_waits += 1
        self.device.host.catch_up(self.clock)

    def query(self) -> bool:
        """Whether the device has got there. Of what the host knows to be over, all can be sure."""
        if self.device.is_through:
            self.device.host.catch_up(self.clock)
        return self.device.is_through


Access = tuple[int, int, str]  # the stream, its ticks, and the operator


@dataclass
class _Block:
    """What is known of one storage."""

    weak: int
    allocated_on: int
    last_write: list[Access] = field(default_factory=list)  # one at most
    reads: dict[int, Access] = field(default_factory=dict)  # since then, by stream

    def memory(self) -> range:
        """Where the storage is now; it may have been resized, and moved."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.weak)
        return range(0) if storage is None else _memory_of(storage)

    def accesses(self) -> list[Access]:
        return [*self.last_write, *self.reads.values()]


class FakeDevice:
    """Stands in for ``torch.cuda``: streams, events and the current stream."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.compute = self.Stream()
        self.host = Stream(self, -1)  # as a queue: it runs one operator after the other
        self.num_host_waits = 0
        self.num_waits = 0  # of streams
        self.is_through = False  # with all that was queued: it is slow, so that nothing is lucky
        self._host_memory: list[int] = []  # weak references to storages
        self._current = threading.local()
        self.races: list[str] = []

    def add_host_memory(self, tensor: torch.Tensor) -> None:
        self._host_memory.append(tensor.untyped_storage()._weak_ref())

    def is_host_memory(self, tensor: torch.Tensor) -> bool:
        memory = _memory_of(tensor.untyped_storage())
        return bool(memory) and any(memory[0] in each for each in self.host_ranges())

    def host_ranges(self) -> list[range]:
        found = []
        for weak in list(self._host_memory):
            storage = torch.UntypedStorage._new_with_weak_ptr(weak)
            if storage is None:
                torch.UntypedStorage._free_weak_ref(weak)
                self._host_memory.remove(weak)
            else:
                found.append(_memory_of(storage))
        return found

    def Stream(self, priority: int = 0) -> Stream:
        self.streams.append(Stream(self, len(self.streams)))
        return self.streams[-1]

    def Event(self, *, enable_timing: bool = False) -> Event:
        return Event({}, self)

    def synchronize(self) -> None:
        self.num_host_waits += 1
        for stream in self.streams:
            self.host.catch_up(stream.clock)

    def current_stream(self) -> Stream:
        return getattr(self._current, "stream", self.compute)

    def set_stream(self, stream: Stream) -> None:
        self._current.stream = stream

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)


class Recorder(TorchDispatchMode):
    """Watches every operator and adds what is not ordered to ``device.races``."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self.device = device
        self.num_checked = 0
        self.num_blocking = 0  # operators for which the host waited
        self.streams_used: set[int] = set()
        self._blocks: dict[int, _Block] = {}
        self._freed: list[_Block] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, what = kwargs or {}, str(func)
        reads, writes = _touched(func, args, kwargs)
        known = {_key(tensor) for tensor in (*reads, *writes)}
        self._notice_frees()
        stream, is_copy = self._runs_on(func, [*reads, *writes])
        access = stream.number, stream.tick(), what
        self.streams_used.add(stream.number)
        if func.is_view or "empty" in what or "aten.set_." in what:
            reads, writes = [], []  # it is about shapes, touches no element, and queues nothing
        for tensor in reads:
            block = self._block(tensor, stream)
            self._check(stream, block.last_write, f"read by {what}")
            block.reads[stream.number] = access
        result = func(*args, **kwargs)
        for tensor in _leaves(result):
            if not isinstance(tensor, torch.Tensor) or tensor.is_meta:  # which has no memory
                continue
            if _key(tensor) not in known:
                self._allocated(stream, what)
                writes.append(tensor)
                if stream is self.device.host:
                    self.device.add_host_memory(tensor)
        for tensor in writes:
            block = self._block(tensor, stream)
            self._check(stream, block.accesses(), f"write by {what}")
            block.last_write, block.reads = [access], {}
        is_blocking = is_copy and not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        if is_blocking or "_local_scalar_dense" in what:
            self.num_blocking += 1
            self.device.host.catch_up(stream.clock)
        return result

    def _runs_on(self, func: Any, operands: list[torch.Tensor]) -> tuple[Stream, bool]:
        """Return the queue of an operator, and whether it copies between host and device."""
        # Numbers may be anywhere, and nothing is nowhere.
        on_host = [self.device.is_host_memory(t) for t in operands if t.dim() and t.numel()]
        # On a real device, empty_like(host_tensor, device=...) is how its memory is made.
        if on_host and all(on_host) and "empty_like" not in str(func):
            return self.device.host, False
        stream = self.device.current_stream()
        stream.catch_up(self.device.host.clock)  # launched by the host
        is_copy = any(on_host) and "aten.copy_" in str(func)
        if any(on_host) and not all(on_host) and not is_copy:
            self.device.races.append(f"{func} takes tensors of host and device")
        return stream, is_copy

    def _block(self, tensor: torch.Tensor, stream: Stream) -> _Block:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._blocks:
            memory = _memory_of(storage)
            for block in self._blocks.values():
                if memory and memory[0] in block.memory():
                    return block  # a storage inside another: the same memory
            is_host = self.device.is_host_memory(tensor)
            owner = self.device.host if is_host else stream
            self._blocks[storage._cdata] = _Block(storage._weak_ref(), owner.number)
        return self._blocks[storage._cdata]

    def _check(self, stream: Stream, accesses: list[Access], what: str) -> None:
        for number, ticks, before in accesses:
            self.num_checked += 1
            if not stream.has_seen(number, ticks):
                self.device.races.append(
                    f"{what} on stream {stream.number} is not ordered after {before} on {number}"
                )

    def _notice_frees(self) -> None:
        for key, block in list(self._blocks.items()):
            if torch.UntypedStorage._expired(block.weak):
                torch.UntypedStorage._free_weak_ref(block.weak)
                self._freed.append(self._blocks.pop(key))

    def _allocated(self, stream: Stream, what: str) -> None:
        self._notice_frees()
        for block in [block for block in self._freed if block.allocated_on == stream.number]:
            self._freed.remove(block)
            self._check(stream, block.accesses(), f"reuse of memory by {what}")


def _memory_of(storage: torch.UntypedStorage) -> range:
    try:
        return range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
    except RuntimeError:  # of a wrapper: a DTensor has no memory of its own
        return range(0)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _leaves(item)]
    value = getattr(value, "_local_tensor", value)  # of a DTensor
    if not hasattr(value, "__tensor_flatten__"):
        return [value]
    names, _ = value.__tensor_flatten__()  # of a tensor around others
    return [leaf for name in names for leaf in _leaves(getattr(value, name))]


def _touched(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return what an operator reads and what it writes, by its schema."""
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    is_collective = func.namespace == "c10d"
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        tensors = [leaf for leaf in _leaves(value) if isinstance(leaf, torch.Tensor)]
        is_write = argument.alias_info is not None and argument.alias_info.is_write
        # The schemas of collectives do not say what they write: take operands for both, but inputs.
        if is_write or (is_collective and not argument.name.startswith("input")):
            writes += tensors
        if not is_write or is_collective:
            reads += tensors
    return reads, writes
