"""Plain values as JSON text, and back: nothing that is loaded runs code.

What JSON cannot express (tuples, bytes, infinities, keys that are no strings) becomes an object
whose key ``"$"`` tells what it is. Tensors become references by name; their data is elsewhere.
"""

from __future__ import annotations

import base64
import enum
import math
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

from meshard._torch.private import dtype_of
from meshard.checkpoint._protocol.tensor_file import copied_bytes

_KIND = "$"
Path = tuple[Any, ...]  # the keys that lead to a value
# Of these the class alone tells how they are made of a list, or of pairs.
_SEQUENCES: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple, "set": set, "frozenset": frozenset, "Size": torch.Size,
}  # fmt: skip
_MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "dict": dict, "OrderedDict": OrderedDict, "Counter": lambda pairs: Counter(dict(pairs)),
}  # fmt: skip


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


def wrapped(tensor: torch.Tensor, inner: Any, context: Any, name: str | None) -> dict[str, Any]:
    """Return what stands for a tensor that is made of others, as ``__tensor_flatten__`` tells.

    With a ``name`` it is the local tensor of a DTensor.
    """
    return {
        _KIND: "wrapped",
        "class": _name_of(type(tensor)),
        "inner": inner,
        "context": context,
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "placed": name,
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
    if kind is float and math.isfinite(value):
        return value
    if kind in (float, complex):
        return {_KIND: kind.__name__, "value": repr(value)}
    if isinstance(value, torch.Tensor):
        return tensor(path, value)

    def items(values: Any) -> list[Any]:
        return [encode(each, tensor, (*path, number)) for number, each in enumerate(values)]

    if kind is list:
        return items(value)
    if kind in (tuple, set, frozenset, torch.Size):
        # Sorted, because the order of a set differs between processes.
        ordered = sorted(value, key=repr) if kind in (set, frozenset) else value
        return {_KIND: kind.__name__, "items": items(ordered)}
    if kind is deque:
        return {_KIND: "deque", "items": items(value), "maxlen": value.maxlen}
    if kind in (dict, OrderedDict, Counter, defaultdict):
        pairs = [
            (encode(key, tensor, path), encode(each, tensor, (*path, key)))
            for key, each in value.items()
        ]
        if kind is dict and all(type(key) is str and key != _KIND for key in value):
            return dict(pairs)
        table = {_KIND: kind.__name__, "items": [list(pair) for pair in pairs]}
        if kind is defaultdict and value.default_factory is not None:
            name = _name_of(value.default_factory)
            if name not in _FACTORIES:
                raise _refused(value, path)
            return {**table, "factory": name}
        return table
    if kind in (bytes, bytearray):
        return {_KIND: kind.__name__, "base64": base64.b64encode(value).decode()}
    if kind in (torch.dtype, torch.device):
        return {_KIND: kind.__name__, "value": str(value).removeprefix("torch.")}
    is_named_tuple = isinstance(value, tuple) and hasattr(kind, "_fields")
    if (isinstance(value, enum.Enum) or is_named_tuple) and _found(_name_of(kind)) is kind:
        if is_named_tuple:
            return {_KIND: "named tuple", "class": _name_of(kind), "items": items(value)}
        if isinstance(value, enum.Flag):  # several flags together have no name
            return {_KIND: "flags", "class": _name_of(kind), "value": value.value}
        return {_KIND: "enum", "class": _name_of(kind), "name": value.name}
    if kind.__module__ == "numpy" and hasattr(value, "tobytes"):
        return _encoded_numpy(value, path)
    raise _refused(value, path)


def _refused(value: Any, path: Path) -> TypeError:
    kind, where = type(value), "".join(f"[{key!r}]" for key in path)
    return TypeError(
        f"the value at {where or 'the top'} is a {kind.__module__}.{kind.__qualname__}, which a "
        "checkpoint does not store, as it unpickles nothing: pass plain values (numbers, strings, "
        "lists, tuples, dicts), tensors, or an object whose state_dict() returns these."
    )


def _encoded_numpy(value: Any, path: Path) -> Any:
    """Return an array or a scalar with its data."""
    dtype = value.dtype
    kind = "scalar" if not value.shape and type(value).__name__ != "ndarray" else "ndarray"
    is_known = kind == "scalar" or type(value).__name__ == "ndarray"  # and no matrix, for example
    # A long double has other bytes on other machines.
    if not is_known or dtype.hasobject or dtype.names or dtype.char in "gG" or not dtype.itemsize:
        raise _refused(value, path)
    data = base64.b64encode(value.tobytes()).decode()
    return {_KIND: kind, "dtype": dtype.str, "shape": list(value.shape), "base64": data}


def _name_of(kind: Any) -> str:
    return f"{kind.__module__}:{getattr(kind, '__qualname__', kind)}"


# What a defaultdict may make: plain values.
_FACTORIES = {
    _name_of(kind): kind
    for kind in (bool, int, float, str, list, tuple, set, dict, OrderedDict, Counter, deque)
}


def _found(name: str) -> Any:
    """Return what has a name in a module that the program has imported: none is imported here."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def _named(name: str, base: type) -> Any:
    found = _found(name)
    if not isinstance(found, type) or not issubclass(found, base):
        raise ValueError(
            f"there is no class {name!r} of a value; import the module that defines it first."
        )
    return found


def decode(value: Any, tensor: Callable[..., Any]) -> Any:
    """Return what ``encode`` was given. ``tensor`` returns the tensor of a given name.

    With a second argument, a local tensor, it returns the DTensor of that name.

    Raises:
        ValueError: ``encode`` does not return such a value, or a class that it needs is not here.
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
    if kind == "wrapped":
        inner, context = decode(value["inner"], tensor), decode(value["context"], tensor)
        found: Any = _named(value["class"], torch.Tensor)
        made = found.__tensor_unflatten__(inner, context, value["shape"], value["stride"])
        return made if value["placed"] is None else tensor(value["placed"], made)
    if kind in ("float", "complex"):
        return (float if kind == "float" else complex)(value["value"])
    if kind == "dtype":
        return dtype_of(value["value"])
    if kind == "device":
        return torch.device(value["value"])
    if kind == "flags":
        return _named(value["class"], enum.Flag)(value["value"])
    if kind == "enum":
        return _named(value["class"], enum.Enum)[value["name"]]
    if "base64" in value:
        return _decoded_bytes(kind, value)
    items = [decode(each, tensor) for each in value.get("items", ())]
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](items)
    if kind in _MAPPINGS:
        return _MAPPINGS[kind](items)
    if kind == "deque":
        return deque(items, value["maxlen"])
    if kind == "defaultdict":
        name = value.get("factory")
        return defaultdict(None if name is None else _FACTORIES[name], items)
    if kind == "named tuple":
        return _named(value["class"], tuple)._make(items)
    raise ValueError(f"{kind!r} is no kind of value that a checkpoint stores.")


