"""The gradients of ``replicate``: buckets that are all-reduced while the backward goes on.

A hook takes each gradient from autograd and adds it to a bucket. So ``.grad`` of a parameter does
not change until its bucket is reduced. If the model has no other sharded or replicated module (and
no reentrant checkpoint), a bucket is sent as soon as all its gradients have come and the buckets
before it are sent. All other buckets are sent when the backward of the module is over. So ranks
issue the same collectives in the same order, even if they use different parameters.

A bucket is one tensor: the gradients of its parameters, then for each parameter a *count*: 1 if
this rank has used the parameter, else 0. If no rank has, its ``.grad`` does not change. Else the
result is added to ``.grad``, or ``.grad``, if None, becomes a view or a copy of the bucket.

Under NONE and REDUCE_SCATTER nothing is sent: the buckets keep the sum over microbatches.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshard._comm.blocking import broadcast
from meshard._comm.communicator import CommStream, Handle, ranged
from meshard._comm.divergence import check_fingerprint, explain_failure
from meshard._comm.gradient_buffer import run_hooks
from meshard._gradients.accumulator import (
    GradientRules,
    Gradients,
    ReduceSettings,
    TensorHook,
    on_arrived,
    unrecorded,
)
from meshard._gradients.comm_hook import CommHook, GradBucket
from meshard._params.replicated_params import ReplicatedParam, ReplicatedParams
from meshard.foreach_reduce import divide_, resolve_divisors

_FIRST_CAP = 2**20  # most bytes of the first bucket; small, so that communication starts early


def partition(params: Sequence[nn.Parameter], cap: int) -> list[list[int]]:
    """Cut ``params`` into buckets of one dtype each. Return each bucket as a list of positions.

    A bucket has at most ``cap`` bytes, and the first bucket at most ``_FIRST_CAP``. A parameter
    with more bytes gets a bucket of its own.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[torch.dtype, tuple[list[int], int]] = {}
    for position, param in enumerate(params):
        bucket, size = open_buckets.get(param.dtype, ([], 0))
        limit = min(cap, _FIRST_CAP) if not buckets or bucket is buckets[0] else cap
        if not bucket or size + param.nbytes > limit:
            bucket, size = [], 0
            buckets.append(bucket)
        bucket.append(position)
        open_buckets[param.dtype] = bucket, size + param.nbytes
    return buckets


class Memory(NamedTuple):
    """The memory of a bucket."""

    flat: torch.Tensor  # [numel + number of parameters]: what is sent
    gradients: torch.Tensor  # [numel], the first part of ``flat``
    counts: torch.Tensor  # [number of parameters], the rest of ``flat``
    views: dict[int, torch.Tensor]  # per parameter: its part of ``gradients``, in its shape


