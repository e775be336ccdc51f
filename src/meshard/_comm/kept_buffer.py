"""How does a buffer that is used in every step keep its views, but not its memory?"""

from __future__ import annotations

from collections.abc import Callable

import torch

_TINY = 2**14  # bytes


class KeptBuffer:
    """A buffer ``[count, n]`` that is made once, and has memory only from ``take`` to ``free``.

    Tensors are made once instead of in each step, which takes longer than to move their memory.
    Only for memory that the host alone uses: no stream is asked whether it may go.

    Args:
        like: Of the dtype and device wanted.
        count: Rows.
        numel: Elements of a row.
        cut: Makes the views of ``rows`` that its user wants to keep beside it.
    """

    def __init__(
        self,
        like: torch.Tensor,
        count: int,
        numel: int,
        cut: Callable[[torch.Tensor], list[torch.Tensor]] | None = None,
    ) -> None:
        with torch.inference_mode(False):  # a module that runs under it first must train later
            self.flat = like.new_empty(count * numel)
            self.rows = self.flat.view(count, numel)
            self.views = [] if cut is None else cut(self.rows)
        storage = self.flat.untyped_storage()
        self._num_bytes = storage.nbytes()
        self._resize = storage.resize_
        # The system would not have such a piece back from malloc.
        self._stays = self._num_bytes <= _TINY
        self.free()

    def take(self) -> None:
        """Have memory. The content is undefined until it is filled."""
        if not self._stays:
            self._resize(self._num_bytes)

    def free(self) -> None:
        """Give the memory back."""
        if not self._stays:
            self._resize(0)
