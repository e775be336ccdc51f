"""Gradient norms and clipping.

All arithmetic is on local tensors, because a DTensor operator costs more than the arithmetic.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from meshard._comm.blocking import gather_from_all
from meshard._engine.param_group import sharded_params_of
from meshard._mesh.mesh_info import device_of
from meshard._optimizer_hooks import check_may_step, refuse_to_clip_overlapped, warn_about_strays
from meshard._torch.dtensor import plain_of
from meshard._torch.private import foreach_mul_
from meshard.policies import check_bool, list_of

Parameters = torch.Tensor | Iterable[torch.Tensor] | nn.Module
Groups = tuple[dist.ProcessGroup, ...]


def get_total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Return the norm of all tensors together, as if each were unsharded and on one device.

    **Collective:** every rank of the meshes of the DTensors among them, with the same tensors in
    the same order; one all-gather of a few numbers per process group that shards any of them.

    Args:
        tensors: Plain tensors count once, and must be the same on all ranks; DTensors may be
            sharded over different meshes.
        norm_type: ``p`` of the p-norm, positive; ``inf`` for the largest magnitude.
        error_if_nonfinite: Raise a RuntimeError if the norm is not finite.
        foreach: Passed on to ``torch.nn.utils.get_total_norm`` for the local part.

    Returns:
        A plain scalar, the same on all ranks.

    Raises:
        ValueError: ``norm_type`` is not positive, or a DTensor is a pending partial sum.

    >>> import torch
    >>> get_total_norm([torch.tensor([3.0]), torch.tensor([4.0])])
    tensor(5.)
    """
    norm_type = _as_number("norm_type", norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive, got {norm_type}.")
    check_bool("error_if_nonfinite", error_if_nonfinite)
    if foreach is not None:
        check_bool("foreach", foreach)
    listed = _list_tensors("tensors", tensors)
    by_groups: dict[Groups, list[torch.Tensor]] = {}
    for tensor in listed:
        by_groups.setdefault(_sharded_over(tensor), []).append(tensor)
    if not by_groups:
        return torch.tensor(0.0)
    norms: dict[Groups, torch.Tensor] = {}
    for groups, members in by_groups.items():
        norm = _local_norm([plain_of(tensor) for tensor in members], norm_type, foreach)
        first = members[0]
        if isinstance(first, DTensor) and norm.device.type != first.device_mesh.device_type:
            norm = norm.to(device_of(first.device_mesh))  # the shards are in host memory
        norms[groups] = norm
    for group in dict.fromkeys(group for groups in norms for group in groups):
        spread = [groups for groups in norms if group in groups]  # the norms sent together
        dtype = functools.reduce(torch.promote_types, [norms[groups].dtype for groups in spread])
        own = torch.stack([norms[groups].to(dtype) for groups in spread])
        gathered = gather_from_all(own, group, label="(norm)")
        for groups, of_ranks in zip(spread, gathered.unbind(1), strict=True):
            norms[groups] = torch.linalg.vector_norm(of_ranks, norm_type)
    total, *others = norms.values()
    if others:
        parts = torch.stack([total, *(norm.to(total.device) for norm in others)])
        total = torch.linalg.vector_norm(parts, norm_type)
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

    **Collective:** as ``get_total_norm``, whose errors are raised here too.

    Args:
        parameters: Parameters, sharded or plain, or the module that holds them.
        max_norm: Limit of the norm.
        norm_type: As for ``get_total_norm``.
        error_if_nonfinite: As for ``get_total_norm``; gradients stay as they are then.
        foreach: As for ``get_total_norm``.

    Returns:
        The norm before clipping: a plain scalar, the same on all ranks.

    Raises:
        RuntimeError: Gradients of some unit are not fully reduced yet, or an optimizer of
            ``overlap_optimizer`` steps a parameter in backward, before the norm is known.

    >>> import torch, meshard
    >>> layer = meshard.fully_shard(torch.nn.Linear(1, 1))
    >>> layer(torch.tensor([[3.0]])).sum().backward()
    >>> norm = clip_grad_norm_(layer, 1.0)
    >>> round(norm.item() ** 2), round(layer.weight.grad.full_tensor().item(), 2)
    (10, 0.95)
    """
    max_norm = _as_number("max_norm", max_norm)
    if not max_norm >= 0:
        raise ValueError(f"max_norm must not be negative, nor NaN, got {max_norm}.")
    names: dict[int, str] = {}
    if isinstance(parameters, nn.Module):
        named = dict(parameters.named_parameters())
        names = {id(param): name for name, param in named.items()}
        parameters = named.values()
    listed = sharded_params_of(_list_tensors("parameters", parameters))
    refuse_to_clip_overlapped(listed)
    if owners := check_may_step(listed):
        warn_about_strays(listed, owners, names)
    grads = [param.grad for param in listed if param.grad is not None]
    total = get_total_norm(grads, norm_type, error_if_nonfinite, foreach)
    scale_gradients(grads, clip_coefficient(total, max_norm))
    return total


def clip_coefficient(total_norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the factor that limits the norm of gradients to ``max_norm``."""
    # The same formula as in torch. The small number avoids a division by zero. Gradients are
    # multiplied even by 1.0, because the host would have to wait to find out whether to clip.
    return torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)


