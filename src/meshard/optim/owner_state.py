"""The state of an ``OwnerOptimizer``: whole on owners, and in shards on all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from meshard._comm.blocking import gather_objects, ranks_that_differ
from meshard._torch.dtensor import is_plain, local_of, make_dtensor
from meshard.optim.exchange import Layout, Route, TensorOf

if TYPE_CHECKING:
    from meshard.optim.owner_step import Bucket

_LABEL = "(state of owners)"
_PLAIN = (int, float, complex, str, type(None))


@dataclass(frozen=True)
class _Described:
    """A tensor of a state, without its values."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class _Item:
    """A tensor of the state of one parameter, to be exchanged."""

    position: int  # of the parameter in the bucket
    layout: Layout
    dtype: torch.dtype


def states_as_shards(bucket: Bucket) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the state of each member with shards in the place of unsharded tensors.

    The second value is what the optimizers have written to their param groups.

    **Collective:** all ranks of the mesh. **Stream:** the current one.

    Raises:
        NotImplementedError: A state is neither a tensor nor a plain value.
    """
    ranks, inner = bucket.ranks, bucket.inner
    own = {
        position: {} if inner is None else dict(inner.state.get(placeholder, {}))
        for position, placeholder in bucket.placeholders.items()
    }
    problems = [
        problem
        for position, state in own.items()
        for problem in _problems(bucket.members[position].fqn, state)
    ]
    mine = {} if problems else _mapped(own, _describe)
    gathered = gather_objects((mine, bucket.written, problems), ranks.group, label=_LABEL)
    for *_, found in gathered:
        if found:
            raise NotImplementedError(found[0])
    described = {position: state for states, *_ in gathered for position, state in states.items()}
    states = [described[position] for position in range(len(bucket.members))]
    items = [
        _Item(position, bucket.members[position].layout.of_state(each.shape), each.dtype)
        for position, state in enumerate(states)
        for each in _leaves(state)
        if isinstance(each, _Described)
    ]
    whole = {position: filter(_is_cut, _leaves(state)) for position, state in own.items()}
    sources = {
        number: next(whole[item.position])
        for number, item in enumerate(items)
        if item.position in whole
    }
    shards = {
        number: torch.empty(
            item.layout.box_of(ranks, ranks.own).sizes, dtype=item.dtype, device=ranks.device
        )
        for number, item in enumerate(items)
    }
    _exchange(bucket, items, sources, shards, to_owners=False)
    made = iter(
        shards[number]
        if item.layout.placements is None
        else make_dtensor(shards[number], ranks.mesh, item.layout.placements, item.layout.shape)
        for number, item in enumerate(items)
    )
    filled = [
        _mapped(state, lambda each: next(made) if isinstance(each, _Described) else each)
        for state in states
    ]
    return filled, {key: value for _, written, _ in gathered for key, value in written.items()}


def load_states(bucket: Bucket, states: Sequence[dict[str, Any]], *, keeps_counts: bool) -> None:
    """Give owners the state of each member: unsharded tensors, or DTensors of any mesh.

    With ``keeps_counts`` the count ``step`` stays on its device; other tensors go to that of the
    mesh.

    **Collective:** all ranks of the mesh. **Stream:** the current one.
    """
    ranks = bucket.ranks
    _check_same_trees(states, bucket)
    items: list[_Item] = []
    shards: dict[int, torch.Tensor] = {}
    whole: dict[int, torch.Tensor] = {}  # of what arrives

    def taken(position: int, key: str, each: Any) -> Any:
        """Return what the owner's state gets. Other ranks get None in the place of a tensor.

        ``_exchange`` below fills the tensors that arrive in shards.
        """
        is_own = position in bucket.placeholders
        if not isinstance(each, torch.Tensor):
            return each
        if not isinstance(each, DTensor):
            keeps = keeps_counts and key == "step"
            device = each.device if keeps else ranks.device
            return each.to(device, copy=not _is_cut(each)) if is_own else None
        layout = bucket.members[position].layout.of_state(each.shape)
        if each.device_mesh != ranks.mesh or tuple(each.placements) != layout.placements:
            unsharded = each.full_tensor()
            return unsharded.to(ranks.device) if is_own else None
        number = len(items)
        items.append(_Item(position, layout, each.dtype))
        shards[number] = local_of(each)
        if is_own:
            whole[number] = torch.empty(each.shape, dtype=each.dtype, device=ranks.device)
        return whole.get(number)

    trees = [
        {
            key: _mapped(value, functools.partial(taken, position, key))
            for key, value in state.items()
        }
        for position, state in enumerate(states)
    ]
    _exchange(bucket, items, shards, whole, to_owners=True)
    bucket.written = {}
    if not any(states):
        # There is no state to load. Some optimizers make an initial state in their constructor, so
        # the next step makes a new optimizer; clearing the state of this one would lose it.
        bucket.inner = None
        return
    bucket.make_inner()
    if (inner := bucket.inner) is not None:
        inner.state.clear()
        for position, placeholder in bucket.placeholders.items():
            if trees[position]:
                inner.state[placeholder] = trees[position]


def _exchange(
    bucket: Bucket,
    items: Sequence[_Item],
    sources: dict[int, torch.Tensor],
    targets: dict[int, torch.Tensor],
    *,
    to_owners: bool,
) -> None:
    """Send ``sources`` to ``targets``, both by the number of their item, one dtype at a time."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    for number, item in enumerate(items):
        by_dtype.setdefault(item.dtype, []).append(number)
    for dtype, numbers in by_dtype.items():
        route = Route.of(
            [items[number].layout for number in numbers],
            [bucket.members[items[number].position].owner for number in numbers],
            bucket.ranks,
            to_owners=to_owners,
        )
        route.start(
            _in_order(sources, numbers),
            _in_order(targets, numbers),
            dtype,
            bucket.ranks,
            bucket.comm,
            _LABEL,
        ).finish()


