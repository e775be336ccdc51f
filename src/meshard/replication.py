"""Replicated modules: all parameters on every rank, gradients averaged in buckets.

A bucket is all-reduced once all gradients of it and of the buckets before it have arrived, so it
should hold gradients that arrive at about the same time. Before the first backward the order of
arrival is unknown, and buckets are filled in the reverse order of ``module.parameters()``. After
the first reduction they are rebuilt once, in the order of arrival on the first rank. This is done
by the next forward that records a graph while no bucket is in use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
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
from meshard._engine.unit import Unit, UnitSettings, units_in
from meshard._gradients.buckets import BucketedGradients
from meshard._gradients.comm_hook import CommHook
from meshard._mesh.mesh_info import MeshInfo, device_of
from meshard._optimizer_hooks import watch_optimizers
from meshard._params.replicated_params import ReplicatedParam, ReplicatedParams
from meshard._params.unit_params import GroupSpec, leave_out
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
from meshard.policies import MixedPrecisionPolicy, check_bool, check_positive


class _Preparation:
    """What a forward of a replicated module does first."""

    def __init__(self, unit: Unit, *, sends_buffers: bool) -> None:
        self.unit = unit
        self._sends_buffers = sends_buffers  # overwrites buffers by those of the first rank

    @skip_dynamo
    def before_forward(self, module: nn.Module, _: Any) -> None:
        """Rebuild the buckets once, and send buffers if asked to, if the forward records a graph.

        **Collective:** all ranks of the mesh, if it does either.
        """
        unit, lifecycle = self.unit, self.unit.lifecycle
        lifecycle.abort_if_failed()  # otherwise ``backward`` may be one that has raised
        # A forward inside a backward recomputes an earlier one, with the same buckets and buffers.
        if not torch.is_grad_enabled() or lifecycle.backward is not None:
            return
        if not unit.step.is_due:
            without_modes(cast("BucketedGradients", unit.gradients).rebuild_as_arrived)
        if self._sends_buffers:
            without_modes(self._send_buffers, module)

    @torch.no_grad()
    def _send_buffers(self, module: nn.Module) -> None:
        """Give all ranks the buffers of the first rank. **Collective:** all of the mesh."""
        group = self.unit.group.spec.mesh_info.replicate_group
        assert group is not None
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in module.buffers():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for buffers in by_dtype.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            broadcast(flat, group, label="(buffers)")
            parts = flat.split([buffer.numel() for buffer in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part.view_as(buffer))


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
        unit = self._meshard_unit
        unit.lifecycle.check_between_steps(unit, "register_comm_hook")
        if unit.gradients.comm_hook is not None:
            raise RuntimeError(
                "register_comm_hook was called before, and a module has one communication hook; "
                "let one call the other."
            )
        unit.gradients.comm_hook = CommHook(state, hook)

    def _apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        """Move or cast the parameters, which stay in their buckets."""
        for unit in units_in(self):
            if unit.gradients.is_replicated and unit.gradients.is_in_flight:
                unit.lifecycle.finish_reductions()
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # of nn.Module, mixed in
        for unit in [each for each in units_in(self) if each.gradients.is_replicated]:
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
            unit.gradients.rebuild()
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
    unit = Unit([module], UnitSettings(), policy)
    unit.set_params(
        ReplicatedParams(
            params,
            spec=GroupSpec(mesh_info, device),
            param_dtype=policy.param_dtype,
            gradient_hook=gradient_hook_maker(unit, is_replicated=True),
            bucket_cap=int(bucket_cap_mb * 2**20),
            are_views=gradient_as_bucket_view,
        )
    )
    adopt_module(module, unit, ReplicateModule, "Replicated")
    register_hooks(unit)
    adopt_inner_units(unit, [module])
    preparation = _Preparation(unit, sends_buffers=broadcast_buffers)
    module.register_forward_pre_hook(preparation.before_forward, prepend=True)
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
