"""The parameters of one unit, and functions that find the ``ParamGroup`` of a given tensor."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from meshard._comm.communicator import CommStream, Communicator, Handle, log_event, ranged
from meshard._comm.divergence import explain_failure
from meshard._comm.first_values import FirstValues
from meshard._gradients.accumulator import Gradients
from meshard._gradients.zero_grad import pending_holders
from meshard._params.unit_params import (
    ShardedParam,
    UnitParam,
    UnitParams,
    take_flags,
    take_frozen,
)
from meshard._torch.dtensor import is_plain, plain_of
from meshard._torch.private import graph_task_id, is_in_transform
from meshard._torch.user_line import listed, warn_user

if TYPE_CHECKING:
    from meshard._engine.unit import Failure

_VERSION = attrgetter("unsharded._version")
_UNKNOWN = -1  # version of unsharded parameters that the next forward must gather again


class AwaitedStep(Protocol):
    """What the engine calls of an optimizer step in backward: ``optim.overlap.UnitStepper``."""

    def before_gather(self) -> None: ...
    def finish(self) -> None: ...


class ParamState(enum.IntEnum):  # an IntEnum, because hashing one is fast
    """Whether a group is sharded, and which parameters its modules hold."""

    SHARDED = enum.auto()
    GATHERING = enum.auto()
    UNSHARDED = enum.auto()  # gathered; modules hold the sharded parameters
    INSTALLED = enum.auto()  # gathered; modules hold the unsharded parameters
    # Inside a block of ``unsharded_params``, which has put parameters of its own into the modules.
    SUMMONED = enum.auto()


class Lease:
    """The reasons for which a unit stays unsharded. When none is left, it is resharded."""

    # Plain ints: a step combines them often, and enum.IntFlag takes ten times as long.
    RUNS = 1  # a forward of the unit runs
    BACKWARD = 2  # a backward of the unit runs
    KEPT = 4  # a forward has left the unit unsharded for the backward
    GRAPH = 8  # a create_graph=True backward has left it unsharded, for a backward of the new graph
    # HIDDEN: modules hold the shards, but the unsharded values stay in memory, because a backward
    # may read them without a hook that could gather them.
    HIDDEN = 64
    LATER = KEPT | GRAPH | HIDDEN
    USER = 16  # from the user's unshard() to reshard(), or a forward or backward that reshards
    AHEAD = 32  # prefetched: a unit that runs before this one has started the gather
    LENT = KEPT | USER  # outside of forwards too, users may read and edit unsharded parameters
    ALL = 127


@dataclass(frozen=True, slots=True)
class PostForwardShard:
    """What this rank keeps of the parameters until backward under ``reshard_after_forward=n``."""

    rows: torch.Tensor  # the shards of several ranks, one per row
    group: dist.ProcessGroup  # n ranks, which together keep the shards of all ranks


@dataclass(frozen=True, slots=True)
class SummonOptions:
    """The user's arguments to the public function ``caller``, such as ``unsharded_params``."""

    caller: str
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
        """Whether this rank gets unsharded parameters. ``rank0_only``: the first rank gets them."""
        return not self.rank0_only or group.spec.mesh_info.is_first_rank

    def check_may_run(self, group: ParamGroup) -> None:
        """Raise if only the first rank has the unsharded parameters, and this is another rank."""
        if not self.unshards_here(group):
            raise RuntimeError(
                f"unit {group.label!r} is unsharded on rank 0 only, so it cannot run on this rank; "
                "leave unsharded_params(..., rank0_only=True) before the forward."
            )


