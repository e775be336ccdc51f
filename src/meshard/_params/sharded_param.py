"""Which of a parameter's two faces does the module see?"""

from __future__ import annotations

import weakref

import torch
from torch import nn

from meshard._geometry.layout import ParamLayout
from meshard._geometry.mesh_roles import MeshRoles
from meshard._params.dtensors import local_of, make_dtensor, set_local


class ShardedParam:
    """A parameter of a unit: a DTensor shard at rest, a plain whole tensor in use.

    Args:
        fqn: Dotted name from the unit's module.
        owners: Every ``(module, attribute)`` that holds the parameter; several if it is tied.
        layout: How it is cut.
    """

    __slots__ = ("__weakref__", "fqn", "layout", "owners", "sharded", "unsharded")

    def __init__(self, fqn: str, owners: list[tuple[nn.Module, str]], layout: ParamLayout) -> None:
        self.fqn = fqn
        self.owners = [(weakref.ref(module), name) for module, name in owners]
        self.layout = layout
        self.sharded: nn.Parameter
        self.unsharded: nn.Parameter

    def make_sharded(self, local: torch.Tensor, roles: MeshRoles, *, requires_grad: bool) -> None:
        """Create the sharded face over ``local``, a view of the unit's flat shard."""
        placements = roles.placements(self.layout.shard_dim)
        dtensor = make_dtensor(local, roles.mesh, placements, self.layout.shape)
        self.sharded = nn.Parameter(dtensor, requires_grad=requires_grad)
        # nn.Parameter wraps the local tensor anew; identity is how a replacement is noticed.
        set_local(self.sharded, local)

    def show(self, face: nn.Parameter) -> None:
        """Make every owner hold ``face``, without the cost of ``Module.__setattr__``."""
        for module_ref, name in self.owners:
            module = module_ref()
            if module is not None:
                module._parameters[name] = face

    def stranger(self) -> nn.Parameter | None:
        """Return what an owner holds instead of one of the two faces, if any does.

        Raises:
            RuntimeError: An owner holds nothing there any more.
        """
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
                return held
        return None

    @property
    def version(self) -> int:
        """Grows whenever the shard is edited, as a DTensor or through its local tensor."""
        return int(self.sharded._version + local_of(self.sharded)._version)