def _decoded_bytes(kind: str, value: dict[str, Any]) -> Any:
    data = bytearray(base64.b64decode(value["base64"]))
    if kind == "bytearray":
        return data
    if kind == "bytes":
        return bytes(data)
    if kind in ("ndarray", "scalar"):
        import numpy  # noqa: PLC0415  # only a program that has it can have saved an array

        array = numpy.frombuffer(data, numpy.dtype(value["dtype"])).reshape(value["shape"])
        return array if kind == "ndarray" else array[()]
    if kind != "data":
        raise ValueError(f"{kind!r} is no kind of value that a checkpoint stores.")
    dtype = dtype_of(value["dtype"])
    flat = (
        torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")
    )
    return flat.view(value["shape"])


def encoded_items(tree: Any) -> dict[str, Any]:
    """Return the values of an encoded dict, still encoded, by those keys that are strings."""
    if not isinstance(tree, dict) or tree.get(_KIND, "dict") not in (*_MAPPINGS, "defaultdict"):
        return {}
    pairs = tree["items"] if _KIND in tree else tree.items()
    return {key: each for key, each in pairs if type(key) is str}


def names_in(tree: Any) -> set[str]:
    """Return the names of the tensors that an encoded tree refers to."""
    if isinstance(tree, list):
        return set().union(*map(names_in, tree))
    if not isinstance(tree, dict):
        return set()
    if tree.get(_KIND) == "tensor":
        return {str(tree["name"])}
    return set().union(*map(names_in, tree.values()))
