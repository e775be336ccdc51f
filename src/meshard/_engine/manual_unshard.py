"""Unsharded parameters that modules hold outside of a forward.

Modules hold them from ``unshard()`` to ``reshard()`` or to the next forward that reshards, and
after a forward that does not. These parameters are a copy of the shards' values. If the user sets
their ``requires_grad``, the flag is carried over to the sharded parameters. If the user edits their
values, the edits are lost when the copy is freed, and a warning says so. If the user casts them or
gives them other data (``weight.data = ...``), the module holds memory that no gather fills. That is
undone, with an error after ``unshard()``, and a warning after a forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from meshard._params.sharded_param import UnitParam
from meshard._torch.dtensor import place_like, plain_of, set_local
from meshard._torch.private import version_of
from meshard._torch.user_line import warn_user


class InstalledParams:
    """The unsharded parameters of a unit, as they were when modules began to hold them."""

    def __init__(
        self,
        label: str,
        params: Sequence[UnitParam],
        shard_version: int,
        since: str,
        earlier: InstalledParams | None = None,
    ) -> None:
        """``since`` is a text for a warning: when modules began to hold the parameters.

        ``earlier`` is the record of an earlier forward with the same unsharded copy, if ``end`` of
        that record was not called. Edits since that forward count too.
        """
        self._label = label
        self._params = params
        self._shard_version = shard_version
        self._since = since
        self._before = [
            _Before(plain_of(each).detach(), version_of(each), each.requires_grad)
            for each in (param.unsharded for param in params)
        ]
        if earlier is not None:
            self._before = [
                now._replace(local=before.local, version=before.version)
                for now, before in zip(self._before, earlier._before, strict=True)
            ]

    def take_flags(self) -> None:
        """Carry ``requires_grad`` flags that the user has set over to the sharded parameters."""
        for param, before in zip(self._params, self._before, strict=True):
            if param.unsharded.requires_grad is not before.requires_grad:
                param.sharded.requires_grad_(param.unsharded.requires_grad)

    def end(self, shard_version: int) -> list[str]:
        """Carry flags over to the sharded parameters, and warn of edits that are lost.

        There is no warning if the shards were edited too, as by ``load_state_dict``: their version
        has grown then. If parameters were cast, moved or given other data, this method undoes that
        and returns their names.
        """
        self.take_flags()
        edited, replaced = [], []
        for param, before in zip(self._params, self._before, strict=True):
            unsharded, now = param.unsharded, plain_of(param.unsharded)
            if unsharded.requires_grad is not before.requires_grad:
                # ``take_flags`` has carried the user's flag over to the sharded parameter. Put the
                # old flag back on the unsharded one, because the backward of an earlier forward may
                # follow. That forward counted the parameters that get a gradient. If a parameter
                # was frozen since, ``take_frozen`` sees two different flags, and corrects the
                # count.
                unsharded.requires_grad_(before.requires_grad)
            if now.data_ptr() != before.local.data_ptr() or now.dtype != before.local.dtype:
                _restore(unsharded, before.local)
                replaced.append(param.fqn)
            elif version_of(unsharded) != before.version:
                edited.append(param.fqn)
        if edited and shard_version == self._shard_version:
            warn_user(self.loss_of(edited))
        return replaced

    def loss_of(self, names: list[str]) -> str:
        """Return the text of a warning that the edits of parameters are lost."""
        return (
            f"parameter(s) {listed(names)} of unit {self._label!r} were edited after "
            f"{self._since}, and these edits are lost: they were made to a copy. Call "
            "reshard() on the unit before, or edit them inside "
            "meshard.unsharded_params(module)."
        )


class _Before(NamedTuple):
    """The state of an unsharded parameter when modules began to hold it."""

    local: torch.Tensor  # the memory that gathers fill
    version: int
    requires_grad: bool


@dataclass(eq=False, slots=True)
class ManualUnshard:
    """One ``unshard()`` by the user, until it ends."""

    installed: InstalledParams | None = None  # None: the gather was not waited for yet


def listed(names: list[str]) -> str:
    """Return the first three names and how many more there are, for an error."""
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _restore(unsharded: torch.Tensor, local: torch.Tensor) -> None:
    """Give ``unsharded`` its original memory again: ``local``, which gathers fill."""
    if isinstance(unsharded, DTensor):
        unsharded.data = place_like(unsharded, local)
        set_local(unsharded, local)
    else:
        unsharded.data = local
