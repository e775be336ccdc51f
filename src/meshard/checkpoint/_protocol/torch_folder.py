"""Folders that ``torch.distributed.checkpoint.save`` has written.

Their metadata is a pickle of torch's own classes, whose fields change from torch to torch. It is
read with stand-ins for a fixed list of classes, so that nothing else is unpickled and every version
of torch is read. Each tensor is a chunk that ``torch.save`` has packed.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch

from meshard._torch.private import constant_of
from meshard.checkpoint._protocol.manifest import (
    Chunk,
    Manifest,
    TensorEntry,
    check_covered,
    check_file_name,
)
from meshard.checkpoint._protocol.plain import embedded, encode, reference
from meshard.checkpoint._protocol.storage import CheckpointError, Source, Storage

METADATA = ".metadata"

# --- the metadata --------------------------------------------------------------------------


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


class _Maker:
    """Stands for a function or class that a pickle calls. A pickle cannot change it."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, *args: Any) -> Any:
        return self._make(*args)

    def __setstate__(self, state: Any) -> None:
        raise _refused("a change of a function")


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


_MAKERS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
    ("collections", "defaultdict"): lambda *_: {},
    ("builtins", "list"): list,
    ("builtins", "dict"): dict,
    ("builtins", "set"): set,
    ("builtins", "getattr"): _member_of_enum,
    ("pathlib", "PosixPath"): lambda *path: "/".join(path),
    ("pathlib", "WindowsPath"): lambda *path: "/".join(path),
    ("torch.serialization", "_get_layout"): str,
}
_RECORDS = {
    "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
    "TensorProperties", "MetadataIndex", "StorageMeta", "_StorageInfo", "_MEM_FORMAT_ENCODING",
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """Reads torch's metadata; any other class is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("torch.distributed.checkpoint.") and name in _RECORDS:
            return _Record
        make = _MAKERS.get((module.removesuffix("._local"), name))
        if make is not None:
            return _Maker(make)
        value = constant_of(name) if module == "torch" else None
        if value is not None:
            return value
        raise _refused(f"{module}.{name}")


def read_folder(storage: Storage) -> Manifest:
    """Return a manifest for what ``dcp.save`` has written. It has no checksums.

    Raises:
        CheckpointError: The metadata is not that of torch, or its chunks do not cover a tensor.
    """
    where = f"{storage.root}/{METADATA}"
    try:
        metadata = _Unpickler(io.BytesIO(storage.read(METADATA))).load()
        return _manifest_of(metadata, storage)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error
    except OSError:
        raise
    except Exception as error:  # whatever a wrong form leads to
        raise CheckpointError(f"{where} has not the form of torch's metadata.") from error


def _manifest_of(metadata: Any, storage: Storage) -> Manifest:
    infos: dict[tuple[str, tuple[int, ...] | None], Any] = {}
    sizes_of_files = storage.files("")
    for index, info in metadata.storage_data.items():
        file = check_file_name(info.relative_path)
        if info.offset < 0 or info.offset + info.length > sizes_of_files.get(file, -1):
            raise CheckpointError(f"{file}, where {index.fqn!r} is, is missing or too short.")
        offset = getattr(index, "offset", None)
        infos[index.fqn, None if offset is None else tuple(offset)] = info
    paths = getattr(metadata, "planner_data", None) or {}
    tensors, nested, unreadable = dict[str, TensorEntry](), dict[Any, Any](), list[str]()
    with contextlib.ExitStack() as stack:
        sources: dict[str, Source] = {}
        for name, entry in metadata.state_dict_metadata.items():
            path = paths.get(name, (name,))
            if hasattr(entry, "chunks"):
                tensors[name] = _entry_of(name, entry, infos)
                _put(nested, path, reference(name))
                continue
            info = infos[name, None]
            file = info.relative_path
            if file not in sources:
                sources[file] = stack.enter_context(contextlib.closing(storage.open(file)))
            try:
                _put(nested, path, _value_of(sources[file].read(info.offset, info.length)))
            except (pickle.UnpicklingError, TypeError):  # it needs classes that are not loaded here
                unreadable.append(name)
    return _as_manifest(tensors, nested, unreadable)


def _value_of(data: bytes) -> Any:
    """Return an object that is no tensor, encoded as a plain value."""
    value = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    return encode(value, lambda _, tensor: embedded(tensor))


def _entry_of(name: str, entry: Any, infos: dict[Any, Any]) -> TensorEntry:
    properties = entry.properties
    dtype = getattr(properties, "dtype", None)  # its first field
    dtype = str(properties.args[0] if dtype is None else dtype).removeprefix("torch.")
    found = TensorEntry(tuple(entry.size), dtype, [])
    for each in entry.chunks:
        offsets = tuple(each.offsets)
        if (name, offsets) not in infos:
            raise CheckpointError(f"it does not say where the chunk {offsets} of {name!r} is.")
        info = infos[name, offsets]
        place = info.relative_path, info.offset, info.length
        found.chunks.append(Chunk(offsets, tuple(each.sizes), *place, is_archive=True))
    check_covered(name, found)
    return found


# --- as a manifest -------------------------------------------------------------------------


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
    for name, value in nested.items():
        tree = _optimizer_of(value) or _as_trees(value)
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
        if own:
            parts["model"] = {"kind": "module", "tree": {}}
    step = parts.pop("step", {}).get("tree")
    step = step if type(step) is int else None
    return Manifest(step, tensors, parts, about={"has_each_name": True}, unreadable=unreadable)


def _optimizer_of(value: Any) -> dict[str, Any] | None:
    """Return the state of an optimizer as it is elsewhere, if torch has changed its form.

    torch flattens it with ``flatten_optimizer_state_dict=True``: a key for each state of a
    parameter, as ``state.layer.weight.exp_avg``, and for each of its hyperparameters. The state
    dict of an optimizer as it is has numbers in the place of names: see ``with_names``.
    """
    if not isinstance(value, dict):
        return None
    keys = [key for key in value if isinstance(key, str)]
    if keys and all(key.startswith(("state.", "param_groups.")) for key in keys):
        state, settings = dict[str, Any](), dict[str, dict[str, Any]]()
        for key in keys:
            kind, _, rest = key.partition(".")
            fqn, _, name = rest.rpartition(".")
            (state if kind == "state" else settings).setdefault(fqn, {})[name] = value[key]
        groups: dict[str, dict[str, Any]] = {}
        for fqn, own in settings.items():
            own = {name: _as_trees(each) for name, each in own.items() if name != "param_names"}
            group = groups.setdefault(json.dumps(own, sort_keys=True), {"params": [], **own})
            group["params"].append(fqn)
        return {"state": state, "param_groups": list(groups.values())}
    found = _as_trees(value.get("param_groups"))
    if not found or any(type(name) is not int for group in found for name in group["params"]):
        return None
    return {
        "state": {f"#{n}": _as_trees(each) for n, each in value.get("state", {}).items()},
        "param_groups": [{**each, "params": [f"#{n}" for n in each["params"]]} for each in found],
    }
