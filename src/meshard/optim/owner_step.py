"""The step of an ``OwnerOptimizer``: batches arrive at the owners, are stepped, and leave."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from meshard._comm.blocking import gather_objects
from meshard._comm.communicator import Communicator, ranged
from meshard._engine.param_group import owner_of as param_group_of
from meshard._torch.dtensor import plain_of
from meshard._torch.private import foreach_copy_
from meshard._torch.user_line import listed
from meshard.optim.exchange import Layout, start_from_owners, start_to_owners
from meshard.optim.mapping import MakeOptimizer, States, check_gradient, filled


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
        self.make = make

    def __iter__(self) -> Iterator[Member]:
        """Iterate over all members, owner by owner."""
        return (member for part in self.members for member in part)

    @property
    def comm(self) -> Communicator:
        """The communicator of the first member's root."""
        group = param_group_of(next(iter(self)).param)
        assert group is not None  # the hooks of all optimizers refuse parameters of no unit
        return group.comm


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What the steps of all batches have in common."""

    hyperparameters: dict[str, Any]
    sent_dtype: torch.dtype | None  # in which gradients are sent; None: their own
    # In the first step, the name of the optimizer. Then what it raises is raised on all ranks.
    first_of: str | None
    # Counts that optimizers write to their param groups.
    written: dict[str, int] = field(default_factory=dict)


def step_batches(batches: Sequence[Batch], states: States, options: StepOptions) -> None:
    """Step every parameter that has a gradient. While one batch is stepped, its neighbours travel.

    **Collective:** all ranks of the meshes. The order of exchanges is the same on all of them.
    """
    steps = [_step(batch, states, options) for batch in batches]
    try:
        next(steps[0], None)  # starts to arrive
        for before, present, after in zip(
            [iter(()), *steps[:-1]], steps, [*steps[1:], iter(())], strict=True
        ):
            next(present, None)  # has arrived
            next(after, None)  # starts to arrive
            next(present, None)  # is stepped
            next(before, None)  # has left
            next(present, None)  # starts to leave
        next(steps[-1], None)  # has left
    finally:
        for each in steps:
            each.close()  # after an error: gives up what is in flight


def _step(batch: Batch, states: States, options: StepOptions) -> Generator[None]:
    """Step one batch. Between two parts of it, those before and after it have their turns."""
    present = [[each for each in part if each.param.grad is not None] for part in batch.members]
    values = [[plain_of(each.param) for each in part] for part in present]
    grads = [[_gradient_of(each) for each in part] for part in present]
    shards = [shard for part in values for shard in part]
    if not shards:
        return
    comm, label = batch.comm, batch.label
    if comm.is_checked:  # under MESHARD_DEBUG=1 ranks compare labels
        label = f"{label[:-1]}, {listed([each.fqn for part in present for each in part])})"

    # 1. Shards go to the owners. Values go along, because any rank may have edited its shards.
    dtype = shards[0].dtype
    grad_dtype = functools.reduce(torch.promote_types, (g.dtype for part in grads for g in part))
    sent_dtype = options.sent_dtype or grad_dtype
    parts = [(values, (dtype, dtype)), (grads, (sent_dtype, grad_dtype))]
    if dtype == grad_dtype == sent_dtype:
        parts = [([*map(operator.add, values, grads)], (dtype, dtype))]
    with contextlib.ExitStack() as stack:
        arriving = [start_to_owners(batch.layout, *each, comm, label) for each in parts]
        for exchange in arriving:
            stack.enter_context(exchange)
        yield
        matrices = [matrix for exchange in arriving for matrix in exchange.finish()]
    yield

    # 2. The user's optimizer steps what this rank owns.
    with _raised_on_all_ranks(batch.layout, options.first_of), ranged("optimizer", label):
        matrices = _run(batch, matrices, states, options)
    yield

    # 3. New values go to all ranks.
    counts = [len(part) for part in present]
    with start_from_owners(batch.layout, matrices, counts, dtype, comm, label) as leaving:
        matrices.clear()
        yield
        foreach_copy_(shards, leaving.finish())


def _gradient_of(member: Member) -> torch.Tensor:
    grad = member.param.grad
    assert grad is not None
    check_gradient(grad, member.param, f"parameter {member.fqn!r}")
    return plain_of(grad)


# --- the ordinary optimizer ------------------------------------------------------------------


def _run(
    batch: Batch, matrices: list[torch.Tensor], states: States, options: StepOptions
) -> list[torch.Tensor]:
    """Step by values and gradients, in this order in ``matrices``, and return the new values."""
    pairs = list(zip(batch.own, batch.placeholders, strict=True))
    stepped = [each for member, each in pairs if member.param.grad is not None]
    states.update({each.param: {} for each in batch if each.param not in states})
    if not pairs:
        return []
    try:
        with filled(stepped, matrices[: len(stepped)], matrices[len(stepped) :]):
            is_new = batch.inner is None
            inner = batch.inner = batch.inner or batch.make([{"params": batch.placeholders}])
            for member, placeholder in pairs:  # users may have edited what they see
                if states[member.param]:
                    inner.state[placeholder] = states[member.param]
                elif not is_new:
                    inner.state.pop(placeholder, None)
            inner.param_groups[0].update(options.hyperparameters)
            # Without the hooks of torch, which the user's optimizer has called already.
            getattr(type(inner).step, "__wrapped__", type(inner).step)(inner)
            options.written.update(_counts_in(inner, options.hyperparameters))
            return [placeholder.data for placeholder in stepped]  # a step may replace ``.data``
    finally:
        if batch.inner is not None:
            states.update({m.param: batch.inner.state.get(each, {}) for m, each in pairs})


@contextlib.contextmanager
def _raised_on_all_ranks(layout: Layout, name: str | None) -> Iterator[None]:
    """Raise an exception of the block on all ranks.

    Does nothing if there is no ``name``. **Collective:** all ranks of the mesh.
    """
    if name is None:
        yield
        return
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    label = f"first step of owner_optimizer({name})"
    texts = gather_objects(error and str(error), layout.group, label=label)
    if error is not None:
        raise error
    for rank, text in zip(layout.ranks, texts, strict=True):
        if text is not None:
            raise RuntimeError(f"{name} has raised an exception on rank {rank}: {text}")


def _counts_in(inner: Optimizer, given: dict[str, Any]) -> dict[str, int]:
    """Return what a step has written to its param group. Raise unless these are counts of steps."""
    group = {key: value for key, value in inner.param_groups[0].items() if key != "params"}
    written = {k: value for k, value in group.items() if k not in given or value is not given[k]}
    for key, value in written.items():
        if not isinstance(value, int):
            raise RuntimeError(
                f"{type(inner).__name__} writes {key!r} into its param group, which is no count of "
                "steps. It may depend on all parameters together, but each rank steps some of them "
                "only; build it on module.parameters(). Some parameters have been stepped once."
            )
    return written


def placeholder_for(param: torch.Tensor, device: torch.device) -> nn.Parameter:
    """Return a parameter of the unsharded shape that takes the memory of one element.

    Its value is NaN. If an optimizer copies it too early, the results show that.
    """
    filler = math.nan if param.is_floating_point() else 0
    one = torch.full((), filler, dtype=param.dtype, device=device)
    placeholder = nn.Parameter(one.expand(param.shape), requires_grad=param.requires_grad)
    placeholder.grad_dtype = None  # None: a .grad of any dtype is accepted
    return placeholder
