"""What if the parameters of one module lie over several meshes, or are not of one kind?

A unit communicates on one mesh, by one gather. So the module gets a unit for each: the outer one,
and companions, as if the module had been wrapped several times. They are entered from the outside
and left from the inside; units further inside are inside all of them. Only the outer one casts
what the module is given and what it returns.
"""

from __future__ import annotations

import weakref

from meshard._geometry.mesh_roles import MeshRoles
from meshard._runtime.extended_tensors import ExtendedTensors
from meshard._runtime.unit import Casts, Unit


def accompany(units: list[Unit]) -> Unit:
    """Make the units after the first its companions, and return the first.

    Args:
        units: Made for the same modules, on different meshes, or of different kinds.
    """
    for unit in units[1:]:
        assert unit.group is not None
        unit.mesh_name = _name(unit.group.place.roles)
        if isinstance(unit.group.tensors, ExtendedTensors):
            unit.mesh_name += " (extended)"
    return nest(units)


def nest(units: list[Unit]) -> Unit:
    """Put each unit inside the one before, as companions of the first, and return that."""
    outer, *companions = units
    around = outer
    for unit in companions:
        unit.casts = Casts(None, None)
        unit.companion_of = weakref.ref(outer)
        unit.parent = weakref.ref(around)
        around.children.append(weakref.ref(unit))
        around = unit
    outer.companions = companions
    return outer


def chain_of(unit: Unit) -> list[Unit]:
    """Return a unit and its companions, outermost first."""
    return [unit, *unit.companions]


def _name(roles: MeshRoles) -> str:
    mesh = roles.mesh
    how = " on" if roles.shard_axis is not None else " whole on"
    if mesh.mesh_dim_names is None:
        return f"{how} {'x'.join(map(str, mesh.shape))}"
    pairs = zip(mesh.mesh_dim_names, mesh.shape, strict=True)
    return f"{how} {', '.join(f'{name}={size}' for name, size in pairs)}"
