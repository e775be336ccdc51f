"""The parameters of one unit, and the lookup of the group that a tensor belongs to."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from meshard._comm.communicator import CommStream, Communicator, GatherInFlight, log_event
from meshard._comm.divergence import explain_failure
from meshard._comm.first_values import FirstValues, sum_of_samples
from meshard._engine.step_state import Failure
from meshard._gradients.accumulator import Gradients
from meshard._params.sharded_param import (
    ShardedParam,
    UnitParam,
    install_sharded,
    install_unsharded,
    take_flags,
    take_frozen,
)
from meshard._params.unit_params import UnitParams
from meshard._torch.dtensor import is_plain, plain_of
from meshard._torch.patches import pending_holders
from meshard._torch.private import graph_task_id, is_in_transform
from meshard._torch.user_line import listed, warn_user

_VERSION = attrgetter("unsharded._version")
_UNKNOWN = -1  # the version of an unsharded copy that later forwards must not reuse


class AwaitedStep(Protocol):
    """The methods that the engine calls of ``optim.overlap.UnitStepper``, in a layer above."""

    def before_gather(self) -> None: ...
    def finish(self) -> None: ...


class ParamState(enum.IntEnum):  # an IntEnum, because hashing one is fast
    """Whether a group is sharded, and which parameters its modules hold."""

    SHARDED = enum.auto()
    GATHERING = enum.auto()
    UNSHARDED = enum.auto()  # gathered; modules hold the sharded parameters
    INSTALLED = enum.auto()  # gathered; modules hold the unsharded parameters
    # Modules hold the parameters of a ``SummonedUnit``. With rank0_only, other ranks hold shards.
    SUMMONED = enum.auto()


_ALLOWED = {
    ParamState.SHARDED: (ParamState.GATHERING, ParamState.SUMMONED),
    ParamState.GATHERING: (ParamState.UNSHARDED, ParamState.SHARDED),
    # UNSHARDED to itself: ``finish_unshard`` was interrupted after ``_move``, and runs again.
    ParamState.UNSHARDED: (ParamState.UNSHARDED, ParamState.INSTALLED, ParamState.SHARDED),
    ParamState.INSTALLED: (ParamState.UNSHARDED,),
    ParamState.SUMMONED: (ParamState.SHARDED,),
}


class Lease:
    """Why a unit is unsharded. The unit is resharded when no lease is left."""

    # Plain ints: a step combines them often, and enum.IntFlag takes ten times as long.
    RUNS = 1  # a forward of the unit runs
    BACKWARD = 2  # its backward runs: from BEGIN to OVER
    KEPT = 4  # a forward has left it unsharded for its backward
    GRAPH = 8  # a create_graph backward has left it unsharded, for a backward through the new graph
    # HIDDEN keeps memory only. The unit is resharded, but the unsharded values stay in memory for a
    # backward that no hook announces.
    HIDDEN = 64
    LATER = KEPT | GRAPH | HIDDEN
    USER = 16  # from unshard() until reshard(), or until the end of a use that reshards
    AHEAD = 32  # the unit was gathered ahead of its use
    LENT = KEPT | USER  # users may read and edit the unsharded parameters
    ALL = 127


@dataclass(frozen=True, slots=True)
class PostForwardShard:
    """The rows that this rank keeps until backward under ``reshard_after_forward=n``."""

    rows: torch.Tensor
    group: dist.ProcessGroup  # n ranks, which together keep all rows


@dataclass(slots=True)
class _Gather:
    """A gather in flight."""

    in_flight: GatherInFlight
    is_post_forward: bool  # True: it gathers post-forward shards


@dataclass(frozen=True, slots=True)
class SummonOptions:
    """The options of the public function that summons a unit: see ``weights.SummonedUnit``."""

    caller: str  # the name of that public function
    writeback: bool
    rank0_only: bool = False
    offload_to_cpu: bool = False

    def check_allows(self, inner: SummonOptions, label: str) -> None:
        ours = (self.caller, self.rank0_only, self.offload_to_cpu)
        is_same = (inner.caller, inner.rank0_only, inner.offload_to_cpu) == ours
        if not is_same or (inner.writeback and not self.writeback):
            raise RuntimeError(
                f"unit {label!r} is unsharded already by {self.caller}(rank0_only="
                f"{self.rank0_only}, offload_to_cpu={self.offload_to_cpu}, writeback="
                f"{self.writeback}); use the same arguments inside, or leave the outer context "
                "first (with writeback=False outside, edits inside are dropped)."
            )

    def unshards_here(self, group: ParamGroup) -> bool:
        """Whether the parameters are unsharded on this rank (``rank0_only``: on the first only)."""
        return not self.rank0_only or group.spec.mesh_info.is_first_rank

    def check_may_run(self, group: ParamGroup) -> None:
        """Raise if only the first rank has the unsharded parameters, and this is another rank."""
        if not self.unshards_here(group):
            raise RuntimeError(
                f"unit {group.label!r} is unsharded on rank 0 only, so it cannot run on this rank; "
                "leave unsharded_params(..., rank0_only=True) before the forward."
            )


def refuse_transforms(label: str, error: RuntimeError) -> None:
    """Raise a clearer error than ``error`` if a transform of torch.func runs around a unit."""
    if is_in_transform():
        raise RuntimeError(
            f"torch.func (grad, vjp, jacrev, hessian) cannot go through unit {label!r}, whose "
            "parameters are gathered and freed; call it inside "
            "meshard.unsharded_params(module), where the module is an ordinary one."
        ) from error


class ParamGroup:
    """The parameters of one unit, with their gradients.

    The lifecycle decides when they are gathered, resharded and reduced; this class does it.
    """

    def __init__(self, unit_params: UnitParams, gradients: Gradients) -> None:
        self.unit_params = unit_params
        self.params = unit_params.params
        self.spec = unit_params.spec
        self.gradients = gradients
        self.num_trainable = 0
        # Optimizer steps so far. Version counters do not show all of them: torch's foreach kernels
        # edit a DTensor without raising its version.
        self.num_steps = 0
        self.num_rebuilds = 0  # how often the unsharded parameters were rebuilt
        self.was_resharded_between = False  # a forward since the last step has resharded the unit
        self.keeps_storage = False  # whether reshard keeps the memory of unsharded parameters
        self.failure: Failure  # shared by all units of a root; ``Root`` sets it
        self.modules: list[weakref.ref[nn.Module]] = []  # of the unit; ``Root`` sets it
        self.leases = 0  # see ``Lease``
        self._num_given_back = 0  # how often the user's unshard() has ended
        self.pending_step: AwaitedStep | None = None  # the next gather waits for this step
        self.state = ParamState.SHARDED  # written by _move only
        self.summoned_by: SummonOptions  # set while the state is SUMMONED
        self._gather: _Gather | None = None
        self._post_forward_shard: PostForwardShard | None = None
        # Two sums over a few elements of the initial weights. Ranks compare the first, over
        # unsharded weights. The second, over this rank's shards, shows whether the shards were
        # written to since. None: nothing was recorded.
        self._first: tuple[FirstValues, torch.Tensor] | None = None
        # The optimizers of ``overlap_optimizer`` that step these parameters.
        self.overlapped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # From the id of a sharded parameter to its index. Ids of replaced parameters are not
        # removed, and may belong to other tensors by now. So ``owner_of`` compares tensors too.
        self.indices: dict[int, int] = {}
        self._unsharded_version = _UNKNOWN
        self._steps_of_copy = 0  # ``num_steps`` when the unsharded parameters were filled last
        self._versions: list[int] = []  # of unsharded parameters, after the engine's last write
        self._has_warned = False  # of edits of unsharded parameters
        # For each parameter, the ``requires_grad`` that both of its tensors had when the engine
        # last made them equal. If one of the two has another value now, the user has set it.
        self._flags: list[bool] = []
        register_owner(self)

    @property
    def comm(self) -> Communicator:
        return self.unit_params.comm

    @property
    def label(self) -> str:
        return self.unit_params.label

    def _move(self, to: ParamState) -> None:
        assert to in _ALLOWED[self.state], f"unit {self.label!r}: {self.state} to {to}"
        self.state = to

    @property
    def holds_shards(self) -> bool:
        """Whether modules hold the sharded parameters. False while the unit is summoned."""
        return self.state not in (ParamState.INSTALLED, ParamState.SUMMONED)

    @property
    def is_summoned(self) -> bool:
        return self.state is ParamState.SUMMONED

    def summon(self, options: SummonOptions) -> None:
        self._move(ParamState.SUMMONED)
        self.summoned_by = options

    def dismiss(self) -> None:
        self._move(ParamState.SHARDED)

    def check_not_summoned(self, what: str) -> None:
        if self.is_summoned:
            raise RuntimeError(
                f"unit {self.label!r} is inside unsharded_params, so it cannot be {what}; leave "
                "that block first."
            )

    # --- edits from outside -----------------------------------------------------------

    def adopt_edits(self) -> int:
        """Adopt parameters that the user has replaced since the last use. Return ``version``."""
        version = self.unit_params.version_unless_replaced()
        if version is not None:
            return self.num_steps + version
        self.check_not_summoned("stepped, moved or gathered")
        before = [param.sharded for param in self.params]
        # This may run in an evaluation in inference mode, and the module may train later. So the
        # tensors made here must not be inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            if self.unit_params.take_replacements():
                pairs = enumerate(zip(self.params, before, strict=True))
                gone = frozenset(index for index, (param, old) in pairs if param.sharded is not old)
                if gone:
                    self.gradients.clear(gone)  # pending gradients are of the old parameters
                self._versions = list(map(_VERSION, self.params))
                self.reshard()
                self.unit_params.rebuild()
                self.gradients.rebuild()
                self.num_rebuilds += 1
                self.forget_version()
                register_owner(self)
        return self.version

    @property
    def version(self) -> int:
        """A number that grows with each step and edit: see ``UnitParams.version``."""
        return self.num_steps + self.unit_params.version

    def forget_version(self) -> None:
        self._unsharded_version = _UNKNOWN

    def record_first_values(self, unsharded: list[torch.Tensor]) -> None:
        """Record a sample of ``unsharded`` and one of the shards. Meta tensors are left out."""
        which = tuple(index for index, each in enumerate(unsharded) if not each.is_meta)
        total = sum_of_samples([unsharded[index] for index in which])
        sharded = sum_of_samples(self._shards(which))
        if total is not None and sharded is not None:
            self._first = FirstValues(which, total), sharded

    def first_values(self) -> FirstValues | None:
        """Return the recorded sample, if any, and whether the shards were written to since."""
        if self._first is None:
            return None
        values, sharded = self._first
        shards = self._shards(values.which)
        # Compare values, because writes through ``param.data`` do not raise the version counter.
        now = sum_of_samples(shards)
        is_written = now is None or int(now) != int(sharded)
        has_elements = is_written or any(shard.numel() for shard in shards)
        return values._replace(is_written=is_written if has_elements else None)

    def _shards(self, which: Sequence[int]) -> list[torch.Tensor]:
        return [plain_of(self.params[index].sharded).detach() for index in which]

    # --- optimizer steps --------------------------------------------------------------

    def check_may_step(self) -> None:
        if self.failure.has_happened():
            raise RuntimeError(
                f"the last backward through unit {self.label!r} raised, or a microbatch of its "
                "loop, so some gradients are missing; run the whole window again (the next forward "
                "drops them, as reset_iter_state() does)."
            )
        grads = self.gradients
        if grads.is_replicated and graph_task_id() >= 0:
            raise RuntimeError(
                f"an optimizer with parameters of unit {self.label!r}, which is replicated, was "
                "stepped inside the backward, before gradients were reduced, so ranks would drift "
                "apart. To step in backward call meshard.overlap_optimizer."
            )
        self.check_nothing_is_pending()

    def check_nothing_is_pending(self) -> None:
        grads = self.gradients
        if grads.window.is_in_loop and (grads.pending or grads.window.is_open):
            held = grads.pending or "those of some microbatches only"
            raise RuntimeError(
                "step, clip and save after the loop over microbatches(), not inside: "
                f"unit {self.label!r} holds gradients that are {held}. "
                "(zero_grad() inside the loop drops them.)"
            )
        if grads.pending:
            raise RuntimeError(
                f"unit {self.label!r} holds gradients that are {grads.pending}, so they "
                "would be missed; end the window with a backward under GradientSync.FULL (the last "
                "one, set_is_last_backward(True)), or call meshard.finalize_gradients(module); "
                "under set_manual_backward_finalization(True) call finalize_backward() of the "
                "root, and wait() of its handle. Or drop them with zero_grad()."
            )
        self.settle()

    def settle(self) -> None:
        """Wait for gradients that are being copied to host memory, and put them into ``.grad``."""
        if self.unit_params.host_copies is not None and not self._steps_everything():
            with self.failure.recorded():
                self.gradients.settle()

    def finish_copies(self) -> None:
        """Wait for copies between host memory and the device."""
        if self.unit_params.host_copies is not None and not self._steps_everything():
            self.unit_params.host_copies.wait()

    def _steps_everything(self) -> bool:
        """Whether a pending step has taken all gradients. It waits for their copies itself.

        If another optimizer has some, this finishes the pending step.
        """
        if self.pending_step is None:
            return False
        if all(param.sharded.grad is None for param in self.params):
            return True
        self.finish_pending_step()
        return False

    def finish_pending_step(self) -> None:
        if self.pending_step is not None:
            self.pending_step.finish()

    def record_step(self) -> None:
        log_event("step", self.unit_params.label)
        if not self.leases & Lease.USER:
            self.install_sharded()  # the unsharded copy is stale now
        self.num_steps += 1
        self.was_resharded_between = False
        self.gradients.end_window()

    def clear_pending(self, ids: set[int]) -> None:
        if not self._steps_everything():
            cleared = (i for i, param in enumerate(self.params) if id(param.sharded) in ids)
            self.gradients.clear(frozenset(cleared))

    # --- leases -------------------------------------------------------------------------

    def take(self, why: int, post_forward_group: dist.ProcessGroup | None = None) -> None:
        """Take the lease ``why``: gather the parameters if they are sharded, and install them.

        **Collective:** as ``start_unshard``, if the parameters are sharded.
        """
        self.finish_unshard(post_forward_group)
        self.leases = (self.leases | why) & ~Lease.AHEAD
        if self.leases & Lease.LENT:
            pending_holders.add(self)
        self._install_unsharded()

    def keep(self, why: int = Lease.KEPT) -> None:
        """Take the lease ``why`` on unsharded parameters, for a backward that will read them."""
        if self._unsharded_version == _UNKNOWN:
            self._unsharded_version = self.version  # so that a forward may use them too
        self.leases |= why
        if why == Lease.KEPT:
            pending_holders.add(self)

    def release(
        self, why: int, *, keep_post_forward: bool = False, keeps_copy: bool = False
    ) -> None:
        """End the leases ``why``. If no lease is left, reshard.

        With ``keeps_copy``, only install the shards: the unsharded copy stays for the next use.
        """
        if why & self.leases & Lease.LENT:
            self._carry_flags()
            if why & Lease.USER:
                self.end_unshard()
        is_freed = self.leases & why & Lease.HIDDEN and self.state is ParamState.SHARDED
        self.leases &= ~why
        if is_freed and not self.keeps_storage:
            self.unit_params.free_unsharded()
        is_free = not self.leases & ~Lease.HIDDEN
        if is_free and keeps_copy:
            self.install_sharded()
        elif is_free:
            self.reshard(keep_post_forward=keep_post_forward)

    def start_for_user(self) -> int:
        """Start gathering for the user's ``unshard()``. Returns a number for ``finish_for_user``.

        **Collective:** the shard group.
        """
        self.drop_if_stale()
        self.start_unshard()
        self.leases |= Lease.USER
        return self._num_given_back

    def finish_for_user(self, number: int) -> None:
        """Install the gathered parameters, unless the ``unshard()`` that gathered has ended."""
        if self.leases & Lease.USER and self._num_given_back == number:
            self.take(Lease.USER)
            self.void_graphs_of_older_steps()
            self.read_flags()

    def end_unshard(self, *, voids_graphs: bool = False) -> None:
        """End the user's ``unshard()``. The caller takes another lease, or reshards.

        With ``voids_graphs``, autograd refuses a backward through any graph that has saved the
        unsharded parameters, because no hook would gather them again.
        """
        if not self.leases & Lease.USER:
            return
        self._carry_flags()
        self.leases &= ~Lease.USER
        self._num_given_back += 1
        if voids_graphs:
            self._void_graphs()

    # --- gather and reshard -----------------------------------------------------------

    def start_unshard(self, *, only_for_backward: bool = False) -> None:
        """Start gathering, unless a gather has begun or the parameters are unsharded.

        With ``only_for_backward``, do not look for edits of the shards: the unit is resharded after
        the backward, so the next forward gathers it again.
        **Collective:** the shard group, or the group of the post-forward shard if one is kept.
        """
        if self.state is not ParamState.SHARDED:
            return
        log_event("unshard", self.unit_params.label)
        if self.pending_step is not None:
            self.pending_step.before_gather()
        version = _UNKNOWN if only_for_backward else self.adopt_edits()
        self.unit_params.check_materialised()
        shard = self._post_forward_shard
        if shard is not None:
            with self.comm.on_stream(CommStream.GATHER):
                in_flight = self.comm.gather(
                    shard.rows.view(-1), group=shard.group, label=self.label
                )
            self._post_forward_shard = None
        else:
            self._unsharded_version = version
            try:
                in_flight = self.unit_params.start_gather(self.comm)
            except RuntimeError as error:
                refuse_transforms(self.label, error)
                raise
        self._gather = _Gather(in_flight, shard is not None)
        self._move(ParamState.GATHERING)

    def finish_unshard(self, post_forward_group: dist.ProcessGroup | None = None) -> None:
        """Gather the parameters if need be, and wait. On a device only the current stream waits.

        With a ``post_forward_group``, also keep this rank's post-forward shard. The next gather is
        then among the ranks of that group only.
        """
        if self.state is ParamState.SHARDED:
            self.start_unshard()
        gather = self._gather
        if gather is None:
            return
        try:
            rows, shard_count = gather.in_flight.rows(), self.spec.mesh_info.shard_count
        except RuntimeError as error:
            explain_failure(error, f"all-gather of unit {self.label!r}")
            raise
        if gather.is_post_forward:
            rows = [block.view(shard_count // len(rows), -1) for block in rows]
        # torch.no_grad() is not needed: nothing here requires grad, or the method disables it.
        self.unit_params.all_gather_copy_out(rows)
        if post_forward_group is not None:
            count = shard_count // post_forward_group.size()
            first = post_forward_group.rank() * count
            own = [row for block in rows for row in block][first : first + count]
            self._post_forward_shard = PostForwardShard(torch.stack(own), post_forward_group)
        self.pending_step = None
        self._move(ParamState.UNSHARDED)
        self._versions = list(map(_VERSION, self.params))
        self._gather = None
        log_event("unsharded", self.unit_params.label)
        gather.in_flight.release()  # the rows were copied, or are parameters' memory

    def void_graphs_of_older_steps(self) -> None:
        """Make autograd refuse a backward through graphs from before the last optimizer step.

        A step raises the version of an ordinary parameter, and autograd compares versions. Here a
        step edits shards, and a gather raises no versions of unsharded parameters. So raise them.
        """
        if self._steps_of_copy != self.num_steps:
            self._steps_of_copy = self.num_steps
            self._void_graphs()

    def _void_graphs(self) -> None:
        if self.state in (ParamState.UNSHARDED, ParamState.INSTALLED):
            self._warn_of_edits()
        copies = (param.unsharded for param in self.params if param.unsharded is not param.sharded)
        increment_version([plain_of(each) for each in copies])
        self._versions = list(map(_VERSION, self.params))

    def drop_if_stale(self) -> None:
        """Drop the post-forward shard; also the unsharded copy, if shards were edited since."""
        self._post_forward_shard = None
        if self.state is ParamState.SHARDED:
            return
        self._carry_flags()
        if self.adopt_edits() != self._unsharded_version:
            self.reshard()

    def reshard(self, *, keep_post_forward: bool = False) -> None:
        """Install the shards, and free the unsharded copy unless ``keeps_storage`` or HIDDEN.

        The post-forward shard is dropped too, unless ``keep_post_forward``.
        """
        if self._gather is not None:
            # The gather may still write to the memory that is freed below, so end it first.
            self._gather.in_flight.abandon()
            self._gather = None
        if keep_post_forward:
            self.was_resharded_between = True
        else:
            self._post_forward_shard = None
        if self.state is ParamState.SHARDED:
            return
        if self.state in (ParamState.UNSHARDED, ParamState.INSTALLED):
            self._warn_of_edits()
        self.install_sharded()
        if self.state in (ParamState.GATHERING, ParamState.UNSHARDED):
            log_event("reshard", self.unit_params.label)
            self._move(ParamState.SHARDED)
            if not self.keeps_storage and not self.leases & Lease.HIDDEN:
                self.unit_params.free_unsharded()

    def _warn_of_edits(self) -> None:
        """Warn if the user has edited unsharded parameters: they are a copy, so edits are lost."""
        versions = list(map(_VERSION, self.params))
        if versions == self._versions or self._has_warned:
            return
        if self._unsharded_version not in (_UNKNOWN, self.version):
            return  # the shards were edited too, for example by load_state_dict
        pairs = zip(self.params, versions, self._versions, strict=True)
        edited = [param for param, now, before in pairs if now != before and self._differs(param)]
        if edited:
            self._has_warned = True
            warn_user(
                f"parameter(s) {listed([param.fqn for param in edited])} of unit {self.label!r} "
                "were edited while unsharded, as by their module's forward, and these edits are "
                "lost: they were made to a copy. Edit them inside meshard.unsharded_params(module)."
            )

    def _differs(self, param: UnitParam) -> bool:
        """Whether this rank's part of an unsharded parameter differs from the shard."""
        shard, unsharded = plain_of(param.sharded).detach(), plain_of(param.unsharded).detach()
        if (
            param.unsharded is param.sharded
            or not is_plain(unsharded)
            or unsharded.shape != param.layout.shape
        ):
            return False
        own = param.layout.own_part(unsharded, self.spec.mesh_info.shard_rank)
        return not torch.equal(own, shard.to(own.device, own.dtype))

    def keep_storage(self, keep: bool) -> None:
        self.keeps_storage = keep
        if not keep and self.state in (ParamState.SHARDED, ParamState.SUMMONED):
            self.unit_params.free_unsharded()

    # --- what modules hold ------------------------------------------------------------

    def read_flags(self) -> None:
        """Before a forward: adopt the ``requires_grad`` that users have set on either copy."""
        self._flags = take_flags(self.params, self._flags)
        self.num_trainable = sum(self._flags)

    def count_out_frozen(self) -> None:
        """In a backward: freeze unsharded parameters whose shards were frozen since the forward.

        Skipped while modules hold the unsharded parameters: users freeze these directly.
        """
        if self.state is not ParamState.INSTALLED:
            self.num_trainable -= take_frozen(self.params)

    def _install_unsharded(self) -> None:
        if self.state is not ParamState.INSTALLED:
            # The state changes first, so that a clean-up after an interrupt knows what to undo.
            self._move(ParamState.INSTALLED)
            install_unsharded(self.params)

    def install_sharded(self) -> None:
        """Make modules hold the sharded parameters."""
        self._carry_flags()
        if self.state is ParamState.INSTALLED:
            install_sharded(self.params)
            self._move(ParamState.UNSHARDED)
            pending_holders.discard(self)

    def _carry_flags(self) -> None:
        """Copy the ``requires_grad`` that users have set on unsharded parameters to the shards."""
        if self.leases & Lease.LENT and self.state is not ParamState.SUMMONED:
            self._flags = take_flags(self.params, self._flags)


