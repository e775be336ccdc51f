"""Parameters unsharded by a call of ``unshard()``.

From ``unshard()`` to ``reshard()``, or to the next forward, modules hold unsharded parameters
outside of any forward. They are a copy: ``requires_grad`` flags that the user sets are carried over
to the sharded parameters, edits of values are lost with the copy (a warning), and a cast would
leave the module with a tensor that is never filled again (an error).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from meshard._params.sharded_param import UnitParam
from meshard._torch.dtensor import place_like, plain_of, set_local
from meshard._torch.private import version_of
from meshard._torch.user_line import warn_user


class _Installed(NamedTuple):
    """An unsharded parameter as it was when it was installed."""

    local: torch.Tensor
    version: int
    requires_grad: bool


class ManualUnshard:
    """One ``unshard()`` by the user, until it ends."""

    def __init__(self, label: str, params: Sequence[UnitParam]) -> None:
        self._label = label
        self._params = params
        self._shard_version = 0
        self.installed: list[_Installed] = []  # empty until modules hold unsharded parameters

    def record_installed(self, shard_version: int) -> None:
        if not self.installed:  # the handle of another unshard() may have been waited for before
            self._shard_version = shard_version
            self.installed = [
                _Installed(plain_of(each).detach(), version_of(each), each.requires_grad)
                for each in (param.unsharded for param in self._params)
            ]

    def end(self, shard_version: int) -> str:
        """Carry flags over, warn of lost edits, and undo casts; return the text of an error.

        Empty if nothing is wrong. If the version of the shards has grown, they were edited too.
        """
        cast, edited = [], []
        for param, before in zip(self._params, self.installed, strict=False):
            unsharded = param.unsharded
            if unsharded.requires_grad is not before.requires_grad:
                param.sharded.requires_grad_(unsharded.requires_grad)
            local = plain_of(unsharded)
            if local.data_ptr() != before.local.data_ptr() or local.dtype != before.local.dtype:
                _restore(unsharded, before.local)
                cast.append(param.fqn)
            elif version_of(unsharded) != before.version:
                edited.append(param.fqn)
        if edited and shard_version == self._shard_version:
            warn_user(
                f"parameter(s) {listed(edited)} of unit {self._label!r} were edited after "
                "unshard(), and these edits are lost: they were made to a copy. Edit unsharded "
                "parameters inside meshard.unsharded_params(module), or the shards after "
                "reshard().",
            )
        if not cast:
            return ""
        return (
            f"parameter(s) {listed(cast)} of unit {self._label!r} were cast, moved or given other "
            "data after unshard(), which changes a copy only; call reshard() before "
            "module.to(...), and edit unsharded parameters inside meshard.unsharded_params(module)."
        )


def listed(names: list[str]) -> str:
    """Return the first three names, for an error."""
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _restore(unsharded: torch.Tensor, local: torch.Tensor) -> None:
    """Put the memory that gathers fill back under ``unsharded``."""
    if isinstance(unsharded, DTensor):
        unsharded.data = place_like(unsharded, local)
        set_local(unsharded, local)
    else:
        unsharded.data = local


class KeptInstalled:
    """Unsharded parameters that modules hold after a forward, until they are resharded.

    As after ``unshard()``, flags are carried over to the sharded parameters, and lost edits are
    warned of.
    """

    def __init__(self, label: str, params: Sequence[UnitParam], shard_version: int) -> None:
        self._label = label
        self._params = params
        self._shard_version = shard_version
        self._before = [
            (version_of(each.unsharded), each.unsharded.requires_grad) for each in params
        ]

    def end(self, shard_version: int) -> None:
        edited = []
        for param, (version, requires_grad) in zip(self._params, self._before, strict=True):
            if param.unsharded.requires_grad is not requires_grad:
                param.sharded.requires_grad_(param.unsharded.requires_grad)
                # The backward uses the flag of its forward, which is the same on all ranks.
                param.unsharded.requires_grad_(requires_grad)
            if version_of(param.unsharded) != version:
                edited.append(param.fqn)
        if edited and shard_version == self._shard_version:
            warn_user(
                f"parameter(s) {listed(edited)} of unit {self._label!r} were edited after a "
                "forward that has left them unsharded (reshard_after_forward=False, or the root), "
                "and these edits are lost: they were made to a copy. Call reshard() on the unit "
                "before, or edit them inside meshard.unsharded_params(module).",
            )