def _problems(fqn: str, state: dict[str, Any]) -> Iterator[str]:
    """Iterate over error texts, one for each value in a parameter's state that cannot be saved."""
    for key, value in state.items():
        for each in _leaves(value):
            if not is_plain(each) and not isinstance(each, _PLAIN):
                yield (
                    f"the state {key!r} of parameter {fqn!r} has a {type(each).__name__} in it, "
                    "which cannot be cut into shards; only ordinary tensors and plain values can."
                )


def _check_same_trees(trees: Sequence[dict[str, Any]], bucket: Bucket) -> None:
    """Raise on all ranks unless they load states of the same form. **Collective:** these."""
    forms = [
        _mapped(state, lambda each: tuple(each.shape) if _is_cut(each) else type(each).__name__)
        for state in trees
    ]
    ranks, purpose = bucket.ranks, "comparison of the states that owner_optimizer loads"
    if ranks_that_differ(forms, ranks.group, ranks.device, purpose=purpose):
        raise ValueError(
            "ranks load states of different forms into owner_optimizer: all must load the same "
            "keys, with tensors of the same shapes. "
            "(flatten_optimizer_state_dict=True of torch.distributed.checkpoint loses those of "
            "parameters that other ranks own: leave it out.)"
        )


def _in_order(tensors: dict[int, torch.Tensor], numbers: list[int]) -> TensorOf:
    return lambda index: tensors[numbers[index]]


def _is_cut(value: object) -> bool:
    """Whether a value of a state is sharded. Numbers are the same on every rank."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _describe(value: Any) -> Any:
    if _is_cut(value):
        return _Described(value.shape, value.dtype)
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Return ``tree``, of dicts, lists and tuples, with ``function`` applied to its leaves."""
    if isinstance(tree, dict):
        return {key: _mapped(value, function) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_mapped(value, function) for value in tree)
    return function(tree)


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        for value in tree.values():
            yield from _leaves(value)
    elif type(tree) in (list, tuple):
        for value in tree:
            yield from _leaves(value)
    else:
        yield tree
