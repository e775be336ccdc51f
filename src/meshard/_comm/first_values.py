"""Comparison of the parameter values that the ranks have passed to ``fully_shard``.

The ranks compare with the first reduction over all ranks and not earlier, because weights may be
loaded after sharding. They compare a sum over a few elements of each parameter. This is enough to
notice that ranks were seeded differently, or that only some have loaded weights since. A difference
is a warning, and under MESHARD_DEBUG=1 an error on all ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshard._comm.blocking import exchange_numbers
from meshard._comm.divergence import check_fingerprint, is_debugging
from meshard._mesh.mesh_info import MeshInfo, device_of
from meshard._torch.private import backend_name
from meshard._torch.user_line import warn_user

_INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SAMPLES = 16  # about so many elements of each parameter are read, in a few microseconds


class FirstValues(NamedTuple):
    """A sample of the unsharded parameters that the shards of a unit were cut from."""

    which: tuple[int, ...]  # the indices of the parameters that were not on the meta device
    total: torch.Tensor  # the sum of their samples
    of_shards: torch.Tensor  # the same of this rank's shards
    # Whether the sample of the shards has changed since; None: they have no elements.
    is_written: bool | None = None

    @classmethod
    def of(
        cls, unsharded: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]
    ) -> FirstValues | None:
        """Return a sample; None if there is none to take (see ``sum_of_samples``)."""
        which = tuple(index for index, each in enumerate(unsharded) if not each.is_meta)
        total, of_shards = (
            sum_of_samples([tensors[index] for index in which]) for tensors in (unsharded, shards)
        )
        return None if total is None or of_shards is None else cls(which, total, of_shards)

    def compared_with(self, shards: Sequence[torch.Tensor]) -> FirstValues:
        """Return the sample, which tells whether the shards are written to since."""
        # Compare values, because writes through ``param.data`` do not raise the version counter.
        sampled = [shards[index] for index in self.which]
        if not any(each.numel() for each in sampled):
            return self
        now = sum_of_samples(sampled)
        return self._replace(is_written=now is None or int(now) != int(self.of_shards))


def sum_of_samples(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the sum, ``[]`` of int64, of the bits of some elements of each tensor.

    The caller passes detached tensors, so that autograd records nothing. Returns None if the list
    is empty, or if one of the tensors is on the meta device or of a subclass.
    """
    samples: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.is_meta or type(tensor) is not torch.Tensor:
            return None
        bits = tensor.reshape(-1).view(_INT_OF_SIZE[tensor.itemsize])
        every = max(1, bits.numel() // _SAMPLES)
        samples.setdefault((bits.device, bits.dtype), []).append(bits[::every])
    sums = [(torch.cat(each) if len(each) > 1 else each[0]).sum() for each in samples.values()]
    return sum((each.to(sums[0].device) for each in sums[1:]), sums[0]) if sums else None


def compare_first_values(brought: Iterable[tuple[MeshInfo, FirstValues | None]]) -> None:
    """Tell if ranks sharded different values, or if only some have loaded weights since.

    ``brought`` has the mesh and the sample of each unit. None: there is no sample.
    **Collective:** all ranks of the meshes, with the same number of units. Each rank of a mesh
    sends five numbers over the first process group, and all that it received over the second.
    """
    by_groups: dict[tuple[dist.ProcessGroup, ...], tuple[MeshInfo, list[FirstValues | None]]] = {}
    for mesh_info, values in brought:
        by_groups.setdefault(tuple(mesh_info.groups), (mesh_info, []))[1].append(values)
    for mesh_info, samples in by_groups.values():
        kept = [None if values is None or values.is_written else values for values in samples]
        which = zlib.crc32(repr([values and values.which for values in kept]).encode())
        totals = [sum(int(values.total) for values in each if values) for each in (kept, samples)]
        written = [each.is_written for each in samples if each and each.is_written is not None]
        has_loaded = bool(written) and all(written)
        has_not = bool(written) and not any(written)
        row = [which, totals[0] % 2**62, totals[1] % 2**62, int(has_loaded), int(has_not)]
        purpose = "comparison of initial values, at the first reduction"
        rows = dict(
            zip(ranks_of(mesh_info), rows_over_mesh(row, mesh_info, purpose=purpose), strict=False)
        )
        if len({which for which, *_ in rows.values()}) == 1:
            _tell_if_unlike({rank: total for rank, (_, total, *_) in rows.items()})
        elif len({total for _, _, total, *_ in rows.values()}) == 1:
            _tell_if_some_loaded({rank: (each[3], each[4]) for rank, each in rows.items()})


def _tell_if_unlike(totals: dict[int, int]) -> None:
    first = next(iter(totals))
    others = [str(rank) for rank, total in totals.items() if total != totals[first]]
    if others:
        _tell(
            f"the ranks brought different values to fully_shard: rank(s) {', '.join(others)} "
            f"differ from rank {first}, and nothing was loaded since. Each rank kept its "
            "part, so what is trained is a mixture of models, and replicas differ for good. "
            "Seed every rank alike before building the model, load the same file on every "
            "rank, or call fully_shard_units(..., sync_init=True)."
        )


def _tell_if_some_loaded(written: dict[int, tuple[int, int]]) -> None:
    """Tell if some ranks have written to all of their units since, and others to none."""
    loaded = [str(rank) for rank, (has_loaded, _) in written.items() if has_loaded]
    others = [str(rank) for rank, (_, has_not) in written.items() if has_not]
    if loaded and others:
        _tell(
            f"rank(s) {', '.join(loaded)} have loaded or changed their weights since fully_shard, "
            f"and rank(s) {', '.join(others)} have not, so what is trained is a mixture of models. "
            "Each rank loads its own part: call load_state_dict or load_pretrained on every rank, "
            "or torch's set_model_state_dict with broadcast_from_rank0=True, which all ranks call "
            "too."
        )


def _tell(text: str) -> None:
    if is_debugging():
        raise RuntimeError(text)
    warn_user(text)


def rows_over_mesh(row: list[int], mesh_info: MeshInfo, *, purpose: str) -> list[list[int]]:
    """Return the ``row`` of every rank, in the order of ``ranks_of``.

    Over torch's fake backend it returns this rank's row for every rank.
    **Collective:** all ranks of the mesh; one all-gather per process group.
    """
    device, numbers = device_of(mesh_info.mesh), row
    for group in mesh_info.groups:
        if backend_name(group, device) == "fake":  # it leaves outputs unfilled
            numbers = numbers * group.size()
        elif group.size() > 1:
            if is_debugging():
                check_fingerprint(purpose, group)
            gathered = exchange_numbers(numbers, group, device, purpose=purpose)
            numbers = [number for each in gathered for number in each]
    width = len(row)
    return [numbers[start : start + width] for start in range(0, len(numbers), width)]


def ranks_of(mesh_info: MeshInfo) -> list[int]:
    """Return the ranks of the mesh, replica by replica."""
    grid = mesh_info.mesh.mesh
    if mesh_info.shard_axis is not None:
        grid = grid.movedim(mesh_info.shard_axis, -1)
    ranks: list[int] = grid.flatten().tolist()
    return ranks
