"""How does a module become a unit, or stay exactly as it was?

``collect`` and the checks look and do not touch; ``make_unit`` allocates; only ``commit`` changes
the module, with steps that do not fail.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from meshard._comm.checked import number_root
from meshard._comm.streams import make_communicator
from meshard._params.home import Home
from meshard._params.marks import Mark, mark_as, mark_of
from meshard._params.private_torch import queue_backward_callback
from meshard._params.sharded_param import ShardedParam
from meshard._runtime.companions import chain_of
from meshard._runtime.extended_tensors import ExtendedTensors
from meshard._runtime.faces import Faces
from meshard._runtime.gradient_state import GradientState
from meshard._runtime.group_tensors import GroupTensors, Place
from meshard._runtime.hooks import (
    gradient_hook_maker,
    register_hooks,
)
from meshard._runtime.lifecycle import Lifecycle
from meshard._runtime.loading import register_load_hooks
from meshard._runtime.misread import watch_reads
from meshard._runtime.on_access import gather_on_access
from meshard._runtime.param_group import ParamGroup
from meshard._runtime.unit import Casts, Unit, UnitSettings, unit_of, units_of
from meshard.fsdp_module import FSDPModule
from meshard.placing import Placing
from meshard.policies import MixedPrecisionPolicy


class Collected(NamedTuple):
    """A parameter that a unit will manage."""

    fqn: str
    param: nn.Parameter
    owners: list[tuple[nn.Module, str]]


def named_modules_outside_units(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over ``root`` and its submodules, without those that are units or inside one."""
    seen: set[nn.Module] = set()
    stack: list[tuple[str, nn.Module]] = [("", root)]
    while stack:
        prefix, module = stack.pop()
        if module in seen:
            continue
        seen.add(module)
        yield prefix, module
        children = [
            (f"{prefix}.{name}" if prefix else name, child)
            for name, child in module._modules.items()
            if child is not None and unit_of(child) is None
        ]
        stack.extend(reversed(children))


def collect(modules: list[nn.Module], ignored: set[nn.Parameter]) -> list[Collected]:
    """List the parameters of ``modules`` that are in no unit yet, tied ones once.

    Raises:
        ValueError: A parameter is managed by a unit around or beside ``modules``.
    """
    found: dict[nn.Parameter, Collected] = {}
    for place, root in enumerate(modules):
        for prefix, module in named_modules_outside_units(root):
            for name, param in module._parameters.items():
                if param is None or param in ignored or not _may_take(modules, param):
                    continue
                fqn = f"{prefix}.{name}" if prefix else name
                if len(modules) > 1:
                    fqn = f"{place}.{fqn}"
                if param in found:
                    found[param].owners.append((module, name))
                else:
                    found[param] = Collected(fqn, param, [(module, name)])
                    _check_free(fqn, param)
    _collect_hoisted(modules, found)
    return list(found.values())


@contextlib.contextmanager
def hoisting(homes: dict[nn.Parameter, nn.Module]) -> Iterator[None]:
    """Let tied parameters be taken by the unit of ``homes[param]`` only, wherever they are used."""
    for param, home in homes.items():
        param._meshard_home = weakref.ref(home)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for param in homes:
            del param._meshard_home  # type: ignore[attr-defined]


def _home_of(param: nn.Parameter) -> nn.Module | None:
    ref = getattr(param, "_meshard_home", None)
    return None if ref is None else ref()


def _may_take(modules: list[nn.Module], param: nn.Parameter) -> bool:
    home = _home_of(param)
    return home is None or home in modules


def _collect_hoisted(modules: list[nn.Module], found: dict[nn.Parameter, Collected]) -> None:
    """Add the uses inside inner units of parameters that ``modules`` are the home of."""
    for root in modules:
        for prefix, module in root.named_modules():
            for name, param in module._parameters.items():
                if param is None or _home_of(param) is not root:
                    continue
                fqn = f"{prefix}.{name}" if prefix else name
                owners = found.setdefault(param, Collected(fqn, param, [])).owners
                if (module, name) not in owners:
                    owners.append((module, name))


def _check_free(fqn: str, param: nn.Parameter) -> None:
    kind, marked = mark_of(param)
    if kind is Mark.ORIGINAL:
        raise ValueError(
            f"parameter {fqn!r} is tied to {marked!r}, which an inner fully_shard has "
            "already sharded, so the tie would be cut silently; shard both in one call "
            "(apply fully_shard to their common parent only, or pass both modules as a list)."
        )
    if kind is Mark.SHARD:
        raise ValueError(
            f"parameter {fqn!r} already belongs to a unit (as {marked!r}): that of a module "
            "around this one, or of another module that shares it. Call fully_shard on children "
            "before their parents; what is shared goes to the unit around all of its uses, as "
            "fully_shard_units does it."
        )


