"""The format of ``torch.distributed.checkpoint``: what we write beside the manifest, and read.

Its metadata is a pickle of torch's own classes, whose fields change from torch to torch. We write
it with the classes of the present torch, for a plain ``dcp.load``. We read it with stand-ins for a
fixed list of classes, so that nothing else is unpickled and every version of torch is read.
"""

from __future__ import annotations

import collections
import contextlib
import io
import pathlib
import pickle
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from meshard._torch.private import constant_of, dcp_storage_info, dtype_of
from meshard.checkpoint._protocol.blobs import Stored, stored_by_head, stored_in
from meshard.checkpoint._protocol.manifest import (
    OF_TORCH,
    Blob,
    CheckpointError,
    Chunk,
    Manifest,
    TensorEntry,
    check_file_name,
)
from meshard.checkpoint._protocol.plain import decode, embedded, encode, names_in, reference
from meshard.checkpoint._protocol.storage import Source, Storage

METADATA = ".metadata"
OBJECTS = "objects.distcp"
_VERSION = "1.0.0"  # of torch's format
_NO_CHECKSUM = -1
_HEAD = 2048  # bytes of a blob that are read to find where its elements begin


def file_of(rank: int) -> str:
    return f"__{rank}_0.distcp"


# --- written -------------------------------------------------------------------------------


class Flat(NamedTuple):
    """What ``dcp.load`` looks for beside tensors."""

    data: bytes  # objects that are no tensors, as ``torch.save`` writes them
    ranges: dict[str, tuple[int, int]]  # where in ``data`` each object begins, and its size
    paths: dict[str, Any]  # the keys that lead to each object or tensor


# The value in a tree of ``_nested`` for each tensor whose values are in chunks. ``flattened`` skips
# it, because it writes only objects that are no tensors.
_STORED = torch.empty(0, device="cpu")


def flattened(manifest: Manifest) -> Flat:
    """Return the objects of models and optimizers, and the step.

    Of other parts, ``dcp.load`` reads the tensors only; ``Checkpointer`` reads all.
    """
    data, flat = io.BytesIO(), Flat(b"", {}, {name: (name,) for name in manifest.tensors})
    known: dict[Any, tuple[int, int]] = {}  # so that equal values are written once
    for name, tree in _nested(manifest).items():
        planner = DefaultSavePlanner()
        try:
            planner.set_up_planner({name: tree}, is_coordinator=True)
        except ValueError:  # torch cannot save two keys that have the same name when joined
            continue
        flat.paths.update(planner.mappings)
        for full, value in planner.state_dict.items():
            if value is _STORED:
                continue
            key = repr(value) if type(value) in (bool, int, float, str) else full, type(value)
            if key not in known:
                begin = data.tell()
                torch.save(value, data)
                known[key] = begin, data.tell() - begin
            flat.ranges[full] = known[key]
    return flat._replace(data=data.getvalue())


def _nested(manifest: Manifest) -> dict[str, Any]:
    """Return the states of models and optimizers as torch has them, without values of tensors."""
    nested: dict[str, Any] = {"step": manifest.step}
    for name, part in manifest.parts.items():
        if "param_groups" in part:
            nested[name] = decode(part, lambda _: _STORED)
        elif part["kind"] == "module":
            prefix, inner = f"{name}.", names_in(part["tree"])
            names = [
                each
                for each in (*manifest.tensors, *manifest.ties)
                if each.startswith(prefix) and each not in inner
            ]
            others = decode(part["tree"], lambda _: _STORED)
            nested[name] = {each.removeprefix(prefix): _STORED for each in names} | others
    return nested


