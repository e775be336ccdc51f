"""The step of an ``OwnerOptimizer``: buckets of parameters arrive, are stepped, and leave."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshard._comm.communicator import Communicator
from meshard._comm.spans import profiled
from meshard._engine.param_group import owner_of as param_group_of
from meshard._torch.dtensor import is_placed_like, plain_of
from meshard._torch.private import DispatchMode, version_of
from meshard.optim.exchange import ExchangeInFlight, Layout, MeshRanks, Route
from meshard.optim.flat import MakeOptimizer


@dataclass(frozen=True, slots=True, eq=False)
class OwnedParam:
    """A parameter that one rank steps as a whole."""

    fqn: str
    param: torch.Tensor  # sharded
    ranks: MeshRanks
    layout: Layout
    owner: int  # a rank of the group of ``ranks``
    cost: float


class Bucket:
    """Parameters of one mesh and dtype that are exchanged together.

    ``inner`` is the optimizer that steps the parameters that this rank owns. It is made in the
    first step, when their values are there, or earlier, when a state is loaded or set. It is None
    before that, and if this rank owns none. For each parameter that this rank owns,
    ``placeholders`` has an ordinary parameter of the unsharded shape, by position in ``members``.
    Between steps these take no memory.

    With ``keep_values``, ``kept`` has the unsharded values of what this rank owns, and ``marks``
    shows whether this rank's shards are as the last step left them, both by position.
    """

    def __init__(self, number: int, members: Sequence[OwnedParam], make: MakeOptimizer) -> None:
        self.label = f"(owners, bucket {number})"
        self.ranks = members[0].ranks
        self.members = members
        self.placeholders = {
            position: placeholder_for(member.param, self.ranks.device)
            for position, member in enumerate(members)
            if member.owner == self.ranks.own
        }
        self.inner: Optimizer | None = None
        self.kept: dict[int, torch.Tensor] = {}
        self.marks: dict[int, tuple[int, int, int]] = {}
        self._make = make
        # What the optimizer has written to its param group in the last step, such as a count.
        self.written: dict[str, Any] = {}
        # The last route in each direction, with what it is valid for.
        self._routes: dict[bool, tuple[object, Route]] = {}

    def make_inner(self) -> None:
        """Make the optimizer, unless it is made or this rank owns nothing."""
        if self.inner is None and self.placeholders:
            inner = self._make([{"params": list(self.placeholders.values())}])
            check_holds(inner, self.placeholders.values())
            self.inner = inner

    def release(self) -> None:
        """Drop the kept values; the next step sends them. ``offload`` calls this."""
        self.kept, self.marks = {}, {}

    @property
    def comm(self) -> Communicator:
        """The communicator of the first member's root."""
        group = param_group_of(self.members[0].param)
        assert group is not None  # OwnerOptimizer has checked it
        return group.comm

    def route(self, positions: Sequence[int], *, times: int, to_owners: bool) -> Route:
        """Return the route of some members.

        With ``times=2``, tensor ``i`` of the route is a value, and ``len(positions) + i`` is its
        gradient.
        """
        key = list(positions), times
        known = self._routes.get(to_owners)
        if known is None or known[0] != key:
            chosen = [self.members[position] for position in positions] * times
            layouts, owners = [each.layout for each in chosen], [each.owner for each in chosen]
            route = Route.of(layouts, owners, self.ranks, to_owners=to_owners)
            self._routes[to_owners] = known = key, route
        return known[1]


