"""Reduction of one unit's gradients: reduce-scatter, accumulate, all-reduce.

With ``S`` ranks in the shard group, ``R`` replicas and divide factor ``c`` (default ``S * R``), the
reduce-scatter divides its sum by ``c / R``, and the all-reduce divides its sum by ``R``. This also
holds if a group has one rank:

    partial = partial + sum over the shard group of gradients / (c / R)
    result  = sum over the replicas of partial / R

So a partial always has the same meaning (by default the mean over the shard group). The result is
the sum over all microbatches and ranks, divided by ``c``. The old partial is added between the two
collectives. If it were added after the all-reduce, replicas would differ. In a group of one rank
no collective is issued.

Behind the gradients a row has counts: 1 for each parameter that the rank has used, else 0 (see
``_comm/gradient_buffer.py``). They are summed too, and never divided. Where the sum is 0, no rank
has used the parameter, and its result is None. Only a rank that has not used all reads them.

``foreach_reduce`` is the whole reduction as one blocking call. The engine runs the same stages one
by one: see ``Reduction``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshard._comm.communicator import CommStream, Communicator, Handle
from meshard._comm.gradient_buffer import GradientLayout
from meshard._communicators import make_communicator
from meshard._mesh.layout import ParamLayout

_ONE = Fraction(1)


@torch.no_grad()
def foreach_reduce(
    gradients: Sequence[torch.Tensor | None],
    shard_group: dist.ProcessGroup,
    replicate_group: dist.ProcessGroup | None = None,
    *,
    shapes: Sequence[Sequence[int]] | None = None,
    partial: Sequence[torch.Tensor | None] | None = None,
    divide_factor: float | None = None,
    reduce_dtype: torch.dtype = torch.float32,
    accumulate_dtype: torch.dtype = torch.float32,
    all_reduce: bool = True,
    device: torch.device | None = None,
) -> list[torch.Tensor | None]:
    """Reduce the unsharded gradients of one unit to this rank's shards, as training does.

    No module has to be sharded. Calls for several microbatches give the same result as one call
    with their sum, if all but the last have ``all_reduce=False``, and each but the first gets the
    previous result as ``partial``. The arguments are neither changed nor kept; the shards are views
    of a new tensor.

    **Collective:** all ranks of ``shard_group``; then, with ``all_reduce``, of ``replicate_group``;
    all with the same options, and gradients of the same shapes. On CPU tensors the call blocks;
    elsewhere the result may be used on the current stream.

    Args:
        gradients: One per parameter, ``[rows, ...]`` on one device. None: not used on this rank.
        shard_group: Rank ``r`` owns chunk ``r`` of ``torch.chunk`` along dim 0, or nothing.
        replicate_group: Ranks that own the same shard, one per replica. None: one replica.
        shapes: Shape of each parameter; required where a gradient is None.
        partial: Result of an earlier call with ``all_reduce=False`` and the same divide factor.
        divide_factor: ``c``, the divisor of the sum over all ranks. None: the number of ranks.
        reduce_dtype: dtype in which gradients are sent.
        accumulate_dtype: dtype of sums, partials and the result.
        all_reduce: False: stop before the all-reduce and return the partial.
        device: The device of the gradients, read only if all are None on this rank. None: torch's
            default device.

    Returns:
        This rank's shard ``[rows of its chunk, ...]`` of each parameter, in ``accumulate_dtype``.
        None where no rank has used the parameter, in this call or in the partial.

    Raises:
        TypeError: A dtype is not of floating point.
        ValueError: Lengths or shapes do not match, ``shapes`` is missing, a parameter has no dims,
            or the divide factor is not positive and finite.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> group = dist.group.WORLD
    >>> first = foreach_reduce([torch.tensor([2.0, 4.0])], group, all_reduce=False)
    >>> foreach_reduce([torch.tensor([1.0, 1.0])], group, partial=first)
    [tensor([3., 5.])]
    >>> dist.destroy_process_group()
    """
    sizes = _check_arguments(gradients, shapes, divide_factor, (reduce_dtype, accumulate_dtype))
    if not sizes:
        return []
    present = [tensor for tensor in (*gradients, *(partial or ())) if tensor is not None]
    device = present[0].device if present else device or torch.get_default_device()
    params = [ParamLayout(torch.Size(size), 0, shard_group.size()) for size in sizes]
    comm = make_communicator(device, share_memory=False)
    layout = GradientLayout(
        params, tuple(range(len(params))), device, at_once=not comm.waits_block_host
    )
    plan = ReducePlan(
        wire_dtype=reduce_dtype,
        accumulate_dtype=accumulate_dtype,
        shard_group=shard_group,
        replicate_group=replicate_group if all_reduce else None,
        replicate_count=1 if replicate_group is None else replicate_group.size(),
        divide_factor=divide_factor,
        label="(foreach_reduce)",
    )
    used = frozenset(index for index, each in enumerate(gradients) if each is not None)
    narrows = is_narrowed_late(gradients, reduce_dtype)
    buffer = layout.allocate(accumulate_dtype if narrows else reduce_dtype)
    layout.reduce_scatter_copy_in(buffer, list(gradients), used)
    laid_out = _laid_out(partial, layout, shard_group.rank(), accumulate_dtype)
    reduced = Reduction(plan, layout, buffer, laid_out, comm).finish()
    if not comm.waits_block_host:
        reduced = reduced.clone()  # into memory of the current stream: ``comm`` is gone soon
    shards: list[torch.Tensor | None] = [None] * len(params)
    used = layout.used_anywhere(reduced, used)
    for index, shard in layout.shards(reduced, shard_group.rank(), used):
        shards[index] = shard
    return shards


def _check_arguments(
    gradients: Sequence[torch.Tensor | None],
    shapes: Sequence[Sequence[int]] | None,
    divide_factor: float | None,
    dtypes: Sequence[torch.dtype],
) -> list[tuple[int, ...]]:
    """Return the shape of each parameter."""
    for dtype in (*dtypes, *(gradient.dtype for gradient in gradients if gradient is not None)):
        if not dtype.is_floating_point:
            raise TypeError(f"gradients are reduced in floating-point dtypes, got {dtype}.")
    if divide_factor is not None and not is_divide_factor(divide_factor):
        raise ValueError(f"divide_factor must be positive and finite, got {divide_factor}.")
    if shapes is not None and len(shapes) != len(gradients):
        raise ValueError(f"got {len(gradients)} gradients and {len(shapes)} shapes; pass as many.")
    checked = []
    for index, gradient in enumerate(gradients):
        if gradient is None and shapes is None:
            raise ValueError(f"gradient {index} is None: pass shapes, the same on all ranks.")
        shape = tuple(shapes[index] if shapes is not None else gradient.shape)  # type: ignore[union-attr]  # checked above
        if gradient is not None and tuple(gradient.shape) != shape:
            raise ValueError(
                f"gradient {index} has shape {tuple(gradient.shape)}, but shapes says {shape}."
            )
        if not shape:
            raise ValueError(f"gradient {index} has no dims, so it cannot be cut along dim 0.")
        checked.append(shape)
    return checked


def _laid_out(
    partial: Sequence[torch.Tensor | None] | None,
    layout: GradientLayout,
    shard_rank: int,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """Return the shards of ``partial`` as a row of ``layout``."""
    if partial is None:
        return None
    if len(partial) != len(layout.params):
        raise ValueError(
            f"partial has {len(partial)} entries for {len(layout.params)} gradients; pass what "
            "foreach_reduce(..., all_reduce=False) returned for the same parameters."
        )
    flat = torch.zeros(1, layout.row_numel, dtype=dtype, device=layout.device)
    used = frozenset(index for index, shard in enumerate(partial) if shard is not None)
    layout.write_counts(flat, used)
    for index, target in layout.shards(flat[0], shard_rank, used):
        shard = partial[index]
        assert shard is not None
        if shard.shape != target.shape:
            raise ValueError(
                f"partial {index} has shape {tuple(shard.shape)}; this rank's shard has "
                f"{tuple(target.shape)}."
            )
        target.copy_(shard)
    return flat[0]


class Divisors(NamedTuple):
    """What to divide by before and after each of the two collectives, as exact fractions."""

    before_scatter: Fraction
    after_scatter: Fraction
    before_all_reduce: Fraction
    after_all_reduce: Fraction


def is_divide_factor(number: float) -> bool:
    """Whether ``number`` can divide gradients: it must be in float32's positive normal range."""
    limits = torch.finfo(torch.float32)
    return limits.tiny <= number <= limits.max


