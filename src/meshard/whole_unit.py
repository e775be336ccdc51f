"""How is one unit made whole to be initialised, and put back into shards?"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshard._params.dtensors import local_of, place_like
from meshard._params.sharded_param import ShardedParam
from meshard._runtime.param_group import ParamGroup
from meshard._runtime.unit import Unit


def _poison_of(dtype: torch.dtype) -> float | int | None:
    """Return a value that no initialisation leaves behind; None where there is none."""
    if dtype.is_floating_point and dtype.itemsize > 1:
        return math.nan
    if dtype in (torch.int16, torch.int32, torch.int64):
        return torch.iinfo(dtype).min
    return None


def new_poisoned(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return memory for ``like`` in which one can see what has not been written to."""
    new = torch.empty_like(like, device=device)
    poison = _poison_of(new.dtype)
    return new if poison is None else new.fill_(poison)


def is_untouched(tensor: torch.Tensor) -> bool:
    """Whether a part of what ``new_poisoned`` returned has not been written to."""
    poison = _poison_of(tensor.dtype)
    if poison is None:
        return False
    untouched = tensor.isnan() if poison != poison else tensor == poison
    return bool(untouched.any())


class WholeUnit:
    """The parameters of a unit, whole, in the dtype of their shards, seen by its modules.

    Not what a forward sees: that may be of another dtype.

    **Collective:** the mesh of the unit, to gather what has values; nothing for meta tensors.
    **Lifetime:** until ``close``.

    Args:
        unit: A unit with parameters, between two steps.
        fqn: Its name, to name its parameters.
    """

    def __init__(self, unit: Unit, fqn: str) -> None:
        assert unit.group is not None
        self._fqn = fqn
        self._group = unit.group
        self._group.reshard()
        self._group.finish_copies()
        without_memory = self._give_memory(self._group)
        self._is_new = [index in without_memory for index in range(len(self._group.params))]
        device = self._group.place.device
        for param, is_new in zip(self._group.params, self._is_new, strict=True):
            sharded = param.sharded
            assert isinstance(sharded, DTensor)
            if is_new:
                shape = torch.empty(sharded.shape, dtype=sharded.dtype, device="meta")
                face = new_poisoned(shape, device)
            else:
                local = local_of(sharded).to(device)  # the groups of the mesh serve no other
                face = place_like(sharded, local).full_tensor().detach().clone()
            param.show(nn.Parameter(face, requires_grad=sharded.requires_grad))

    @staticmethod
    def _give_memory(group: ParamGroup) -> set[int]:
        """Allocate the shards that are on the meta device; return which those are."""
        group.tensors.take_replacements()
        found = set()
        for index, param in enumerate(group.params):
            local = local_of(param.sharded)
            if local.is_meta:
                found.add(index)
                _leave_meta(param, group)
        group.adopt_edits()  # moves them into one buffer
        return found

    def close(self) -> list[str]:
        """Copy every rank's part back and let the rest go.

        Returns:
            The names of parameters that were on the meta device and have not been written to.
        """
        untouched = []
        for param, is_new in zip(self._group.params, self._is_new, strict=True):
            whole = _held(param)
            param.show(param.sharded)
            if whole is None or whole is param.sharded:
                continue
            if is_new and is_untouched(whole):
                untouched.append(f"{self._fqn}.{param.fqn}" if self._fqn else param.fqn)
            part = param.own_part(whole)
            local_of(param.sharded).copy_(part)
        return untouched


def _leave_meta(param: ShardedParam, group: ParamGroup) -> None:
    """Give a shard memory, under the parameter object that an optimizer may hold."""
    old = param.sharded
    local = torch.empty_like(local_of(old), device=group.place.home.device)
    param.make_sharded(local, group.place.roles, requires_grad=old.requires_grad)
    attributes = dict(vars(old))
    # Not set_local: the device of a DTensor is that of its first local tensor for good.
    torch.utils.swap_tensors(old, param.sharded)
    vars(old).update(attributes)
    param.sharded = old


def _held(param: ShardedParam) -> torch.Tensor | None:
    """Return what the modules hold, which an initialisation may have replaced."""
    for module_ref, name in param.owners:
        module = module_ref()
        if module is not None:
            return module._parameters[name]
    return None