def metadata_of(manifest: Manifest, flat: Flat) -> bytes:
    """Return the metadata file of torch for a checkpoint."""
    known: dict[str, Any] = {name: BytesStorageMetadata() for name in flat.ranges}
    stored = {
        MetadataIndex(name): dcp_storage_info(OBJECTS, begin, size)
        for name, (begin, size) in flat.ranges.items()
    }
    tied = {
        name: manifest.tensors[each]
        for name, each in manifest.ties.items()
        if each in manifest.tensors
    }
    for name, entry in (manifest.tensors | tied).items():
        chunks = []
        for number, chunk in enumerate(entry.chunks):
            offsets, sizes = torch.Size(chunk.offsets), torch.Size(chunk.sizes)
            chunks.append(ChunkStorageMetadata(offsets, sizes))
            blob = chunk.blob
            info = dcp_storage_info(blob.file, blob.begin, blob.size)
            stored[MetadataIndex(name, offsets, number)] = info
        properties = TensorProperties(dtype=dtype_of(entry.dtype))
        known[name] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
    metadata = Metadata(known, flat.paths, stored)
    metadata.version = _VERSION
    return pickle.dumps(metadata)


# --- read ----------------------------------------------------------------------------------


class _Record:
    """Stands for an object of torch's metadata, with the fields that the writing torch gave it."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        self.args = args
        self.__dict__.update(fields)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.args = tuple(state)

    def __hash__(self) -> int:
        return id(self)


def _member_of_enum(owner: Any, name: str) -> _Record:
    """Stand for ``getattr``, by which Python 3.11.2, for example, pickles the members of enums."""
    if owner is not _Record:
        raise _refused("builtins.getattr")
    return _Record(name)


def _refused(what: str) -> CheckpointError:
    return CheckpointError(
        f"{METADATA} refers to {what}, which no metadata of torch's checkpoints does; it was not "
        "loaded, as loading it may run code."
    )


class _Unpickler(pickle.Unpickler):
    """Reads torch's metadata; any other class is refused."""

    _RECORDS = frozenset(
        {
            "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
            "TensorProperties", "MetadataIndex", "StorageMeta", "_StorageInfo",
            "_MEM_FORMAT_ENCODING",
        }
    )  # fmt: skip
    _OTHERS: ClassVar = {
        ("torch", "Size"): torch.Size,
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("collections", "defaultdict"): collections.defaultdict,
        ("builtins", "list"): list,
        ("builtins", "dict"): dict,
        ("builtins", "set"): set,
        ("builtins", "getattr"): _member_of_enum,
        ("pathlib", "PosixPath"): pathlib.PurePosixPath,
        ("pathlib", "WindowsPath"): pathlib.PureWindowsPath,
        ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,
        ("pathlib._local", "WindowsPath"): pathlib.PureWindowsPath,
        ("torch.serialization", "_get_layout"): str,
    }

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("torch.distributed.checkpoint.") and name in self._RECORDS:
            return _Record
        if (module, name) in self._OTHERS:
            return self._OTHERS[module, name]
        value = constant_of(name) if module == "torch" else None
        if value is not None:
            return value
        raise _refused(f"{module}.{name}")


def read_folder(storage: Storage) -> Manifest:
    """Return a manifest for what ``dcp.save`` has written. It has no checksums."""
    metadata = _read_metadata(storage)
    infos: dict[tuple[str, tuple[int, ...] | None], Any] = {}
    for index, info in metadata.storage_data.items():
        check_file_name(str(info.relative_path), f"{storage.root}/{METADATA}")
        offset = getattr(index, "offset", None)
        infos[index.fqn, None if offset is None else tuple(offset)] = info
    paths = getattr(metadata, "planner_data", None) or {}
    tensors, nested, unreadable = dict[str, TensorEntry](), dict[Any, Any](), list[str]()
    with contextlib.closing(_Blobs(storage)) as blobs:
        for name, entry in metadata.state_dict_metadata.items():
            path = paths.get(name, (name,))
            if hasattr(entry, "chunks"):
                tensors[name] = _entry_of(name, entry, infos, blobs)
                _put(nested, path, reference(name))
                continue
            try:
                _put(nested, path, blobs.value_of(infos[name, None]))
            except (pickle.UnpicklingError, TypeError):  # it needs classes that are not loaded here
                unreadable.append(name)
    return _as_manifest(tensors, nested, unreadable)


