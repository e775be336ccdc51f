"""The step of an ``OwnerOptimizer``: batches arrive at the owners, are stepped, and leave."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshard._comm.blocking import gather_objects
from meshard._comm.communicator import Communicator
from meshard._comm.spans import profiled
from meshard._engine.param_group import owner_of as param_group_of
from meshard._torch.dtensor import is_placed_like, plain_of
from meshard._torch.private import DispatchMode, foreach_copy_
from meshard._torch.user_line import listed
from meshard.optim.exchange import InFlight, Layout, start_from_owners, start_to_owners

# Makes an optimizer from param groups.
MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizer]
# The state of an OwnerOptimizer, by sharded parameter: empty if another rank owns it.
States = dict[torch.Tensor, dict[str, Any]]


_MISSING = object()


class Member(NamedTuple):
    """A parameter that one rank steps as a whole."""

    fqn: str
    param: torch.Tensor  # sharded


class Batch:
    """Parameters of one shape, layout and dtype. Each owner has the same number, or one less.

    ``inner`` is the optimizer of those that this rank owns. It is made in the first step, when
    their values are there, and holds ``placeholders``: ordinary parameters of the unsharded shape,
    which between steps take no memory.
    """

    def __init__(
        self, label: str, layout: Layout, members: list[list[Member]], make: MakeOptimizer
    ) -> None:
        self.label = label
        self.layout = layout
        self.members = members  # by owner
        self.own = members[layout.own]
        self.placeholders = [placeholder_for(each.param, layout.device) for each in self.own]
        self.inner: Optimizer | None = None
        self._make = make

    def __iter__(self) -> Iterator[Member]:
        """Iterate over all members, owner by owner."""
        return (member for part in self.members for member in part)

    @property
    def comm(self) -> Communicator:
        """The communicator of the first member's root."""
        group = param_group_of(next(iter(self)).param)
        assert group is not None  # ``check`` has found it
        return group.comm

    def take_states(self, states: States) -> Optimizer:
        """Return the optimizer with the state that users see, in which they may have edited."""
        is_new = self.inner is None
        if self.inner is None:
            self.inner = self._make([{"params": self.placeholders}])
        for member, placeholder in zip(self.own, self.placeholders, strict=True):
            if states.get(member.param):
                self.inner.state[placeholder] = states[member.param]
            elif not is_new:
                self.inner.state.pop(placeholder, None)
        return self.inner

    def show_states(self, states: States) -> None:
        """Show users the state of what this rank owns."""
        inner = {} if self.inner is None else self.inner.state
        for member, placeholder in zip(self.own, self.placeholders, strict=True):
            states[member.param] = inner.get(placeholder, {})

    def description(self) -> list[list[tuple[str, torch.dtype]]]:
        """Return what all ranks must agree on: who owns which parameters."""
        return [[(each.fqn, each.param.dtype) for each in part] for part in self.members]

    def check(self) -> None:
        """Raise a RuntimeError if parameters have changed since the optimizer was made."""
        changed = [each.fqn for each in self if param_group_of(each.param) is None]
        if changed:
            raise RuntimeError(
                f"parameters {listed(changed)} were replaced since owner_optimizer was called; "
                "make it anew, and load its state_dict."
            )
        dtypes = {str(each.param.dtype) for each in self}
        if len(dtypes) > 1:
            raise RuntimeError(
                f"{next(iter(self)).fqn!r} and others were of one dtype when owner_optimizer was "
                f"called, and now are of {listed(sorted(dtypes))}; make it anew, and load its "
                "state_dict."
            )


def step_batches(
    batches: Sequence[Batch],
    states: States,
    options: dict[str, Any],
    *,
    sent_dtype: torch.dtype | None,
    first_of: str | None,
) -> dict[str, int]:
    """Step every parameter that has a gradient; return the counts that optimizers have written.

    Args:
        batches: In the same order on all ranks.
        states: What users see; the optimizers' states are read from it and written to it.
        options: The hyperparameters.
        sent_dtype: The dtype in which gradients are sent; None: their own.
        first_of: In the first step, the name of the optimizer. Then it may not communicate, and
            what it raises is raised on all ranks.
    """
    steps = [BatchStep(batch, sent_dtype) for batch in batches]
    try:
        steps[0].arrive()
        # While one batch is stepped, the next one arrives and the one before leaves.
        for before, present, after in zip(
            [None, *steps[:-1]], steps, [*steps[1:], None], strict=True
        ):
            present.receive()
            if after is not None:
                after.arrive()
            if first_of is None:
                present.run(states, options)
            else:
                present.run_together(states, options, first_of)
            if before is not None:
                before.write_shards()
            present.leave()
        steps[-1].write_shards()
    except BaseException:
        for each in steps:
            each.abandon()
        raise
    return {key: value for each in steps for key, value in each.written.items()}


