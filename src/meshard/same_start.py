"""Equality of first values across ranks.

Each rank keeps one part of what it brings. Ranks that bring different values would be stitched
together to a model that no rank ever had, and replicas would differ for good.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshard._comm.blocking import broadcast_from_first, gather_from_all
from meshard._mesh.mesh_info import MeshInfo
from meshard._torch.dtensor import local_of, plain_tensors_in

_CHUNK = 1 << 20  # elements: a checksum needs no more memory than this many int64
_INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def take_values_of_first_rank(
    named: Iterable[tuple[str, torch.Tensor]], mesh_info: MeshInfo, device: torch.device
) -> None:
    """Overwrite tensors in place by those of the first rank of the mesh, one at a time.

    **Collective:** all ranks of the mesh. **Stream:** the current one.

    Args:
        named: Names and tensors, the same on every rank.
        roles: The mesh.
        device: Where its groups communicate; other tensors are copied there and back, one by one.

    Raises:
        ValueError: A tensor is on the meta device.
    """
    for name, tensor in named:
        if tensor.is_meta:
            raise ValueError(
                f"sync_init=True has no values to send for {name!r}, which is on the meta device; "
                "leave sync_init out and call meshard.materialize(model) after sharding."
            )
        local = local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach()
        overwrite_by_first_rank(local, mesh_info, device, label="(sync_init)")


def overwrite_by_first_rank(
    local: torch.Tensor, mesh_info: MeshInfo, device: torch.device, *, label: str
) -> None:
    """Overwrite ``local`` by what the first rank of the mesh holds.

    **Collective:** all ranks of the mesh. **Stream:** the current one.
    """
    for plain in plain_tensors_in(local):
        buffer = plain.to(device).contiguous()
        broadcast_from_first(buffer, mesh_info.shard_group, label=label)
        if mesh_info.replicate_group is not None:
            broadcast_from_first(buffer, mesh_info.replicate_group, label=label)
        if buffer.data_ptr() != plain.data_ptr():
            plain.copy_(buffer)


def check_same_start(
    named: list[tuple[str, nn.Parameter]], mesh_info: MeshInfo, device: torch.device, unit: str
) -> None:
    """Raise if ranks bring different parameters to a unit: the check behind ``MESHARD_DEBUG=1``.

    **Collective:** all ranks of the mesh; two small all-gathers per axis of the mesh.

    Args:
        named: Names and values of the unit's parameters.
        roles: The mesh.
        device: Where its groups communicate.
        unit: What to call the unit in the error; it has no name yet.

    Raises:
        RuntimeError: Naming the first parameter and the ranks that differ.
    """
    text = "\n".join(f"{name} {tuple(param.shape)} {param.dtype}" for name, param in named)
    outline = torch.tensor([len(named), zlib.crc32(text.encode())], device=device)
    outlines = _of_all_ranks(outline, mesh_info)
    ranks = mesh_info.mesh.mesh.flatten().tolist()
    if not bool((outlines == outlines[0]).all()):
        counts = [f"rank {r}: {int(row[0])}" for r, row in zip(ranks, outlines, strict=True)]
        raise RuntimeError(
            f"the ranks are about to shard different parameters as one unit ({unit}); numbers of "
            f"parameters: {', '.join(counts)}, with other names, shapes or dtypes. Build the same "
            "model on every rank, and call fully_shard on its modules in the same order."
        )
    if not named:
        return
    sums = _of_all_ranks(torch.tensor([_checksum(p) for _, p in named], device=device), mesh_info)
    differs = (sums != sums[0]).any(dim=0).tolist()
    if not any(differs):
        return
    first = differs.index(True)
    others = [
        r for r, row in zip(ranks, sums[:, first].tolist(), strict=True) if row != sums[0, first]
    ]
    raise RuntimeError(
        f"the ranks bring different values to one unit ({unit}): of its {len(named)} parameters "
        f"{sum(differs)} differ, first {named[first][0]!r}, where rank(s) "
        f"{', '.join(map(str, others))} differ from rank {ranks[0]}. Seed every rank alike before "
        "building the model, load the same file on every rank, or call "
        "fully_shard_units(..., sync_init=True)."
    )


def _of_all_ranks(row: torch.Tensor, mesh_info: MeshInfo) -> torch.Tensor:
    """Return every rank's ``row [n]`` as ``[ranks, n]``, in the order of the mesh."""
    rows = gather_from_all(row, mesh_info.shard_group, label="(same start)")
    if mesh_info.replicate_group is not None:
        rows = gather_from_all(rows, mesh_info.replicate_group, label="(same start)")
    return rows.view(-1, row.numel())


@torch.no_grad()
def _checksum(param: torch.Tensor) -> int:
    """Return 64 bits that depend on every bit of ``param`` and on where it stands."""
    local = local_of(param) if isinstance(param, DTensor) else param.detach()
    if local.is_meta:
        return 0
    return sum(map(_checksum_of_plain, plain_tensors_in(local))) % 2**63


def _checksum_of_plain(local: torch.Tensor) -> int:
    flat = local.contiguous().view(-1)
    bits = flat.view(_INT_OF_SIZE[flat.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for number, chunk in enumerate(bits.split(_CHUNK)):
        weights = torch.arange(chunk.numel(), device=bits.device).add_(number * _CHUNK)
        weights.mul_(0x9E3779B97F4A7C1).bitwise_or_(1)  # odd, so that no bit is multiplied away
        total += weights.mul_(chunk).sum()
    return int(total)
