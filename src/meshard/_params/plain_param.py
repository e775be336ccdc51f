"""What is a parameter that every rank keeps whole, as the ordinary tensor it was?

To the engine it is cut into one shard. Its gradient lies in a bucket in the order in which the
parameter itself lies in memory, so that a parameter in ``channels_last`` has a gradient that is so
too.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshard._geometry.layout import ParamLayout
from meshard._geometry.mesh_roles import MeshRoles
from meshard._params.dtensors import make_dtensor
from meshard._params.sharded_param import ShardedParam


class PlainParam(ShardedParam):
    """A parameter of a replicated module: both faces are the parameter itself.

    Unless the module computes in another dtype: then the face in use is a copy in that one.

    Args:
        fqn: Dotted name from the module.
        owners: Every ``(module, attribute)`` that holds the parameter; several if it is tied.
        param: The parameter.
    """

    __slots__ = ()

    def __init__(self, fqn: str, owners: list[tuple[nn.Module, str]], param: nn.Parameter) -> None:
        super().__init__(fqn, owners, ParamLayout(torch.Size((param.numel(),)), 0, 1))
        self.shard_rank = 0
        self.sharded = self.unsharded = param

    @property
    def is_given_otherwise(self) -> bool:
        """See ``ShardedParam.is_given_otherwise``: always."""
        return True

    @property
    def is_cast(self) -> bool:
        """Whether the face in use is a copy."""
        return self.unsharded is not self.sharded

    def own_part_of(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return a gradient as ``[numel]``, in the order in which the parameter lies in memory."""
        param = self.sharded
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if gradient.stride() != param.stride() or not _is_dense(param):
            ordered = torch.empty_strided(
                param.shape, _dense_strides(param), dtype=gradient.dtype, device=gradient.device
            )
            gradient = ordered.copy_(gradient)
        return gradient.as_strided((gradient.numel(),), (1,), gradient.storage_offset())

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """Return ``[numel]`` of a bucket in the shape of the parameter: the same memory.

        It is no view to autograd, which would forbid ``detach_()``.
        """
        param = self.sharded
        return flat.as_strided(param.shape, _dense_strides(param), flat.storage_offset()).detach()

    def own_part(self, whole: torch.Tensor) -> torch.Tensor:
        """Return ``whole`` itself: there is one shard."""
        return whole.detach()

    def partial_of(self, local: torch.Tensor, roles: MeshRoles) -> DTensor:
        """Return ``local`` as a gradient that has not been reduced across the replicas."""
        whole = self.shaped(local).contiguous()
        return make_dtensor(whole, roles.mesh, roles.partial_placements(0), whole.shape)

    def for_copy(self, memo: dict[int, Any]) -> PlainParam:
        """Return a parameter without owners, with a deep copy of the parameter."""
        copied = PlainParam(self.fqn, [], copy.deepcopy(self.sharded, memo))
        memo[id(self.unsharded)] = copied.sharded
        return copied


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.stride() == _dense_strides(tensor)


def _dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return strides that fill memory without gaps, in the order of those of ``tensor``."""
    if tensor.is_contiguous():
        return tensor.stride()
    return torch.empty_like(tensor, device="meta").stride()