class BatchStep:
    """The step of one batch. Its methods are called from top to bottom, ``abandon`` on errors."""

    def __init__(self, batch: Batch, sent_dtype: torch.dtype | None) -> None:
        self.batch = batch
        # Those that have a gradient, by owner: the same on all ranks.
        self.present = [
            [each for each in part if each.param.grad is not None] for part in batch.members
        ]
        self.params = [each.param for part in self.present for each in part]
        self.values: list[torch.Tensor] = []  # unsharded, of what this rank owns
        self.grads: list[torch.Tensor] = []
        self.written: dict[str, int] = {}
        self._sent_dtype = sent_dtype
        self._in_flight: list[InFlight] = []

    def arrive(self) -> None:
        """Send values and gradients of this rank's shards to the owners.

        Values go along because any rank may have edited its shards since the last step.
        """
        if not self.params:
            return
        values = [[plain_of(each.param) for each in part] for part in self.present]
        grads = [[_gradient_of(each) for each in part] for part in self.present]
        dtype = self.params[0].dtype
        # A gradient has this dtype on its owner, in whichever it is sent.
        own_dtype = functools.reduce(
            torch.promote_types, [each.dtype for part in grads for each in part]
        )
        sent_dtype = self._sent_dtype or own_dtype
        if dtype == own_dtype == sent_dtype:
            both = [value + grad for value, grad in zip(values, grads, strict=True)]
            self._send(both, dtype, dtype)
        else:
            self._send(values, dtype, dtype)
            self._send(grads, sent_dtype, own_dtype)

    def _send(
        self, shards: list[list[torch.Tensor]], sent: torch.dtype, received: torch.dtype
    ) -> None:
        batch = self.batch
        self._in_flight.append(
            start_to_owners(batch.layout, shards, (sent, received), batch.comm, self._label())
        )

    def receive(self) -> None:
        """Put the matrices together that this rank owns."""
        matrices = [each for exchange in self._in_flight for each in exchange.finish()]
        count = len(matrices) // 2
        self.values, self.grads = matrices[:count], matrices[count:]
        self._in_flight = []

    def run(self, states: States, options: dict[str, Any]) -> None:
        """Step what this rank owns by the optimizer of the batch."""
        batch, present = self.batch, {id(param) for param in self.params}
        stepped = [
            placeholder
            for member, placeholder in zip(batch.own, batch.placeholders, strict=True)
            if id(member.param) in present
        ]
        blanks = [placeholder.data for placeholder in stepped]
        for member in batch:
            states.setdefault(member.param, {})
        if not batch.own:
            return
        try:
            for placeholder, value in zip(stepped, self.values, strict=True):
                placeholder.grad_dtype = None  # None: a .grad of any dtype is accepted
                placeholder.data = value
            inner = batch.take_states(states)
            inner.param_groups[0].update(options)
            for placeholder, grad in zip(stepped, self.grads, strict=True):
                placeholder.grad = grad
            with profiled("optimizer", batch.label, batch.comm.clock):
                # Without the hooks of torch, which the user's optimizer has called already.
                getattr(type(inner).step, "__wrapped__", type(inner).step)(inner)
            self.values = [placeholder.data for placeholder in stepped]  # it may be another tensor
        finally:
            for placeholder, blank in zip(stepped, blanks, strict=True):
                placeholder.data, placeholder.grad = blank, None
            batch.show_states(states)
        self.grads = []
        self.written = _counts_in(inner, options)

    def run_together(self, states: States, options: dict[str, Any], name: str) -> None:
        """Run without collectives, and raise an exception on all ranks. **Collective:** these."""
        error: Exception | None = None
        try:
            with _RefuseCollectives(name):
                self.run(states, options)
        except Exception as raised:
            error = raised
        layout, label = self.batch.layout, f"first step of owner_optimizer({name})"
        texts = gather_objects(error and str(error), layout.group, label=label)
        if error is not None:
            raise error
        for rank, text in zip(layout.ranks, texts, strict=True):
            if text is not None:
                raise RuntimeError(f"{name} has raised an exception on rank {rank}: {text}")

    def leave(self) -> None:
        """Send the new values to all ranks that hold shards of them."""
        if self.params:
            batch, counts = self.batch, [len(part) for part in self.present]
            dtype = self.params[0].dtype
            self._in_flight = [
                start_from_owners(
                    batch.layout, self.values, counts, dtype, batch.comm, self._label()
                )
            ]
        self.values = []

    def write_shards(self) -> None:
        """Write the new values to this rank's shards."""
        for exchange in self._in_flight:
            foreach_copy_([plain_of(param) for param in self.params], exchange.finish())
        self._in_flight = []

    def abandon(self) -> None:
        """Give up what is in flight after an error."""
        for exchange in self._in_flight:
            exchange.abandon()

    def _label(self) -> str:
        if not self.batch.comm.is_checked:
            return self.batch.label
        # Under MESHARD_DEBUG=1 ranks compare labels.
        names = [each.fqn for part in self.present for each in part]
        return f"{self.batch.label[:-1]}, {listed(names)})"


def _gradient_of(member: Member) -> torch.Tensor:
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


def _counts_in(inner: Optimizer, options: dict[str, Any]) -> dict[str, int]:
    """Return what a step has written to its param group. Raise unless these are counts of steps."""
    group = {key: value for key, value in inner.param_groups[0].items() if key != "params"}
    written = {k: value for k, value in group.items() if value is not options.get(k, _MISSING)}
    for key, value in written.items():
        if not isinstance(value, int):
            raise RuntimeError(
                f"{type(inner).__name__} writes {key!r} into its param group, which is no count of "
                "steps. It may depend on all parameters together, but each rank steps some of them "
                "only; build it on module.parameters(). Some parameters have been stepped once."
            )
    return written
