"""One tensor in a file, as ``torch.save`` writes it.

A file of ``torch.distributed.checkpoint`` is a sequence of such *blobs*, so that ``dcp.load`` reads
ours. A blob is a zip archive that holds the elements as they are in memory. We take the bytes
before and after the elements from ``torch.save``, and write the elements straight from memory. We
read the elements by their place in the file.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import io
import pickle
import struct
import zipfile
from typing import Any, NamedTuple

import torch

_DATA = "archive/data/0"
_CENTRAL_HEADER = 46  # bytes before the name of a file in the directory at the end of a zip
_CRC_IN_LOCAL, _CRC_IN_CENTRAL = 14, 16  # bytes from the beginning of either header

# Makes a memoryview of the memory at an address. torch itself shows the memory of a tensor to
# Python only as a NumPy array, and NumPy may not be installed.
_WRITABLE = 0x200  # PyBUF_WRITE
_memory_at: Any = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
)(("PyMemoryView_FromMemory", ctypes.pythonapi))


class Frame(NamedTuple):
    """What stands before and after the elements of a tensor in its blob."""

    head: bytes
    tail: bytes
    crc_in_head: int  # where in ``head`` the checksum of the elements stands
    crc_in_tail: int

    def around(self, crc32: int) -> tuple[bytes, bytes]:
        """Return head and tail for a tensor whose elements have this checksum."""
        packed = struct.pack("<L", crc32)
        head, tail = bytearray(self.head), bytearray(self.tail)
        head[self.crc_in_head : self.crc_in_head + 4] = packed
        tail[self.crc_in_tail : self.crc_in_tail + 4] = packed
        return bytes(head), bytes(tail)


@functools.lru_cache(maxsize=4096)
def frame_of(shape: tuple[int, ...], dtype: torch.dtype) -> Frame:
    """Return the frame of a contiguous tensor: all of one shape and dtype have the same."""
    file = io.BytesIO()
    torch.save(torch.zeros(shape, dtype=dtype, device="cpu"), file)
    blob = file.getvalue()
    begin, size, local = _place_in(blob)
    tail = blob[begin + size :]
    central = tail.index(_DATA.encode()) - _CENTRAL_HEADER
    return Frame(blob[:begin], tail, local + _CRC_IN_LOCAL, central + _CRC_IN_CENTRAL)


def _place_in(blob: bytes) -> tuple[int, int, int]:
    """Return where the elements begin, how many bytes they are, and where their header begins."""
    with zipfile.ZipFile(io.BytesIO(blob)) as archive:
        info = archive.getinfo(_DATA)
    local = info.header_offset
    name_size, extra_size = struct.unpack_from("<HH", blob, local + 26)
    return local + 30 + name_size + extra_size, info.file_size, local


class Stored(NamedTuple):
    """Where the elements of a tensor begin in its blob, and whether they are in order there."""

    begin: int
    is_in_order: bool  # contiguous; if not, only ``torch.load`` knows where each element is


def stored_in(blob: bytes) -> Stored:
    """Return where the elements are in a whole blob.

    Raises:
        ValueError: It is not what ``torch.save`` writes for one tensor.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(blob)) as archive:
            names = [name for name in archive.namelist() if "/data/" in name]
        if names != [_DATA]:
            raise ValueError(f"the archive holds the tensors {names}, and not one.")
        tensor = torch.load(io.BytesIO(blob), weights_only=True, map_location="cpu")
        return Stored(_place_in(blob)[0], _is_in_order(tensor))
    except (zipfile.BadZipFile, struct.error, KeyError, pickle.UnpicklingError) as error:
        raise ValueError(f"this is no archive of torch.save: {error}") from error


def _is_in_order(tensor: torch.Tensor) -> bool:
    is_view = tensor.is_conj() or tensor.is_neg() or tensor.storage_offset() > 0
    return tensor.is_contiguous() and not is_view


def stored_by_head(head: bytes) -> Stored | None:
    """Return where the elements are, given the first bytes of a blob; None: they do not tell."""
    place, is_in_order = 0, False
    while head[place : place + 4] == b"PK\x03\x04" and place + 30 <= len(head):
        flags, _, _, _, _, size, _, name_size, extra_size = struct.unpack_from(
            "<HHHHLLLHH", head, place + 6
        )
        name = head[place + 30 : place + 30 + name_size]
        begin = place + 30 + name_size + extra_size
        if name.endswith(b"/data/0"):
            return Stored(begin, is_in_order)
        if flags & 8 or begin + size > len(head):  # the size is unknown: it comes after the data
            return None
        if name.endswith(b"/data.pkl"):
            try:
                is_in_order = _Layout(io.BytesIO(head[begin : begin + size])).load()
            except (pickle.UnpicklingError, TypeError, EOFError):
                return None
        place = begin + size
    return None


class _Layout(pickle.Unpickler):
    """Reads from the pickle in a blob only whether the elements are in order."""

    def persistent_load(self, pid: Any) -> Any:
        return None  # stands for the storage, which is not needed

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name == "_rebuild_tensor_v2":
            return _is_plain_layout
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module == "torch" and name.endswith("Storage"):
            return None
        raise pickle.UnpicklingError(f"{module}.{name} is not of an ordinary tensor.")


def _is_plain_layout(
    storage: Any, offset: int, size: Any, stride: Any, _grad: Any, _hooks: Any, view: Any = None
) -> bool:
    """Stand for torch's function that makes a tensor of these arguments."""
    return (
        not offset and not view and torch.empty_strided(size, stride, device="meta").is_contiguous()
    )


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with these elements one after the other in host memory."""
    return tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()


def copied_bytes(tensor: torch.Tensor) -> bytes:
    """Return a copy of the elements of a tensor."""
    host = on_host(tensor)
    return bytes(bytes_of(host))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU. **Lifetime:** that of ``tensor``."""
    assert tensor.is_contiguous() and tensor.is_cpu
    if not tensor.numel():
        return memoryview(b"")
    memory: memoryview = _memory_at(tensor.data_ptr(), tensor.nbytes, _WRITABLE)
    return memory