def check_parameters(found: Iterable[Collected], device: torch.device) -> None:
    """Check what can be sharded onto ``device``.

    Raises:
        ValueError: A parameter is on a third device, is a scalar, or is complex.
    """
    for fqn, param, _ in found:
        movable = param.device.type in ("cpu", "meta")
        if not movable and param.device != device:
            raise ValueError(
                f"parameter {fqn!r} is on {param.device}, but the mesh is on {device}; "
                "move the module there (or to the CPU) before fully_shard."
            )
        if param.dim() == 0:
            raise ValueError(
                f"parameter {fqn!r} is a scalar and cannot be sharded; give it shape (1,), "
                "or pass it in ignored_params."
            )
        if param.is_complex():
            raise ValueError(
                f"parameter {fqn!r} is {param.dtype}; complex parameters are not supported, "
                "hold torch.view_as_real of it as the parameter."
            )


def make_unit(
    modules: list[nn.Module],
    found: list[Collected],
    *,
    placings: list[Placing],
    policy: MixedPrecisionPolicy,
    settings: UnitSettings,
    device: torch.device,
    host: Home | None = None,
) -> Unit:
    """Return a unit for ``modules`` that nothing refers to yet.

    All parameters go onto the same mesh, and are extended, or none is.
    """
    casts = Casts(
        inputs=policy.param_dtype if policy.cast_forward_inputs else None,
        outputs=policy.output_dtype,
    )
    unit = Unit(modules, casts, settings)
    if not found:
        return unit
    place = Place(placings[0].roles, device, host)
    unit.group = ParamGroup(_make_faces(unit, found, placings, place, policy))
    unit.gradients = GradientState(
        unit.group,
        reduce_dtype=policy.reduce_dtype,
        accumulate_dtype=policy.accumulate_dtype,
    )
    unit.group.accumulated = weakref.ref(unit.gradients)
    return unit


def _make_faces(
    unit: Unit,
    found: list[Collected],
    placings: list[Placing],
    place: Place,
    policy: MixedPrecisionPolicy,
) -> Faces:
    params, shards = [], []
    for (fqn, param, owners), placing in zip(found, placings, strict=True):
        params.append(ShardedParam(fqn, owners, placing.layout, placing.placed))
        shards.append(placing.own_part(param))
    flags = [entry.param.requires_grad for entry in found]
    gradient_hook = gradient_hook_maker(unit)
    if placings[0].is_extended:
        return ExtendedTensors(
            params, shards, flags, place=place, mp_policy=policy, gradient_hook=gradient_hook
        )
    return GroupTensors(
        params,
        shards,
        flags,
        place=place,
        param_dtype=policy.param_dtype,
        gradient_hook=gradient_hook,
    )


def commit(
    unit: Unit, modules: list[nn.Module], found: list[Collected], device: torch.device
) -> None:
    """Make ``modules`` the modules of ``unit``, and ``unit`` the parent of the units inside.

    Args:
        unit: With its companions.
        modules: Of the unit.
        found: The parameters of the unit, then those of its companions.
        device: Of the mesh.
    """
    chain = chain_of(unit)
    all_sharded = [param for each in chain if each.group is not None for param in each.group.params]
    for sharded, (fqn, param, _) in zip(all_sharded, found, strict=True):
        # Whoever still holds the original holds a tie that the unit does not know of.
        mark_as(param, Mark.ORIGINAL, fqn)
        sharded.show(sharded.sharded)
    for module in modules:
        FSDPModule.adopt(module, unit)
    for each in reversed(chain):  # so that the outermost is entered first, and left last
        register_hooks(each)
        register_load_hooks(each)
        watch_reads(each)
    if unit.settings.unshard_on_access:
        gather_on_access(unit)
    adopt_inner_units(unit, modules, device)


def adopt_inner_units(unit: Unit, modules: list[nn.Module], device: torch.device) -> None:
    """Name the units inside after their place, and give all of them one lifecycle."""
    units = chain_of(unit)
    innermost = units[-1]
    for place, root in enumerate(modules):
        for fqn, module in root.named_modules():
            for inner in units_of(module):
                if inner in units:
                    continue
                units.append(inner)
                inner.fqn = f"{place}.{fqn}" if len(modules) > 1 else fqn
                inner.reset_step()  # it may have run by itself
                if inner.parent is None:
                    inner.parent = weakref.ref(innermost)
                    innermost.children.append(weakref.ref(inner))
    comm = make_communicator(device)
    all_roles = [each.group.place.roles for each in units if each.group is not None]
    number_root(comm, [group for roles in all_roles for group in roles.groups])
    Lifecycle(queue_backward_callback, comm).set_units(units)