@functools.lru_cache  # called for every unit in every step
def resolve_divisors(
    shard_count: int, replicate_count: int, divide_factor: float | None, wire_dtype: torch.dtype
) -> Divisors:
    """Return the divisors of a reduction for ``S`` shards, ``R`` replicas and divide factor ``c``.

    The reduce-scatter divides by ``c / R`` and the all-reduce by ``R``: exactly ``c`` in all. In
    float16, which overflows at 65504, each of these two numbers is split: a power of two near its
    square root divides before the collective, and the rest after it. In other dtypes the whole
    number divides after the sum, so that division rounds only once.

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
    """Return a power of two near the square root of ``divisor``; 1 if that is below 1."""
    # The caller divides by this power before the sum, and by the rest after the sum. If two powers
    # are equally near, as for 8 (2 * 4 or 4 * 2), the larger one is returned: that risks underflow,
    # which loses small values only, rather than overflow, which spoils the step.
    return Fraction(2) ** max(0, math.floor(math.log2(divisor) / 2 + 0.5))


def _wider(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Return the dtype that holds the values of both."""
    return one if one is other else torch.promote_types(one, other)


def divide_(tensor: torch.Tensor, divisor: Fraction) -> None:
    """Divide in place, rounding once if the divisor or its reciprocal is exact as a float."""
    numerator, denominator = divisor.as_integer_ratio()
    if numerator == denominator:
        return
    if numerator & (numerator - 1) == 0 and denominator < 2**24:
        # The reciprocal is exact: the divisor is a power of two, or a fraction such as 1 / 7.
        tensor.mul_(denominator / numerator)
    else:
        # Multiplying by a reciprocal that is not exact would round twice. On a device torch
        # multiplies by the reciprocal if the divisor is a Python number. So there the divisor is a
        # tensor. It has one dim, because torch would round a 0-d tensor to the dtype of ``tensor``,
        # which may be bfloat16.
        quotient = numerator / denominator
        if tensor.is_cpu:
            tensor.div_(quotient)
        else:
            dtype = _wider(tensor.dtype, torch.float32)
            tensor.div_(torch.full((1,), quotient, dtype=dtype, device=tensor.device))


