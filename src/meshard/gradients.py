"""How is a global norm clipped, and a loss scaled, when gradients are shards?

Everything here works on local tensors: an operator on a DTensor costs more than the arithmetic.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.optim import Optimizer

from meshard._comm.scalars import agree_on_max, gather_values
from meshard._geometry.mesh_roles import device_of
from meshard._params.dtensors import local_of
from meshard._runtime.optimizer_steps import at_rest, check_may_step
from meshard._runtime.overlapped_params import find_overlapped, note_scaled

Parameters = torch.Tensor | Iterable[torch.Tensor] | nn.Module


def get_total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Return the norm of all tensors together, as if each were whole and on one device.

    **Collective:** every rank of the meshes of the DTensors among them, with the same tensors in
    the same order; one all-gather of a few numbers per process group that shards any of them.

    Args:
        tensors: Plain tensors count once, and must be the same on all ranks (those of
            ``ignored_params`` are so only if you reduce them); DTensors may be sharded over
            different meshes.
        norm_type: ``p`` of the p-norm, positive; ``inf`` for the largest magnitude.
        error_if_nonfinite: Raise if the norm is not finite.
        foreach: Passed on to ``torch.nn.utils.get_total_norm`` for the local part.

    Returns:
        A plain scalar, the same on all ranks.

    Raises:
        RuntimeError: The norm is not finite, with ``error_if_nonfinite``.
        ValueError: ``norm_type`` is not positive, or a DTensor is a pending partial sum.

    >>> import torch
    >>> get_total_norm([torch.tensor([3.0]), torch.tensor([4.0])])
    tensor(5.)
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive, got {norm_type}.")
    listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    groups: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for tensor in listed:
        groups.setdefault(_sharded_over(tensor), []).append(tensor)
    if not groups:
        return torch.tensor(0.0)
    norms = []
    for members in groups.values():
        local = [local_of(t) if isinstance(t, DTensor) else t for t in members]
        norm = _local_norm(local, norm_type, foreach)
        first = members[0]
        if isinstance(first, DTensor) and norm.device.type != first.device_mesh.device_type:
            norm = norm.to(device_of(first.device_mesh))  # shards are in host memory
        norms.append(norm)
    norms = _over_ranks(norms, list(groups), norm_type)
    total = norms[0]
    if len(norms) > 1:
        total = _combine(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the {norm_type}-norm of the gradients is {total.item()}; "
            "pass error_if_nonfinite=False to scale by it all the same."
        )
    return total


def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale all gradients so that their norm together is at most ``max_norm``.

    **Collective:** as ``get_total_norm``.

    Args:
        parameters: Parameters, sharded or plain, or the module that holds them.
        max_norm: What the norm is at most afterwards.
        norm_type: ``p`` of the p-norm, positive, or ``inf``.
        error_if_nonfinite: Raise if the norm is not finite, and change nothing.
        foreach: Use the fused kernels of torch for the norm. None: where they are faster.

    Returns:
        The norm before clipping: a plain scalar, the same on all ranks.

    Raises:
        RuntimeError: Gradients of some unit are not fully reduced yet, the norm is not finite, or
            an optimizer of ``overlap_optimizer`` steps a parameter before its norm could be known.

    >>> import torch, meshard
    >>> layer = meshard.fully_shard(torch.nn.Linear(1, 1))
    >>> layer(torch.tensor([[3.0]])).sum().backward()
    >>> norm = clip_grad_norm_(layer, 1.0)
    >>> round(norm.item() ** 2), round(layer.weight.grad.full_tensor().item(), 2)
    (10, 0.95)
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    listed = at_rest([parameters] if isinstance(parameters, torch.Tensor) else parameters)
    _refuse_overlapped(listed, "clip_grad_norm_")
    check_may_step(listed)
    grads = [param.grad for param in listed if param.grad is not None]
    total = get_total_norm(grads, norm_type, error_if_nonfinite, foreach)
    scale_gradients(grads, clip_coefficient(total, max_norm))
    return total


def clip_coefficient(total_norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return what to multiply gradients by, so that their norm is at most ``max_norm``."""
    # As torch does: a norm of zero must not divide, and 1.0 multiplies without a host wait.
    return torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)


def scale_gradients(grads: Iterable[torch.Tensor], coefficient: torch.Tensor) -> None:
    """Multiply gradients by a number, in place."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for grad in grads:
        local = local_of(grad) if isinstance(grad, DTensor) else grad
        by_device.setdefault(local.device, []).append(local)
    with torch.no_grad():
        for device, locals_ in by_device.items():
            # Private, but what torch's own clipping calls: a fifth of the time of one by one.
            torch._foreach_mul_(locals_, coefficient.to(device))


def _refuse_overlapped(params: Iterable[torch.Tensor], what: str) -> None:
    if find_overlapped(params) is not None:
        raise RuntimeError(
            f"{what} comes too late: an optimizer of overlap_optimizer steps each unit in "
            "backward, before the gradients of all are there. Clip each unit by its own norm "
            "(overlap_optimizer(..., max_unit_norm=)), clip by value (clip_value=), have the "
            'exact global norm with steps in the next forward (clip="deferred", max_norm=), or '
            "step in the ordinary way (detach())."
        )


def _sharded_over(tensor: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups over which a tensor is spread, one per mesh axis that cuts it."""
    if not isinstance(tensor, DTensor):
        return ()
    groups = []
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Partial):
            raise ValueError(
                f"cannot take the norm of a partial sum (placements {placement}); call "
                "meshard.finalize_gradients(module), or reduce it first."
            )
        # Not isinstance(placement, Shard): a strided shard is none.
        if not isinstance(placement, Replicate) and tensor.device_mesh.size(axis) > 1:
            groups.append(tensor.device_mesh.get_group(axis))
    return tuple(groups)