def sharded_params(group: ParamGroup) -> list[ShardedParam]:
    """Return the sharded parameters of a group: all of them, or none under ``replicate``."""
    return [param for param in group.params if isinstance(param, ShardedParam)]


# --- which group a tensor belongs to, for optimizers and for gradient clipping ----------------

# The keys are ids of tensors. Tensors as keys would stay alive, and torch's ``Module.to`` cannot
# swap a tensor that has a weak reference. A freed id may belong to another tensor later, so
# ``owner_of`` and ``sharded_params_of`` check what they find. ``has_been_sharded`` does not: it
# only decides about a warning.
_owners: weakref.WeakValueDictionary[int, ParamGroup] = weakref.WeakValueDictionary()
_copies: weakref.WeakValueDictionary[int, ParamGroup] = weakref.WeakValueDictionary()
_latest = object()  # a token for caches: see ``latest_registration``


def register_owner(owner: ParamGroup) -> None:
    """Record ``owner`` as the group of its sharded parameters, which may be new tensors."""
    global _latest
    for index, param in enumerate(owner.params):
        owner.indices[id(param.sharded)] = index
        _owners[id(param.sharded)] = owner
        if param.unsharded is not param.sharded:
            _copies[id(param.unsharded)] = owner
    _latest = object()


def latest_registration() -> object:
    """Return a token for caches, which changes with the parameters that optimizers may hold."""
    return _latest


