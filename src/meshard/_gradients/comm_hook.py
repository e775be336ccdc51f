"""Communication hooks of DDP: code of the user that averages a gradient bucket over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(eq=False)
class GradBucket:
    """The bucket that a hook gets, with the methods of ``torch.distributed.GradBucket``.

    Python cannot instantiate torch's own class.
    """

    _buffer: torch.Tensor
    _numels: Sequence[int]
    _params: Sequence[torch.Tensor]
    _index: int
    _is_last: bool

    def index(self) -> int:
        """Return the position of the bucket in the order of reductions."""
        return self._index

    def is_last(self) -> bool:
        """Whether no other bucket is reduced after this one."""
        return self._is_last

    def buffer(self) -> torch.Tensor:
        """Return this rank's gradients ``[n]``, summed over microbatches; 0 for unused parameters.

        A hook takes their mean over ranks. If the user has set a divide factor ``c``, they are
        already multiplied by ``ranks / c``, so that the mean is the sum over ranks, divided by
        ``c``.
        """
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Make the other methods use ``buffer [n]``."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return the parts of the buffer: contiguous views in the shapes of ``parameters()``."""
        # The buffer has the elements of each parameter in memory order. So the view for a
        # channels_last parameter has the right shape, but its elements are in another order than
        # those of the parameter. DDP does the same.
        parts = self._buffer.split(list(self._numels))
        return [part.view(param.shape) for part, param in zip(parts, self._params, strict=True)]

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters, in the order of the buffer."""
        return list(self._params)


@dataclass(eq=False)
class CommHook:
    """The user's hook and its state. The hook averages all buckets of one replicated module."""

    state: object
    hook: Callable[[Any, Any], Any]
    num_windows: int = 0  # how often it has averaged all buckets; mostly once per optimizer step

    def average(self, bucket: GradBucket) -> None:
        """Run the hook on one bucket, wait for its future, and overwrite the buffer.

        Hooks such as PowerSGD's start a second collective from a callback, in a thread of gloo. If
        the thread that runs the backward issued another collective meanwhile, the order of the two
        might differ between ranks. So this method waits for the future at once (on a device the
        stream waits, not the host).
        """
        buffer = bucket.buffer()
        future = self.hook(self.state, bucket)
        result = future.wait() if hasattr(future, "wait") else None
        if not isinstance(result, torch.Tensor) or result.numel() != buffer.numel():
            got = f"one of {type(result).__name__}" if result is not None else repr(future)
            raise TypeError(
                f"the communication hook {self.hook!r} must return a torch.futures.Future of one "
                f"tensor with the {buffer.numel()} elements of bucket {bucket.index()}, got {got}; "
                "that of a collective holds a list: end with "
                "work.get_future().then(lambda future: future.value()[0])."
            )
        if result is not buffer:
            buffer.copy_(result.reshape(-1))
        self.num_windows += bucket.is_last()
