"""Safetensors files as Hugging Face lays them out: one, or several with an index.

A file is eight bytes with the length of a header in JSON, the header, and the data of all tensors
without gaps. Here it is written tensor by tensor, because the writers of ``safetensors`` take all
tensors of a file at once; it is read through ``safetensors``, block by block.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from meshard._mesh.boxes import Box
from meshard.checkpoint._protocol.storage import sync
from meshard.checkpoint._protocol.tensor_file import bytes_of, on_host
from meshard.checkpoint.weights_gather import sent_dtype, unsharded_bytes
from meshard.checkpoint.weights_layout import Weight, own_rank

safe_open: Any
try:
    from safetensors import safe_open
except ImportError:  # the extra is not installed
    safe_open = None

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
NUMBERED = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
UNFINISHED = re.compile(r"\.model.*\.safetensors\.saving")
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


# --- writing ---------------------------------------------------------------------------------


def parse_size(size: int | str) -> int:
    """Return bytes.

    >>> parse_size("5GB"), parse_size("1KiB"), parse_size(7)
    (5000000000, 1024, 7)
    """
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B\s*", str(size), re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise ValueError(
            f"max_shard_size must be a positive number of bytes or a text such as '5GB' or "
            f"'512MiB', got {size!r}."
        )
    power = " KMGT".index(match[2].upper() or " ")
    return max(1, int(float(match[1]) * (1024 if match[3] else 1000) ** power))


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file to be written: what is in it, in the order of its data."""

    name: str
    weights: list[Weight]
    dtype: torch.dtype | None

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(unsharded_bytes(weight, self.dtype) for weight in self.weights)

    @property
    def unfinished(self) -> str:
        """The name under which it is written, until all files are."""
        return f".{self.name}.saving"

    def header(self) -> bytes:
        """Return what stands before the data."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for weight in self.weights:
            begin, end = end, end + unsharded_bytes(weight, self.dtype)
            entries[weight.fqn] = {
                "dtype": _NAMES[sent_dtype(weight, self.dtype)],
                "shape": list(weight.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # aligns the data
        return struct.pack("<Q", len(text)) + text


def plan_files(weights: list[Weight], max_bytes: int, dtype: torch.dtype | None) -> list[FilePlan]:
    """Distribute weights over files of at most ``max_bytes``, or of one larger tensor."""
    lists: list[list[Weight]] = [[]]
    num_bytes = 0
    for weight in weights:
        wanted = sent_dtype(weight, dtype)
        if wanted not in _NAMES:
            raise ValueError(f"{weight.fqn!r} is {wanted}, which safetensors does not have.")
        own = unsharded_bytes(weight, dtype)
        if lists[-1] and num_bytes + own > max_bytes:
            lists.append([])
            num_bytes = 0
        lists[-1].append(weight)
        num_bytes += own
    count = len(lists)
    return [
        FilePlan(
            SINGLE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors",
            # Wider dtypes first, so that every tensor is aligned for its dtype.
            sorted(each, key=lambda weight: -sent_dtype(weight, dtype).itemsize),
            dtype,
        )
        for number, each in enumerate(lists, 1)
    ]


def write_tensor(file: IO[bytes], tensor: torch.Tensor) -> None:
    """Append the values of a tensor."""
    values = on_host(tensor)
    file.write(bytes_of(values))


def index_text(files: Sequence[FilePlan]) -> str:
    """Return the JSON of the index of several files."""
    weight_map = {weight.fqn: file.name for file in files for weight in file.weights}
    total = sum(file.num_bytes for file in files)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2) + "\n"


def sync_folder(folder: Path) -> None:
    """Make renames in ``folder`` survive a crash of the machine, where the system can."""
    if os.name == "posix":
        sync(folder)


# --- reading ---------------------------------------------------------------------------------


class StoredTensor:
    """A tensor in a file. ``read`` returns a block of it."""

    def __init__(self, path: Path, name: str, shape: list[int], dtype: str) -> None:
        self.path, self.name = path, name
        self.shape = tuple(shape)
        self.dtype_name = dtype  # as safetensors calls it

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in the file; a ValueError if torch has no such dtype."""
        if self.dtype_name not in _DTYPES:
            raise ValueError(
                f"{self.name!r} in {self.path} is {self.dtype_name}, which cannot be loaded."
            )
        return _DTYPES[self.dtype_name]

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, opened: Any, box: Box) -> torch.Tensor:
        """Return a block, given what ``opened(path)`` yields. It may share memory with the file."""
        block: torch.Tensor
        with torch.device("cpu"):  # safetensors cuts slices on the default device
            if not box.sizes:
                block = opened.get_tensor(self.name)
            else:
                block = opened.get_slice(self.name)[box.slices]
        return block


