"""Buffers that have got memory by ``to_empty``, and no values since.

Non-persistent buffers, such as the frequencies of rotary embeddings, are in no checkpoint. So after
``to_empty`` and a load, a forward would compute with uninitialised memory. meshard therefore fills
the new memory with a value that no initialisation writes, and the first forward looks for it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from meshard._engine.unit import joined, unit_of
from meshard._torch.private import is_of_to_empty, version_of
from meshard._torch.user_line import warn_user

# The name of an attribute of buffers that have got memory and no values. Its value is the version
# that the buffer had when it was marked.
_MARK = "_meshard_unwritten"
REMEDY = (
    "No checkpoint has non-persistent buffers. For a Hugging Face model on the meta device, "
    "meshard.checkpoint.load_pretrained(model, folder) computes them, in the place of to_empty() "
    "and load_state_dict, and so does meshard.materialize(model, init=model._init_weights), before "
    "a Checkpointer's load. For others call meshard.materialize(model), which runs "
    "reset_parameters() of each module, before loading; or assign them before the first forward."
)


def _poison_of(dtype: torch.dtype) -> float | int | None:
    """Return a value that no initialisation writes; None if the dtype has none to spare."""
    if dtype.is_floating_point and dtype.itemsize > 1:
        return math.nan
    if dtype in (torch.int16, torch.int32, torch.int64):
        return torch.iinfo(dtype).min
    return None


def poisoned(new: torch.Tensor) -> torch.Tensor:
    """Fill new memory so that it shows which elements have not been written to."""
    poison = _poison_of(new.dtype)
    return new if poison is None else new.fill_(poison)


def is_untouched(tensor: torch.Tensor) -> bool:
    """Whether some elements of ``tensor`` still have the value that ``poisoned`` wrote."""
    poison = _poison_of(tensor.dtype)
    return poison is not None and bool((tensor.isnan() | (tensor == poison)).any())


@contextlib.contextmanager
def watching_buffers(
    module: nn.Module, fn: Callable[..., Any], *, recurse: bool = True
) -> Iterator[None]:
    """After the block, which calls ``_apply(fn)``, mark buffers that have memory but no values."""
    empties = is_of_to_empty(fn)
    held = [
        (inner, name, buffer)
        for inner in (module.modules() if recurse else [module])
        for name, buffer in inner._buffers.items()
        if buffer is not None and (empties or buffer.is_meta or _is_unwritten(buffer))
    ]
    yield
    for inner, name, before in held:
        buffer = inner._buffers.get(name)
        # Fake and meta tensors have no values, and inference tensors have no version.
        if type(buffer) is not torch.Tensor or buffer.is_meta or buffer.is_inference():
            continue
        if not hasattr(buffer, _MARK):  # the call for an inner unit may have marked it
            with torch.no_grad():
                if empties or before.is_meta:
                    poisoned(buffer)
            setattr(buffer, _MARK, version_of(buffer))
            unit = unit_of(module)
            if unit is not None:
                unit.root.has_new_buffers = True


def _is_unwritten(buffer: torch.Tensor) -> bool:
    mark = getattr(buffer, _MARK, None)
    if mark is None or mark != version_of(buffer):
        return False
    # Writes by collectives and to ``.data`` do not raise the version. They are seen by the values,
    # in dtypes that have a value to mark memory with (``_poison_of``).
    return _poison_of(buffer.dtype) is None or is_untouched(buffer)


def warn_about_unwritten(modules: Iterable[nn.Module]) -> None:
    """Warn of marked buffers in ``modules`` that nothing has written to. Remove all marks."""
    names = []
    for module in modules:
        for fqn, inner in module.named_modules():
            for name, buffer in inner._buffers.items():
                if not hasattr(buffer, _MARK):
                    continue
                if _is_unwritten(buffer):
                    names.append(joined(fqn, name))
                delattr(buffer, _MARK)
    if names:
        warn_user(
            f"this forward computes with buffers that hold no values: {', '.join(map(repr, names))}"
            f" got memory from to_empty(), and nothing has written to them since.\n{REMEDY}"
        )
