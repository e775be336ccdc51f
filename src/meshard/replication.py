"""Replicated modules: all parameters on every rank, gradients averaged in buckets.

A bucket is all-reduced once all gradients of it and of the buckets before it have arrived, so it
should hold gradients that arrive at about the same time. Before the first backward the order of
arrival is unknown, and buckets are filled in the reverse order of ``module.parameters()``. After
the first reduction they are rebuilt once, in the order of arrival on the first rank. This is done
by the next forward that records a graph while no bucket is in use.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy

from meshard._comm.blocking import broadcast
from meshard._engine.build import (
    Collected,
    adopt_inner_units,
    adopt_module,
    check_dtype,
    collect,
)
from meshard._engine.hooks import gradient_hook_maker, register_hooks
from meshard._engine.unit import Unit, UnitSettings, buckets_in, nest, units_in, with_siblings
from meshard._gradients.comm_hook import CommHook
from meshard._mesh.mesh_info import MeshInfo, device_of
from meshard._params.replicated_params import ReplicatedParam, ReplicatedParams
from meshard._params.sharded_param import UnitParam, leave_out
from meshard._params.unit_params import GroupSpec
from meshard._torch.dtensor import gradient_dtype
from meshard._torch.private import skip_dynamo, without_modes
from meshard.accumulation import no_sync
from meshard.api import (
    as_policy,
    as_set,
    check_mesh,
    check_module,
    default_mesh,
    move_buffers,
)
from meshard.fsdp_module import GradientSetters
from meshard.initialization import overwrite_by_first_rank
from meshard.optim.hooks import watch_optimizers
from meshard.policies import MixedPrecisionPolicy, check_bool, check_positive

_FIRST_CAP = 2**20  # bytes of the first bucket: small, so that communication starts early

# --- buckets -------------------------------------------------------------------------------


def partition(params: Sequence[nn.Parameter], cap: int) -> list[list[int]]:
    """Cut ``params`` into buckets of one dtype each. Return each bucket as a list of positions.

    A bucket has at most ``cap`` bytes, and the first one at most ``_FIRST_CAP``. A larger parameter
    gets a bucket of its own.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[torch.dtype, tuple[list[int], int]] = {}
    for position, param in enumerate(params):
        bucket, size = open_buckets.get(param.dtype, ([], 0))
        limit = min(cap, _FIRST_CAP) if not buckets or bucket is buckets[0] else cap
        if not bucket or size + param.nbytes > limit:
            bucket, size = [], 0
            buckets.append(bucket)
        bucket.append(position)
        open_buckets[param.dtype] = bucket, size + param.nbytes
    return buckets


def join_two(buckets: list[list[int]], dtypes: Sequence[torch.dtype]) -> None:
    """Join the last two buckets of equal dtype, or just the last two if all dtypes differ."""
    seen: dict[torch.dtype, int] = {}
    for number in range(len(buckets) - 1, -1, -1):
        later = seen.setdefault(dtypes[buckets[number][0]], number)
        if later != number:
            break
    else:
        number, later = len(buckets) - 2, len(buckets) - 1
    buckets[number] = buckets[number] + buckets.pop(later)


