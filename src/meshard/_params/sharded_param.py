"""One parameter of a unit, sharded and unsharded.

Tensors outlive their part: an optimizer may hold the parameters that ``fully_shard`` replaced, and
would never train. So each says on itself what it is. The checks
are in ``optimizer_steps`` and, for ties that a call would cut, in ``build_unit``.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement

from meshard._mesh.layout import ParamLayout
from meshard._mesh.mesh_info import MeshInfo
from meshard._mesh.placement import DTensorPlacement
from meshard._torch.dtensor import (
    copy_dtensor,
    make_dtensor,
    own_local,
    place_like,
    set_local,
)
from meshard._torch.private import without_torch_function


class TensorTag(enum.Enum):
    """What a tensor is to the unit that marked it."""

    ORIGINAL = enum.auto()  # what fully_shard replaced
    SHARD = enum.auto()  # the sharded parameter, or a copy of it
    REPLACED_LATER = enum.auto()  # it was the sharded parameter, or should have become it
    UNSHARDED = enum.auto()  # the whole parameter, which lives inside forward and backward


def tag_tensor(tensor: torch.Tensor, mark: TensorTag, fqn: str) -> None:
    """Write on ``tensor`` what it is, and its dotted name from the unit's module."""
    # By name: torch.save takes attributes along, and may be read where there is no meshard.
    tensor._meshard_tag = (mark.name, fqn)  # type: ignore[attr-defined]


def tag_of(tensor: torch.Tensor) -> tuple[TensorTag | None, str]:
    """Return what ``tag_tensor`` wrote; None for a tensor that no unit knows."""
    name, fqn = getattr(tensor, "_meshard_tag", (None, ""))
    return None if name is None else TensorTag[name], fqn