def scale_gradients(grads: Iterable[torch.Tensor], coefficient: torch.Tensor) -> None:
    """Multiply gradients by a number, in place."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for grad in grads:
        local = plain_of(grad)
        by_device.setdefault(local.device, []).append(local)
    with torch.no_grad():
        for device, locals_ in by_device.items():
            foreach_mul_(locals_, coefficient.to(device))


def _list_tensors(name: str, tensors: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return list_of(name, tensors, torch.Tensor, "a tensor or an iterable of them")


def _as_number(name: str, value: Any) -> float:
    """Return ``value`` as a float. Like torch, accept all that ``float`` does, such as "inf"."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be a number, got {value!r}.") from None


def _sharded_over(tensor: torch.Tensor) -> Groups:
    """Return the groups over which a tensor is sharded, one per mesh axis that cuts it."""
    if not isinstance(tensor, DTensor):
        return ()
    groups = []
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Partial):
            raise ValueError(
                f"cannot take the norm of a partial sum (placements {placement}); call "
                "meshard.finalize_gradients(module), or reduce it first."
            )
        # Not isinstance(placement, Shard): a strided shard is no subclass of Shard.
        if not isinstance(placement, Replicate) and tensor.device_mesh.size(axis) > 1:
            groups.append(tensor.device_mesh.get_group(axis))
    return tuple(groups)


def _local_norm(
    tensors: list[torch.Tensor], norm_type: float, foreach: bool | None
) -> torch.Tensor:
    # The dtypes of empty shards count too: ranks that own nothing must gather the same dtype.
    dtypes = [tensor.dtype for tensor in tensors]
    dtype = functools.reduce(torch.promote_types, dtypes, torch.float32).to_real()
    filled = [tensor.detach() for tensor in tensors if tensor.numel()]
    if not filled:
        return torch.zeros((), dtype=dtype, device=tensors[0].device)
    wide = [t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in filled]
    return torch.nn.utils.get_total_norm(wide, norm_type, foreach=foreach).to(dtype)


def check_limit(name: str, value: float | None) -> None:
    """Raise a ValueError unless ``value`` is None or a positive, finite number."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < value < math.inf):
        raise ValueError(f"{name} must be a positive, finite number or None, got {value!r}.")


def unit_clip(
    max_unit_norm: float | None, clip_value: float | None
) -> Callable[[Sequence[torch.Tensor]], None] | None:
    """Return a function that clips the gradients of a unit in place; None if there is no limit.

    **Collective:** the returned function, if ``max_unit_norm`` is given: as ``get_total_norm``.
    """
    check_limit("max_unit_norm", max_unit_norm)
    check_limit("clip_value", clip_value)
    if max_unit_norm is None and clip_value is None:
        return None

    def clip(grads: Sequence[torch.Tensor]) -> None:
        if clip_value is not None:
            for grad in grads:
                plain_of(grad).clamp_(-clip_value, clip_value)
        if max_unit_norm is not None:
            scale_gradients(grads, clip_coefficient(get_total_norm(grads), max_unit_norm))

    return clip
