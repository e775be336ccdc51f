"""How does a unit's flat shard hold the shards of its parameters?

One buffer per unit, laid out by a ``FlatLayout``. The local tensor of every sharded parameter is a
view of it, so the buffer itself is what an all-gather sends.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshard._geometry.layout import FlatLayout
from meshard._params.home import Home


def with_storage_of_its_own(view: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a tensor whose storage begins with it.

    ``torch.save`` and ``copy.deepcopy`` of a DTensor fail where the local tensor has a storage
    offset, and would store the whole flat buffer with every parameter.
    """
    if view.is_meta or not view.numel():
        return view.clone()
    start = view.storage_offset() * view.itemsize
    part = view.untyped_storage()[start : start + view.numel() * view.itemsize]
    return view.new_empty(0).set_(part, 0, view.shape, view.stride())


class ShardStorage:
    """This rank's flat shard of a unit, and its view for every parameter.

    Args:
        layout: Where each parameter stands.
        shard_rank: This rank's coordinate on the shard axis.
        home: What the buffer is allocated in; may be meta.
    """

    def __init__(self, layout: FlatLayout, shard_rank: int, home: Home) -> None:
        self.layout = layout
        self.buffer = home.buffer_for(layout)
        self.segments = layout.split(self.buffer)
        self.locals: list[torch.Tensor] = [self.buffer] * len(layout.params)
        for segment, flat in zip(layout.segments, self.segments, strict=True):
            for slot in segment.slots:
                shape = layout.params[slot.index].local_shape(shard_rank)
                owned = flat.narrow(0, slot.offset, shape.numel())
                self.locals[slot.index] = with_storage_of_its_own(owned).view(shape)

    @torch.no_grad()
    def fill(self, sources: Sequence[torch.Tensor]) -> None:
        """Copy each parameter's shard in; padding becomes zero, so that it never holds a NaN."""
        if self.buffer.device.type == "meta":
            return
        self.buffer.zero_()
        for own, source in zip(self.locals, sources, strict=True):
            if source.device.type != "meta":
                own.copy_(source)
