"""Memory of sharded and unsharded parameters.

A unit with ``FlatParams`` has one buffer, laid out by a ``FlatLayout``. The local tensors of its
sharded parameters are views of the buffer. So an all-gather sends the buffer itself. It sends a
copy if shards live in host memory, or if modules compute in another dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from meshard._mesh.layout import FlatLayout


@dataclass(frozen=True, slots=True)
class MemoryLocation:
    """A device, and whether memory there is pinned."""

    device: torch.device  # the device of the mesh, the CPU, or meta
    is_pinned: bool = False  # page-locked host memory: copies to and from a device are asynchronous

    @classmethod
    def host_memory(cls, device: torch.device, *, pin: bool) -> MemoryLocation:
        """Return host memory for tensors of ``device``; ``pin`` has no effect for the CPU."""
        return cls(torch.device("cpu"), pin and device.type != "cpu")

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=self.device, pin_memory=self.is_pinned)

    def buffer_for(self, layout: FlatLayout) -> torch.Tensor:
        """Return an uninitialised flat shard of a unit."""
        numel, dtype = layout.shard_form
        return torch.empty(numel, dtype=dtype, device=self.device, pin_memory=self.is_pinned)


META = MemoryLocation(torch.device("meta"))


def with_own_storage(view: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the memory of ``view``, with a storage that covers only this memory.

    ``torch.save`` and ``copy.deepcopy`` of a DTensor fail if its local tensor has a storage offset,
    and they copy all of the local tensor's storage. So a local tensor must not use the storage of
    the flat buffer, which has the shards of all parameters.
    """
    if view.is_meta or not view.numel():
        return view.clone()
    start = view.storage_offset() * view.itemsize
    part = view.untyped_storage()[start : start + view.numel() * view.itemsize]
    return view.new_empty(0).set_(part, 0, view.shape, view.stride())


class FlatShard:
    """This rank's flat shard of a unit, with a view for every parameter."""

    def __init__(self, layout: FlatLayout, shard_rank: int, location: MemoryLocation) -> None:
        self.buffer = location.buffer_for(layout)
        self.layout = layout
        self.segments = layout.split(self.buffer)
        self.locals = [self.buffer] * len(layout.params)  # replaced below by views
        for segment, flat in zip(layout.segments, self.segments, strict=True):
            for param_range in segment.ranges:
                shape = layout.params[param_range.index].local_shape(shard_rank)
                owned = flat.narrow(0, param_range.offset, shape.numel())
                self.locals[param_range.index] = with_own_storage(owned).view(shape)

        # The ``__dict__`` of each view. It is empty until a user sets ``fsdp_pre_all_gather`` on
        # the view. Each forward looks here for that.
        self.attributes = [vars(local) for local in self.locals]

    @torch.no_grad()
    def fill(self, sources: Sequence[torch.Tensor], *, non_blocking: bool = False) -> None:
        """Copy each parameter's shard into the buffer. Padding becomes zero, so it has no NaN."""
        if self.buffer.is_meta:
            return
        self.buffer.zero_()
        for index in self.layout.order:
            self.locals[index].copy_(sources[index], non_blocking=non_blocking)


_ALIGNMENT = 64  # bytes: a cache line


class UnshardedMemoryPool:
    """One allocation per dtype for the unsharded parameters of a unit.

    ``free`` resizes the storages to zero, and ``allocate`` resizes them back. They stay the same
    objects until the parameters are rebuilt. So a view that autograd has saved is valid again once
    its storage is filled. Storages are filled through ``views``, whose version counters are not
    those of the parameters, so that autograd does not see a saved tensor change. ``layout`` has the
    dtypes of the unsharded parameters.
    """

    def __init__(self, layout: FlatLayout, device: torch.device) -> None:
        self.views: list[torch.Tensor] = [torch.empty(0, device="cpu")] * len(layout.params)
        self._storages: Storages = []
        for segment in layout.segments:
            step = max(1, _ALIGNMENT // segment.dtype.itemsize)
            params = {each.index: layout.params[each.index] for each in segment.ranges}
            sizes = [-(-param.numel // step) * step for param in params.values()]
            flat = torch.empty(sum(sizes), dtype=segment.dtype, device=device)
            for (index, param), part in zip(params.items(), flat.split(sizes), strict=True):
                self.views[index] = part[: param.numel].view(param.shape)
            self._storages.append((flat.untyped_storage(), flat.untyped_storage().nbytes()))
        self.free()

    def allocate(self) -> None:
        resize(self._storages)

    def free(self) -> None:
        # Resized and not replaced, because autograd may have saved views of these storages.
        resize(self._storages, to_zero=True)


Storages = list[tuple[torch.UntypedStorage, int]]  # with the numbers of bytes that they had


def resize(storages: Storages, *, to_zero: bool = False) -> None:
    """Resize ``storages`` to zero, or back to the size that they had."""
    for storage, num_bytes in storages:
        size = 0 if to_zero else num_bytes
        if storage.nbytes() != size:  # resize_ to the same size would copy the memory
            storage.resize_(size)