def owner_of(param: torch.Tensor) -> ParamGroup | None:
    """Return the group that has ``param`` itself as a sharded parameter, if there is one."""
    owner = _owners.get(id(param))
    is_own = owner is not None and owner.params[owner.indices[id(param)]].sharded is param
    return owner if is_own else None


def owners_of(params: Iterable[torch.Tensor]) -> list[ParamGroup]:
    """Return the groups that have one of ``params`` as a sharded parameter, each once."""
    return list(dict.fromkeys(owner for each in params if (owner := owner_of(each)) is not None))


def all_owners() -> set[ParamGroup]:
    """Return all groups that have parameters."""
    return set(_owners.values())


def has_been_sharded(param: torch.Tensor) -> bool:
    """Whether a group has, or had, a sharded parameter with the id of ``param``."""
    return id(param) in _owners


def register_summoned(owner: ParamGroup) -> None:
    """Record the parameters that modules hold while their unit is summoned."""
    for held, _ in _unsharded_of(owner):
        _copies[id(held)] = owner
    # torch's module.zero_grad() clears only what modules hold. Our patch of it clears the sharded
    # parameters too, but only while ``pending_holders`` is not empty.
    pending_holders.add(owner)


def forget_summoned(owner: ParamGroup) -> None:
    """Undo ``register_summoned``."""
    global _latest
    _latest = object()  # optimizers cannot hold those parameters any more
    for held, _ in _unsharded_of(owner):
        _copies.pop(id(held), None)
    pending_holders.discard(owner)


def _unsharded_of(owner: ParamGroup) -> Iterator[tuple[torch.Tensor | None, torch.Tensor]]:
    """Iterate over the unsharded tensors that modules may hold, each with its sharded parameter."""
    for param in owner.params:
        for held in param.installed() if owner.is_summoned else (param.unsharded,):
            yield held, param.sharded


def sharded_params_of(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return ``params`` with each unsharded parameter replaced by its sharded one."""
    if not _copies:
        return list(params)
    given = list(params)
    owners = {owner for param in given if (owner := _copies.get(id(param))) is not None}
    # An id may be that of a freed tensor. So compare with the tensors that are alive.
    sharded = {id(held): param for owner in owners for held, param in _unsharded_of(owner)}
    return [sharded.get(id(param), param) for param in given]