class ParamGroup:
    """The parameters of one unit, with their gradients.

    ``Lifecycle`` decides when the parameters are gathered and resharded; this class does it.
    """

    def __init__(self, unit_params: UnitParams, gradients: Gradients) -> None:
        self.unit_params = unit_params
        self.params = unit_params.params
        self.spec = unit_params.spec
        self.gradients = gradients
        self.num_trainable = 0
        # Optimizer steps so far. Version counters of shards do not show all steps: torch's foreach
        # kernels edit a DTensor without raising its version.
        self.num_steps = 0
        self.num_rebuilds = 0  # how often users have replaced parameters, as by module.to()
        self.keeps_storage = False  # whether reshard keeps the memory of unsharded parameters
        self.failure: Failure  # one object for all units of a root; ``Root`` sets it
        self.modules: list[weakref.ref[nn.Module]] = []  # the unit's modules; ``Root`` sets them
        self.leases = 0  # bits of ``Lease``: why the unit stays unsharded
        self.pending_step: AwaitedStep | None = None  # optimizer step; the next gather awaits it
        self.state = ParamState.SHARDED
        self.summoned_by: SummonOptions  # valid while the state is SUMMONED
        self._gather: Handle | None = None
        self._post_forward_shard: PostForwardShard | None = None
        # Two sums over a few elements of the initial weights: one of the unsharded weights, which
        # ranks compare, and one of this rank's shards, to tell whether these were written to since,
        # as by load_state_dict. None: no sum was recorded.
        self._first: FirstValues | None = None
        # The optimizers of ``overlap_optimizer`` that step these parameters.
        self.overlapped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # From the id() of a sharded parameter to its index in ``params``. Ids of parameters that
        # users have replaced stay here, and other tensors may have got these ids since.
        self.indices: dict[int, int] = {}
        self._unsharded_version = _UNKNOWN
        self._steps_of_copy = 0  # ``num_steps`` when a forward or backward last used the parameters
        self._versions: list[int] = []  # of unsharded parameters, after meshard's last write
        self._has_warned = False  # that the user's edits of unsharded parameters are lost
        # ``requires_grad`` of each parameter, when the sharded and the unsharded tensor were last
        # made to agree. If one of the two has another value now, the user has set it.
        self._flags: list[bool] = []
        register_owner(self)

    @property
    def comm(self) -> Communicator:
        return self.unit_params.comm

    @property
    def label(self) -> str:
        return self.unit_params.label

    @property
    def holds_shards(self) -> bool:
        """Whether modules hold the sharded parameters. False inside ``unsharded_params``."""
        return self.state not in (ParamState.INSTALLED, ParamState.SUMMONED)

    @property
    def is_at_rest(self) -> bool:
        """Whether the group is sharded, and nothing is kept of what a forward has gathered."""
        return not self.leases and not self._post_forward_shard and self.state is ParamState.SHARDED

    @property
    def is_summoned(self) -> bool:
        return self.state is ParamState.SUMMONED

    def summon(self, options: SummonOptions) -> None:
        self.state = ParamState.SUMMONED
        self.summoned_by = options

    def dismiss(self) -> None:
        self.state = ParamState.SHARDED

    def check_not_summoned(self, what: str) -> None:
        if self.is_summoned:
            raise RuntimeError(
                f"unit {self.label!r} is inside unsharded_params, so it cannot be {what}; leave "
                "that block first."
            )

    # --- edits from outside -----------------------------------------------------------

    def adopt_edits(self) -> int:
        """Take over parameters that users have replaced, as by module.to(). Return ``version``."""
        if not self.unit_params.has_replacements:
            return self.version
        self.check_not_summoned("stepped, moved or gathered")
        before = [param.sharded for param in self.params]
        # An evaluation under torch.inference_mode() may call this, and the module may train later.
        # So the tensors made here must not be inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            if self.unit_params.take_replacements():
                pairs = enumerate(zip(self.params, before, strict=True))
                gone = frozenset(index for index, (param, old) in pairs if param.sharded is not old)
                if gone:
                    self.gradients.clear(gone)  # accumulated for parameters that are replaced now
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
        """A number that grows with each optimizer step, and as edits raise version counters."""
        return self.num_steps + self.unit_params.version

    def forget_version(self) -> None:
        self._unsharded_version = _UNKNOWN

    def record_first_values(self, unsharded: list[torch.Tensor]) -> None:
        """Record a sample of ``unsharded``, from which the shards were cut."""
        self._first = FirstValues.of(unsharded, self._shards())

    def first_values(self) -> FirstValues | None:
        """Return the sample of initial weights, if there is one."""
        return self._first and self._first.compared_with(self._shards())

    def _shards(self) -> list[torch.Tensor]:
        return [plain_of(param.sharded).detach() for param in self.params]

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
        """Whether an optimizer step in backward has taken all gradients, and waits for copies.

        If a gradient is left in ``.grad``, for another optimizer, finish that step; return False.
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
            self.install_sharded()  # the unsharded values are those from before the step
        self.num_steps += 1
        self.gradients.end_window()

    def clear_pending(self, ids: set[int]) -> None:
        if not self._steps_everything():
            cleared = (i for i, param in enumerate(self.params) if id(param.sharded) in ids)
            self.gradients.clear(frozenset(cleared))

    # --- leases -------------------------------------------------------------------------

    def take(self, why: int, post_forward_group: dist.ProcessGroup | None = None) -> None:
        """Gather if need be, put unsharded parameters into modules, and record the lease ``why``.

        **Collective:** the shard group (or that of a ``PostForwardShard``), if no gather has begun.
        """
        self.finish_unshard(post_forward_group)
        self.leases = (self.leases | why) & ~Lease.AHEAD
        if self.leases & Lease.LENT:
            pending_holders.add(self)
        if self.state is not ParamState.INSTALLED:
            # Change the state first, so that a clean-up after Ctrl-C knows what to undo.
            self.state = ParamState.INSTALLED
            # What the user has assigned to a module between forward and backward stays there, and
            # the next forward adopts it. The backward does not read it: it reads no attributes of
            # modules, unless a checkpoint runs a forward again.
            for param in self.params:
                for parameters, name in param.owner_dicts:
                    if parameters.get(name) is param.sharded:
                        parameters[name] = param.unsharded

    def keep(self, why: int = Lease.KEPT) -> None:
        """Keep the unit unsharded for the reason ``why``: a later backward will read parameters."""
        if self._unsharded_version == _UNKNOWN:
            self._unsharded_version = self.version  # so that the next forward need not gather
        self.leases |= why
        if why == Lease.KEPT:
            pending_holders.add(self)

    def release(
        self, why: int, *, keep_post_forward: bool = False, keeps_copy: bool = False
    ) -> None:
        """End the leases in ``why``. If no lease but HIDDEN is left, reshard.

        With ``keeps_copy``, only put shards into modules, and do not free the unsharded parameters.
        ``keep_post_forward``: see ``reshard``.
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

    def start_for_user(self) -> None:
        """Start gathering for the user's ``unshard()``.

        **Collective:** the shard group.
        """
        self.drop_if_stale()
        self.start_unshard()
        self.leases |= Lease.USER

    def finish_for_user(self) -> None:
        """Put the gathered parameters into modules, unless the user's ``unshard()`` has ended."""
        if self.leases & Lease.USER:
            self.take(Lease.USER)
            self.void_graphs_of_older_steps()
            self.read_flags()

    def end_unshard(self, *, voids_graphs: bool = False) -> None:
        """End the user's ``unshard()``. The caller reshards, or keeps the unit for another reason.

        With ``voids_graphs``, autograd will refuse a backward through any graph that has saved the
        unsharded parameters: once they are freed, no hook would gather them for that backward.
        """
        if not self.leases & Lease.USER:
            return
        self._carry_flags()
        self.leases &= ~Lease.USER
        if voids_graphs:
            self._void_graphs()

    # --- gather and reshard -----------------------------------------------------------

    def start_unshard(self, *, only_for_backward: bool = False) -> None:
        """Start gathering, unless a gather has begun or the parameters are unsharded.

        With ``only_for_backward``, do not look for edits of the shards: the unit is resharded after
        the backward, so the next forward gathers it again.
        **Collective:** the shard group; if this rank has a ``PostForwardShard``, its group instead.
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
                self._gather = self.comm.all_gather(
                    shard.rows.view(-1), group=shard.group, label=self.label
                )
            self._post_forward_shard = None
        else:
            self._unsharded_version = version
            try:
                self._gather = self.unit_params.start_gather(self.comm)
            except RuntimeError as error:
                if is_in_transform():
                    raise RuntimeError(
                        "torch.func (grad, vjp, jacrev, hessian) cannot go through unit "
                        f"{self.label!r}, whose parameters are gathered and freed; call it inside "
                        "meshard.unsharded_params(module), where the module is an ordinary one."
                    ) from error
                raise
        self.state = ParamState.GATHERING

    def finish_unshard(self, post_forward_group: dist.ProcessGroup | None = None) -> None:
        """Gather the parameters if need be, and wait. On a device only the current stream waits.

        With a ``post_forward_group``, also keep this rank's ``PostForwardShard``, so that the
        gather of the backward is among the ranks of that group only.
        """
        if self.state is ParamState.SHARDED:
            self.start_unshard()
        gather = self._gather
        if gather is None:
            return
        try:
            gather.wait()
        except RuntimeError as error:
            explain_failure(error, f"all-gather of unit {self.label!r}")
            raise
        gathered, shard_count = gather.result, self.spec.mesh_info.shard_count
        if gathered.size(0) != shard_count:  # each rank has sent the shards of several
            gathered = gathered.view(shard_count, -1)
        if post_forward_group is not None:
            own = gathered.chunk(post_forward_group.size())[post_forward_group.rank()]
            self._post_forward_shard = PostForwardShard(own.clone(), post_forward_group)
        # No torch.no_grad(): no gathered tensor requires grad, or all_gather_copy_out disables it.
        with ranged("copy_out", self.label):
            self.unit_params.all_gather_copy_out(gathered)
        self.pending_step = None
        self.state = ParamState.UNSHARDED
        self._versions = list(map(_VERSION, self.params))
        self._gather = None
        log_event("unsharded", self.unit_params.label)
        gather.release()

    def void_graphs_of_older_steps(self) -> None:
        """Make autograd refuse a backward through graphs from before the last optimizer step.

        Autograd compares versions, and a step raises those of the tensors that it edits: here of
        shards. A gather raises no versions of unsharded parameters, so this method raises them.
        """
        if self._steps_of_copy != self.num_steps:
            self._steps_of_copy = self.num_steps
            self._void_graphs()

    def _void_graphs(self) -> None:
        if self.state in (ParamState.UNSHARDED, ParamState.INSTALLED):
            self._warn_of_edits()
        copies = [each.unsharded for each in self.params if each.unsharded is not each.sharded]
        increment_version([plain_of(each) for each in copies])
        self._versions = list(map(_VERSION, self.params))

    def drop_if_stale(self) -> None:
        """Before a forward: reshard if shards were edited; always drop the ``PostForwardShard``."""
        self._post_forward_shard = None
        if self.state is ParamState.SHARDED:
            return
        self._carry_flags()
        if self.adopt_edits() != self._unsharded_version:
            self.reshard()

    def reshard(self, *, keep_post_forward: bool = False) -> None:
        """Put shards into modules. Free unsharded memory unless ``keeps_storage`` or HIDDEN is set.

        Drop the ``PostForwardShard`` too, except at the end of a forward (``keep_post_forward``).
        """
        if self._gather is not None:
            # The gather may still write to the memory that is freed below, so end it first.
            self._gather.release()
            self._gather = None
        if not keep_post_forward:
            self._post_forward_shard = None
        if self.state is ParamState.SHARDED:
            return
        if self.state in (ParamState.UNSHARDED, ParamState.INSTALLED):
            self._warn_of_edits()
        self.install_sharded()
        if self.state in (ParamState.GATHERING, ParamState.UNSHARDED):
            log_event("reshard", self.unit_params.label)
            self.state = ParamState.SHARDED
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
        """Whether an unsharded parameter differs from this rank's shard; False if incomparable."""
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
        """Make shards and unsharded parameters agree on ``requires_grad``, and count trained ones.

        Called before a forward, and when the user's ``unshard()`` is over.
        """
        self._flags = take_flags(self.params, self._flags)
        self.num_trainable = sum(self._flags)

    def count_out_frozen(self) -> None:
        """In a backward: freeze unsharded parameters whose shards users froze since the forward.

        Skipped while modules hold the unsharded parameters: then users freeze these directly.
        """
        if self.state is not ParamState.INSTALLED:
            self.num_trainable -= take_frozen(self.params)

    def install_sharded(self) -> None:
        """Make modules that hold the unsharded parameters hold the sharded ones."""
        if self.state is ParamState.INSTALLED:
            self._carry_flags()
            for param in self.params:
                for parameters, name in param.owner_dicts:
                    if parameters.get(name) is param.unsharded:
                        parameters[name] = param.sharded
            self.state = ParamState.UNSHARDED
            pending_holders.discard(self)

    def _carry_flags(self) -> None:
        """Copy ``requires_grad`` to the shards from unsharded parameters on which users set it."""
        if self.leases & Lease.LENT and self.state is not ParamState.SUMMONED:
            self._flags = take_flags(self.params, self._flags)


