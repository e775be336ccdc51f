"""Reduction of one unit's gradients: reduce-scatter, then all-reduce.

A reduce-scatter inside the shard group, an accumulation, and an all-reduce across the replicas,
with divisors taken from the groups that are passed in, when they are passed in. With ``S`` shards,
``R`` replicas and divide factor ``c`` (default ``S * R``), what goes through the reduce-scatter is
divided by ``c / R`` and what goes through the all-reduce by ``R``, whatever the sizes: so a partial
means the same at every moment, the mean over the shard group, and ``.grad`` is the sum over all
microbatches and ranks over ``c``.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshard._comm.buffers import ReusableBuffer, ScalarOperands
from meshard._comm.communicator import CommStream, Communicator, InFlight, Rows
from meshard._comm.cpu import wider
from meshard._comm.unused_params import UnusedParamMarks

_ONE = Fraction(1)


class Divisors(NamedTuple):
    """What to divide by before and after each of the two collectives, exactly."""

    before_scatter: Fraction
    after_scatter: Fraction
    before_all_reduce: Fraction
    after_all_reduce: Fraction


@functools.lru_cache
def resolve_divisors(
    shard_count: int, replicate_count: int, divide_factor: float | None, wire_dtype: torch.dtype
) -> Divisors:
    """Return the divisors of one reduction.

    float16 overflows at 65504, so there each group's share is split around its own collective:
    a power of two near its square root before, the rest after. Other dtypes divide once, after
    the sum, which rounds once.

    Args:
        shard_count: Ranks in the shard group.
        replicate_count: Ranks in the replica group; 1 on a 1D mesh.
        divide_factor: The divisor of the whole reduction; None: the number of ranks.
        wire_dtype: The dtype in which gradients travel.

    >>> [float(divisor) for divisor in resolve_divisors(8, 4, None, torch.float32)]
    [1.0, 8.0, 1.0, 4.0]
    >>> float(resolve_divisors(255, 1, None, torch.float16).before_scatter)
    16.0
    """
    total = shard_count * replicate_count if divide_factor is None else divide_factor
    scatter, across = Fraction(total) / replicate_count, Fraction(replicate_count)
    if wire_dtype != torch.float16:
        return Divisors(_ONE, scatter, _ONE, across)
    scatter_first, across_first = _near_root(scatter), _near_root(across)
    return Divisors(scatter_first, scatter / scatter_first, across_first, across / across_first)


def _near_root(divisor: Fraction) -> Fraction:
    # Halves round up: overflow destroys a step, underflow loses what hardly mattered.
    return Fraction(2) ** max(0, math.floor(math.log2(divisor) / 2 + 0.5))


def divide_(tensor: torch.Tensor, divisor: Fraction, operands: ScalarOperands) -> None:
    """Divide in place; rounds once where the divisor or its reciprocal is a float."""
    numerator, denominator = divisor.as_integer_ratio()
    if numerator == denominator:
        return
    if numerator & (numerator - 1) == 0 and denominator < 2**24:
        # As for 1 / 7, whose reciprocal alone is exact.
        tensor.mul_(operands.as_operand(denominator / numerator, tensor))
    else:
        # Not by multiplication with the reciprocal, which would round twice. CUDA kernels do just
        # that with a Python number, but not with a tensor.
        quotient = numerator / denominator
        if tensor.is_cpu:
            tensor.div_(operands.as_operand(quotient, tensor))
        else:
            tensor.div_(tensor.new_full((), quotient))


def _parts(rows: Rows) -> list[torch.Tensor]:
    return rows if isinstance(rows, list) else [rows]


@dataclass(slots=True, kw_only=True)
class ReduceRequest:
    """What is to be reduced, over whom, and how.

    Attributes:
        buffer: ``[shard_count, shard_numel]``, or what ``allocate_rows`` lent in ``wire_dtype``;
            consumed.
        wire_dtype: The dtype in which it travels; narrowed to only after the first division.
        partial: ``[shard_numel]`` in ``accumulate_dtype``, reduced over the shard group earlier in
            the window, or None. Added after the reduce-scatter, before the all-reduce.
        shard_group: Ranks that each own a row of ``buffer``.
        replicate_group: Ranks that own the same row; None: do not all-reduce.
        replicate_count: Replicas of the mesh, also when this reduction stops before them.
        divide_factor: See ``resolve_divisors``.
        accumulate_dtype: dtype of the result.
        marks: Keeps the marks of non-use right on the way.
        label: Name of the unit.
        output: ``[shard_numel]`` in the wider of the two dtypes, where the result should be; may be
            a row of ``buffer``. None: anywhere.
        sums_apart: ``buffer`` is one row that was allocated to be sent by the all-reduce, whose sum
            goes to ``output``.
        kept: What ``buffer`` is in, if it is to be given back by its owner.
    """

    buffer: Rows
    wire_dtype: torch.dtype
    partial: torch.Tensor | None
    shard_group: dist.ProcessGroup
    replicate_group: dist.ProcessGroup | None
    replicate_count: int
    divide_factor: float | None
    accumulate_dtype: torch.dtype
    marks: UnusedParamMarks
    label: str
    output: torch.Tensor | None = None
    sums_apart: bool = False
    reusable: ReusableBuffer | None = None


class Reduced(NamedTuple):
    """The end of a reduction."""

    shard: torch.Tensor  # [shard_numel], in the accumulate dtype
    used: frozenset[int]  # the parameters for which some rank had a gradient


class Reduction:
    """A reduction on its way, one stage per ``advance``.

    **Collective:** the ranks of both groups, which must advance alike.
    **Stream:** stages queue on the scatter and all-reduce lanes; ``finish`` orders the caller's
    stream after the last.
    **Lifetime:** holds all tensors that are in use until ``finish``.
    """

    def __init__(self, request: ReduceRequest, comm: Communicator) -> None:
        self._request = request
        self._comm = comm
        self._stages_done = 0
        self._shard_count = request.shard_group.size()
        self._divisors = resolve_divisors(
            self._shard_count,
            request.replicate_count,
            request.divide_factor,
            request.wire_dtype,
        )
        # Marks are read from raw sums: in a narrower dtype a small one may become a negative zero.
        self._sum_dtype = wider(request.wire_dtype, request.accumulate_dtype)
        self._unused: torch.Tensor | None = None
        self._ends: list[InFlight] = []  # what follows the last work on each lane
        self._result: torch.Tensor
        self._pending = self._start_scatter()

    def _start_scatter(self) -> InFlight:
        request = self._request
        if self._shard_count == 1 and self._comm.waits_block_host:
            request.buffer = [_parts(request.buffer)[0].view(-1)]  # the sum will be there
        if self._divisors.before_scatter is not _ONE:  # another one divides by 1, to no effect
            for part in _parts(request.buffer):
                self._divide(part, self._divisors.before_scatter)
        if isinstance(request.buffer, torch.Tensor) and request.buffer.dtype != request.wire_dtype:
            narrow = self._allocate(request.buffer.numel(), request.wire_dtype)
            request.buffer = narrow.view_as(request.buffer).copy_(request.buffer)
        for part in _parts(request.buffer):
            request.marks.mark_sent(part)
        with self._comm.on_stream(CommStream.SCATTER):
            self._result = self._memory_for_sum(request)
            return self._comm.reduce_scatter(
                self._result,
                request.buffer,
                group=request.shard_group,
                label=request.label,
                keep_signs=not request.marks.all_used,
            )

    def _memory_for_sum(self, request: ReduceRequest) -> torch.Tensor:
        rows = request.buffer
        if isinstance(rows, list):
            own = rows[request.shard_group.rank()]
            if own.dtype == self._sum_dtype:
                return own
        if request.output is not None:
            return request.output
        return self._allocate(rows[0].numel(), self._sum_dtype)

    def _divide(self, tensor: torch.Tensor, divisor: Fraction) -> None:
        divide_(tensor, divisor, self._request.marks.operands)

    def _allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        group, device = self._request.shard_group, self._request.buffer[0].device
        return self._comm.allocate(
            numel, CommStream.SCATTER, dtype=dtype, device=device, group=group
        )

    @property
    def has_more(self) -> bool:
        """Whether there is a stage that has not been queued."""
        return self._stages_done < (1 if self._request.replicate_group is None else 2)

    def advance(self) -> None:
        """Queue the next stage. Blocks the host only where the communicator's waits do."""
        self._stages_done += 1
        if self._stages_done == 1:
            self._after_scatter()
        else:
            self._after_all_reduce()

    def free_input_if_sent(self) -> bool:
        """Give back what was sent, if all have it. Starts nothing, and does not block.

        Returns:
            Whether there is nothing more to give back.
        """
        if self._stages_done or self._request.buffer is self._result:
            return True
        if not self._pending.poll():
            return False
        self._drop_sent()
        return True

    def _drop_sent(self) -> None:
        self._request.buffer = self._result
        if self._request.reusable is not None:
            self._request.reusable.free()
            self._request.reusable = None

    def _after_scatter(self) -> None:
        request, marks = self._request, self._request.marks
        with self._comm.on_stream(CommStream.SCATTER):
            self._pending.wait()
            if request.reusable is not None:
                self._drop_sent()
            self._unused = marks.read(self._result)
            self._divide(self._result, self._divisors.after_scatter)
            if request.partial is not None:
                if self._unused is not None:
                    self._unused = self._unused & marks.is_marked(request.partial)
                self._result.add_(request.partial)
            if self._sum_dtype != request.accumulate_dtype:
                self._result = self._result.to(request.accumulate_dtype)
            if request.replicate_group is None and request.replicate_count > 1:
                marks.write(self._result, self._unused)  # it becomes a partial
            self._pending = self._comm.record(self._result)
            self._ends.append(self._pending)
        if request.replicate_group is not None:
            self._start_all_reduce(request.replicate_group)

    def _start_all_reduce(self, group: dist.ProcessGroup) -> None:
        request = self._request
        with self._comm.on_stream(CommStream.ALL_REDUCE):
            self._pending.wait()
            # In place where no lane but the host's has used it.
            self._wire = self._result if self._comm.waits_block_host else self._result.clone()
            self._divide(self._wire, self._divisors.before_all_reduce)
            self._wire = self._wire.to(request.wire_dtype)
            request.marks.write(self._wire, self._unused)
            wire, output = self._wire, request.output if request.sums_apart else None
            self._pending = self._comm.all_reduce(
                wire, group=group, label=request.label, output=output
            )
            if output is not None:
                self._wire = output

    def _after_all_reduce(self) -> None:
        request = self._request
        with self._comm.on_stream(CommStream.ALL_REDUCE):
            self._pending.wait()
            # Under a second name: the first was allocated on the scatter lane, and is read on this.
            self._unused_anywhere = request.marks.read(self._wire)
            self._reduced = self._wire.to(request.accumulate_dtype)
            self._divide(self._reduced, self._divisors.after_all_reduce)
            self._ends.append(self._comm.record(self._reduced))

    def finish(self) -> Reduced:
        """Return the result, usable on the caller's stream."""
        while self.has_more:
            self.advance()
        for end in self._ends:
            end.wait()
        over_replicas = self._request.replicate_group is not None
        shard = self._reduced if over_replicas else self._result
        # Only now may the inputs go: the caller's stream is ordered after every use of them.
        unused = self._unused_anywhere if over_replicas else self._unused
        used = self._request.marks.used_after(unused)
        del self._request
        return Reduced(shard, used)

    def abandon(self) -> None:
        """Wait for what was started, and queue nothing more."""
        self._pending.wait()
        if self._request.reusable is not None:
            self._drop_sent()
        for end in self._ends:
            end.wait()