class Buckets:
    """The buckets of one replicated module. Each is a unit; the innermost is reduced first.

    ``params`` are in the order of the module; ``cap`` is in bytes.
    """

    def __init__(
        self,
        module: nn.Module,
        params: list[ReplicatedParam],
        *,
        spec: GroupSpec,
        policy: MixedPrecisionPolicy,
        cap: int,
        are_views: bool,  # whether .grad are views of the buckets
        sends_buffers: bool,  # whether forwards overwrite buffers by those of one rank
    ) -> None:
        self._comm_hook: CommHook | None = None  # runs instead of all-reduces
        self._params = params
        self._spec = spec
        assert spec.mesh_info.replicate_group is not None
        self._group = spec.mesh_info.replicate_group
        self._policy = policy
        self._cap = cap
        self._are_views = are_views
        self._sends_buffers = sends_buffers
        count = max(1, len(partition([param.sharded for param in reversed(params)], cap)))
        # The outermost unit comes first. Each other unit is nested in the one before it.
        self.units = [Unit([module], UnitSettings(), policy) for _ in range(count)]
        nest(self.units)
        for number, unit in enumerate(reversed(self.units)):
            unit.mesh_name = f" bucket {number}" if count > 1 else ""
        self._fill(list(reversed(range(len(params)))))
        # Until the buckets are rebuilt, the recorders note in ``_arrivals`` the order in which
        # gradients arrive. They are hooks on the present ``unsharded`` tensors. A tensor that
        # replaces one of these later (a new cast copy, say) has no recorder. ``_is_final`` says
        # that the buckets will not be rebuilt any more.
        self._is_final = False
        self._arrivals: dict[int, None] = {}  # a set that keeps the order
        self._recorders = [
            param.unsharded.register_post_accumulate_grad_hook(
                partial(_record_arrival, self._arrivals, index)
            )
            for index, param in enumerate(params)
            if param.unsharded.is_floating_point() and param.unsharded.requires_grad
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> Buckets:
        """Return buckets for the copied units. The copied buckets are never rebuilt."""
        copied = copy.copy(self)
        copied.units = [memo[id(unit)] for unit in self.units]
        copied._comm_hook = None  # its state belongs to the original
        copied._params, copied._recorders, copied._is_final = [], [], True
        copied._configure_gradients()
        return copied

    def _fill(self, order: list[int]) -> None:
        """Distribute parameters over units in ``order``, the expected order of their gradients."""
        params = [self._params[position] for position in order]
        parts = partition([param.sharded for param in params], self._cap)
        dtypes = [param.sharded.dtype for param in params]
        while len(parts) > len(self.units):  # the number of units never changes
            join_two(parts, dtypes)
        innermost_first = list(reversed(self.units))
        parts += [[]] * (len(self.units) - len(parts))
        for unit, part in zip(innermost_first, parts, strict=True):
            unit_params = ReplicatedParams(
                [params[position] for position in part],
                spec=self._spec,
                param_dtype=self._policy.param_dtype,
                gradient_hook=gradient_hook_maker(unit),
            )
            unit.set_params(unit_params)
        self._configure_gradients()

    def _configure_gradients(self) -> None:
        later: list[UnitParam] = []  # the parameters of buckets that are reduced later
        for position, (unit, grads) in enumerate(buckets_in(self.units), 1):
            grads.are_views = self._are_views
            if self._comm_hook is not None:
                grads.average = partial(
                    self._comm_hook.average,
                    params=unit.params,
                    later=later,
                    index=len(self.units) - position,
                )
                later = [*later, *unit.params]

    def use_hook(self, hook: CommHook) -> None:
        """Let ``hook`` average the buckets from now on."""
        if self._comm_hook is not None:
            raise RuntimeError(
                "register_comm_hook was called before, and a module has one communication hook; "
                "let one call the other."
            )
        self._comm_hook = hook
        self._configure_gradients()

    @skip_dynamo
    def before_forward(self, module: nn.Module, _: Any) -> None:
        """Call ``prepare`` if the forward records a graph. This hook runs before those of units."""
        lifecycle = self.units[0].lifecycle
        lifecycle.abort_if_failed()  # otherwise ``backward`` may be one that has raised
        # A forward inside a backward recomputes an earlier one, with the same buckets and buffers.
        is_in_backward = lifecycle.backward is not None
        if torch.is_grad_enabled() and not is_in_backward:
            self.prepare(module)

    def prepare(self, module: nn.Module) -> None:
        """Rebuild the buckets once, when they are reduced and not in use. Send buffers if asked to.

        **Collective:** all ranks of the mesh, if it does either.
        """
        # A rebuild is collective, so all ranks must decide alike. All ranks start the same
        # reductions, so ``has_reduced`` is the same on all of them. An error on one rank does not
        # reset it.
        is_late = not self._is_final and any(unit.gradients.has_reduced for unit in self.units)
        # A communication hook may keep state per bucket, as PowerSGD's does. DDP rebuilds its
        # buckets before the second backward and never again. So once a hook has averaged in two
        # backwards, it expects the buckets to stay as they are.
        is_late = is_late and (self._comm_hook is None or self._comm_hook.num_windows < 2)
        if is_late and not any(map(_is_in_use, self.units)):
            without_modes(self._rebuild)
        if self._sends_buffers:
            without_modes(self._send_buffers, module)

    def _rebuild(self) -> None:
        """Rebuild the buckets in the order in which gradients arrived on the first rank.

        **Collective:** all ranks of the mesh.
        """
        self._is_final = True
        for handle in self._recorders:
            handle.remove()
        order = self._agreed_order()
        for unit in self.units:
            assert isinstance(unit.group.unit_params, ReplicatedParams)
            unit.group.unit_params.unhook()
        # The parameters of an overlapped optimizer may now be in any bucket. So every new bucket
        # lists all these optimizers; ``find_overlapped`` checks which parameters an optimizer has.
        overlapped = {each for unit in self.units for each in unit.group.overlapped}
        self._fill(order)
        for unit in self.units:
            unit.group.overlapped.update(overlapped)
            unit.group.failure, unit.group.modules = unit.root.failure, unit.modules
            unit.group.unit_params.label = unit.label
            unit.group.unit_params.comm = unit.lifecycle.comm.with_custom(unit.settings.comm)

    def _agreed_order(self) -> list[int]:
        """Return the order of arrival on the first rank. Parameters without gradients come last.

        **Collective:** all ranks of the mesh.
        """
        late = [i for i in reversed(range(len(self._params))) if i not in self._arrivals]
        order = torch.tensor([*self._arrivals, *late], device=self._spec.device)
        broadcast(order, self._group, label="(order of gradients)")
        return [int(index) for index in order.tolist()]

    @torch.no_grad()
    def _send_buffers(self, module: nn.Module) -> None:
        """Give all ranks the buffers of the first rank. **Collective:** all of the mesh."""
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in module.buffers():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for buffers in by_dtype.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            broadcast(flat, self._group, label="(buffers)")
            parts = flat.split([buffer.numel() for buffer in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part.view_as(buffer))


def _is_in_use(unit: Unit) -> bool:
    """Whether a graph, accumulated gradients, a reduction or an optimizer uses this bucket."""
    grads = unit.gradients
    is_reduced = grads.window.is_open or grads.is_in_flight
    return unit.step.awaits_gradients or bool(unit.on_reduced) or is_reduced


def _record_arrival(arrivals: dict[int, None], index: int, _: Any) -> None:
    arrivals.setdefault(index)


# --- public --------------------------------------------------------------------------------


class ReplicateModule(GradientSetters):
    """Methods of replicated modules.

    A replicated module is an instance of this class and of its original class. Its parameters,
    their names and its ``state_dict`` stay the same. It has the setters of ``FSDPModule`` for
    gradients.

    >>> import torch, meshard
    >>> layer = meshard.replicate(torch.nn.Linear(4, 4))
    >>> isinstance(layer, torch.nn.Linear) and isinstance(layer, meshard.ReplicateModule)
    True
    """

    def no_sync(self: Any) -> contextlib.AbstractContextManager[None]:
        """Return a context that accumulates without communication: ``meshard.no_sync(self)``."""
        return no_sync(self)

    def register_comm_hook(self: Any, state: object, hook: Callable[[Any, Any], Any]) -> None:
        """Let a communication hook of DDP average the gradients, instead of an all-reduce.

        ``hook(state, bucket)`` runs at each full reduction of a bucket, and returns a future of the
        mean over ranks. ``bucket`` has the methods of ``torch.distributed.GradBucket``, so
        hooks of ``torch.distributed.algorithms.ddp_comm_hooks`` run unchanged. ``buffer()`` is
        ``[n]`` in the reduce dtype: this rank's gradients, summed over microbatches. A
        ``copy.deepcopy`` of the module has no hook.

        **Collective:** hooks run in the same order on all ranks.
        **Stream:** the stream of all-reduces. It waits for the future; for CPU tensors the host
        waits.
        **Lifetime:** the buffer is used again in the next reduction.

        Raises:
            TypeError: ``hook`` is not callable; in backward: it returned no future of one tensor.
            RuntimeError: The module has a hook already, or a forward or backward is under way.

        >>> import torch, meshard
        >>> def double(state, bucket):
        ...     future = torch.futures.Future()
        ...     future.set_result(2 * bucket.buffer())
        ...     return future
        >>> layer = meshard.replicate(torch.nn.Linear(1, 1))
        >>> layer.register_comm_hook(None, double)
        >>> layer(torch.ones(1, 1)).sum().backward()
        >>> layer.bias.grad
        tensor([2.])
        """
        if not callable(hook):
            raise TypeError(f"hook must be callable as hook(state, bucket), got {hook!r}.")
        unit = self._meshard_buckets.units[0]
        unit.lifecycle.check_between_steps(unit, "register_comm_hook")
        self._meshard_buckets.use_hook(CommHook(state, hook))

    def _apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        """Move or cast the parameters, which stay in their buckets."""
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # of nn.Module, mixed in
        for unit, grads in buckets_in(units_in(self)):
            unit.group.reshard()
            unit.group.unit_params.take_replacements()
            if not unit.gradients.pending:
                for param in unit.params:
                    cast("ReplicatedParam", param).take_memory_format()
            used = [param.unsharded for param in unit.params]
            unit.group.unit_params.rebuild()
            if any(
                param.unsharded is not old for param, old in zip(unit.params, used, strict=True)
            ):
                unit.group.num_rebuilds += 1  # graphs made before have the old cast copies
            grads.forget_bucket()  # torch has cast or moved .grad too
        return result


def replicate(
    module: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    bucket_cap_mb: float = 25.0,
    gradient_as_bucket_view: bool = True,
    mp_policy: TorchMixedPrecisionPolicy = MixedPrecisionPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    broadcast_buffers: bool = False,
    init_sync: bool = True,
) -> ReplicateModule:
    """Average the gradients of ``module`` over the ranks of ``mesh``, in place.

    Every rank keeps all parameters, and the tensor objects stay the same. Gradients are accumulated
    in buckets; each is all-reduced, in order, once all its gradients have arrived, while backward
    goes on. A parameter that any rank has used gets its averaged gradient on all ranks.

    **Collective:** every rank of the mesh, in the same order; also the first forward after a
    backward, and with ``broadcast_buffers`` every forward that records a graph.
    **Lifetime:** a ``.grad`` that you keep is overwritten in the next step (unless
    ``gradient_as_bucket_view=False``); ``clone()`` it.

    Args:
        module: The outermost module that is called. Units of ``fully_shard`` inside stay sharded.
            Parameters and buffers in host memory are moved to the device of the mesh.
        mesh: 1D or 2D; all axes replicate. None: 1D over the default group, as for ``fully_shard``.
        bucket_cap_mb: MiB of parameters per bucket; the first bucket has at most 1 MiB.
        gradient_as_bucket_view: False makes every ``.grad`` a tensor of its own: twice the memory.
        mp_policy: dtypes for compute, communication and accumulation. With a ``param_dtype``, each
            forward and its backward use a copy of the parameters in that dtype.
        ignored_params: Parameters to leave as they are, gradients too.
        broadcast_buffers: Overwrite buffers in place by those of the first rank before every
            forward that records a graph. So if a forward computes with a buffer, run its backward
            before the next forward.
        init_sync: Overwrite parameters and buffers by those of the first rank now. Without it all
            ranks must hold the same values.

    Returns:
        ``module``, the same object; its class is now also a subclass of ``ReplicateModule``.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: Something cannot be replicated as asked; the module is left as it was.
        NotImplementedError: As for ``fully_shard``.

    >>> import torch, meshard
    >>> model = meshard.replicate(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)))
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> model[1].bias.grad
    tensor([1.])
    """
    check_module(module, "replicate")
    check_positive("bucket_cap_mb", bucket_cap_mb)
    check_bool("gradient_as_bucket_view", gradient_as_bucket_view)
    check_bool("broadcast_buffers", broadcast_buffers)
    check_bool("init_sync", init_sync)
    policy = as_policy(mp_policy)
    check_mesh(mesh)
    if mesh is not None and mesh.ndim > 2:
        raise ValueError(
            f"replicate needs a mesh of one or two axes, all of which replicate, got {mesh}; pass "
            "the data-parallel part of a larger mesh, as in mesh['data']."
        )
    ignored = as_set(ignored_params)
    found = collect([module], ignored)
    mesh_info = MeshInfo.of(mesh if mesh is not None else default_mesh()).replicating_all()
    device = device_of(mesh_info.mesh)
    _check_parameters(found, device)
    if init_sync or broadcast_buffers:
        _check_buffers(module)
    if device.type != "cpu":
        for _, param, _ in found:
            param.data = param.data.to(device)
        move_buffers(module.modules(), device)
    params = [
        ReplicatedParam(fqn, owners, param, keeps_dtype=policy.keeps_dtype(fqn, param))
        for fqn, param, owners in found
    ]
    if init_sync:
        with torch.no_grad():
            for tensor in (*(entry.param for entry in found), *module.buffers()):
                overwrite_by_first_rank(tensor.detach(), mesh_info, label="(replicate)")
    buckets = Buckets(
        module,
        params,
        spec=GroupSpec(mesh_info, device),
        policy=policy,
        cap=int(bucket_cap_mb * 2**20),
        are_views=gradient_as_bucket_view,
        sends_buffers=broadcast_buffers,
    )
    unit = buckets.units[0]
    adopt_module(module, unit, ReplicateModule, "Replicated")
    module.__dict__["_meshard_buckets"] = buckets
    for each in reversed(with_siblings(unit)):  # the outermost last: its pre-hook runs first
        register_hooks(each)
    adopt_inner_units(unit, [module])
    module.register_forward_pre_hook(buckets.before_forward, prepend=True)
    leave_out(ignored, [module])
    watch_optimizers()
    assert isinstance(module, ReplicateModule)
    return module


# --- checks --------------------------------------------------------------------------------


def _check_parameters(found: list[Collected], device: torch.device) -> None:
    for fqn, param, _ in found:
        if not param.is_cpu and param.device != device:
            raise ValueError(
                f"parameter {fqn!r} is on {param.device}, but the mesh is on {device}; move the "
                "module there (from meta: to_empty, then initialise it) before replicate."
            )
        if param.is_inference():
            raise ValueError(
                f"parameter {fqn!r} was made under torch.inference_mode and cannot get gradients; "
                "make the module outside of it, or replicate a copy.deepcopy made outside."
            )
        check_dtype(fqn, param)
        if gradient_dtype(param) is not param.dtype:
            raise NotImplementedError(
                f"parameter {fqn!r}, which is {param.dtype}, has grad_dtype={param.grad_dtype}, "
                "which is not built for replicate: .grad has the dtype of the parameter. Use "
                "fully_shard, or leave grad_dtype as it is."
            )
        if type(param) is not nn.Parameter:
            raise ValueError(
                f"parameter {fqn!r} is a {type(param).__name__}; replicate keeps ordinary "
                "ones only. DTensors go to fully_shard, whose shard_placement_fn may return "
                "Replicate()."
            )


def _check_buffers(module: nn.Module) -> None:
    for name, buffer in module.named_buffers():
        dims = zip(buffer.shape, buffer.stride(), strict=True)
        if any(size > 1 and not stride for size, stride in dims):
            raise ValueError(
                f"buffer {name!r} is expanded: its elements share memory, so it cannot be "
                "overwritten by that of the first rank; register its clone()."
            )