def sharded_params(group: ParamGroup) -> list[ShardedParam]:
    """Return all parameters of a group with type ``ShardedParam``; none under ``replicate``."""
    return [param for param in group.params if isinstance(param, ShardedParam)]


# --- which group a tensor belongs to, for optimizers and for gradient clipping ----------------

# The keys are ids of tensors. Tensors as keys would stay alive, and torch's ``Module.to`` cannot
# swap a tensor that has a weak reference. Python may give a freed tensor's id to another one, so
# ``owner_of`` and ``sharded_params_of`` check what they find; ``has_been_sharded`` may be wrong.
_owners: weakref.WeakValueDictionary[int, ParamGroup] = weakref.WeakValueDictionary()
_copies: weakref.WeakValueDictionary[int, ParamGroup] = weakref.WeakValueDictionary()
_latest = object()  # part of cache keys: replaced when what caches hold may have become wrong


def register_owner(owner: ParamGroup) -> None:
    """Record ``owner`` as the group of its present sharded and unsharded parameters."""
    global _latest
    for index, param in enumerate(owner.params):
        owner.indices[id(param.sharded)] = index
        _owners[id(param.sharded)] = owner
        if param.unsharded is not param.sharded:
            _copies[id(param.unsharded)] = owner
    _latest = object()


