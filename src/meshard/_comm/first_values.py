"""Comparison of the values that ranks bring to ``fully_shard``, at the first step of an optimizer.

What is loaded after sharding is in place by then. A few elements of each parameter tell apart
models of different seeds, or of which one rank alone has loaded weights; MESHARD_DEBUG=1 compares
every bit, and before anything is sharded.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from meshard._comm.blocking import gather_from_all
from meshard._mesh.mesh_info import MeshInfo, device_of

INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SAMPLES = 16  # elements of each parameter, which is a few microseconds


@dataclass(frozen=True, slots=True)
class FirstValues:
    """Sums of the samples of a unit: of its parameters before sharding, and of its shards after."""

    mesh_info: MeshInfo
    unsharded_sum: torch.Tensor
    sharded_sum: torch.Tensor


@torch.no_grad()
def sum_of_samples(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum, ``[]`` of int64, of the bits of some elements of each tensor."""
    samples: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        bits = tensor.reshape(-1).view(INT_OF_SIZE[tensor.itemsize])
        every = max(1, bits.numel() // _SAMPLES)
        samples.setdefault((bits.device, bits.dtype), []).append(bits[::every])
    sums = [torch.cat(each).sum() for each in samples.values()]
    return sum((each.to(sums[0].device) for each in sums[1:]), sums[0])


def warn_if_different(units: Iterable[tuple[FirstValues, list[torch.Tensor]]]) -> None:
    """Warn if ranks brought different values to units whose shards are still as they were then.

    ``units`` are given with their present shards.
    **Collective:** all ranks of the units' meshes, with the same units in the same order; one
    all-gather of two numbers per process group.
    """
    by_groups: dict[object, list[tuple[FirstValues, bool]]] = {}
    for first, shards in units:
        is_kept = int(sum_of_samples(shards)) == int(first.sharded_sum)
        by_groups.setdefault(tuple(first.mesh_info.groups), []).append((first, is_kept))
    for members in by_groups.values():
        mesh_info, kept = members[0][0].mesh_info, [is_kept for _, is_kept in members]
        total = sum(int(first.unsharded_sum) for first, is_kept in members if is_kept)
        own = torch.tensor([total % 2**62, zlib.crc32(bytes(kept))])
        rows = of_all_ranks(own.to(device_of(mesh_info.mesh)), mesh_info).tolist()
        totals = [row[0] for row in rows if row[1] == rows[0][1]]
        if len(totals) < len(rows) or len(set(totals)) == 1:
            continue  # the same values, or ranks that have loaded different parts since
        ranks = ranks_of(mesh_info)
        others = [str(r) for r, own in zip(ranks, totals, strict=True) if own != totals[0]]
        warnings.warn(
            f"the ranks brought different values to fully_shard: rank(s) {', '.join(others)} "
            f"differ from rank {ranks[0]}, and nothing was loaded since. Each rank kept its part, "
            "so what is trained is a mixture of models, and replicas differ for good. Seed every "
            "rank alike before building the model, load the same file on every rank, or call "
            "fully_shard_units(..., sync_init=True). MESHARD_DEBUG=1 names the parameters.",
            stacklevel=2,
        )


def of_all_ranks(row: torch.Tensor, mesh_info: MeshInfo) -> torch.Tensor:
    """Return every rank's ``row [n]`` as ``[ranks, n]``, in the order of ``ranks_of``."""
    rows = gather_from_all(row, mesh_info.shard_group, label="(same start)")
    if mesh_info.replicate_group is not None:
        rows = gather_from_all(rows, mesh_info.replicate_group, label="(same start)")
    return rows.view(-1, row.numel())


def ranks_of(mesh_info: MeshInfo) -> list[int]:
    """Return the ranks of the mesh, replica by replica."""
    grid = mesh_info.mesh.mesh
    if mesh_info.shard_axis is not None:
        grid = grid.movedim(mesh_info.shard_axis, -1)
    ranks: list[int] = grid.flatten().tolist()
    return ranks
