"""First values of sharded parameters: initialization, and agreement of the ranks.

If each rank drew random numbers for its own shard, the values would not be those of an unsharded
model, and ranks with the same seed would draw equal shards. So modules are initialised unsharded,
with the same random numbers on every rank, and each rank keeps its part.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshard._comm.blocking import broadcast
from meshard._comm.first_values import ranks_of, rows_over_mesh
from meshard._engine.param_group import ParamGroup, SummonOptions, sharded_params
from meshard._engine.unit import Unit, joined, own_class, owned_names, units_in, units_of
from meshard._mesh.mesh_info import MeshInfo, device_of
from meshard._params.unit_params import ShardedParam
from meshard._torch.dtensor import (
    is_plain,
    keep_gradient_dtype,
    local_of,
    place_like,
    plain_of,
    plain_tensors_in,
)
from meshard.weights import SummonedUnit

# --- memory without values -----------------------------------------------------------------


def _poison_of(dtype: torch.dtype) -> float | int | None:
    """Return a value that no initialisation writes; None if the dtype has none to spare."""
    if (dtype.is_floating_point and dtype.itemsize > 1) or dtype.is_complex:
        return math.nan
    if dtype in (torch.int16, torch.int32, torch.int64):
        return torch.iinfo(dtype).min
    return None


def poisoned(new: torch.Tensor) -> torch.Tensor:
    """Fill new memory so that it shows which elements have not been written to."""
    poison = _poison_of(new.dtype)
    return new if poison is None else new.fill_(poison)


def _is_untouched(tensor: torch.Tensor) -> bool:
    """Whether some elements of ``tensor`` still have the value that ``poisoned`` wrote."""
    poison = _poison_of(tensor.dtype)
    return poison is not None and bool((tensor.isnan() | (tensor == poison)).any())


# --- materialize ---------------------------------------------------------------------------


@torch.inference_mode(False)  # the module may train later, so it must hold no inference tensors
@torch.no_grad()
def leave_meta(group: ParamGroup) -> list[ShardedParam]:
    """Reshard, and allocate the shards that are on the meta device; return which those are.

    Afterwards the shards may be written to in place. Parameters stay the same objects.
    """
    group.end_unshard()
    group.reshard()
    group.finish_pending_step()
    group.finish_copies()
    group.unit_params.take_replacements()
    new = [param for param in sharded_params(group) if local_of(param.sharded).is_meta]
    for param in new:
        old = param.sharded
        local = torch.empty_like(local_of(old), device=group.spec.location.device)
        if is_plain(local):  # if the caller fails before it writes values, NaNs show that
            poisoned(local)
        param.make_sharded(local, group.spec.mesh_info, requires_grad=old.requires_grad)
        keep_gradient_dtype(old, param.sharded)
        # The parameter must stay the same object, because an optimizer may hold it. set_local is
        # not enough for that: a DTensor reports the device of the local tensor it was made with.
        attributes = dict(vars(old))
        torch.utils.swap_tensors(old, param.sharded)
        vars(old).update(attributes)
        param.sharded = old
    group.adopt_edits()  # moves the new shards into one buffer
    group.unit_params.check_materialised()
    return new


def _unsharded_copy(param: ShardedParam, device: torch.device, *, is_new: bool) -> nn.Parameter:
    """Return a plain parameter of the global shape, in the dtype of the shard.

    With ``is_new`` the shard has no values yet, and those that are returned are poison.
    **Collective:** the mesh of the parameter, if it is not new.
    """
    sharded = param.sharded
    like = torch.empty(sharded.shape, dtype=sharded.dtype, device="meta")
    if param.extent is not None and param.dtensor_placement is None:
        # Random numbers are drawn in the order of memory. So use the strides from before
        # fully_shard.
        stride = param.extent.stride
        like = torch.empty_strided(like.shape, stride, dtype=like.dtype, device="meta")
    value = torch.empty_like(like, device=device)
    if is_new:
        poisoned(value)
    else:
        local = local_of(sharded).to(device)  # the shard may be in host memory
        value.copy_(place_like(sharded, local).full_tensor())
    return nn.Parameter(value, requires_grad=False)


AnyModule = TypeVar("AnyModule", bound=nn.Module)
Init = Callable[[nn.Module], Any]


def materialize(module: AnyModule, *, init: Init | None = None) -> AnyModule:
    """Initialise the parameters and buffers of a sharded ``module`` like those of a plain one.

    Calls ``reset_parameters()`` (or ``_reset_parameters()``) of every module inside that has it,
    children before their parents, while its parameters are unsharded. Meta tensors get memory.
    The values are, bit for bit, those of the same calls on the unsharded model, on one process with
    the random number generator of the first rank. **Collective:** every rank of the mesh.

    Args:
        module: A module that ``fully_shard`` was applied to, or one around such modules.
        init: Called once with every module inside instead, children first. It may write to the
            unit of that module and to those around it, not to units further inside.

    Raises:
        ValueError: Modules hold meta tensors and nothing would initialise them, a parameter belongs
            to a unit around ``module``, or parameters are on the meta device on some ranks only.
            Nothing has been changed.
        RuntimeError: A meta tensor was not initialised, ``init`` wrote to a unit that is sharded,
            or a forward or backward is running.

    >>> import meshard
    >>> with torch.device("meta"):
    ...     layer = nn.Linear(4, 4)
    >>> _ = torch.manual_seed(0)
    >>> _ = meshard.materialize(meshard.fully_shard(layer))
    >>> _ = torch.manual_seed(0)
    >>> bool((layer.weight.full_tensor() == nn.Linear(4, 4).weight).all())
    True
    """
    groups = [unit.group for unit in units_in(module) if unit.params]
    _check_on_meta_alike(groups)
    if init is None:
        _check_resets(module)
    elif not callable(init):
        raise TypeError(f"init must be callable or None, got {init!r}.")
    _check_owners(module)
    device = groups[0].spec.device if groups else torch.get_default_device()
    work = _Initialisation(init, device)
    shared = _random_state(_mesh_infos(groups), device) if groups else contextlib.nullcontext()
    with shared, torch.no_grad():
        work.run(module)
    if work.untouched:
        raise RuntimeError(
            f"{len(work.untouched)} parameters or buffers were on the meta device and were not "
            f"initialised, the first is {work.untouched[0]!r}; write to all of it in "
            "reset_parameters (or in init) of the module that holds it."
        )
    return module


class _Initialisation:
    """One walk over a model, children first."""

    def __init__(self, init: Init | None, device: torch.device) -> None:
        self.untouched: list[str] = []
        self._init = init
        self._device = device  # where meta tensors that belong to no unit get memory
        self._seen: set[nn.Module] = set()
        self._summoned: dict[Unit, SummonedUnit] = {}
        # The parameters in summoned units that had no values before, with their names.
        self._new: dict[ShardedParam, str] = {}
        # For each meta tensor that belongs to no unit: its name, and the tensor in its place.
        self._given: dict[torch.Tensor, tuple[str, torch.Tensor]] = {}

    def run(self, root: nn.Module) -> None:
        """Initialise everything inside ``root``. ``untouched`` lists what was not."""
        try:
            self._visit("", root)
            self._finish(list(self._summoned))
        finally:
            for summoned in self._summoned.values():
                summoned.close()
        self.untouched += [name for name, tensor in self._given.values() if _is_untouched(tensor)]

    def _visit(self, fqn: str, module: nn.Module) -> None:
        if module in self._seen:
            return
        self._seen.add(module)
        summoned = self._summon_for(module)
        self._give_memory(fqn, module)
        for name, child in module.named_children():
            self._visit(joined(fqn, name), child)
        if self._init is not None:
            self._call_init(fqn, module, self._init)
        elif (reset := _reset_of(module)) is not None:
            reset()
        # A unit of several modules stays unsharded until the end of the walk, when all of them have
        # been visited.
        self._finish([unit for unit in summoned if len(unit.modules) == 1])

    def _summon_for(self, module: nn.Module) -> list[Unit]:
        """Unshard the units that initialising ``module`` may write to.

        Return those that were not unsharded before.
        """
        resets_all = self._init is None and _reset_of(module) is not None
        modules = module.modules() if resets_all else [module]
        units = dict.fromkeys(unit for inner in modules for unit in units_of(inner))
        return [unit for unit in units if self._summon(unit)]

    def _summon(self, unit: Unit) -> bool:
        """Unshard a unit. Return False if it is unsharded already, or has no shards."""
        group = unit.group
        if unit in self._summoned or not sharded_params(group):
            return False
        unit.lifecycle.check_between_steps(unit, "materialize")
        group.check_not_summoned("materialized")
        new = leave_meta(group)
        self._new.update({param: joined(unit.fqn, param.fqn) for param in new})
        device = group.spec.device
        unsharded = [_unsharded_copy(p, device, is_new=p in new) for p in sharded_params(group)]
        self._summoned[unit] = SummonedUnit(
            unit, SummonOptions("materialize", writeback=True), unsharded
        )
        return True

    def _finish(self, units: list[Unit]) -> None:
        """Check what was initialised in ``units``, write it to their shards, and reshard them."""
        for unit in units:
            summoned = self._summoned[unit]
            values = summoned.edited_values()
            for param, value in zip(summoned.params, values, strict=True):
                name = self._new.pop(param, None)
                if name is not None and _is_untouched(value):
                    self.untouched.append(name)
            summoned.close()
            summoned.write(values)
            del self._summoned[unit]

    def _give_memory(self, fqn: str, module: nn.Module) -> None:
        """Give memory to meta tensors that ``module`` holds and that belong to no unit."""
        held: Any
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if tensor not in self._given:
                    new = poisoned(torch.empty_like(tensor.detach(), device=self._device))
                    if isinstance(tensor, nn.Parameter):
                        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
                    self._given[tensor] = (joined(fqn, name), new)
                held[name] = self._given[tensor][1]

    def _call_init(self, fqn: str, module: nn.Module, init: Init) -> None:
        inside = [unit for unit in units_in(module) if unit not in self._summoned]
        storages = [unit.group.unit_params for unit in inside]
        before = [unit_params.version for unit_params in storages]
        init(module)
        if before != [unit_params.version for unit_params in storages]:
            raise RuntimeError(
                f"init({fqn or '(root)'}) wrote to parameters of a unit inside it, which holds "
                "shards only; write to them when init is called with the module that holds them, "
                "or with one of the same unit."
            )


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    # The second name is that of torch's MultiheadAttention.
    reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
    return reset if callable(reset) else None


def _check_on_meta_alike(groups: list[ParamGroup]) -> None:
    """Raise on all ranks if some of them have values of parameters, and others have not.

    **Collective:** all ranks of the meshes of ``groups``.
    """
    for mesh, mesh_info in {g.spec.mesh_info.mesh: g.spec.mesh_info for g in groups}.items():
        # Meshes that users have made separately may be equal.
        own = [group for group in groups if group.spec.mesh_info.mesh == mesh]
        params = [param for group in own for param in sharded_params(group)]
        num_meta = sum(local_of(param.sharded).is_meta for param in params)
        rows = rows_over_mesh([num_meta], mesh_info, purpose="comparison of ranks by materialize")
        counts = dict(zip(ranks_of(mesh_info), (count for (count,) in rows), strict=True))
        if len(set(counts.values())) > 1:
            raise ValueError(
                "materialize initialises the model as one, but ranks have different numbers of "
                f"parameters on the meta device (by rank: {counts}). Build the model there on "
                "every rank, or on none. If only rank 0 has values, then let it pass them to "
                "set_model_state_dict of torch, with broadcast_from_rank0=True."
            )


def _check_resets(root: nn.Module) -> None:
    """Raise if a module holds meta tensors that nothing would initialise."""
    # A reset may initialise everything inside its module.
    reset = {inner for module in root.modules() if _reset_of(module) for inner in module.modules()}
    helpless = []
    for fqn, module in root.named_modules():
        held = {**module._parameters, **module._buffers}
        if module not in reset and any(t is not None and t.is_meta for t in held.values()):
            name = own_class(module).__name__
            helpless.append(f"{fqn or '(root)'} ({name}: {', '.join(held)})")
    if helpless:
        more = f", and {len(helpless) - 3} more" if len(helpless) > 3 else ""
        raise ValueError(
            "these modules hold tensors on the meta device and have no reset_parameters: "
            f"{'; '.join(helpless[:3])}{more}. Write a reset_parameters() for them, which the "
            "constructor may call too, or pass init=, a function that initialises the module that "
            "it is given."
        )


def _check_owners(root: nn.Module) -> None:
    """Raise if a parameter belongs to a unit that is not inside ``root``."""
    owned = owned_names(root)
    for fqn, module in root.named_modules():
        for name, param in module._parameters.items():
            if isinstance(param, DTensor) and (module, name) not in owned:
                raise ValueError(
                    f"parameter {joined(fqn, name)!r} is a DTensor of no unit inside this module; "
                    "call materialize on the module that fully_shard was applied to, or the root."
                )


def _mesh_infos(groups: list[ParamGroup]) -> list[MeshInfo]:
    """Return the data-parallel meshes, largest first, then one for each axis of other meshes.

    The other meshes are those over which users have placed DTensor parameters.
    """
    meshes = {
        param.dtensor_placement.in_use.mesh: None
        for group in groups
        for param in group.params
        if isinstance(param, ShardedParam) and param.dtensor_placement is not None
    }
    axes = [MeshInfo.of(mesh[name]) for mesh in meshes for name in mesh.mesh_dim_names or ()]
    own = {group.spec.mesh_info.mesh: group.spec.mesh_info for group in groups}
    return [*sorted(own.values(), key=lambda info: -info.mesh.size()), *axes]


@contextlib.contextmanager
def _random_state(meshes: list[MeshInfo], device: torch.device) -> Iterator[None]:
    """Make every rank draw the random numbers that the first rank of the meshes draws."""
    generators: list[Any] = [torch.random]
    if device.type != "cpu":
        generators.append(torch.get_device_module(device))  # its state: the current device's
    own = [generator.get_rng_state() for generator in generators]
    first = [state.clone() for state in own]
    for generator, state in zip(generators, first, strict=True):
        for mesh_info in meshes:
            overwrite_by_first_rank(state, mesh_info, label="(materialize)")
        generator.set_rng_state(state)
    try:
        yield
    finally:
        # A generator that differed from that of the first rank gets its state back. Others keep the
        # state that they have after the initialisation, as on one process.
        for generator, before, state in zip(generators, own, first, strict=True):
            if not torch.equal(before, state):
                generator.set_rng_state(before)


# --- the same values on all ranks ----------------------------------------------------------

# Each rank keeps a part of the values that it has before sharding. If ranks have different values,
# the parts make a model that no rank ever had, and replicas differ for good.


def refuse_meta(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise a ValueError if one of the tensors is on the meta device."""
    for name, tensor in named:
        if tensor.is_meta:
            raise ValueError(
                f"sync_init=True overwrites tensors in memory, but {name!r} is on the meta device. "
                "Build the model there on every rank, leave sync_init out, and call "
                "meshard.materialize(model) after sharding. If only rank 0 has values, then let it "
                "pass them to set_model_state_dict of torch, with broadcast_from_rank0=True."
            )