class Bucket:
    """Gradients that are all-reduced in one tensor."""

    def __init__(
        self,
        number: int,
        params: dict[int, ReplicatedParam],
        rules: GradientRules,
    ) -> None:
        self.number = number  # position among the buckets, in the order in which they are sent
        self.params = params  # by index in the module
        computed = {param.unsharded.dtype for param in params.values()}
        # ``wire``: the dtype in which the bucket is sent, unless a hook sets another. ``wide``: the
        # dtype in which microbatches are added up.
        self.wire = rules.reduce_dtype or functools.reduce(torch.promote_types, computed)
        held = {param.sharded.dtype for param in params.values()}
        widest = functools.reduce(torch.promote_types, held, torch.float32)
        self.wide = rules.chosen_dtype or widest
        self.numels = [param.sharded.numel() for param in params.values()]
        # Memory for the next gradients. ``begin`` drops it if some .grad is still a view of it.
        self.kept: Memory | None = None
        self.forget()

    def forget(self) -> None:
        """Drop all gradients."""
        self.memory: Memory | None = None
        self.used: set[int] = set()  # the parameters with a gradient in ``memory``
        self.earlier: tuple[Memory, set[int]] | None = None  # sums of earlier microbatches
        self.awaited = set(self.params)  # parameters whose gradient has not come in this backward
        self.sent: Handle | None = None  # the all-reduce; the next four are about its result
        self.counts = torch.empty(0)  # per parameter: how many ranks have used it
        self.gone = frozenset[int]()  # parameters whose gradients were cleared since the sending
        self.divisor = Fraction(1)
        self.after: list[TensorHook] = []  # hooks to run on the result

    def wire_dtype(self, settings: ReduceSettings) -> torch.dtype:
        return settings.wire_dtype or self.wire

    def allocate(self, dtype: torch.dtype) -> Memory:
        """Set ``memory`` for new gradients: the memory kept for them if ``dtype`` fits, or new."""
        self.memory = self.kept
        if self.memory is None or self.memory.flat.dtype is not dtype:
            device = next(iter(self.params.values())).sharded.device
            size = sum(self.numels) + len(self.params)
            self.memory = self._over(torch.empty(size, dtype=dtype, device=device))
        self.used = set()
        return self.memory

    def _over(self, flat: torch.Tensor) -> Memory:
        *parts, counts = flat.split([*self.numels, len(self.params)])
        pairs = zip(self.params.items(), parts, strict=True)
        views = {index: param.shaped(part) for (index, param), part in pairs}
        return Memory(flat, flat[: flat.numel() - len(self.params)], counts, views)

    def add(self, index: int, gradient: torch.Tensor) -> None:
        assert self.memory is not None
        view = self.memory.views[index]
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if index in self.used:
            view.add_(gradient)
        else:
            view.copy_(gradient)
            self.used.add(index)
        self.awaited.discard(index)

    def complete(self, dtype: torch.dtype, hooks: Sequence[TensorHook]) -> None:
        """Run hooks on this microbatch's gradients (0 if unused). Then add earlier microbatches."""
        memory = self.memory or self.allocate(dtype)
        self.run_hooks(hooks)
        if self.earlier is not None:
            (earlier, used), self.earlier = self.earlier, None
            for index in used:
                memory.views[index].add_(earlier.views[index])
            self.used |= used

    def run_hooks(self, hooks: Sequence[TensorHook]) -> None:
        """Run hooks on the gradients. Set those of unused parameters to zero before and after."""
        assert self.memory is not None
        self._zero_unused()
        if hooks:
            run_hooks(hooks, self.memory.gradients.view(1, -1))
            self._zero_unused()

    def _zero_unused(self) -> None:
        assert self.memory is not None
        for index in self.params.keys() - self.used:
            self.memory.views[index].zero_()

    def narrow(self, wire: torch.dtype) -> Memory:
        """Return memory with the gradients in dtype ``wire`` and the counts (1 if used, or 0)."""
        memory, used = self.memory, self.used
        assert memory is not None
        if memory.flat.dtype is not wire:
            narrow = self.allocate(wire)
            narrow.gradients.copy_(memory.gradients)
            memory, self.used = narrow, used
        if len(used) == len(self.params):
            memory.counts.fill_(1)
        else:
            counts = [float(index in used) for index in self.params]
            memory.counts.copy_(torch.tensor(counts))
        return memory

    def for_hook(self, *, is_last: bool) -> GradBucket:
        """Return the object that the user's communication hook gets for this bucket."""
        assert self.memory is not None
        params = [param.sharded for param in self.params.values()]
        return GradBucket(self.memory.gradients, self.numels, params, self.number, is_last)

    def used_anywhere(self) -> set[int]:
        """Return the parameters that any rank has used. To read counts, wait for the device."""
        if len(self.used) == len(self.params):
            return self.used
        counts = self.counts.tolist()
        return {index for index, count in zip(self.params, counts, strict=True) if count}

    def drop(self, gone: frozenset[int]) -> None:
        """Drop the gradients of some parameters."""
        self.used -= gone
        if self.earlier is not None:
            self.earlier = self.earlier[0], self.earlier[1] - gone

    def publish(self, *, as_views: bool) -> None:
        """Divide the all-reduced sums, and add them to ``.grad``. Set ``.grad`` where it is None.

        With ``as_views`` a new ``.grad`` may be a view of the bucket. Otherwise it is a copy.
        """
        memory, used = self.memory, self.used_anywhere() - self.gone
        assert memory is not None
        params = [(index, param.sharded) for index, param in self.params.items() if index in used]
        dtype = memory.flat.dtype
        if self.after or any(param.dtype is not dtype for _, param in params):
            memory = self._over(memory.flat.to(self.wide))
        divide_(memory.gradients, self.divisor)
        run_hooks(self.after, memory.gradients)
        sums, added = list[torch.Tensor](), list[torch.Tensor]()
        for index, param in params:
            view, old = memory.views[index], param.grad
            if old is None:
                view = view.to(param.dtype)
                param.grad = view if as_views else view.clone()
                self.kept = self.memory
                continue
            if old.is_sparse:
                old = param.grad = old.to_dense()
            sums.append(old)
            added.append(view)
        if sums:
            torch._foreach_add_(sums, added)
        self.forget()


