"""Loss scaling that ranks agree on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from meshard._comm.blocking import agree_on_max
from meshard._mesh.mesh_info import device_of
from meshard._optimizer_hooks import check_may_step
from meshard._torch.dtensor import plain_of
from meshard._torch.patches import params_in
from meshard._torch.private import queue_backward_callback, tree_flatten, unscale_each

# One callback per backward of a scaled loss. Autograd drops it when that backward is over.
_scaled_backwards: weakref.WeakSet[Callable[[], None]] = weakref.WeakSet()


def is_backward_scaled() -> bool:
    """Return whether the loss of a running backward was scaled."""
    return len(_scaled_backwards) > 0


def _mark_backward(_: Tensor) -> None:
    def do_nothing() -> None:  # it matters only that it lives until the backward is over
        pass

    _scaled_backwards.add(do_nothing)
    queue_backward_callback(do_nothing)


class ShardedGradScaler(torch.amp.GradScaler):
    """A ``torch.amp.GradScaler`` whose ranks agree on whether a step is skipped.

    An inf or NaN in one shard on one rank skips the step and lowers the scale on every rank of
    ``process_group`` (None: the default group). Other arguments are torch's.

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
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
            raise TypeError(f"process_group must be a ProcessGroup or None, got {process_group!r}.")
        super().__init__(*args, **kwargs)
        self._process_group = process_group

    @override
    def scale(self, outputs: Any) -> Any:
        """Multiply a loss by the scale, before its backward.

        Backward raises where it reaches a unit that an optimizer of ``overlap_optimizer`` steps,
        because that step would come before the gradients can be unscaled.
        """
        scaled = super().scale(outputs)
        if self.is_enabled():
            if isinstance(scaled, Iterator):  # as torch returns for a generator of losses
                scaled = list(scaled)
            for loss in tree_flatten(scaled)[0]:
                if loss.requires_grad:
                    loss.register_hook(_mark_backward)
        return scaled

    @override
    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        """Return the scale and its growth tracker.

        A rank that had no batch has scaled no loss, so both are made here.
        """
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        return super()._check_scale_growth_tracker(funcname)

    @override
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step, or skip the step and clear all gradients, also those that are pending.

        **Collective:** as ``unscale_``; none if that was called before.
        """
        loss = super().step(optimizer, *args, **kwargs)
        found = self._found_inf_per_device(optimizer).values() if self.is_enabled() else ()
        if any(each.item() for each in found):
            optimizer.zero_grad()
        return loss

    @override
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale the shards, and record on all ranks whether any rank has found an inf or NaN.

        **Collective:** every rank of the process group, also those without a gradient.
        """
        params = params_in(optimizer)
        check_may_step(params)
        by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for param in params:
            if param.grad is None:
                continue
            local = plain_of(param.grad)
            if local.dtype == torch.float16 and not allow_fp16:
                raise ValueError(
                    f"cannot unscale the float16 gradient of a parameter of shape "
                    f"{tuple(param.shape)}: what is small is lost already; keep parameters in "
                    "float32, with MixedPrecisionPolicy(param_dtype=torch.float16) to compute."
                )
            if local.is_sparse:  # of a parameter that is not sharded
                local = local._values()
            by_kind.setdefault((local.device, local.dtype), []).append(local)
        found = {found_inf.device: found_inf}
        with torch.no_grad():
            for (device, _), grads in by_kind.items():
                found.setdefault(device, found_inf.to(device))
                # The kernel behind torch's own scaler, on plain tensors.
                unscale_each(grads, found[device], inv_scale.to(device))
            for other in found.values():
                found_inf.copy_(torch.maximum(found_inf, other.to(found_inf.device)))
            # ``found_inf`` is on the device of the first loss, or on that of the scaler if this
            # rank had no loss. That may be the host, for which the process group may have no
            # backend. So it is sent from the device of the mesh.
            meshes = [param.device_mesh for param in params if isinstance(param, DTensor)]
            sent = found_inf.to(device_of(meshes[0]) if meshes else found_inf.device)
            agree_on_max(sent, self._process_group)
            found_inf.copy_(sent)
            for other in found.values():
                other.copy_(found_inf)
        return found