def _over_ranks(
    norms: list[torch.Tensor], spread: list[tuple[dist.ProcessGroup, ...]], norm_type: float
) -> list[torch.Tensor]:
    """Combine each norm over the groups it is spread over; all of one group travel together."""
    for group in dict.fromkeys(group for groups in spread for group in groups):
        places = [place for place, groups in enumerate(spread) if group in groups]
        dtype = functools.reduce(torch.promote_types, (norms[place].dtype for place in places))
        own = torch.stack([norms[place].to(dtype) for place in places])
        of_ranks = gather_values(own, group)
        for place, column in zip(places, of_ranks.unbind(1), strict=True):
            norms[place] = _combine(column, norm_type)
    return norms


def _local_norm(
    tensors: list[torch.Tensor], norm_type: float, foreach: bool | None
) -> torch.Tensor:
    # Also for a rank whose shards are all empty: ranks must gather the same dtype.
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    filled = [tensor.detach() for tensor in tensors if tensor.numel()]
    if not filled:
        return torch.zeros((), dtype=dtype, device=tensors[0].device)
    wide = [t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in filled]
    return torch.nn.utils.get_total_norm(wide, norm_type, foreach=foreach).to(dtype)


def _agree(
    found_inf: torch.Tensor, params: list[torch.Tensor], group: dist.ProcessGroup | None
) -> None:
    """Let ``found_inf`` be its maximum over all ranks; their group may not serve host memory."""
    meshes = (param.device_mesh for param in params if isinstance(param, DTensor))
    mesh = next(meshes, None)
    if mesh is None or mesh.device_type == found_inf.device.type:
        agree_on_max(found_inf, group)
        return
    travelling = found_inf.to(device_of(mesh))
    agree_on_max(travelling, group)
    found_inf.copy_(travelling)


def _combine(norms: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return the norm of a whole from the norms of its parts."""
    combined: torch.Tensor = torch.linalg.vector_norm(norms, norm_type)
    return combined


def _tensors_in(outputs: Any) -> Iterator[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, (list, tuple)):
        for each in outputs:
            yield from _tensors_in(each)


class ShardedGradScaler(torch.amp.GradScaler):
    """A ``torch.amp.GradScaler`` whose ranks agree on whether a step is skipped.

    An inf or NaN in one shard on one rank skips the step on every rank, and lowers the scale once.

    Args:
        *args: As for ``torch.amp.GradScaler``: device, init_scale, growth_factor, ...
        process_group: All ranks that step together. None: the default group.
        **kwargs: As for ``torch.amp.GradScaler``.

    >>> import torch, meshard
    >>> layer = meshard.fully_shard(torch.nn.Linear(1, 1))
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> scaler = ShardedGradScaler("cpu", init_scale=8.0)
    >>> scaler.scale(layer(torch.ones(1, 1)).sum() * float("inf")).backward()
    >>> _ = scaler.step(optimizer)  # skipped
    >>> scaler.update()
    >>> scaler.get_scale()
    4.0
    """

    def __init__(
        self, *args: Any, process_group: dist.ProcessGroup | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._process_group = process_group

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss by the scale, before its backward.

        If that reaches parameters which an optimizer of ``overlap_optimizer`` steps, backward
        raises before it steps any: nobody would have unscaled their gradients.
        """
        scaled = super().scale(outputs)
        if self.is_enabled():
            note_scaled(_tensors_in(scaled))
        return scaled

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step, or skip the step and clear all gradients, also those that are pending.

        **Collective:** as ``unscale_``, which it calls if that has not been done. Waits for what
        was found.
        """
        loss = super().step(optimizer, *args, **kwargs)
        if self.is_enabled():
            found = self._found_inf_per_device(optimizer).values()
            if any(each.item() for each in found):
                optimizer.zero_grad()
        return loss

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale the shards, and let all ranks know what any rank has found.

        **Collective:** every rank of the process group, also those without a gradient.
        """
        params = [param for group in optimizer.param_groups for param in group["params"]]
        check_may_step(params)
        by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for param in params:
            if param.grad is None:
                continue
            local = local_of(param.grad) if isinstance(param.grad, DTensor) else param.grad
            if local.dtype == torch.float16 and not allow_fp16:
                raise ValueError(
                    f"cannot unscale the float16 gradient of a parameter of shape "
                    f"{tuple(param.shape)}: what is small is lost already; keep parameters in "
                    "float32, with MixedPrecisionPolicy(param_dtype=torch.float16) to compute."
                )
            by_kind.setdefault((local.device, local.dtype), []).append(local)
        found = {found_inf.device: found_inf}
        scales = {inv_scale.device: inv_scale}
        with torch.no_grad():
            for (device, _), grads in by_kind.items():
                if device not in found:
                    found[device], scales[device] = found_inf.to(device), inv_scale.to(device)
                # The kernel behind torch's own scaler, on plain tensors.
                torch._amp_foreach_non_finite_check_and_unscale_(
                    grads, found[device], scales[device]
                )
            for other in found.values():
                found_inf.copy_(torch.maximum(found_inf, other.to(found_inf.device)))
            _agree(found_inf, params, self._process_group)
            for other in found.values():
                other.copy_(found_inf)
        return found