class ReducePlan(NamedTuple):
    """The dtypes, groups and divisors of one reduction, decided before it starts."""

    wire_dtype: torch.dtype  # in which gradients are sent
    accumulate_dtype: torch.dtype  # of sums over microbatches, the partial and the result
    shard_group: dist.ProcessGroup  # ranks that each own a row of the buffer
    replicate_group: dist.ProcessGroup | None  # ranks that own the same row; None: no all-reduce
    replicate_count: int  # how many replicas there are, even if this reduction has no all-reduce
    divide_factor: float | None  # see ``resolve_divisors``
    label: str  # the name of the unit
    parts: GradientLayout | None = None  # set if the sum over replicas is a reduce-scatter: to what

    @property
    def divisors(self) -> Divisors:
        """What to divide by before and after each collective."""
        return resolve_divisors(
            self.shard_group.size(), self.replicate_count, self.divide_factor, self.wire_dtype
        )


def is_narrowed_late(gradients: Sequence[torch.Tensor | None], wire_dtype: torch.dtype) -> bool:
    """Whether to pack gradients in the accumulate dtype, as float16 may overflow undivided."""
    return wire_dtype == torch.float16 and any(
        gradient is not None and gradient.dtype != wire_dtype for gradient in gradients
    )


class Reduction:
    """A reduction in flight, which reads top to bottom in ``_run``.

    On CPU, where waits block the host, ``__init__`` starts the reduce-scatter. ``advance`` waits
    for the collective under way and starts the next. On a device ``__init__`` queues everything.
    ``rows`` are packed by ``layout``. The caller must not use them again. A user's own collective
    gets the gradients only; counts follow in an all-reduce of their own. Hooks run outside.

    **Collective:** the ranks of both groups, which must advance in the same order.
    **Stream:** the scatter and all-reduce streams; ``finish`` makes the caller's stream wait.
    **Lifetime:** the object keeps what was sent until the reduce-scatter is over (on a device until
    ``free_sent`` or ``finish``), and other tensors in use until ``finish``.
    """

    def __init__(
        self,
        plan: ReducePlan,
        layout: GradientLayout,
        rows: torch.Tensor,  # [shard_count, row_numel]
        partial: torch.Tensor | None,  # of earlier microbatches, [row_numel], accumulate dtype
        comm: Communicator,
    ) -> None:
        self._plan = plan
        self._comm = comm
        self.sent: torch.Tensor | None = None  # until its memory is freed
        self._ends: list[Handle] = []  # of the work on each stream
        self._kept: object = None  # tensors that streams still use
        self._result: torch.Tensor
        self._stages = self._run(layout, rows, partial)
        self._in_flight = next(self._stages, None)

    def _run(
        self, layout: GradientLayout, rows: torch.Tensor, partial: torch.Tensor | None
    ) -> Iterator[Handle]:
        """Yield, on CPU, each collective that the host must wait for before the next stage."""
        plan, comm, numel = self._plan, self._comm, layout.shard_numel
        wire, group = plan.wire_dtype, plan.shard_group
        divisors = plan.divisors

        # What is sent is divided first only in float16, which would overflow. It comes in a wider
        # dtype if it is a sum of microbatches, or is narrowed late.
        _divide(rows, numel, divisors.before_scatter)
        if rows.dtype != wire and group.size() > 1:
            narrow = comm.send_memory(rows.size(1), wire, device=rows.device, group=group)
            rows = narrow.copy_(rows)
        self.sent = rows
        with comm.on_stream(CommStream.SCATTER):
            # The accumulate dtype, or the wire dtype if that is wider. CPU ranks add up in it; NCCL
            # adds up in the wire dtype, and the sum is widened.
            sum_dtype = _wider(wire, plan.accumulate_dtype)
            scatter = comm.reduce_scatter(
                rows, sum_dtype, group=group, label=plan.label, num_counts=layout.num_counts
            )
            del rows  # ``sent`` alone keeps them
            if comm.waits_block_host:
                yield scatter
                self.sent = None  # free it before the all-reduce takes memory
            scatter.wait()
            total = scatter.result
            _divide(total, numel, divisors.after_scatter)
            if partial is not None:
                total.add_(partial)  # the counts too
            total = total.to(plan.accumulate_dtype)
            scattered = comm.record(total, after=scatter)
            self._ends.append(scattered)
            if not comm.waits_block_host:
                # ``total`` is allocated on this stream and read on the next, ``partial`` may come
                # from compute (rules 3 and 4 of _comm/streams.py).
                self._kept = total, partial
            del partial
        if plan.replicate_group is None:
            self._result = total  # the result, if there are no replicas, or the new partial
            return

        with comm.on_stream(CommStream.ALL_REDUCE):
            scattered.wait()
            _divide(total, numel, divisors.before_all_reduce)
            if plan.parts is None:
                across = comm.all_reduce(
                    total.to(wire),
                    group=plan.replicate_group,
                    label=plan.label,
                    num_counts=layout.num_counts,
                )
            else:
                across, numel = (
                    self._reduce_parts(total, layout, plan.parts),
                    plan.parts.shard_numel,
                )
            if comm.waits_block_host:
                yield across
            across.wait()
            total = across.result.to(plan.accumulate_dtype)
            _divide(total, numel, divisors.after_all_reduce)
            self._ends.append(comm.record(total, after=across))
        self._result = total

    def _reduce_parts(
        self, total: torch.Tensor, layout: GradientLayout, parts: GradientLayout
    ) -> Handle:
        """Start the reduce-scatter over the replicas, in the place of their all-reduce."""
        plan, comm, group = self._plan, self._comm.without_custom, self._plan.replicate_group
        assert group is not None
        wire, device = plan.wire_dtype, total.device
        rows = comm.send_memory(parts.row_numel, wire, device=device, group=group)
        layout.cut_again(total, parts, rows)
        return comm.reduce_scatter(  # adds up in the wire dtype, as an all-reduce does
            rows, wire, group=group, label=plan.label, num_counts=parts.num_counts
        )

    @property
    def has_more(self) -> bool:
        """Whether ``advance`` has a collective to wait for."""
        return self._in_flight is not None

    def advance(self) -> None:
        """On CPU, wait for the collective under way, and start the next, if any."""
        assert self._in_flight is not None
        self._in_flight.wait()
        self._in_flight = next(self._stages, None)

    def free_sent(self) -> None:
        """On a device, free what was sent: the current stream waits for the reduce-scatter."""
        self._ends[0].wait()
        self.sent = None

    def finish(self) -> torch.Tensor:
        """Return the result ``[row_numel]``, in the accumulate dtype, for the current stream."""
        while self.has_more:
            self.advance()
        for end in self._ends:
            end.wait()
        # On a device inputs are freed only now, when the current stream waits for all uses of them.
        self.sent = self._kept = None
        return self._result

    def abort(self) -> None:
        """Give up the collectives that were started, and start no other one."""
        for each in (self._in_flight, *self._ends):
            if each is not None:
                each.release()


def _divide(buffer: torch.Tensor, numel: int, divisor: Fraction) -> None:
    """Divide the first ``numel`` columns: the gradients, and not the counts."""
    if divisor != 1:
        divide_(buffer.narrow(-1, 0, numel), divisor)
