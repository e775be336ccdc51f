"""Plain values as JSON text, and back: nothing that is loaded runs code.

What JSON cannot express (tuples, bytes, infinities, keys that are no strings) becomes an object
whose key ``"$"`` tells what it is. Tensors become references by name; their data is elsewhere.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from meshard._torch.private import dtype_of
from meshard.checkpoint._protocol.blobs import copied_bytes

_KIND = "$"
Path = tuple[Any, ...]  # the keys that lead to a value


def reference(name: str) -> dict[str, str]:
    """Return what stands for a tensor whose data is elsewhere."""
    return {_KIND: "tensor", "name": name}


def embedded(tensor: torch.Tensor) -> dict[str, Any]:
    """Return a small tensor with its data."""
    return {
        _KIND: "data",
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "base64": base64.b64encode(copied_bytes(tensor)).decode(),
    }


def encode(value: Any, tensor: Callable[[Path, torch.Tensor], Any], path: Path = ()) -> Any:
    """Return ``value`` as what ``json.dumps`` takes.

    ``tensor`` is called for each tensor in it, with the path that leads there, and returns what
    stands for it: ``reference`` or ``embedded``.

    Raises:
        TypeError: Something in it is neither a tensor nor plain.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {_KIND: "float", "value": repr(value)}
    if isinstance(value, torch.Tensor):
        return tensor(path, value)
    if kind in (list, tuple, set, torch.Size):
        # Sorted, because the order of a set differs between processes.
        ordered = sorted(value, key=repr) if kind is set else value
        items = [encode(each, tensor, (*path, number)) for number, each in enumerate(ordered)]
        return items if kind is list else {_KIND: kind.__name__, "items": items}
    if kind in (dict, OrderedDict, Counter):
        pairs = [
            (encode(key, tensor, path), encode(each, tensor, (*path, key)))
            for key, each in value.items()
        ]
        if kind is dict and all(type(key) is str and key != _KIND for key in value):
            return dict(pairs)
        return {_KIND: kind.__name__, "items": [list(pair) for pair in pairs]}
    if kind in (bytes, bytearray):
        return {_KIND: kind.__name__, "base64": base64.b64encode(value).decode()}
    if kind in (torch.dtype, torch.device):
        return {_KIND: kind.__name__, "value": str(value).removeprefix("torch.")}
    if kind.__module__ == "numpy" and hasattr(value, "item") and not getattr(value, "shape", ()):
        plain = value.item()
        if type(plain) is not kind:  # of a longdouble it is one again
            return encode(plain, tensor, path)
    where = "".join(f"[{key!r}]" for key in path)
    raise TypeError(
        f"the value at {where or 'the top'} is a {kind.__module__}.{kind.__qualname__}, which a "
        "checkpoint does not store, as it unpickles nothing: pass plain values (numbers, strings, "
        "lists, tuples, dicts), tensors, or an object whose state_dict() returns these."
    )


_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "Size": torch.Size,
}
_MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda pairs: Counter(dict(pairs)),
}


def decode(value: Any, tensor: Callable[[str], Any]) -> Any:
    """Return what ``encode`` was given. ``tensor`` returns the tensor of a given name.

    Raises:
        ValueError: ``encode`` does not return such a value.
    """
    if isinstance(value, list):
        return [decode(each, tensor) for each in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind is None:
        return {key: decode(each, tensor) for key, each in value.items()}
    if kind == "tensor":
        return tensor(value["name"])
    if kind == "data":
        data = bytearray(base64.b64decode(value["base64"]))
        dtype, shape = dtype_of(value["dtype"]), value["shape"]
        flat = (
            torch.frombuffer(data, dtype=dtype)
            if data
            else torch.empty(0, dtype=dtype, device="cpu")
        )
        return flat.view(shape)
    if kind in _SEQUENCES:
        return _SEQUENCES[kind]([decode(each, tensor) for each in value["items"]])
    if kind in _MAPPINGS:
        items = value["items"]
        return _MAPPINGS[kind]([(decode(key, tensor), decode(each, tensor)) for key, each in items])
    if kind == "float":
        return float(value["value"])
    if kind in ("bytes", "bytearray"):
        content = base64.b64decode(value["base64"])
        return content if kind == "bytes" else bytearray(content)
    if kind == "dtype":
        return dtype_of(value["value"])
    if kind == "device":
        return torch.device(value["value"])
    raise ValueError(f"{kind!r} is no kind of value that a checkpoint stores.")


def encoded_items(tree: Any) -> dict[str, Any]:
    """Return the values of an encoded dict, still encoded, by those keys that are strings."""
    if not isinstance(tree, dict) or tree.get(_KIND, "dict") not in _MAPPINGS:
        return {}
    pairs = tree["items"] if _KIND in tree else tree.items()
    return {key: each for key, each in pairs if type(key) is str}


def names_in(tree: Any) -> set[str]:
    """Return the names of the tensors that an encoded tree refers to."""
    names = set[str]()
    decode(tree, names.add)
    return names