@torch.no_grad()
def take_values_of_first_rank(tensors: Iterable[torch.Tensor], mesh_info: MeshInfo) -> None:
    """Overwrite tensors by those of the first rank of the mesh, one at a time.

    **Collective:** all ranks of the mesh, with the same tensors.
    """
    for tensor in tensors:
        overwrite_by_first_rank(plain_of(tensor).detach(), mesh_info, label="(sync_init)")


def overwrite_by_first_rank(local: torch.Tensor, mesh_info: MeshInfo, *, label: str) -> None:
    """Overwrite ``local``, on any device, by that of the first rank of the mesh.

    **Collective:** all ranks of the mesh; ``CommLedger`` shows ``label`` as the unit.
    """
    device = device_of(mesh_info.mesh)
    for plain in plain_tensors_in(local):
        buffer = plain.to(device).contiguous()
        broadcast(buffer, mesh_info.shard_group, label=label)
        if mesh_info.replicate_group is not None:
            broadcast(buffer, mesh_info.replicate_group, label=label)
        # The whole tensor was sent, because it may be expanded on some ranks only. If all values
        # along an expanded dim are equal, only the first of them is written.
        for dim, stride in enumerate(plain.stride()):
            first = buffer.narrow(dim, 0, min(1, buffer.size(dim)))
            if stride == 0 and torch.equal(first.expand_as(buffer), buffer):
                plain, buffer = plain.narrow(dim, 0, first.size(dim)), first
        if buffer.data_ptr() != plain.data_ptr():
            plain.copy_(buffer)  # torch raises if an expanded dim would get different values