def _place_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@functools.lru_cache
def _divisors(
    count: int, divide_factor: float | None, wire: torch.dtype, *, is_averaged: bool
) -> tuple[Fraction, Fraction]:
    """Return what to divide by before and after the all-reduce.

    ``is_averaged``: a communication hook takes the mean, so nothing is divided after the hook.
    """
    divisors = resolve_divisors(1, count, divide_factor, wire)
    before = divisors.before_scatter * divisors.after_scatter
    if is_averaged:
        return before, Fraction(1)
    return before * divisors.before_all_reduce, divisors.after_all_reduce


class BucketedGradients(Gradients):
    """The gradients of a replicated module."""

    is_replicated = True

    def __init__(self, unit_params: ReplicatedParams, rules: GradientRules) -> None:
        super().__init__(unit_params, rules)
        self._params, self._cap = unit_params.params, unit_params.bucket_cap
        self._are_views = unit_params.are_views
        self.comm_hook: CommHook | None = None  # the user's; averages gradients, not the counts
        # Indices of parameters. ``order``: in the order in which autograd is expected to bring
        # their gradients. ``_arrivals``: in the order they came; None once ``order`` is final.
        self.order = list(reversed(range(len(self._params))))
        self._arrivals: dict[int, None] | None = {}
        self._has_reduced = False  # whether a reduction was started before; equal on all ranks
        self._holds = False  # whether buckets hold microbatches not yet sent; equal on all ranks
        self._in_buckets: set[int] = set()
        self.buckets: list[Bucket] = []
        self.fill()

    def rebuild(self) -> None:
        self.fill()

    # --- buckets ----------------------------------------------------------------------

    def parts(self) -> list[list[int]]:
        """Return the parameters of each bucket, frozen ones too, in the order of sending."""
        params = [self._params[index].sharded for index in self.order]
        return [[self.order[place] for place in part] for part in partition(params, self._cap)]

    def fill(self) -> None:
        """Build buckets for the parameters that train. Move gradients there from old buckets."""
        self._finish_sent()
        old, self._in_buckets = self.buckets, self._wanted()
        self.buckets, parts = [], self.parts()
        self._num_parts = len(parts)
        for number, part in enumerate(parts):
            params = {i: self._params[i] for i in part if i in self._in_buckets}
            if params:
                self.buckets.append(Bucket(number, params, self.rules))
        self._bucket_of = {index: bucket for bucket in self.buckets for index in bucket.params}
        for bucket in old:
            for index in bucket.used:
                new = self._bucket_of[index]
                assert bucket.memory is not None
                if new.memory is None:
                    new.allocate(new.wide)
                new.add(index, bucket.memory.views[index])

    def rebuild_as_arrived(self) -> None:
        """Rebuild the buckets, once, in the order in which gradients came on the first rank.

        Parameters without gradients come last. Before the first reduction, or while buckets hold
        gradients, this does nothing. **Collective:** all ranks of the mesh, if it does something.
        """
        # A communication hook may keep state per bucket, as PowerSGD's does. DDP rebuilds its
        # buckets before the second backward and never again. So a hook that has averaged in two
        # backwards expects that buckets do not change any more.
        is_late = self.comm_hook is not None and self.comm_hook.num_windows >= 2
        is_in_use = self.window.is_open or self.is_in_flight
        if self._arrivals is None or not self._has_reduced or is_late or is_in_use:
            return
        arrivals, self._arrivals = self._arrivals, None
        late = [index for index in self.order if index not in arrivals]
        spec = self.unit_params.spec
        order = torch.tensor([*arrivals, *late], device=spec.device)
        assert spec.mesh_info.replicate_group is not None
        broadcast(order, spec.mesh_info.replicate_group, label="(order of gradients)")
        self.order = [int(index) for index in order.tolist()]
        self.fill()

    def _wanted(self) -> set[int]:
        """Return the parameters that buckets need memory for: they train, or have a gradient."""
        # If only ``sharded`` was frozen after the forward, the parameter may still get a gradient.
        trained = {
            index
            for index, param in enumerate(self._params)
            if param.sharded.requires_grad or param.unsharded.requires_grad
        }
        return trained | self._in_buckets if self._holds or self.arrived else trained

    # --- a backward -------------------------------------------------------------------

    def begin(self, settings: ReduceSettings) -> None:
        """Prepare the buckets for the gradients of a backward. No all-reduce may be in flight."""
        if self._wanted() != self._in_buckets:
            self.fill()
        self._open_window()
        separates, shown = bool(on_arrived(settings)) and not self.arrived, self._memory_of_grads()
        for bucket in self.buckets:
            bucket.awaited = set(bucket.params)
            if bucket.kept is not None and _place_of(bucket.kept.flat) in shown:
                bucket.kept = None
            if separates and bucket.memory is not None and bucket.earlier is None:
                bucket.earlier = bucket.memory, bucket.used
                bucket.memory = bucket.kept = None

    def _memory_of_grads(self) -> set[int]:
        grads = [param.sharded.grad for param in self._params]
        return {_place_of(grad) for grad in grads if grad is not None and not grad.is_sparse}

    def receive(self, index: int, gradient: torch.Tensor, settings: ReduceSettings) -> bool:
        """Add a gradient of this backward to its bucket. Return whether the bucket is complete."""
        if self._arrivals is not None:
            self._arrivals.setdefault(index)
        with unrecorded():
            self.arrived.add(index)
            bucket = self._bucket_of[index]
            if bucket.sent is not None:
                raise RuntimeError(
                    f"parameter {self._params[index].fqn!r} of a replicated module got a second "
                    "gradient in one backward, after its bucket was sent: it is used in a "
                    "reentrant checkpoint and outside of it. Use checkpoint(..., "
                    "use_reentrant=False)."
                )
            if bucket.memory is None:
                bucket.allocate(self._dtype_of(bucket, settings))
            bucket.add(index, gradient)
            return not bucket.awaited

    def _dtype_of(self, bucket: Bucket, settings: ReduceSettings) -> torch.dtype:
        """Return the dtype for new memory of a bucket.

        It is the wire dtype if this backward sends the bucket, unless that is float16 or sums of
        earlier microbatches are to be added. Else it is the dtype in which microbatches are summed.
        """
        is_sent = settings.sync.over_replicas and bucket.earlier is None
        wire = bucket.wire_dtype(settings)
        # In float16, gradients may overflow before they are divided.
        return wire if is_sent and wire is not torch.float16 else bucket.wide

    def accumulate(self, settings: ReduceSettings) -> None:
        """Keep the gradients of this backward in the buckets until a reduction sends them."""
        with unrecorded():
            if not self.arrived:
                self.begin(settings)
            self.arrived.clear()
            if hooks := on_arrived(settings):
                for bucket in self.buckets:
                    bucket.complete(bucket.wide, hooks)
            self._holds = bool(self.buckets)

    def send_complete(self, settings: ReduceSettings, divide_factor: float | None) -> None:
        """Send buckets in order, up to the first that still waits for a gradient."""
        for bucket in self.buckets:
            if bucket.awaited:
                return
            if bucket.sent is None:
                self._send(bucket, settings, divide_factor)

    def start_reduce(
        self,
        settings: ReduceSettings,
        *,
        over_replicas: bool,
        ends_window: bool,
        divide_factor: float | None,
    ) -> bool:
        """Send the buckets that are not sent yet. **Collective:** all ranks of the mesh."""
        if not self.arrived:
            self.begin(settings)
        for bucket in self.buckets:
            if bucket.sent is None:
                self._send(bucket, settings, divide_factor)
        self.arrived.clear()
        self._holds = False
        self._has_reduced = bool(self.buckets)
        return self._has_reduced

    def _send(self, bucket: Bucket, settings: ReduceSettings, divide_factor: float | None) -> None:
        unit_params, hooks = self.unit_params, settings.reduce_hooks
        comm, group = unit_params.comm, unit_params.spec.mesh_info.replicate_group
        assert group is not None
        label = unit_params.label + self.name_of(bucket.number)
        self.window.divide(divide_factor, unit_params.label)
        wire, is_averaged = bucket.wire_dtype(settings), self.comm_hook is not None
        before, after = _divisors(group.size(), divide_factor, wire, is_averaged=is_averaged)
        if comm.is_checked:
            factor = float(divide_factor or group.size())
            check_fingerprint(f"the reduction of unit {label!r}, divided by {factor}", group)
        bucket.complete(self._dtype_of(bucket, settings), on_arrived(settings))
        if hooks:
            bucket.run_hooks([hook.before for hook in hooks if hook.before])
        if settings.zero_unused:
            bucket.used = set(bucket.params)
        with comm.on_stream(CommStream.ALL_REDUCE):
            assert bucket.memory is not None
            wide = bucket.memory.flat
            divide_(bucket.memory.gradients, before)
            memory = bucket.narrow(wire)
            bucket.counts, num_counts = memory.counts, memory.counts.numel()
            if self.comm_hook is None:
                pending = comm.all_reduce(
                    memory.flat, group=group, label=label, num_counts=num_counts
                )
            else:
                # All-reduce a copy of the counts. The counts follow the hook's buffer in memory,
                # and a hook may write beyond the end of its buffer, as batched PowerSGD does.
                bucket.counts = memory.counts.clone()
                pending = comm.without_custom.all_reduce(bucket.counts, group=group, label=label)
            bucket.sent, self.is_in_flight = pending, True
            if self.comm_hook is not None:
                with ranged("comm_hook", label):
                    is_last = bucket is self.buckets[-1]
                    self.comm_hook.average(bucket.for_hook(is_last=is_last))
            if not comm.waits_block_host:
                pending.wait()
                bucket.sent = comm.record(memory.flat, wide, after=pending)
        bucket.divisor, bucket.after = after, [h.after for h in reversed(hooks) if h.after]

    def finish_reduce(self) -> None:
        is_all_gone = all(bucket.gone.issuperset(bucket.params) for bucket in self.buckets)
        self._finish_sent()
        if is_all_gone:
            self.window.forget_factor()
            self._end_window_if_cleared()
        self._release_if_settled()

    def _finish_sent(self) -> None:
        for bucket in self.buckets:
            if bucket.sent is not None:
                try:
                    bucket.sent.wait()
                except RuntimeError as error:
                    explain_failure(error, f"reduction of unit {self.unit_params.label!r}")
                    raise
                bucket.publish(as_views=self._are_views)
        self.is_in_flight = False

    def name_of(self, number: int) -> str:
        """Return the suffix by which the label of a bucket differs from the label of its unit."""
        return f" bucket {number}" if self._num_parts > 1 else ""

    # --- gradients that are not in .grad yet ------------------------------------------

    @property
    def is_pending(self) -> bool:
        return self._holds

    is_unreduced = is_pending

    def pending_of_params(self) -> dict[int, DTensor | None]:
        shown = self._holds or self.arrived
        return {index: None for bucket in self.buckets for index in bucket.used if shown}

    def _drop(self, gone: frozenset[int]) -> None:
        is_all_gone = self._cleared_since_add.issuperset(self._in_buckets)
        self._holds &= not is_all_gone
        for bucket in self.buckets:
            if bucket.sent is not None:
                bucket.gone |= gone
            elif is_all_gone:
                bucket.forget()
            else:
                bucket.drop(gone)

    def _drop_arrived(self) -> None:
        for bucket in self.buckets:
            if bucket.sent is not None:
                bucket.sent.release()
            if bucket.sent is not None or not self._holds:
                bucket.forget()
