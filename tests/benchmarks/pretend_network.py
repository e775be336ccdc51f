"""A process group that takes its time, but sends nothing.

It stands for any number of ranks of a given network. A collective takes latency plus bytes over
bandwidth, one after the other as on a wire: on the stream where it is queued, or, for CPU tensors,
until its work is waited for. Outputs stay as they are. Small ones, by
which ranks compare settings, say that all ranks have the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from tests.support.thread_group import LocalGroup

BACKEND = "pretend"
_SMALL = 2**16  # bytes
_CYCLES = 10_000_000  # for which the clock of a device is measured


@dataclass(frozen=True)
class Network:
    """What joins the ranks.

    Attributes:
        inside: Bytes per second between the ranks of a host.
        across: Likewise between hosts, for each rank.
        latency: Seconds of a collective without bytes, for each doubling of its ranks.
        per_host: Ranks of a host.
    """

    inside: float = 400e9
    across: float = 50e9
    latency: float = 5e-6
    per_host: int = 8

    def seconds(self, num_bytes: int, ranks: int) -> float:
        """Return how long one pass over a ring takes, with all that a rank sends."""
        bandwidth = self.inside if ranks <= self.per_host else self.across
        return self.latency * math.log2(ranks) + num_bytes * (ranks - 1) / ranks / bandwidth


NOTHING = Network(inside=float("inf"), across=float("inf"), latency=0.0)
_network = Network()


class _LateWork(dist.Work):
    """A collective that is over at a given moment."""

    def __init__(self, ready: float, outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self._ready, self._outputs = ready, outputs

    def wait(self, timeout: object = None) -> bool:
        time.sleep(max(0.0, self._ready - time.monotonic()))
        return True

    def is_completed(self) -> bool:
        return time.monotonic() >= self._ready

    def is_success(self) -> bool:
        return self.is_completed()

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class PretendGroup(LocalGroup):
    """The group of one rank among many that do not exist."""

    backend = BACKEND

    def __init__(self, name: str, group_rank: int, size: int) -> None:
        super().__init__(name, group_rank, size)
        self._free_at = 0.0  # when the wire is free
        self._cycles_per_second = 0.0

    def _take(self, whole: Sequence[torch.Tensor], outputs: list[torch.Tensor]) -> _LateWork:
        num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in whole)
        seconds = _network.seconds(num_bytes, self._size) if self._size > 1 else 0.0
        if whole and whole[0].is_cuda:
            torch.cuda._sleep(int(seconds * self._clock()))  # on the current stream
            return _LateWork(0.0, outputs)
        self._free_at = max(self._free_at, time.monotonic()) + seconds
        return _LateWork(self._free_at, outputs)

    def _clock(self) -> float:
        if not self._cycles_per_second:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            torch.cuda._sleep(_CYCLES)
            events[0].record()
            torch.cuda._sleep(_CYCLES)
            events[1].record()
            events[1].synchronize()
            self._cycles_per_second = _CYCLES / (1e-3 * events[0].elapsed_time(events[1]))
        return self._cycles_per_second

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: object = None
    ) -> _LateWork:
        if output.nbytes <= _SMALL or not output.is_floating_point():
            # Ranks compare settings, and with such numbers what they have: all have the same. This
            # copy is no kernel of the rank, so no mode sees it.
            with _disable_current_modes():
                output.view(self._size, -1).copy_(input.view(1, -1))
        return self._take([output], [output])

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: object = None
    ) -> _LateWork:
        return self._take([input], [output])

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int] | None = None,
        input_splits: list[int] | None = None,
        opts: object = None,
    ) -> _LateWork:
        return self._take([input], [output])

    def allreduce(self, tensors: list[torch.Tensor], opts: object = None) -> _LateWork:
        return self._take(tensors * 2, tensors)  # two passes

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: object = None
    ) -> _LateWork:
        for output in outputs[0]:
            output.copy_(inputs[0])  # meshes compare what they gather
        return self._take(outputs[0], outputs[0])

    def broadcast(self, tensors: list[torch.Tensor], opts: object = None) -> _LateWork:
        return self._take(tensors, tensors)

    def barrier(self, opts: object = None) -> _LateWork:
        return self._take([], [])

    # The names that torch 2.11 and 2.12 call.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


def _create(options: object, _backend_options: object) -> PretendGroup:
    return PretendGroup(options.group_id, options.group_rank, options.group_size)  # type: ignore[attr-defined]  # torch gives this type no stub


dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])


@contextmanager
def pretend_group(ranks: int, network: Network) -> Iterator[None]:
    """Be rank 0 of ``ranks`` that ``network`` joins."""
    global _network
    _network = network
    dist.init_process_group(BACKEND, store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
