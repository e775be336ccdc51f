"""Optimizer state that rests in host memory, and is on the device while it is stepped.

The step goes through *chunks* of parameters, by default those of a unit. Two buffers on the device
take turns: while one chunk is stepped, the state of the next is copied in, and that of the one
before is copied out. Copies each way have a stream of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from meshard._comm.communicator import DONE, CommStream, Handle, ranged
from meshard._engine.param_group import ParamGroup, owner_of
from meshard._engine.unit import Unit
from meshard._mesh.layout import ROW_BYTES, padded
from meshard._params.unit_params import MemoryLocation
from meshard._torch.dtensor import plain_of
from meshard.optim.local_step import LocalStep
from meshard.optim.mapping import OptimGroups, State, States, are_same, objects_in

_OWN = "(optimizer state)"


class StreamedStep:
    """Steps by several ``LocalStep``, one for each chunk, whose state rests in host memory."""

    has_loose = False

    def __init__(
        self,
        make: Callable[[], LocalStep],
        group: ParamGroup,  # of any unit: all have the same device and streams
        chunk_bytes: int | None = None,  # of parameters; None: a unit is a chunk
    ) -> None:
        self._make, self._group, self._chunk_bytes = make, group, chunk_bytes
        self._host = MemoryLocation.host_memory(group.spec.device, pin=True)
        self._planned: list[object] = []
        self._chunks: list[tuple[LocalStep, dict[int, list[torch.Tensor]]]] = []
        self._stored: Handle = DONE  # the last copy to host memory
        # State that is on the device, by the id of its dict and its key there: the dict, and the
        # host memory to which it goes back.
        self._away: dict[tuple[int, str], tuple[State, torch.Tensor]] = {}
        self._ahead: tuple[list[torch.Tensor], list[Handle]] | None = None  # see ``prefetch``

    def take(self, optim_groups: OptimGroups, states: States) -> None:
        """See ``LocalStep``."""
        is_new = not are_same(objects_in(optim_groups), self._planned)
        if is_new or any(step.is_shown for step, _ in self._chunks):
            self._give_back()
        if is_new:
            self.show(states)
            self._chunks = [(self._make(), each) for each in self._cut(optim_groups)]
            self._planned = objects_in(optim_groups)
        for step, members in self._chunks:
            step.take([{**optim_groups[i], "params": each} for i, each in members.items()], states)

    def _cut(self, optim_groups: OptimGroups) -> Iterator[dict[int, list[torch.Tensor]]]:
        """Yield the parameters of each chunk, by the index of their param group."""
        chunk, num_bytes, last = dict[int, list[torch.Tensor]](), 0, None
        for number, group in enumerate(optim_groups):
            for param in group["params"]:
                unit, size = owner_of(param), plain_of(param).nbytes
                is_full = (
                    unit is not last
                    if self._chunk_bytes is None
                    else (num_bytes + size > self._chunk_bytes)
                )
                if chunk and is_full:
                    yield chunk
                    chunk, num_bytes = {}, 0
                chunk.setdefault(number, []).append(param)
                num_bytes, last = num_bytes + size, unit
        if chunk:
            yield chunk

    def prefetch(self) -> None:
        """Begin to copy state to the device. **Stream:** the one on which ``run`` follows."""
        if self._ahead is None:
            self._ahead = self._fetch_first()

    def _fetch_first(self) -> tuple[list[torch.Tensor], list[Handle]]:
        """Return two buffers, to which the state of two chunks is on its way, and the copies."""
        self._stored.synchronize()  # the host copies may be in use
        steps = [step for step, _ in self._chunks]
        sizes = [sum(_room(own[key]) for own, key in self._at_rest(step)) for step in steps]
        room, device = max(sizes, default=0), self._group.spec.device
        buffers = [torch.empty(room, dtype=torch.uint8, device=device) for _ in steps[:2]]
        return buffers, [self._fetch(*pair) for pair in zip(steps[:2], buffers, strict=True)]

    def _give_back(self) -> None:
        """Drop what was fetched ahead, and what a step that raised has left on the device."""
        for _, copied in zip(*(self._ahead or ([], [])), strict=True):
            copied.wait()
        for (_, key), (own, host) in self._away.items():
            own[key] = host
        self._away.clear()
        self._ahead = None

    def run(self) -> None:
        """Step all chunks. **Stream:** the current one steps; the state follows on two others."""
        steps = [step for step, _ in self._chunks]
        (buffers, fetched), self._ahead = self._ahead or self._fetch_first(), None
        leaving: Handle = DONE  # the copy of the chunk before; the wait frees what was new
        for number, step in enumerate(steps):
            fetched[number].wait()
            step.run()
            leaving.wait()
            leaving = self._store(step)
            if number + 2 < len(steps):
                fetched.append(self._fetch(steps[number + 2], buffers[number % 2], self._stored))
        leaving.wait()  # before the buffers are freed

    def _at_rest(self, step: LocalStep) -> list[tuple[State, str]]:
        """Return where state is in host memory: all, but for what was loaded to the device."""
        host = self._host.device
        return [(own, key) for own, key in step.large_states() if own[key].device == host]

    def _fetch(self, step: LocalStep, buffer: torch.Tensor, after: Handle = DONE) -> Handle:
        """Copy state to the device, into ``buffer``, which ``after`` has read."""
        comm, offset = self._group.comm, 0
        with comm.on_stream(CommStream.FETCH), ranged("copy_to_device", _OWN):
            after.wait()
            for own, key in self._at_rest(step):
                host = own[key]
                self._away[id(own), key] = own, host
                own[key] = buffer[offset : offset + host.nbytes].view(host.dtype).view(host.shape)
                own[key].copy_(host, non_blocking=True)
                offset += _room(host)
            return comm.record()

    def _store(self, step: LocalStep) -> Handle:
        """Copy state to host memory: to where it was, or what is new to new memory."""
        comm, kept = self._group.comm, list[torch.Tensor]()
        with comm.on_stream(CommStream.HOST), ranged("copy_to_host", _OWN):
            for own, key in step.large_states():
                source, (_, host) = own[key], self._away.pop((id(own), key), (own, None))
                kept.append(source)
                own[key] = self._host.empty_like(source) if host is None else host
                own[key].copy_(source, non_blocking=True)
            self._stored = comm.record()  # keeps nothing: another stream may be the first to wait
            return comm.record(*kept)

    def show(self, states: States) -> None:
        """See ``LocalStep``. Waits for the last copy to host memory."""
        self._give_back()
        self._stored.synchronize()
        for step, _ in self._chunks:
            step.show(states)


def _room(tensor: torch.Tensor) -> int:
    return padded(tensor.nbytes, ROW_BYTES)


def check_host_state(units: Sequence[Unit], state_device: str | torch.device) -> None:
    """Raise a ValueError unless state of parameters on a device can rest in host memory."""
    if torch.device(state_device).type != "cpu":
        raise ValueError(f'state_device must be "cpu" or None, got {str(state_device)!r}.')
    for unit in units:
        if unit.group.spec.host is not None:
            raise ValueError(
                f"the shards of unit {unit.label!r} are in host memory (CPUOffloadPolicy), and so "
                "is their state; leave out state_device."
            )
