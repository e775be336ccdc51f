"""Safetensors files as Hugging Face lays them out: one, or several with an index.

They are written tensor by tensor (``_protocol/tensor_file.py``), and read through ``safetensors``,
block by block.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from meshard._mesh.boxes import Box
from meshard.checkpoint._protocol.storage import sync
from meshard.checkpoint._protocol.tensor_file import DTYPE_NAMES, Entry, bytes_of, header, pieces
from meshard.checkpoint.weights_gather import cast_dtype, in_lists, unsharded_bytes
from meshard.checkpoint.weights_layout import Weight, own_rank

safe_open: Any
try:
    from safetensors import safe_open
except ImportError:  # the extra is not installed
    safe_open = None

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Of several files: as everyone names them, or beside such files of another save.
NUMBERED = re.compile(r"model(-\d+)?-\d{5}-of-\d{5}\.safetensors")
_WEIGHTS = (
    ".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf", ".h5",
    ".msgpack", ".onnx",
)  # fmt: skip
_OF_PICKLES = (
    "A pickle (.bin, .pt) is to be loaded once by the class that wrote it, and saved by its "
    "save_pretrained."
)
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


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

    def header(self) -> bytes:
        """Return what stands before the data."""
        entries = [Entry(w.fqn, cast_dtype(w, self.dtype), w.shape) for w in self.weights]
        return header(entries, {})


def plan_files(weights: list[Weight], max_bytes: int, dtype: torch.dtype | None) -> list[FilePlan]:
    """Distribute weights over files of at most ``max_bytes``, or of one larger tensor."""
    for weight in weights:
        if cast_dtype(weight, dtype) not in DTYPE_NAMES:
            raise ValueError(f"{weight.fqn!r} is {weight.dtype}, which safetensors does not have.")
    # A module without weights has one file too.
    lists = list(in_lists(weights, lambda w: unsharded_bytes(w, dtype), max_bytes)) or [[]]
    count = len(lists)
    return [
        FilePlan(
            SINGLE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors",
            # Wider dtypes first, so that every tensor is aligned for its dtype.
            sorted(each, key=lambda weight: -cast_dtype(weight, dtype).itemsize),
            dtype,
        )
        for number, each in enumerate(lists, 1)
    ]


def write_tensor(file: IO[bytes], tensor: torch.Tensor) -> None:
    """Append the values of a tensor."""
    for piece in pieces(tensor):
        file.write(bytes_of(piece))


def index_text(files: Sequence[FilePlan], names: Mapping[str, str] | None = None) -> str:
    """Return the JSON of the index of several files. ``names`` has those that are renamed."""
    weight_map = {
        weight.fqn: (names or {}).get(file.name, file.name)
        for file in files
        for weight in file.weights
    }
    total = sum(file.num_bytes for file in files)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2) + "\n"


def extra_paths(given: Any) -> Iterator[Path]:
    """Yield files, and those in folders, but for hidden ones and for weights."""
    for path in map(Path, [given] if isinstance(given, (str, os.PathLike)) else given or ()):
        for each in path.iterdir() if path.is_dir() else (path,):
            if not (each.is_dir() or each.name.startswith(".") or each.name.endswith(_WEIGHTS)):
                yield each


def commit(aside: Path, files: list[FilePlan]) -> None:
    """Move what lies in ``aside`` into the folder around it, and remove what it replaces.

    Readers take the single file or what the index names, and some look for the one first, some for
    the other. So new files get names that no old one has, and the last rename is the commit. Where
    one file follows several, or several one, some readers find the old weights, still whole, until
    the old single file or index is removed.
    """
    folder = aside.parent
    last, other = (SINGLE, INDEX) if len(files) == 1 else (INDEX, SINGLE)
    names = _new_names(folder, files)
    if last == INDEX:
        (aside / INDEX).write_text(index_text(files, names))
    for path in aside.iterdir():
        if path.name not in names:
            sync(path)
            names[path.name] = path.name
    del names[last]
    for name, new in names.items():
        os.replace(aside / name, folder / new)
    sync(folder)
    os.replace(aside / last, folder / last)
    sync(folder)
    (folder / other).unlink(missing_ok=True)
    sync(folder)
    aside.rmdir()
    for path in folder.iterdir():
        if NUMBERED.fullmatch(path.name) and path.name not in names.values():
            path.unlink()


def _new_names(folder: Path, files: list[FilePlan]) -> dict[str, str]:
    """Return names that no file of the folder has; of a single file its own."""
    names = {file.name: file.name for file in files}
    for number in itertools.count(2):
        if SINGLE in names or not any((folder / name).exists() for name in names.values()):
            break
        names = {name: name.replace("model", f"model-{number}") for name in names}
    return names


# --- reading ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file. ``read`` returns a block of it."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype_name: str  # as safetensors calls it

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in the file; a ValueError if torch has no such dtype."""
        if self.dtype_name not in _DTYPES:
            raise ValueError(f"{self.name!r} in {self.path} is {self.dtype_name}, not of torch.")
        return _DTYPES[self.dtype_name]

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, opened: Any, box: Box) -> torch.Tensor:
        """Return a block, given what ``opened(path)`` yields. It may share memory with the file."""
        with torch.device("cpu"):  # safetensors cuts slices on the default device
            block: torch.Tensor
            if box.sizes:
                block = opened.get_slice(self.name)[box.slices]
            else:
                block = opened.get_tensor(self.name)
        return block


