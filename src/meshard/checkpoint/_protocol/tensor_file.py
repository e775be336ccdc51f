"""A file of tensors as safetensors lays it out, and the bytes of tensors in memory.

A file is eight bytes with the length of a header in JSON, the header, and the data of all tensors
without gaps. We write it ourselves, because the writers of ``safetensors`` take all tensors of a
file at once; anything that reads safetensors reads it.
"""

from __future__ import annotations

import ctypes
import json
import math
import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

# What is copied to the host, or read, at a time.
PIECE_BYTES = 2**23

_NAMES = """
    float64=F64 float32=F32 float16=F16 bfloat16=BF16 float8_e4m3fn=F8_E4M3
    float8_e4m3fnuz=F8_E4M3FNUZ float8_e5m2=F8_E5M2 float8_e5m2fnuz=F8_E5M2FNUZ
    float8_e8m0fnu=F8_E8M0 complex64=C64 int64=I64 int32=I32 int16=I16 int8=I8 uint64=U64
    uint32=U32 uint16=U16 uint8=U8 bool=BOOL
"""  # of dtypes in torch, and in safetensors
DTYPE_NAMES: dict[torch.dtype, str] = {
    getattr(torch, own): name for own, name in (pair.split("=") for pair in _NAMES.split())
}


class Entry(NamedTuple):
    """A tensor of a file. Its data follows that of the entry before."""

    name: str
    dtype: torch.dtype
    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize

    @property
    def stored_sizes(self) -> tuple[int, ...]:
        """The shape in the file: a dtype that safetensors lacks is written as bytes."""
        return self.sizes if self.dtype in DTYPE_NAMES else (*self.sizes, self.dtype.itemsize)


def header(entries: Iterable[Entry], metadata: dict[str, str]) -> bytes:
    """Return what stands before the data.

    Raises:
        ValueError: A tensor is called ``__metadata__``, which has a meaning in such files.
    """
    rows: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for entry in entries:
        if entry.name == "__metadata__":
            raise ValueError(
                "a tensor is called '__metadata__', which no safetensors file can hold."
            )
        begin, end = end, end + entry.num_bytes
        rows[entry.name] = {
            "dtype": DTYPE_NAMES.get(entry.dtype, "U8"),
            "shape": entry.stored_sizes,
            "data_offsets": [begin, end],
        }
    text = json.dumps(rows, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the data
    return struct.pack("<Q", len(text)) + text


# --- bytes of tensors ----------------------------------------------------------------------


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with these elements one after the other in host memory."""
    return tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()


def pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Iterate over the elements in order, in contiguous host tensors, as views where it can.

    **Lifetime:** of each, until the next one.
    """
    buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
    # Views take no memory. In small pieces a save takes half as long again.
    limit = 4 * PIECE_BYTES if tensor.is_cpu and tensor.is_contiguous() else PIECE_BYTES
    for part in _parts(tensor.detach(), limit):
        if part.is_cpu and part.is_contiguous() and not (part.is_conj() or part.is_neg()):
            yield part
            continue
        if not buffer.numel():
            buffer = torch.empty(min(limit, tensor.nbytes), dtype=torch.uint8, device="cpu")
        yield buffer[: part.nbytes].view(part.dtype).view(part.shape).copy_(part)


def _parts(tensor: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    if tensor.nbytes <= limit:
        yield tensor
        return
    rows = limit // (tensor.nbytes // tensor.size(0))
    for block in tensor.split(rows) if rows else tensor.unbind():
        yield from _parts(block, limit)


def copied_bytes(tensor: torch.Tensor) -> bytes:
    """Return a copy of the elements of a tensor."""
    host = on_host(tensor)
    return bytes(bytes_of(host))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, which it keeps alive.

    torch itself shows it to Python only as an array of NumPy, which may not be installed.
    """
    assert tensor.is_contiguous() and tensor.is_cpu
    if not tensor.numel():
        return memoryview(b"")
    array: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor  # keeps it alive
    return memoryview(array).cast("B")
