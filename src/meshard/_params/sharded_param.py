"""Which of a parameter's two faces does the module see?"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshard._geometry.layout import ParamLayout
from meshard._geometry.mesh_roles import MeshRoles
from meshard._params.dtensors import copy_dtensor, local_of, make_dtensor, place_like, set_local
from meshard._params.marks import Mark, mark_as


def own_part(whole: torch.Tensor, layout: ParamLayout, shard_rank: int) -> torch.Tensor:
    """Return the part of a whole parameter that ``shard_rank`` owns: a view of it."""
    rows = layout.owned_rows(shard_rank)
    return whole.detach().narrow(layout.shard_dim, rows.start, len(rows))


class ShardedParam:
    """A parameter of a unit: a DTensor shard at rest, a plain whole tensor in use.

    Args:
        fqn: Dotted name from the unit's module.
        owners: Every ``(module, attribute)`` that holds the parameter; several if it is tied.
        layout: How it is cut.
    """

    __slots__ = (
        "__weakref__",
        "fqn",
        "layout",
        "owners",
        "shard_rank",
        "sharded",
        "unsharded",
    )

    def __init__(self, fqn: str, owners: list[tuple[nn.Module, str]], layout: ParamLayout) -> None:
        self.fqn = fqn
        self.owners = [(weakref.ref(module), name) for module, name in owners]
        self.layout = layout
        self.shard_rank: int
        self.sharded: nn.Parameter
        self.unsharded: nn.Parameter

    def make_sharded(self, local: torch.Tensor, roles: MeshRoles, *, requires_grad: bool) -> None:
        """Create the sharded face over ``local``, a view of the unit's flat shard."""
        self.shard_rank = roles.shard_rank
        placements = roles.placements(self.layout.shard_dim)
        dtensor = make_dtensor(local, roles.mesh, placements, self.layout.shape)
        self.sharded = nn.Parameter(dtensor, requires_grad=requires_grad)
        # nn.Parameter wraps the local tensor anew; identity is how a replacement is noticed.
        set_local(self.sharded, local)
        mark_as(self.sharded, Mark.SHARD, self.fqn)

    def shard_of(self, whole: torch.Tensor) -> DTensor:
        """Return this rank's shard of ``whole``, a tensor of the global shape: a view of it."""
        return place_like(self.sharded, own_part(whole, self.layout, self.shard_rank))

    def for_copy(self, memo: dict[int, Any]) -> ShardedParam:
        """Return a parameter without owners, with a deep copy of the sharded face.

        In ``memo`` that copy stands for both faces: a copied module begins sharded.
        """
        copied = ShardedParam(self.fqn, [], self.layout)
        copied.shard_rank = self.shard_rank
        copied.sharded = copy_dtensor(self.sharded, memo)
        memo[id(self.unsharded)] = copied.sharded
        return copied

    def show(self, face: nn.Parameter) -> None:
        """Make every owner hold ``face``, without the cost of ``Module.__setattr__``."""
        for module_ref, name in self.owners:
            module = module_ref()
            if module is not None:
                module._parameters[name] = face

    def held(self) -> list[nn.Parameter | None]:
        """Return what each owner holds."""
        modules = ((module_ref(), name) for module_ref, name in self.owners)
        return [module._parameters.get(name) for module, name in modules if module is not None]

    def strangers(self) -> list[nn.Parameter]:
        """Return what owners hold instead of one of the two faces.

        Raises:
            RuntimeError: An owner holds nothing there any more.
        """
        found: list[nn.Parameter] = []
        for module_ref, name in self.owners:
            module = module_ref()
            if module is None:
                continue
            held = module._parameters.get(name)
            if held is None:
                raise RuntimeError(
                    f"parameter {self.fqn!r} was removed from its module after fully_shard; "
                    "remove it before, or set requires_grad to False."
                )
            if held is not self.sharded and held is not self.unsharded:
                found.append(held)
        return found

    @property
    def version(self) -> int:
        """Grows whenever the shard is edited, as a DTensor or through its local tensor."""
        return int(self.sharded._version + local_of(self.sharded)._version)
