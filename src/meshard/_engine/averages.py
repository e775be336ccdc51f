"""torch's AveragedModel on shards.

It is a deep copy that a foreach kernel pulls towards the model. Such kernels raise no version
counter of a DTensor, so a whole copy that somebody keeps would be reused although it is old; and
they refuse a list that has plain buffers beside DTensors, which ``use_buffers=True`` makes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_swa_multi_avg_fn

from meshard._engine.optimizer_hooks import owners_of

_Average = Callable[[Any, Any, Any], None]
_update = AveragedModel.update_parameters
_is_watching = False


def watch_averages() -> None:
    """Look after every ``AveragedModel`` of a sharded module from now on."""
    global _is_watching
    if not _is_watching:
        # There is no hook for it, so the method is replaced, which mypy refuses.
        AveragedModel.update_parameters = _update_shards  # type: ignore[method-assign]
        _is_watching = True


@functools.wraps(_update)
def _update_shards(self: AveragedModel, *args: Any, **kwargs: Any) -> None:
    owners = owners_of(self.parameters())
    chosen: Any = self.multi_avg_fn
    average = chosen
    if average is None and self.avg_fn is None and self.n_averaged.device.type != "cpu":
        average = get_swa_multi_avg_fn()  # what torch takes on a device with foreach kernels
    try:
        if owners and self.use_buffers and average is not None:
            self.multi_avg_fn = _apart(average)
        _update(self, *args, **kwargs)
    finally:
        self.multi_avg_fn = chosen
    for owner in owners:
        owner.record_step()


def _apart(average: _Average) -> _Average:
    """Return ``average`` called once for DTensors and once for plain tensors."""

    def apart(averaged: list[torch.Tensor], new: list[torch.Tensor], num_averaged: Any) -> None:
        for is_sharded in (True, False):
            pairs = [
                pair
                for pair in zip(averaged, new, strict=True)
                if isinstance(pair[0], DTensor) is is_sharded
            ]
            if pairs:
                average([old for old, _ in pairs], [now for _, now in pairs], num_averaged)

    return apart