class BucketStep:
    """The step of one bucket: ``arrive``, ``finish``, ``run``, ``leave`` and ``finish``.

    Tensors of the bucket are numbered: first the values of the parameters that have a gradient,
    then their gradients.
    """

    def __init__(self, bucket: Bucket, dtype: torch.dtype | None, *, keeps_values: bool) -> None:
        """``dtype`` is that in which gradients are sent; None: their own."""
        self.bucket = bucket
        self.sends_values = True  # False: the owners have kept them
        self._keeps_values = keeps_values
        self._positions = [
            position
            for position, member in enumerate(bucket.members)
            if member.param.grad is not None
        ]
        self._values = [plain_of(bucket.members[position].param) for position in self._positions]
        self._grads = [_gradient_of(bucket.members[position]) for position in self._positions]
        grad_dtypes = {grad.dtype for grad in self._grads}
        # The dtypes that values and gradients have on the owner. Gradients may be sent in another.
        self._dtypes = (
            bucket.members[0].param.dtype,
            functools.reduce(torch.promote_types, grad_dtypes) if grad_dtypes else torch.float32,
        )
        self._sent_dtype = dtype or self._dtypes[1]
        self._whole: dict[int, torch.Tensor] = {}  # of the parameters that this rank owns
        self._in_flight: list[ExchangeInFlight] = []

    def _whole_of(self, number: int) -> torch.Tensor:
        if number not in self._whole:
            is_gradient, index = divmod(number, len(self._positions))
            shape = self.bucket.members[self._positions[index]].layout.shape
            self._whole[number] = torch.empty(
                shape, dtype=self._dtypes[is_gradient], device=self.bucket.ranks.device
            )
        return self._whole[number]

    def was_edited(self) -> bool:
        """Return whether a shard may have changed since the last step, or was never stepped."""
        bucket = self.bucket
        return any(
            bucket.marks.get(position) != _mark_of(bucket.members[position].param)
            for position in self._positions
        )

    def mark(self) -> None:
        """Remember that the shards are as this step has left them."""
        if self._keeps_values:
            for position in self._positions:
                param = self.bucket.members[position].param
                self.bucket.marks[position] = _mark_of(param)
                group = param_group_of(param)
                assert group is not None  # OwnerOptimizer has checked it
                group.slice_holders.add(self.bucket)

    def arrive(self) -> None:
        """Send gradients of this rank's shards to the owners; values too, if ``sends_values``."""
        bucket, grads, whole_of = self.bucket, self._grads, self._whole_of
        values = self._values if self.sends_values else []
        dtype, grad_dtype = self._dtypes[0], self._sent_dtype
        for number, position in enumerate(self._positions):
            # A shard without a mark counts as edited. So a step that fails must leave no mark.
            bucket.marks.pop(position, None)
            kept = bucket.kept.pop(position, None)
            if kept is not None and not self.sends_values:
                self._whole[number] = kept
        if values and dtype == grad_dtype:
            self._start(values + grads, whole_of, dtype, is_arrival=True)
        else:
            self._start(values, whole_of, dtype, is_arrival=True)
            first = len(self._positions)
            self._start(grads, lambda n: whole_of(first + n), grad_dtype, is_arrival=True)

    def run(self, group: dict[str, Any], *, is_first: bool) -> None:
        """Step what this rank owns, with the hyperparameters of ``group``.

        In the first step, collectives are refused.
        """
        bucket, count = self.bucket, len(self._positions)
        if not bucket.placeholders:
            return
        stepped = {
            number: bucket.placeholders[position]
            for number, position in enumerate(self._positions)
            if position in bucket.placeholders
        }
        blanks = {number: placeholder.data for number, placeholder in stepped.items()}
        try:
            for number, placeholder in stepped.items():
                placeholder.grad_dtype = None  # None: a .grad of any dtype is accepted
                placeholder.data = self._whole_of(number)
            bucket.make_inner()
            inner = bucket.inner
            assert inner is not None
            own = inner.param_groups[0]
            given = {key: value for key, value in group.items() if key != "params"}
            own.update(given)
            for number, placeholder in stepped.items():
                placeholder.grad = self._whole_of(count + number)
            with profiled("optimizer", bucket.label, bucket.comm.clock):
                _step(inner, is_first=is_first)
            # A step may replace ``.data``.
            self._whole = {number: each.data for number, each in stepped.items()}
        finally:
            for number, placeholder in stepped.items():
                placeholder.data, placeholder.grad = blanks[number], None
        bucket.written = {
            key: value
            for key, value in own.items()
            if key != "params" and (key not in given or _differ(value, given[key]))
        }
        _check_counts(bucket.written, type(inner).__name__)

    def leave(self) -> None:
        """Send the new values to all ranks that hold shards of them."""
        whole, values = self._whole, self._values
        if self._keeps_values:
            self.bucket.kept.update({self._positions[number]: whole[number] for number in whole})
        self._start(values, whole.__getitem__, self._dtypes[0], is_arrival=False)
        self._whole = {}

    def abandon(self) -> None:
        """Give up after an error."""
        for exchange in self._in_flight:
            exchange.abandon()
        self._in_flight = []

    def _start(
        self,
        shards: list[torch.Tensor],
        whole_of: Callable[[int], torch.Tensor],
        dtype: torch.dtype,
        *,
        is_arrival: bool,
    ) -> None:
        if not shards:
            return
        bucket, times = self.bucket, len(shards) // len(self._positions)
        ends = (shards.__getitem__, whole_of)
        source, target = ends if is_arrival else reversed(ends)
        route = bucket.route(self._positions, times=times, to_owners=is_arrival)
        comm, label = bucket.comm, bucket.label
        if comm.is_checked:  # under MESHARD_DEBUG=1 ranks compare labels
            label = f"{label[:-1]}, parameters {self._positions})"
        self._in_flight.append(route.start(source, target, dtype, bucket.ranks, comm, label))

    def finish(self) -> None:
        """Wait until what was sent has arrived."""
        while self._in_flight:
            self._in_flight[0].finish()
            del self._in_flight[0]


