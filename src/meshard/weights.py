"""How do I read or edit whole weights?"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from meshard._comm.scalars import agree_on_max
from meshard._runtime.open_events import Opening
from meshard._runtime.open_unit import OpenUnit, check_may_open
from meshard._runtime.unit import Unit, units_in, units_of


@contextlib.contextmanager
def unsharded_params(
    module: nn.Module,
    *,
    recurse: bool = True,
    rank0_only: bool = False,
    writeback: bool = True,
    offload_to_cpu: bool = False,
) -> Iterator[None]:
    """Have the parameters of ``module`` whole inside, and edits in the shards afterwards.

    Inside, parameters are plain tensors of the dtype that the shards have, so that nothing is
    rounded (those that tensor parallelism has placed are the DTensors that forward sees);
    ``state_dict``, ``load_state_dict``, ``functional_call`` and ``module(...)`` work as on a plain
    module, without communication. Edit them in place, or assign others of the same shape.
    ``.grad`` is None; gradients of what is computed from them reach the shards, also after the
    block. An exception leaves the shards of all ranks as they were.

    **Collective:** every rank of the mesh, entry and exit.
    **Lifetime:** the whole parameters live until the exit, unless something else refers to them.

    Args:
        module: A module with units in it.
        recurse: Also the units inside ``module``, which is one itself otherwise.
        rank0_only: Have whole parameters on the first rank of the mesh only, whose edits are sent
            to all. The others keep seeing their shards, which they must not edit.
        writeback: Write edits back. Every rank writes its own part, so all must make the same
            edits; of several replicas, the first one's count.
        offload_to_cpu: Hold the whole parameters in host memory.

    Raises:
        NotImplementedError: A parameter has ``fsdp_pre_all_gather``.
        RuntimeError: A forward or backward is running; the units are open in another way; what was
            assigned cannot be written back; or another rank has raised inside.
        ValueError: There is no unit in ``module``.

    >>> import torch, meshard
    >>> layer = meshard.fully_shard(torch.nn.Linear(2, 2, bias=False))
    >>> with meshard.unsharded_params(layer), torch.no_grad():
    ...     _ = torch.nn.init.eye_(layer.weight)
    >>> layer.weight.detach().full_tensor()
    tensor([[1., 0.],
            [0., 1.]])
    """
    opening = Opening(writeback, rank0_only, offload_to_cpu)
    opened: list[OpenUnit] = []
    values: list[list[torch.Tensor]] = []
    has_failed = False
    try:
        opened += _open(_units_of(module, recurse), opening)
        try:
            yield
            if writeback:
                values += [each.edited_values() for each in opened]
        except Exception:
            if writeback:
                _has_any_failed(opened, here=True)
            raise
        has_failed = writeback and _has_any_failed(opened, here=False)
    finally:
        for each in opened:
            each.close()
    if has_failed:
        raise RuntimeError(
            "another rank raised inside unsharded_params; nothing was written back on any rank."
        )
    if writeback:
        for each, edited in zip(opened, values, strict=True):
            each.write(edited)
            edited.clear()


def _units_of(module: nn.Module, recurse: bool) -> list[Unit]:
    units = list(units_in(module)) if recurse else units_of(module)
    if not units:
        raise ValueError(
            f"there is no unit in this {type(module).__name__}; pass a module that fully_shard was "
            "applied to, or one around it (with recurse=True)."
        )
    return units


def _open(units: list[Unit], opening: Opening) -> list[OpenUnit]:
    wanted = [unit for unit in units if check_may_open(unit, opening)]
    opened: list[OpenUnit] = []
    try:
        for unit in wanted:
            opened.append(OpenUnit(unit, opening))
    except BaseException:
        for each in opened:
            each.close()
        raise
    return opened


def _has_any_failed(opened: list[OpenUnit], *, here: bool) -> bool:
    """Return whether any rank raised: edits are written back on all ranks, or on none."""
    if not opened:
        return here
    all_roles = {id(each.place.roles): each.place.roles for each in opened}.values()
    groups = [g for roles in all_roles for g in (roles.shard_group, roles.replicate_group) if g]
    failed = torch.tensor(float(here), device=opened[0].place.device)
    for group in dict.fromkeys(groups):
        agree_on_max(failed, group, "(unsharded_params)")
    return bool(failed.item())