def latest_registration() -> object:
    """Return an object for cache keys: a new one when what caches hold may have become wrong."""
    return _latest


def owner_of(param: torch.Tensor) -> ParamGroup | None:
    """Return the group that has ``param`` as a sharded parameter; None if no group has it."""
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
    """Record the parameters that modules hold inside ``unsharded_params``."""
    for held, _ in _unsharded_of(owner):
        _copies[id(held)] = owner
    # torch's module.zero_grad() clears ``.grad`` of what modules hold. meshard's patch of it clears
    # that of sharded parameters too, but only while ``pending_holders`` is not empty.
    pending_holders.add(owner)


def forget_summoned(owner: ParamGroup) -> None:
    """Undo ``register_summoned``."""
    global _latest
    _latest = object()  # caches must not find the parameters of that block any more
    for held, _ in _unsharded_of(owner):
        _copies.pop(id(held), None)
    pending_holders.discard(owner)


def _unsharded_of(owner: ParamGroup) -> Iterator[tuple[torch.Tensor | None, torch.Tensor]]:
    """Yield each unsharded tensor that modules may hold, with its sharded parameter."""
    for param in owner.params:
        for held in param.installed() if owner.is_summoned else (param.unsharded,):
            yield held, param.sharded


def sharded_params_of(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return a copy of ``params`` with sharded parameters in place of unsharded ones."""
    if not _copies:
        return list(params)
    given = list(params)
    owners = {owner for param in given if (owner := _copies.get(id(param))) is not None}
    # ``_copies`` may have found the id of a freed tensor. So look up ids of tensors that are alive.
    sharded = {id(held): param for owner in owners for held, param in _unsharded_of(owner)}
    return [sharded.get(id(param), param) for param in given]