def opened(path: Path) -> Any:
    """Open a safetensors file as a context manager. Raises a ValueError if it is damaged."""
    assert safe_open is not None  # see require_safetensors
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {path} on rank {own_rank()}.") from None
    except Exception as error:  # safetensors raises a class of its own
        raise ValueError(
            f"{path} is no whole safetensors file ({error}); it may have been truncated, or be a "
            "pointer of Git LFS. Download or write it again."
        ) from error


def require_safetensors() -> None:
    """Raise, with the remedy, if safetensors is not installed."""
    if safe_open is None:
        raise ImportError(
            "load_pretrained reads files through safetensors, which is not installed; run "
            'pip install "meshard[checkpoint]".'
        )


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a folder, an index or a file, by their names there."""
    require_safetensors()
    files, promised = _files_of(path)
    found: dict[str, StoredTensor] = {}
    for file in files:
        with opened(file) as contents:
            for name in contents.keys():  # noqa: SIM118  # it is no dict
                block = contents.get_slice(name)
                if name in found:
                    raise ValueError(f"{name!r} is in {found[name].path} and in {file}.")
                found[name] = StoredTensor(file, name, block.get_shape(), block.get_dtype())
    for name, promised_in in promised.items():
        if name not in found or found[name].path != promised_in:
            raise ValueError(
                f"the index of {path} says that {name!r} is in {promised_in.name}, but it is not; "
                "the folder is a mixture of several saves. Write it again."
            )
    return found


def _files_of(path: Path) -> tuple[list[Path], dict[str, Path]]:
    """Return the files; and in which of them an index says that each tensor is."""
    if path.is_dir():
        if (path / SINGLE).is_file():
            return [path / SINGLE], {}
        indices = [path / INDEX] if (path / INDEX).is_file() else []
        indices = indices or sorted(path.glob("*.safetensors.index.json"))
        if indices:
            return _files_of_index(indices[0])
        files = sorted(path.glob("*.safetensors"))
        if len(files) == 1 and not NUMBERED.fullmatch(files[0].name):
            return files, {}
        _refuse_folder(path, files)
    if path.name.endswith(PICKLED):
        _refuse_pickled(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no file or folder {path} on rank {own_rank()}. What lies on a hub is "
            "downloaded before, by huggingface_hub.snapshot_download."
        )
    if path.name.endswith(".json"):
        return _files_of_index(path)
    return [path], {}


def _files_of_index(index: Path) -> tuple[list[Path], dict[str, Path]]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        names = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no index of safetensors files ({error!r}).") from error
    for file in names.values():
        if Path(file).name != file:
            raise ValueError(f"{index} names {file!r}, which is not a file beside it.")
    promised = {name: index.parent / file for name, file in names.items()}
    return sorted(set(promised.values())), promised


def _refuse_folder(folder: Path, files: list[Path]) -> None:
    if files:
        names = ", ".join(file.name for file in files[:3])
        raise ValueError(
            f"{folder} has {len(files)} safetensors files ({names}) and neither {SINGLE} nor "
            f"{INDEX}; a save may have been interrupted. Pass one file, or write the folder again."
        )
    pickled = [each for each in sorted(folder.iterdir()) if each.name.endswith(PICKLED)]
    if pickled:
        _refuse_pickled(pickled[0])
    raise FileNotFoundError(f"there are no safetensors files in {folder} on rank {own_rank()}.")


def _refuse_pickled(path: Path) -> None:
    raise ValueError(
        f"{path} is a pickle, which can run any code while it is loaded and cannot be read in "
        "parts; convert it once, on one process: load it with the class that wrote it, and call "
        "its save_pretrained, or safetensors.torch.save_file(state_dict, 'model.safetensors')."
    )


def in_file_order(stored: Iterable[StoredTensor]) -> dict[Path, list[StoredTensor]]:
    """Return the tensors by file, so that each file is opened once."""
    by_file: dict[Path, list[StoredTensor]] = {}
    for each in stored:
        by_file.setdefault(each.path, []).append(each)
    return by_file
