"""How are several tensors per rank, of any dtypes and shapes, gathered by one collective?

They travel as bytes, one behind the other. What arrives is laid out per tensor, rank by rank along
dim 0, in memory that is given back by resizing it: who has wrapped these tensors finds them filled
again after the next gather.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshard._comm.all_gather import GatherInFlight, start_all_gather
from meshard._comm.communicator import Communicator
from meshard._comm.setup_communicator import gather_from_all


class Form(NamedTuple):
    """What every rank sends of one tensor: so many rows."""

    dtype: torch.dtype
    rows: int
    row_shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        """Return the form of ``tensor``; one without dims is one row."""
        return cls(tensor.dtype, tensor.shape[0] if tensor.dim() else 1, tuple(tensor.shape[1:]))

    @property
    def num_bytes(self) -> int:
        """Bytes of one rank."""
        return self.rows * math.prod(self.row_shape) * self.dtype.itemsize


def agree_on_forms(
    own: Sequence[Form], group: dist.ProcessGroup, *, device: torch.device, label: str
) -> list[Form]:
    """Return forms with the most rows that any rank sends, if ranks differ in nothing else.

    **Collective:** all ranks of ``group``; two small all-gathers, which block. **Stream:** the
    current one.

    Raises:
        RuntimeError: On all ranks, if they differ in more than rows.
    """
    text = "\n".join(f"{form.dtype} {form.row_shape}" for form in own)
    outline = torch.tensor([len(own), zlib.crc32(text.encode())], device=device)
    outlines = gather_from_all(outline, group, label=label)
    if not bool((outlines == outlines[0]).all()):
        raise RuntimeError(
            f"unit {label!r} cannot be gathered: fsdp_pre_all_gather returned {own} on this rank, "
            "and other dtypes, row shapes or numbers of tensors on another. Only the size of dim 0 "
            "may be smaller on ranks that own fewer rows."
        )
    if not own:
        return []
    rows = torch.tensor([form.rows for form in own], device=device)
    most = gather_from_all(rows, group, label=label).amax(dim=0).tolist()
    return [form._replace(rows=int(rows)) for form, rows in zip(own, most, strict=True)]


class PackedGather:
    """Memory for tensors of all ranks, and the way of this rank's tensors into it.

    Args:
        forms: What every rank sends.
        count: Ranks.
        device: Where the tensors are.
    """

    def __init__(self, forms: Sequence[Form], count: int, device: torch.device) -> None:
        self.forms = list(forms)
        self._sizes = [form.num_bytes for form in forms]
        self._bytes = [
            torch.empty((count, size), dtype=torch.uint8, device=device) for size in self._sizes
        ]
        self.outputs = [
            _typed(flat, form, count) for flat, form in zip(self._bytes, forms, strict=True)
        ]
        self._storages = [flat.untyped_storage() for flat in self._bytes]
        self.free()

    def start(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        comm: Communicator,
        group: dist.ProcessGroup,
        label: str,
    ) -> GatherInFlight:
        """Start gathering; a tensor of fewer rows than its form is padded with zeros.

        **Collective:** all ranks of ``group``. **Stream:** call it inside the gather lane.
        **Lifetime:** ``tensors`` must not be edited until the gather is waited for.
        """
        source = self._pack([_bytes_of(tensor) for tensor in tensors])
        return start_all_gather(source, group.size(), comm=comm, group=group, label=label)

    def _pack(self, parts: list[torch.Tensor]) -> torch.Tensor:
        if len(parts) == 1 and parts[0].numel() == self._sizes[0]:
            return parts[0]
        source = parts[0].new_empty(sum(self._sizes))
        for target, part in zip(source.split(self._sizes), parts, strict=True):
            target[: part.numel()].copy_(part)
            target[part.numel() :].zero_()
        return source

    def copy_out(self, gathered: torch.Tensor) -> None:
        """Fill the outputs, which have memory, from ``gathered [ranks, bytes]``."""
        torch.split_with_sizes_copy(gathered, self._sizes, dim=1, out=self._bytes)

    def allocate(self) -> None:
        """Give the outputs memory."""
        for flat, storage in zip(self._bytes, self._storages, strict=True):
            storage.resize_(flat.numel())

    def free(self, indices: Iterable[int] | None = None) -> None:
        """Take the memory of the outputs, or of some, back."""
        for index in range(len(self._storages)) if indices is None else indices:
            self._storages[index].resize_(0)


def _typed(flat: torch.Tensor, form: Form, count: int) -> torch.Tensor:
    shape = (count * form.rows, *form.row_shape)
    if not flat.numel():
        return torch.empty(shape, dtype=form.dtype, device=flat.device)
    # `.data`: what is handed out has a version counter of its own, so that filling it again is
    # not taken for an in-place change of what autograd has saved.
    return flat.view(-1).view(form.dtype).view(shape).data


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():
        return tensor.new_empty(0, dtype=torch.uint8)
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
