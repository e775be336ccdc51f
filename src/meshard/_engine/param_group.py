"""The parameters of a unit, gathered and resharded together.

They follow every operation, also those that only move shards, and refuse some of them.

They are gathered (``start_unshard``, ``finish_unshard``) and let go (``reshard``). When that
happens is decided elsewhere. Gradients are in ``gradient_state``.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from meshard._comm.all_gather import GatherInFlight, start_all_gather
from meshard._comm.communicator import CommStream, Communicator, StepPhase
from meshard._engine.autograd_calls import explain_autograd
from meshard._engine.averages import watch_averages
from meshard._engine.manual_unshard import ManualUnshard, end_manual_unshard
from meshard._engine.optimizer_hooks import watch_optimizers
from meshard._params.flat_params import UnitParams
from meshard._params.sharded_param import OwnerDicts


class PendingStep(Protocol):
    """The step of a group that an optimizer has begun; until its next gather is there."""

    def before_gather(self) -> None:
        """Order the next use of the gather lane after it, and show the shards."""

    def finish(self) -> None:
        """Order what the caller does next after it."""

    def abandon(self) -> None:
        """The window is void: do not take the step, if it has not been taken."""


def refuse_transforms(label: str, error: RuntimeError) -> None:
    """Raise what to do instead, if ``error`` came inside of a transform around unit ``label``."""
    try:
        torch.empty(0).requires_grad_()
    except RuntimeError:
        raise RuntimeError(
            f"torch.func (grad, vjp, jacrev, hessian) cannot go through unit {label!r}, whose "
            "parameters are gathered and given back; call it inside "
            "meshard.unsharded_params(module), where the module is an ordinary one."
        ) from error


class ParamState(enum.Enum):
    """Where the values of a group are at present."""

    SHARDED = enum.auto()
    GATHERING = enum.auto()
    UNSHARDED = enum.auto()
    SUMMONED = enum.auto()  # in the modules' hands: see open_unit


class Accumulated(Protocol):
    """Gradients on their way into ``.grad``: see ``gradient_state``."""

    @property
    def pending(self) -> str:
        """What has not been done to them yet, in words; empty if nothing is pending."""

    def settle(self) -> None:
        """Have in ``.grad`` what is on its way there from the device."""

    def clear(self, indices: frozenset[int]) -> None:
        """Forget those of some parameters."""

    def close_window(self) -> None:
        """What comes next belongs to another window."""


_UNKNOWN = -1  # no version: a copy of it is stale to everybody who asks


@dataclass(slots=True)
class _PostForwardShard:
    """The rows of the gathered unit that this rank keeps between forward and backward."""

    rows: torch.Tensor
    group: dist.ProcessGroup


class ParamGroup:
    """The parameters of one unit.

    Args:
        tensors: Their faces, sharded and whole.
    """

    def __init__(self, tensors: UnitParams) -> None:
        self.tensors = tensors
        self.params = tensors.params
        self._owner_dicts = OwnerDicts(tensors.params)
        self.spec = tensors.spec
        self.comm: Communicator  # shared by all units of a root
        self.accumulated: weakref.ref[Accumulated] | None = None  # gradients of these parameters
        self.state = ParamState.SHARDED
        self.num_trainable = 0
        self.is_leftover = False  # whole since an earlier forward
        self.num_steps = 0  # that optimizers have taken: see optimizer_steps
        self.saves_memory = False  # it was resharded between forward and backward of this step
        self.has_failed = False  # the last backward raised, and nothing was cleaned up since
        self._in_flight: GatherInFlight | None = None
        self._post_forward_shard: _PostForwardShard | None = None
        self._gathers_post_forward_shard = False  # what is gathered
        self.may_keep = True  # not of what unshard() by hand gathers: each rank waits as it likes
        self.is_unsharded_installed = False  # the module sees whole parameters
        self.manual_unshard: ManualUnshard | None = None  # what unshard() by hand has asked for
        self.pending_step: PendingStep | None = None  # until the next gather is there
        self._begin_watching()

    @property
    def label(self) -> str:
        """The unit's name; known once its root is sharded."""
        return self.tensors.label

    # --- edits made from outside -----------------------------------------------------------

    def adopt_edits(self) -> int:
        """Take over parameters and storage that were replaced since the last use.

        Returns:
            The version of the shards.

        Raises:
            RuntimeError: A parameter was replaced by something that is not its shard.
        """
        version = self.tensors.version_unless_replaced()
        if version is not None:
            return self.num_steps + version
        if self.tensors.take_replacements():
            self.reshard()
            self.tensors.rebuild()
            self._begin_watching()
        return self.version

    @property
    def is_summoned(self) -> bool:
        """Whether the modules hold whole parameters that are theirs: see ``open_unit``."""
        return self.state is ParamState.SUMMONED

    def check_not_summoned(self, what: str) -> None:
        """Raise if the group is open, so that it cannot be ``what``."""
        if self.is_summoned:
            raise RuntimeError(
                f"unit {self.label!r} is open, so it cannot be {what}; leave unsharded_params "
                "first."
            )

    def _begin_watching(self) -> None:
        self._unsharded_version = _UNKNOWN
        watch_optimizers(self, [param.sharded for param in self.params])
        explain_autograd()
        watch_averages()

    @property
    def version(self) -> int:
        """Grows with every edit of a shard, and with every step of an optimizer."""
        return self.num_steps + self.tensors.version

    @property
    def is_stale(self) -> bool:
        """Whether the whole copy is older than the shards."""
        return self.state is not ParamState.SHARDED and self._unsharded_version != self.version

    def record_version(self) -> None:
        """The whole copy is as new as the shards, and may outlast the backward it was made for."""
        if self._unsharded_version == _UNKNOWN:
            self._unsharded_version = self.version

    def owns(self, param: torch.Tensor) -> bool:
        """Whether ``param`` is one of the sharded parameters: see ``optimizer_steps``."""
        return any(own.sharded is param for own in self.params)

    def unsharded_of(self, param: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the whole faces of one of the sharded parameters: see ``autograd_calls``."""
        return next(own.all_unsharded() for own in self.params if own.sharded is param)

    def sharded_of(self, unsharded: torch.Tensor) -> torch.Tensor | None:
        """Return the sharded parameter of one of the whole faces: see ``optimizer_steps``."""
        return next((own.sharded for own in self.params if own.unsharded is unsharded), None)

    def check_may_step(self) -> None:
        """Raise if an optimizer would miss gradients: see ``optimizer_steps``."""
        if self.has_failed:
            raise RuntimeError(
                f"the last backward through unit {self.label!r} raised, so gradients are those of "
                "some units only; run the whole window again (the next forward drops them, as "
                "reset_iter_state() does)."
            )
        self.check_nothing_is_pending()

    def check_nothing_is_pending(self) -> None:
        """Raise if gradients are accumulated that are not in ``.grad``."""
        accumulated = self.accumulated() if self.accumulated is not None else None
        if accumulated is not None and accumulated.pending:
            raise RuntimeError(
                f"unit {self.label!r} holds gradients that are {accumulated.pending}, so they "
                "would be missed; end the window with a backward under GradientSync.FULL (the last "
                "one, set_is_last_backward(True)), call meshard.finalize_gradients(module), or "
                "drop them with zero_grad()."
            )
        if (
            accumulated is not None
            and self.tensors.host_copies is not None
            and self.pending_step is None
        ):
            accumulated.settle()

    def finish_copies(self) -> None:
        """Have nothing on its way between host memory and the device, if shards live there."""
        if self.tensors.host_copies is not None and self.pending_step is None:
            self.tensors.host_copies.wait()

    def make_room(self) -> None:
        """An optimizer is about to step, for which it needs memory: see ``optimizer_steps``."""
        self.comm.release_cached_memory(keep_for=None if self.saves_memory else StepPhase.STEP)

    def record_step(self) -> None:
        """An optimizer has stepped: see ``optimizer_steps``."""
        self.num_steps += 1
        self.saves_memory = False
        accumulated = self.accumulated() if self.accumulated is not None else None
        if accumulated is not None:
            accumulated.close_window()

    def clear_pending(self, ids: set[int]) -> None:
        """Forget pending gradients of the sharded parameters with these ids."""
        accumulated = self.accumulated() if self.accumulated is not None else None
        if accumulated is not None and self.pending_step is None:  # else they have been taken
            cleared = (i for i, param in enumerate(self.params) if id(param.sharded) in ids)
            accumulated.clear(frozenset(cleared))

    # --- gather and let go -----------------------------------------------------------------

    def start_unshard(self, *, only_for_backward: bool = False) -> None:
        """Start gathering, unless that has been done.

        **Collective:** the shard group (or, in backward after ``keep_rows``, its neighbours).
        **Stream:** the gather lane.

        Args:
            only_for_backward: No later forward uses the whole copy. Then it is as forward saw it,
                but for edits of the shards in place: what else has been put in their place is
                left to the next forward.
        """
        if self.state is not ParamState.SHARDED:
            return
        if self.pending_step is not None:
            self.pending_step.before_gather()
        version = _UNKNOWN if only_for_backward else self.adopt_edits()
        self.tensors.check_materialised()
        self.may_keep = True
        self._gathers_post_forward_shard = self._post_forward_shard is not None
        if self._post_forward_shard is not None:
            self._in_flight = self._gather_post_forward_shard(self._post_forward_shard)
            self._post_forward_shard = None
        else:
            self._unsharded_version = version
            try:
                self._in_flight = self.tensors.start_gather(self.comm)
            except RuntimeError as error:
                refuse_transforms(self.label, error)
                raise
        self.state = ParamState.GATHERING

    def _gather_post_forward_shard(self, shard: _PostForwardShard) -> GatherInFlight:
        with self.comm.on_stream(CommStream.GATHER):
            return start_all_gather(
                shard.rows.view(-1),
                shard.group.size(),
                comm=self.comm,
                group=shard.group,
                label=self.label,
            )

    def finish_unshard(self, post_forward_group: dist.ProcessGroup | None = None) -> None:
        """Have the whole parameters, on the current stream.

        Args:
            post_forward_group: Also keep this rank's part of them, so that the next gather is among
                the ranks of this group instead of all.
        """
        if self._in_flight is None:
            self.start_unshard()
        if self._in_flight is None:
            return
        if not self.may_keep:
            post_forward_group = None
        gathered, shard_count = self._in_flight.rows(), self.spec.mesh_info.shard_count
        if self._gathers_post_forward_shard and isinstance(gathered, torch.Tensor):
            gathered = gathered.view(shard_count, -1)
        # No torch.no_grad: nothing here requires a gradient.
        self.tensors.fill_unsharded(gathered, comes_again=post_forward_group is not None)
        if post_forward_group is not None:
            count = shard_count // post_forward_group.size()
            first = post_forward_group.rank() * count
            self._post_forward_shard = _PostForwardShard(
                torch.stack([*gathered[first : first + count]]), post_forward_group
            )
        self._in_flight.end()
        self._in_flight = None
        self.is_leftover = False
        self.pending_step = None
        self.state = ParamState.UNSHARDED

    def forget_stale(self, *, leftover: bool) -> None:
        """Reshard if the whole copy (or what was kept of it) is older than the shards.

        Args:
            leftover: Also if it only was left whole by an earlier forward for its backward. Edits
                by ``.data`` or torch's foreach kernels raise no version, so a copy that nobody
                asked to keep is not trusted.
        """
        self._post_forward_shard = None
        if self.state is ParamState.SHARDED:
            return
        if self.manual_unshard is not None:
            end_manual_unshard(self)
        if self.pending_step is not None or (leftover and self.is_leftover):
            self.reshard()
            return
        if self.adopt_edits() != self._unsharded_version:
            self.reshard()

    def reshard(self, *, keep: bool = False) -> None:
        """Give the whole parameters back.

        Args:
            keep: It will be gathered again: leave what ``finish_unshard`` kept for that.
        """
        if self._in_flight is not None:
            self._in_flight.pending.wait()
            self._in_flight.end()
            self._in_flight = None
            self.tensors.free_unsharded()  # where it was gathered in place
            self.state = ParamState.SHARDED
        if self.manual_unshard is not None:
            end_manual_unshard(self, refuse=False, stays=False)
        self.install_sharded()
        if keep:
            self.saves_memory = True
        else:
            self._post_forward_shard = None
        if self.state is ParamState.UNSHARDED:
            self.tensors.free_unsharded()
            self.state = ParamState.SHARDED

    # --- faces -----------------------------------------------------------------------------

    def install_unsharded(self, *, read_flags: bool = True) -> None:
        """Let the module see whole parameters.

        Args:
            read_flags: With the ``requires_grad`` that the sharded ones have now, and not, as in
                backward, with that of the forward: all ranks reduce what forward has recorded.
        """
        if read_flags:
            self.num_trainable = self._owner_dicts.take_flags()
        self._owner_dicts.install_unsharded()
        self.is_unsharded_installed = True

    def install_sharded(self) -> None:
        """Let the module see its sharded parameters, as it does outside its own forward."""
        if self.is_unsharded_installed:
            self._owner_dicts.install_sharded()
            self.is_unsharded_installed = False
            if self.manual_unshard is not None:
                end_manual_unshard(self, refuse=False)