def opened(path: Path) -> Any:
    """Open a safetensors file as a context manager. Raises a ValueError if it is damaged."""
    _check_is_file(path)
    try:
        return safe_open(path, framework="pt")
    except Exception as error:  # safetensors raises a class of its own
        raise ValueError(
            f"{path} is no whole safetensors file ({error}); it may have been truncated, or be a "
            f"pointer of Git LFS: download or write it again. {_OF_PICKLES}"
        ) from error


def _check_is_file(path: Path) -> None:
    if not path.is_file():  # to open a pipe would wait for its writer
        raise FileNotFoundError(
            f"there is no regular file {path} on rank {own_rank()}. What lies on a hub is "
            "downloaded before, by huggingface_hub.snapshot_download."
        )


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a folder, an index or a file, by their names there."""
    if safe_open is None:
        raise ImportError(
            "load_pretrained reads files through safetensors, which is not installed; run "
            'pip install "meshard[checkpoint]".'
        )
    path = _first_in(path) if path.is_dir() else path
    files: dict[Path, list[str]] = {path: []}
    if path.name.endswith(".json"):
        files = _files_of_index(path)
    found: dict[str, StoredTensor] = {}
    for file, names in files.items():
        with opened(file) as contents:
            there = contents.keys()
            if missing := set(names).difference(there):
                raise ValueError(
                    f"{path} says that {min(missing)!r} is in {file.name}, but it is not; the "
                    "folder is a mixture of several saves. Write it again."
                )
            for name in names or there:
                block = contents.get_slice(name)
                shape = tuple(block.get_shape())
                found[name] = StoredTensor(file, name, shape, block.get_dtype())
    return found


def _first_in(folder: Path) -> Path:
    """Return the file of a folder that readers open first."""
    first = [folder / SINGLE, folder / INDEX, *sorted(folder.glob("*.safetensors.index.json"))]
    for path in first:
        if path.exists():
            return path
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1 and not NUMBERED.fullmatch(files[0].name):
        return files[0]
    raise FileNotFoundError(
        f"{folder} has {len(files)} safetensors files on rank {own_rank()}, and neither {SINGLE} "
        "nor an index; a first save may have been interrupted. Pass one file, or write it again. "
        f"{_OF_PICKLES}"
    )


def _files_of_index(index: Path) -> dict[Path, list[str]]:
    """Return the files that an index names, with what it says is in each."""
    _check_is_file(index)
    files: dict[Path, list[str]] = {}
    try:
        for name, file in json.loads(index.read_bytes())["weight_map"].items():
            files.setdefault(index.parent / file, []).append(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no index of safetensors files ({error!r}).") from error
    for file in files:
        if file.parent != index.parent:
            raise ValueError(f"{index} names {file}, which is not a file beside it.")
    return dict(sorted(files.items()))
