"""Communication hooks of DDP: code of the user that averages a bucket over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from meshard._comm.gradient_buffer import GradientLayout
from meshard._gradients.sharded_grads import unrecorded
from meshard._params.sharded_param import UnitParam


class GradBucket:
    """What a hook is given: the methods of torch's class, of which Python makes no instances."""

    def __init__(
        self,
        buffer: torch.Tensor,
        layout: GradientLayout,
        params: Sequence[UnitParam],
        *,
        index: int,
        is_last: bool,
    ) -> None:
        self._buffer = buffer
        self._ranges = layout.ranges.values()
        self._params = params
        self._index = index
        self._is_last = is_last

    def index(self) -> int:
        """Return the position of the bucket in the order of reductions."""
        return self._index

    def is_last(self) -> bool:
        """Whether no other bucket is reduced after this one."""
        return self._is_last

    def buffer(self) -> torch.Tensor:
        """Return the gradients of this rank, ``[n]``, undivided; zero for unused parameters."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Let the other methods refer to ``buffer [n]``."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return the parts of the buffer in the shapes of their parameters.

        As in DDP they are contiguous, in the order in which the parameter lies in memory.
        """
        return [
            self._buffer.narrow(0, each.offset, each.numel).view(param.shape)
            for each, param in zip(self._ranges, self.parameters(), strict=True)
        ]

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters, in the order of ``gradients()``."""
        return [self._params[each.index].sharded for each in self._ranges]


class CommHook:
    """A hook and its state, which averages all buckets of one replicated module."""

    def __init__(self, state: object, hook: Callable[[Any, Any], Any]) -> None:
        self._state = state
        self._hook = hook
        self.num_windows = 0  # in which it has averaged all buckets

    def average(
        self,
        layout: GradientLayout,
        buffer: torch.Tensor,  # [n], overwritten
        *,
        params: Sequence[UnitParam],  # of the bucket
        later: Sequence[UnitParam],  # of the buckets that are reduced after this one
        index: int,
    ) -> None:
        """Run the hook on one bucket, and wait for its future.

        At once: hooks such as PowerSGD's go on in threads of gloo, where their next collective
        would meet those of this thread in another order on each rank. On a device the wait orders
        streams, and the host goes on.
        """
        is_last = not any(param.sharded.requires_grad for param in later)
        bucket = GradBucket(buffer, layout, params, index=index, is_last=is_last)
        with unrecorded():
            future = self._hook(self._state, bucket)
            result = future.wait() if hasattr(future, "wait") else None
            if not isinstance(result, torch.Tensor) or result.numel() != layout.numel:
                raise TypeError(
                    f"the communication hook {self._hook!r} must return a torch.futures.Future of "
                    f"one tensor with the {layout.numel} elements of bucket {index}, got "
                    f"{_described(future, result)}; that of a collective holds a list: end with "
                    "work.get_future().then(lambda future: future.value()[0])."
                )
            if result is not buffer:
                buffer.copy_(result.reshape(-1))
        self.num_windows += is_last


def _described(future: object, result: object) -> str:
    if not hasattr(future, "wait"):
        return f"a {type(future).__name__}"
    if not isinstance(result, torch.Tensor):
        return f"a future of a {type(result).__name__}"
    return f"a future of a tensor of shape {tuple(result.shape)}"
