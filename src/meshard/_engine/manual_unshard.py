"""Parameters unsharded by a call of unshard().

Between ``unshard()`` and the next forward or ``reshard()`` modules show whole parameters outside of
any forward, and what is done to them is done to a copy. Flags can be carried over to the sharded
parameters, which count. Edits of values are lost with the copy, and a cast would leave the module
with a tensor that is never filled again. A graph that was built on the copy keeps it, however long
it lives: the unit gets another one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from meshard._engine.optimizer_hooks import Stepped, register_manually_unsharded
from meshard._params.flat_params import GradientHook, UnitParams
from meshard._params.sharded_param import ShardedParam
from meshard._torch.dtensor import local_of, place_like, set_local
from meshard._torch.private import num_users, references_in_torch


class Gathered(Stepped, Protocol):
    """A group of parameters that can be made whole: see ``param_group``."""

    params: list[ShardedParam]
    tensors: UnitParams
    manual_unshard: ManualUnshard | None
    may_keep: bool

    @property
    def label(self) -> str:
        """The name of its unit."""

    @property
    def version(self) -> int:
        """Grows with every edit of a shard."""

    def forget_stale(self, *, leftover: bool) -> None:
        """Reshard if the whole copy is older than the shards."""

    def start_unshard(self) -> None:
        """Start gathering."""

    def finish_unshard(self) -> None:
        """Have the whole parameters."""

    def install_unsharded(self) -> None:
        """Let the module see them."""

    def reshard(self) -> None:
        """Give them back."""


def start_manual_unshard(
    group: Gathered, joining_hook: Callable[[int], GradientHook]
) -> ManualUnshard:
    """Start gathering for somebody who wants to see whole parameters outside of a forward.

    Args:
        group: What is to be gathered.
        joining_hook: Makes the hook for gradients that come from outside of the unit's forward.
    """
    asked = group.manual_unshard  # who has asked before may wait for the same
    group.forget_stale(leftover=True)
    group.start_unshard()
    # A rank that waits before its forward has nothing to keep there. All decide alike, here.
    group.may_keep = False
    hook = joining_hook if group.tensors.can_leave else None
    group.manual_unshard = asked or ManualUnshard(group.label, group.params, hook)
    return group.manual_unshard


def finish_manual_unshard(group: Gathered, what: ManualUnshard) -> None:
    """Install what ``start_manual_unshard`` gathered, unless it was used or resharded since."""
    if group.manual_unshard is what:
        group.finish_unshard()
        group.install_unsharded()
        what.record_installed(group.version)
        register_manually_unsharded(group, [param.unsharded for param in group.params])


def end_manual_unshard(group: Gathered, *, refuse: bool = True, stays: bool = True) -> None:
    """Look at what was done to whole parameters that ``start_manual_unshard`` gave out, if it did.

    Args:
        group: That may have been gathered.
        refuse: Raise if something was done that cannot last.
        stays: It is not resharded now.

    Raises:
        RuntimeError: ``refuse``, and something was done that cannot last.
    """
    manual_unshard, group.manual_unshard = group.manual_unshard, None
    if manual_unshard is None:
        return
    is_retained = manual_unshard.is_retained
    wrong = manual_unshard.end_manual_unshard(group.version)
    if is_retained and manual_unshard.joining_hook is not None:
        # No rank may gather for this: others may have built no graph.
        group.tensors.leave_whole(manual_unshard.joining_hook, stays=stays and not wrong)
        register_manually_unsharded(group, [param.unsharded for param in group.params])
    if wrong and refuse:
        group.reshard()
        raise RuntimeError(wrong)


@dataclass(frozen=True, slots=True)
class _Face:
    """A whole parameter as it was given."""

    requires_grad: bool
    version: int
    local: torch.Tensor
    address: int
    dtype: torch.dtype


class _Holders(NamedTuple):
    """How many may read the memory of a whole parameter, and a constant more."""

    references: int  # inside torch, to the parameter
    users: int  # tensors on its storage


class ManualUnshard:
    """Whole parameters that ``unshard()`` has asked for, and may show.

    Args:
        label: The unit's name.
        params: Of the unit.
        joining_hook: See ``start_manual_unshard``; None: they cannot be left to graphs.
    """

    def __init__(
        self,
        label: str,
        params: list[ShardedParam],
        joining_hook: Callable[[int], GradientHook] | None,
    ) -> None:
        self.joining_hook = joining_hook
        self._label = label
        self._params = params
        self._version = 0
        self._unsharded_params: list[_Face] = []  # empty unless they are shown
        self._holders: list[_Holders] = []  # when they were shown

    def record_installed(self, version: int) -> None:
        """The modules show them now.

        Args:
            version: Of the shards.
        """
        if not self._unsharded_params:  # else somebody who asked first has waited before
            self._version = version
            self._unsharded_params = [_face_of(param.unsharded) for param in self._params]
            if self.joining_hook is not None:
                self._holders = self._count_holders()

    @property
    def is_retained(self) -> bool:
        """Whether a graph, or a tensor on the same memory, has come to hold a shown parameter."""
        if not self._holders:
            return False
        now = self._count_holders()
        if now == self._holders:
            return False
        if any(map(_is_held, self._params, self._holders, now)):
            return True
        # A graph that was there before is gone: what is there now may belong to another one.
        has_sunk = any(map(_has_sunk, self._holders, now))
        return has_sunk and any(_num_readers(param.unsharded) > 0 for param in self._params)

    def _count_holders(self) -> list[_Holders]:
        return [
            _Holders(references_in_torch(param.unsharded), num_users(shown.local))
            for param, shown in zip(self._params, self._unsharded_params, strict=True)
        ]

    def end_manual_unshard(self, version: int) -> str:
        """Carry over flags, and undo what would outlive the copy.

        Args:
            version: Of the shards. If it has grown, they were edited or loaded too.

        Returns:
            What is wrong, for an error; empty if nothing is.
        """
        cast, edited = [], []
        unsharded_params, self._unsharded_params, self._holders = self._unsharded_params, [], []
        for param, was in zip(self._params, unsharded_params, strict=False):
            unsharded_param = param.unsharded
            if unsharded_param.requires_grad is not was.requires_grad:
                param.sharded.requires_grad_(unsharded_param.requires_grad)
            now = _memory_of(unsharded_param)
            if now.data_ptr() != was.address or now.dtype != was.dtype:
                _restore(unsharded_param, was)
                cast.append(param.fqn)
            elif unsharded_param._version != was.version:
                edited.append(param.fqn)
        if edited and version == self._version:
            warnings.warn(
                f"parameter(s) {_listed(edited)} of unit {self._label!r} were edited while "
                "unshard() had made them whole, and these edits are lost: they were made to a "
                "copy. Edit whole parameters inside meshard.unsharded_params(module), or the "
                "shards after reshard().",
                stacklevel=4,
            )
        if not cast:
            return ""
        return (
            f"parameter(s) {_listed(cast)} of unit {self._label!r} were cast, moved or given other "
            "data while unshard() had made them whole, which changes a copy only; call reshard() "
            "before module.to(...), and edit whole parameters inside "
            "meshard.unsharded_params(module)."
        )


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _memory_of(unsharded_param: torch.Tensor) -> torch.Tensor:
    return local_of(unsharded_param) if isinstance(unsharded_param, DTensor) else unsharded_param


def _face_of(unsharded_param: torch.Tensor) -> _Face:
    local = _memory_of(unsharded_param).detach()
    return _Face(
        unsharded_param.requires_grad,
        unsharded_param._version,
        local,
        local.data_ptr(),
        local.dtype,
    )


def _is_held(param: ShardedParam, before: _Holders, now: _Holders) -> bool:
    """Whether somebody has come who may read the memory of a whole parameter later."""
    unsharded_param, num_new = param.unsharded, now.references - before.references
    if now.users > before.users:
        return True
    if num_new == 1 and before.references == 1:
        return _num_readers(unsharded_param) > 0
    return num_new > 0


def _has_sunk(before: _Holders, now: _Holders) -> bool:
    return now.references < before.references or now.users < before.users


def _num_readers(unsharded_param: torch.Tensor) -> int:
    """Return how many in graphs hold a whole parameter, but for the node that adds to its gradient.

    That one reads nothing, and there is one at a time: who asks for it gets it, or a new one.
    """
    num_holders = references_in_torch(unsharded_param) - 1
    if not num_holders or not unsharded_param.requires_grad:
        return num_holders
    with torch.inference_mode(False), torch.enable_grad():
        node = get_gradient_edge(unsharded_param).node
    was_there = references_in_torch(unsharded_param) - 1 == num_holders
    del node
    return num_holders - was_there


def _restore(unsharded_param: torch.Tensor, was: _Face) -> None:
    """Let ``unsharded_param`` have the memory again that gathers fill."""
    if isinstance(unsharded_param, DTensor):
        unsharded_param.data = place_like(unsharded_param, was.local)
        set_local(unsharded_param, was.local)
    else:
        unsharded_param.data = was.local
