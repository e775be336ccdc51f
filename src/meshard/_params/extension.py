"""Does a tensor say itself what is gathered of it, and what that becomes?

torch's contract for tensor subclasses under ``fully_shard``, used for weights that travel or
compute in float8 and the like: ``fsdp_pre_all_gather`` turns a shard into tensors to gather, and
``fsdp_post_all_gather`` turns what was gathered into the whole parameter.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
_SHORT, _LONG = 1, 5  # arguments of the two signatures of fsdp_pre_all_gather


def is_extension(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has both methods."""
    return hasattr(tensor, PRE) and hasattr(tensor, POST)


def check_extension(fqn: str, tensor: torch.Tensor) -> bool:
    """Return whether ``tensor``, of parameter ``fqn``, has both methods.

    Raises:
        ValueError: It has one only, or one whose arguments are not those of the contract.
    """
    has_pre, has_post = hasattr(tensor, PRE), hasattr(tensor, POST)
    kind = type(tensor).__name__
    if has_pre is not has_post:
        have, lack = (PRE, POST) if has_pre else (POST, PRE)
        raise ValueError(
            f"parameter {fqn!r} is a {kind}, which defines {have} but not {lack}; define both, or "
            "neither."
        )
    if has_pre and _num_arguments(tensor) not in (_SHORT, _LONG):
        raise ValueError(
            f"parameter {fqn!r} is a {kind}, whose {PRE} takes "
            f"{inspect.signature(getattr(tensor, PRE))}; it must take (mesh), or (mesh, "
            "outer_size, outer_stride, module, mp_policy)."
        )
    return has_pre


def _num_arguments(tensor: torch.Tensor) -> int:
    return len(inspect.signature(getattr(tensor, PRE)).parameters)


def plain_tensors_in(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the ordinary tensors that hold the values of ``tensor``.

    Raises:
        TypeError: It is of a class that does not tell.
    """
    if _is_plain(tensor):
        return [tensor]
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        raise TypeError(
            f"{type(tensor).__name__} has no __tensor_flatten__, so its values cannot be read."
        )
    return [plain for name in flatten()[0] for plain in plain_tensors_in(getattr(tensor, name))]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What ``fsdp_pre_all_gather`` is told, beside the shard."""

    mesh: DeviceMesh  # the shard axis
    outer_size: torch.Size
    outer_stride: tuple[int, ...]
    mp_policy: Any  # as the user gave it


class GatherInputs(NamedTuple):
    """What ``fsdp_pre_all_gather`` returned."""

    tensors: tuple[torch.Tensor, ...]
    metadata: Any


def takes_mesh_only(tensor: torch.Tensor) -> bool:
    """Whether ``fsdp_pre_all_gather`` of ``tensor`` has the short signature."""
    return _num_arguments(tensor) == _SHORT


def ask_for_inputs(
    name: str,
    shard: torch.Tensor,
    around: Surroundings,
    *,
    module: nn.Module | None,
    mesh_only: bool,
) -> GatherInputs:
    """Call ``fsdp_pre_all_gather``.

    Args:
        name: Of parameter and unit, for errors.
        shard: The local tensor.
        around: What else it is told.
        module: The first one that holds the parameter.
        mesh_only: See ``takes_mesh_only``.

    Raises:
        TypeError: It returned something else than a tuple of plain tensors, at least one, and
            metadata.
    """
    pre: Any = shard.fsdp_pre_all_gather  # type: ignore[attr-defined]
    if mesh_only:
        returned = pre(around.mesh)
    else:
        returned = pre(
            around.mesh, around.outer_size, around.outer_stride, module, around.mp_policy
        )
    if isinstance(returned, tuple) and len(returned) == 2:
        tensors, metadata = returned
        if isinstance(tensors, (tuple, list)) and tensors and all(map(_is_plain, tensors)):
            return GatherInputs(tuple(tensors), metadata)
    raise TypeError(
        f"{PRE} of {name} must return (a tuple of plain tensors to gather, metadata), got "
        f"{_described(returned)}."
    )


def as_whole(name: str, returned: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return the whole parameter and the tensors with its memory, which a first call returned.

    Raises:
        TypeError: It is something else.
    """
    if isinstance(returned, tuple) and len(returned) == 2:
        whole, inner = returned
        is_inner = isinstance(inner, (tuple, list)) and all(map(_is_plain, inner))
        if isinstance(whole, torch.Tensor) and is_inner:
            return whole, tuple(inner)
    raise TypeError(
        f"{POST} of {name} must return (whole tensor, tuple of the plain tensors that hold its "
        f"memory) where out is None, got {_described(returned)}."
    )


def _is_plain(value: object) -> bool:
    return type(value) in (torch.Tensor, nn.Parameter)


def _described(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_described(each) for each in value)})"
    return type(value).__name__