def _read_metadata(storage: Storage) -> Any:
    try:
        metadata = _Unpickler(io.BytesIO(storage.read(METADATA))).load()
        assert isinstance(metadata.state_dict_metadata, dict)
        assert isinstance(metadata.storage_data, dict)
    except (pickle.UnpicklingError, AttributeError, EOFError, IndexError, AssertionError) as error:
        raise CheckpointError(f"{storage.root}/{METADATA} cannot be read: {error}") from error
    return metadata


def _entry_of(name: str, entry: Any, infos: dict[Any, Any], blobs: _Blobs) -> TensorEntry:
    dtype = str(_dtype_of(entry.properties)).removeprefix("torch.")
    chunks = []
    for chunk in entry.chunks:
        info = infos[name, tuple(chunk.offsets)]
        blob = Blob(info.relative_path, info.offset, info.length, _NO_CHECKSUM)
        stored = blobs.stored_in(blob)
        blob = blob._replace(data_begin=stored.begin)
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        chunks.append(Chunk(offsets, sizes, blob, stored.is_in_order))
    return TensorEntry(tuple(entry.size), dtype, [], chunks)


def _put(nested: dict[Any, Any], path: Sequence[Any], value: Any) -> None:
    for key in path[:-1]:
        nested = nested.setdefault(key, {})
    nested[path[-1]] = value


def _as_trees(nested: Any) -> Any:
    """Return nested dicts as encoded trees. Dicts with the keys 0, 1, 2... become lists."""
    if not isinstance(nested, dict) or "$" in nested:
        return nested
    values = {key: _as_trees(each) for key, each in nested.items()}
    if values and all(type(key) is int for key in values):
        if sorted(values) == list(range(len(values))):
            return [values[number] for number in sorted(values)]
        return {"$": "dict", "items": [[key, each] for key, each in values.items()]}
    return values


def _as_manifest(
    tensors: dict[str, TensorEntry], nested: dict[Any, Any], unreadable: list[str]
) -> Manifest:
    """Sort what was saved into parts, by the keys at the top."""
    parts = dict[str, Any]()
    for name, tree in _as_trees(nested).items():
        is_optimizer = isinstance(tree, dict) and {"state", "param_groups"} <= tree.keys()
        parts[name] = tree if is_optimizer else {"kind": "value", "tree": tree}
    if "model" in parts:
        others = {
            key: each
            for key, each in parts["model"]["tree"].items()
            if f"model.{key}" not in tensors
        }
        parts["model"] = {"kind": "module", "tree": others}
    else:  # the state dict of the model was saved alone, or its names beside other parts
        own = [name for name, each in tensors.items() if name in parts]
        for name in own:
            tensors[f"model.{name}"] = tensors.pop(name)
            del parts[name]
    step = parts.pop("step", {}).get("tree")
    step = step if type(step) is int else None
    return Manifest(step, tensors, parts, [], about={"format": OF_TORCH}, unreadable=unreadable)


def _dtype_of(properties: Any) -> torch.dtype:
    dtype: torch.dtype | None = getattr(properties, "dtype", None)
    found: torch.dtype = properties.args[0] if dtype is None else dtype  # its first field
    return found


class _Blobs:
    """Reads blobs of torch: see ``blobs``."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._sources: dict[str, Source] = {}

    def _source(self, file: str) -> Source:
        if file not in self._sources:
            self._sources[file] = self._storage.open(file)
        return self._sources[file]

    def value_of(self, info: Any) -> Any:
        """Return an object that is no tensor, encoded as a plain value.

        Raises:
            pickle.UnpicklingError: ``torch.load`` does not read it with ``weights_only``.
            TypeError: It is not plain.
        """
        data = self._source(info.relative_path).read(info.offset, info.length)
        value = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
        return encode(value, lambda _, tensor: embedded(tensor))

    def stored_in(self, blob: Blob) -> Stored:
        """Return where the elements of a tensor are in its blob."""
        source = self._source(blob.file)
        found = stored_by_head(source.read(blob.begin, min(_HEAD, blob.size)))
        if found is not None:
            return found
        try:
            return stored_in(source.read(blob.begin, blob.size))
        except ValueError as error:
            raise CheckpointError(f"{self._storage.root}/{blob.file}: {error}") from error

    def close(self) -> None:
        for source in self._sources.values():
            source.close()
