"""The state of an ``OwnerOptimizer``: whole on owners, and in shards on all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from meshard._comm.blocking import gather_objects
from meshard._torch.dtensor import local_of, make_dtensor
from meshard.optim.exchange import Layout, Route, TensorOf

if TYPE_CHECKING:
    from meshard.optim.owner import Bucket

_LABEL = "(state of owners)"


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


def states_as_shards(bucket: Bucket) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the state of each member with shards in the place of whole tensors.

    The second value is what the optimizer of each rank has written to its param group.

    **Collective:** all ranks of the mesh.
    """
    ranks, inner = bucket.ranks, bucket.inner
    own = {
        position: {} if inner is None else dict(inner.state.get(placeholder, {}))
        for position, placeholder in bucket.placeholders.items()
    }
    told = gather_objects((_mapped(own, _describe), bucket.written), ranks.group, label=_LABEL)
    described = {position: state for states, _ in told for position, state in states.items()}
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
    return filled, [written for _, written in told]


def load_states(bucket: Bucket, states: Sequence[dict[str, Any]]) -> None:
    """Give owners the state of each member: whole tensors, or DTensors of any mesh.

    **Collective:** all ranks of the mesh.
    """
    ranks, inner = bucket.ranks, bucket.inner
    items: list[_Item] = []
    shards: dict[int, torch.Tensor] = {}
    whole: dict[int, torch.Tensor] = {}  # of what arrives

    def taken(position: int, each: Any) -> Any:
        """Return what the owner gets: for shards a whole tensor, which is filled below."""
        is_own = position in bucket.placeholders
        if not isinstance(each, torch.Tensor):
            return each
        if not isinstance(each, DTensor):
            return each.to(ranks.device) if _is_cut(each) else each.clone()
        layout = bucket.members[position].layout.of_state(each.shape)
        if each.device_mesh != ranks.mesh or tuple(each.placements) != layout.placements:
            return each.full_tensor()
        number = len(items)
        items.append(_Item(position, layout, each.dtype))
        shards[number] = local_of(each)
        if is_own:
            whole[number] = torch.empty(each.shape, dtype=each.dtype, device=ranks.device)
        return whole.get(number)

    trees = [
        _mapped(state, functools.partial(taken, position)) for position, state in enumerate(states)
    ]
    _exchange(bucket, items, shards, whole, to_owners=True)
    bucket.written = {}
    if inner is not None:
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


def _in_order(tensors: dict[int, torch.Tensor], numbers: list[int]) -> TensorOf:
    return lambda index: tensors[numbers[index]]


def _is_cut(value: object) -> bool:
    """Whether ranks have shards of a value of a state; numbers are the same on all of them."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _describe(value: Any) -> Any:
    if _is_cut(value):
        return _Described(value.shape, value.dtype)
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


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