def _mark_of(param: torch.Tensor) -> tuple[int, int, int]:
    """Return numbers that change if an edit of ``param`` raises its version counter."""
    shard = plain_of(param)
    # An operation on a DTensor raises the version of the DTensor, one on its ``to_local()`` that of
    # the shard.
    return shard.data_ptr(), version_of(shard), version_of(param)


def _gradient_of(member: OwnedParam) -> torch.Tensor:
    grad = member.param.grad
    assert grad is not None
    if isinstance(grad, DTensor) and not is_placed_like(grad, member.param):
        raise RuntimeError(
            f"the gradient of {member.fqn!r} has placements {grad.placements}, and the parameter "
            "has others; redistribute it before step()."
        )
    return plain_of(grad)


# --- the ordinary optimizer ------------------------------------------------------------------


def placeholder_for(param: torch.Tensor, device: torch.device) -> nn.Parameter:
    """Return a parameter of the unsharded shape that takes the memory of one element.

    Its value is NaN. If an optimizer copies it too early, the results show that.
    """
    filler = math.nan if param.is_floating_point() else 0
    one = torch.full((), filler, dtype=param.dtype, device=device)
    return nn.Parameter(one.expand(param.shape), requires_grad=param.requires_grad)


class _RefuseCollectives(DispatchMode):  # type: ignore[misc]  # an Any
    """Raises where an optimizer communicates: other ranks do not step the same parameters."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let dynamo compile functions in this mode. Without this, it would never do so again."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise RuntimeError(
                f"{self._name} communicates in its step ({func}), but each parameter is stepped on "
                "one rank only; build it on module.parameters(), or switch that off."
            )
        return func(*args, **(kwargs or {}))


def _step(inner: Optimizer, *, is_first: bool) -> None:
    """Step, without the hooks of torch, which the user's optimizer has called already."""
    step = getattr(type(inner).step, "__wrapped__", type(inner).step)
    if is_first:
        with _RefuseCollectives(type(inner).__name__):
            step(inner)
    else:
        step(inner)


def _check_counts(written: dict[str, Any], name: str) -> None:
    """Raise unless what an optimizer has written to its param group are counts of steps."""
    for key, value in written.items():
        if not isinstance(value, int):
            raise RuntimeError(
                f"{name} writes {key!r} into its param group, which is no count of steps. It may "
                "depend on all parameters together, but each rank steps some of them only; build "
                "it on module.parameters(). Some parameters have been stepped once."
            )


def _differ(value: object, other: object) -> bool:
    if value is other:
        return False
    return isinstance(value, torch.Tensor) or isinstance(other, torch.Tensor) or value != other


def check_holds(made: Optimizer, params: Iterable[torch.Tensor]) -> None:
    """Raise a ValueError unless ``made`` has these parameters in one group, in any order."""
    held = [id(param) for group in made.param_groups for param in group["params"]]
    if len(made.param_groups) != 1 or sorted(held) != sorted(map(id, params)):
        raise ValueError(
            f"the {type(made).__name__} does not hold the parameters that it was to be made for, "
            "in one group; make it from the param groups that are passed."
        )
