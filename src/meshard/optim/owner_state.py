"""The state of an ``OwnerOptimizer`` in shards on all ranks, and back on the owners."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from meshard._comm.blocking import full_tensor, gather_objects, ranks_that_differ
from meshard._torch.dtensor import is_plain, make_dtensor
from meshard._torch.private import tree_flatten, tree_unflatten
from meshard.optim.exchange import start_from_owners
from meshard.optim.mapping import States
from meshard.optim.owner_step import Batch

_LABEL = "(state of owners)"
_PLAIN = (int, float, complex, str, type(None))


@dataclass(frozen=True)
class _Kind:
    """What tensors have in common that are exchanged together."""

    shape: torch.Size
    dtype: torch.dtype


def state_in_shards(
    batch: Batch, states: States, written: dict[str, int]
) -> tuple[States, dict[str, int]]:
    """Return the state of each member with shards in the place of unsharded tensors.

    The second value is what is ``written`` on any rank.

    **Collective:** all ranks of the mesh. **Stream:** the current one.

    Raises:
        NotImplementedError: A state is neither a tensor nor a plain value.
    """
    own = [dict(states.get(member.param, {})) for member in batch.own]
    problem = next(_problems(batch, own), None)
    # All ranks get the trees of all members, with a kind in the place of each tensor that is cut.
    told = [] if problem else [_mapped(state, _told) for state in own]
    gathered = gather_objects((told, problem, written), batch.layout.group, label=_LABEL)
    for _, found, _ in gathered:
        if found is not None:
            raise NotImplementedError(found)
    shards = {}
    for kind in dict.fromkeys(kind for told, *_ in gathered for kind in _kinds_in(told)):
        layout = batch.layout.of_state(kind.shape)
        counts = [_kinds_in(told).count(kind) for told, *_ in gathered]
        unsharded = [leaf for leaf in tree_flatten(own)[0] if _is_cut(leaf) and _told(leaf) == kind]
        exchange = start_from_owners(layout, unsharded, counts, kind.dtype, batch.comm, _LABEL)
        made = [each.clone() for each in exchange.finish()]  # of no buffer in common
        if isinstance(next(iter(batch)).param, DTensor):
            made = [make_dtensor(e, layout.mesh, layout.placements, layout.shape) for e in made]
        shards[kind] = iter(made)
    trees = [tree for told, *_ in gathered for tree in told]  # owner by owner, as the members
    filled = {
        member.param: _mapped(tree, lambda e: next(shards[e]) if isinstance(e, _Kind) else e)
        for member, tree in zip(batch, trees, strict=True)
    }
    return filled, {key: value for *_, each in gathered for key, value in each.items()}


def load_states(
    batch: Batch, saved: Sequence[dict[str, Any]], states: States, *, keeps_counts: bool
) -> None:
    """Give owners the state of each member: unsharded tensors, or DTensors of any mesh.

    With ``keeps_counts`` the count ``step`` stays on its device; other tensors go to that of the
    mesh. The next step uses the new state.

    **Collective:** all ranks of the mesh. **Stream:** the current one.
    """
    layout, own = batch.layout, {id(member.param) for member in batch.own}
    forms = [_mapped(state, _form) for state in saved]
    purpose = "comparison of the states that owner_optimizer loads"
    if ranks_that_differ(forms, layout.group, layout.device, purpose=purpose):
        raise ValueError(
            "ranks load states of different forms into owner_optimizer: all must load the same "
            "keys, with tensors of the same shapes. "
            "(flatten_optimizer_state_dict=True of torch.distributed.checkpoint loses those of "
            "parameters that other ranks own: leave it out.)"
        )

    def whole(key: str, value: Any, *, is_own: bool) -> Any:
        """Gather one tensor, which its owner keeps."""
        if isinstance(value, DTensor):
            value = full_tensor(cast("DTensor", value.to(layout.device)), label=_LABEL)
        if not is_own or not isinstance(value, torch.Tensor):
            return value if is_own else None
        device = value.device if keeps_counts and key == "step" else layout.device
        return value.to(device, copy=not _is_cut(value))

    for member, state in zip(batch, saved, strict=True):
        is_own = id(member.param) in own
        loaded = {
            key: _mapped(value, functools.partial(whole, key, is_own=is_own))
            for key, value in state.items()
        }
        states[member.param] = loaded if is_own else {}
    if not any(saved):
        # Some optimizers make an initial state in their constructor, so the next step makes a new
        # optimizer; clearing the state of this one would lose it.
        batch.inner = None


def _problems(batch: Batch, own: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Iterate over error texts, one for each value of this rank's states that cannot be saved."""
    for member, state in zip(batch.own, own, strict=True):
        for key, value in state.items():
            for leaf in tree_flatten(value)[0]:
                if not is_plain(leaf) and not isinstance(leaf, _PLAIN):
                    yield (
                        f"the state {key!r} of parameter {member.fqn!r} has a "
                        f"{type(leaf).__name__} in it, which cannot be cut into shards; only "
                        "ordinary tensors and plain values can."
                    )


def _mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    leaves, spec = tree_flatten(tree)
    return tree_unflatten([function(leaf) for leaf in leaves], spec)


def _kinds_in(tree: Any) -> list[_Kind]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, _Kind)]


def _is_cut(value: object) -> bool:
    """Whether a value of a state is sharded. Numbers are the same on every rank."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _told(value: Any) -> Any:
    if _is_cut(value):
        return _Kind(value.shape, value.dtype)
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _form(value: Any) -> object:
    return str(value.shape) if _is_cut(value) else type(value).__name__