class ShardedParam:
    """A parameter of a unit: a DTensor shard at rest, a whole tensor in use.

    In use it is an ordinary tensor, or a DTensor over the axes of another parallelism.

    Args:
        fqn: Dotted name from the unit's module.
        owners: Every ``(module, attribute)`` that holds the parameter; several if it is tied.
        layout: How it is cut; of a placed parameter, how this rank's part is cut.
        placed: If another parallelism has placed it: how it lies over its meshes.
    """

    __slots__ = (
        "__weakref__",
        "_listed",
        "_owner_dicts",
        "dtensor_placement",
        "fqn",
        "layout",
        "left",
        "owners",
        "shard_rank",
        "sharded",
        "unsharded",
    )

    def __init__(
        self,
        fqn: str,
        owners: list[tuple[nn.Module, str]],
        layout: ParamLayout,
        dtensor_placement: DTensorPlacement | None = None,
    ) -> None:
        self.fqn = fqn
        self.owners: list[tuple[weakref.ref[nn.Module], str]] = []
        # Where each owner keeps it: looked at several times in each step.
        self._owner_dicts: list[tuple[dict[str, nn.Parameter | None], str]] = []
        self._listed: weakref.ref[OwnerDicts] | None = None
        for module, name in owners:
            self.add_owner(module, name)
        self.layout = layout
        self.dtensor_placement = dtensor_placement
        self.shard_rank: int
        self.sharded: nn.Parameter
        self.unsharded: nn.Parameter
        # Earlier whole faces that were left to the graphs that hold them: see ``leave``.
        self.left: list[weakref.ref[nn.Parameter]] = []

    @property
    def is_given_otherwise(self) -> bool:
        """Whether its whole gradient must go through ``own_part_of``."""
        return self.dtensor_placement is not None

    def add_owner(self, module: nn.Module, name: str) -> None:
        """Note that ``module`` holds the parameter as its attribute ``name``."""
        self.owners.append((weakref.ref(module), name))
        self._owner_dicts.append((module._parameters, name))
        self._changed_owners()

    def find_owner_dicts(self) -> None:
        """Look again where each owner keeps it: an owner has got another dict of parameters."""
        modules = [(module_ref(), name) for module_ref, name in self.owners]
        self._owner_dicts = [
            (module._parameters, name) for module, name in modules if module is not None
        ]
        self._changed_owners()

    def _changed_owners(self) -> None:
        listed = None if self._listed is None else self._listed()
        if listed is not None:
            listed.forget()

    def make_sharded(
        self, local: torch.Tensor, mesh_info: MeshInfo, *, requires_grad: bool
    ) -> None:
        """Create the sharded face over ``local``, a view of the unit's flat shard."""
        self.shard_rank = mesh_info.shard_rank
        dtensor = self._over_mesh(local, mesh_info, mesh_info.placements(self.layout.shard_dim))
        self.sharded = nn.Parameter(dtensor, requires_grad=requires_grad)
        # nn.Parameter wraps the local tensor anew; identity is how a replacement is noticed.
        set_local(self.sharded, local)
        tag_tensor(self.sharded, TensorTag.SHARD, self.fqn)

    def shard_of(self, unsharded: torch.Tensor) -> DTensor:
        """Return this rank's shard of ``unsharded``, a tensor of the global shape: a view of it."""
        return place_like(self.sharded, self.own_part(unsharded))

    def for_copy(self, memo: dict[int, Any]) -> ShardedParam:
        """Return a parameter without owners, with a deep copy of the sharded face.

        In ``memo`` that copy stands for both faces: a copied module begins sharded.
        """
        copied = ShardedParam(self.fqn, [], self.layout, self.dtensor_placement)
        copied.shard_rank = self.shard_rank
        copied.sharded = copy_dtensor(self.sharded, memo)
        memo[id(self.unsharded)] = copied.sharded
        return copied

    def own_part(self, unsharded: torch.Tensor) -> torch.Tensor:
        """Return a view of what this rank owns of ``unsharded``, a tensor of the global shape."""
        mine = (
            unsharded.detach()
            if self.dtensor_placement is None
            else self.dtensor_placement.cut(unsharded.detach())
        )
        rows = self.layout.owned_rows(self.shard_rank)
        return mine.narrow(self.layout.shard_dim, rows.start, len(rows))

    def partial_of(self, local: torch.Tensor, mesh_info: MeshInfo) -> DTensor:
        """Return ``local`` as a gradient that has not been reduced across the replicas."""
        return self._over_mesh(
            local, mesh_info, mesh_info.partial_placements(self.layout.shard_dim)
        )

    def _over_mesh(
        self, local: torch.Tensor, mesh_info: MeshInfo, data_placements: tuple[Placement, ...]
    ) -> DTensor:
        if self.dtensor_placement is None:
            return make_dtensor(local, mesh_info.mesh, data_placements, self.layout.shape)
        placed_tensor = self.dtensor_placement.sharded_of_all(data_placements)
        return make_dtensor(
            local, placed_tensor.mesh, placed_tensor.placements, placed_tensor.shape
        )

    def as_used(self, unsharded: nn.Parameter) -> nn.Parameter:
        """Return the whole face as the module sees it: a DTensor, if the parameter is placed."""
        if self.dtensor_placement is None:
            return unsharded
        used = self.dtensor_placement.in_use
        dtensor = make_dtensor(unsharded.data, used.mesh, used.placements, used.shape)
        return nn.Parameter(dtensor, requires_grad=unsharded.requires_grad)

    def own_part_of(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return what this rank holds of the gradient of a placed parameter.

        **Collective:** if the gradient is placed otherwise than the parameter (a partial sum under
        sequence parallelism), the ranks of the mesh axes where it is.

        Raises:
            RuntimeError: It is not a DTensor on the mesh of the parameter, or it is cut along a
                data-parallel axis.
        """
        assert self.dtensor_placement is not None
        used = self.dtensor_placement.in_use
        if not isinstance(gradient, DTensor) or gradient.device_mesh != used.mesh:
            raise RuntimeError(
                f"parameter {self.fqn!r} is a DTensor over {used.mesh} in forward, but its "
                f"gradient came as a {type(gradient).__name__} over "
                f"{getattr(gradient, 'device_mesh', 'no mesh')}; compute with the parameter "
                "itself, or with its to_local()."
            )
        target = self.dtensor_placement.of_gradient(gradient.placements)
        if target is None:
            raise RuntimeError(
                f"the gradient of parameter {self.fqn!r} has placements {gradient.placements} "
                f"over {used.mesh}; along data-parallel axes it must be whole or a partial sum."
            )
        if target != gradient.placements:
            gradient = gradient.redistribute(placements=target)
        # Not the local tensor itself: it may still be on its way.
        return gradient.to_local()

    def install(self, unsharded_param: nn.Parameter) -> None:
        """Make every owner hold ``unsharded_param``, without the cost of ``Module.__setattr__``."""
        for parameters, name in self._owner_dicts:
            parameters[name] = unsharded_param

    def leave(self, unsharded_param: nn.Parameter) -> nn.Parameter:
        """Have another whole face, with the gradient that the present one has got.

        Returns:
            The one before, which belongs to those who hold it from now on.
        """
        before, self.unsharded = self.unsharded, unsharded_param
        unsharded_param.grad, before.grad = before.grad, None
        for parameters, name in self._owner_dicts:
            if parameters.get(name) is before:
                parameters[name] = unsharded_param
        self.left = [ref for ref in self.left if ref() is not None]
        self.left.append(weakref.ref(before))
        return before

    def all_unsharded(self) -> list[nn.Parameter]:
        """Return all that graphs may know as the whole parameter."""
        return [
            self.unsharded,
            *(unsharded_param for ref in self.left if (unsharded_param := ref()) is not None),
        ]

    def installed(self) -> list[nn.Parameter | None]:
        """Return what each owner holds."""
        modules = ((module_ref(), name) for module_ref, name in self.owners)
        return [module._parameters.get(name) for module, name in modules if module is not None]

    def replacements(self) -> list[nn.Parameter]:
        """Return what owners hold instead of one of the two faces.

        Raises:
            RuntimeError: An owner holds nothing there any more.
        """
        found: list[nn.Parameter] = []
        for module_ref, name in self.owners:
            module = module_ref()
            if module is None:
                continue
            installed = module._parameters.get(name)
            if installed is None:
                raise RuntimeError(
                    f"parameter {self.fqn!r} was removed from its module after fully_shard; "
                    "remove it before, or set requires_grad to False."
                )
            if installed is not self.sharded and installed is not self.unsharded:
                found.append(installed)
        return found


# What a step does to all parameters of a unit, several times: one loop, and no call for each.


class OwnerDicts:
    """Where the owners of several parameters keep them.

    Args:
        params: Of one unit; each is in one such list at most.
    """

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        self._params = params
        self._found: list[tuple[ShardedParam, dict[str, nn.Parameter | None], str]] = []
        for param in params:
            param._listed = weakref.ref(self)

    def forget(self) -> None:
        """Look again at the next use: an owner has come, or keeps its parameters elsewhere."""
        self._found = []

    def _all(self) -> list[tuple[ShardedParam, dict[str, nn.Parameter | None], str]]:
        if not self._found:
            self._found = [
                (param, *owner_dict) for param in self._params for owner_dict in param._owner_dicts
            ]
        return self._found

    def take_flags(self) -> int:
        """Let whole parameters require gradients as the shards do; return how many do."""
        count, others = 0, []
        with without_torch_function():
            for param in self._params:
                flag = param.sharded.requires_grad
                if param.unsharded.requires_grad is not flag:
                    others.append(param)
                count += flag
        for param in others:
            param.unsharded.requires_grad_(param.sharded.requires_grad)
        return count

    def install_sharded(self) -> None:
        """Make every owner that holds the whole parameter hold the shard."""
        for param, parameters, name in self._all():
            if parameters.get(name) is param.unsharded:
                parameters[name] = param.sharded

    def install_unsharded(self) -> None:
        """Make every owner that holds the shard hold the whole parameter.

        What somebody has put in its place between a forward and its backward stays there: backward
        has no use for it, and the next forward looks at it.
        """
        for param, parameters, name in self._all():
            if parameters.get(name) is param.sharded:
                parameters[name] = param.unsharded


def version_unless_replaced(
    params: Sequence[ShardedParam], locals_: Sequence[torch.Tensor]
) -> int | None:
    """Return a number that grows with every edit of a shard, as a DTensor or its local tensor.

    Args:
        params: Of a unit.
        locals_: The local tensor that each was made over.

    Returns:
        None: An owner holds neither of the two faces, or a local tensor is another one.
    """
    version = 0
    with without_torch_function():
        for param, own in zip(params, locals_, strict=True):
            sharded = param.sharded
            for parameters, name in param._owner_dicts:
                installed = parameters.get(name)
                if installed is not sharded and installed is not param.unsharded:
                    return None
            if own_local(sharded) is not own:
                return None
            version += sharded._version + own._version
    return version
