"""First values of sharded parameters: initialization, and agreement of the ranks.

Random numbers drawn for a shard are not the shard of those drawn for the unsharded parameter, and
on ranks with the same seed every shard would be the same. So modules are initialised unsharded,
with the same random numbers on every rank, and each rank keeps its part.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshard._comm.blocking import broadcast_from_first, gather_from_all
from meshard._engine.param_group import ParamGroup, SummonOptions, sharded_params
from meshard._engine.unit import Unit, own_class, owned_names, units_in, units_of
from meshard._mesh.mesh_info import MeshInfo
from meshard._params.replicated_params import ReplicatedParams
from meshard._params.sharded_param import ShardedParam
from meshard._torch.dtensor import local_of, place_like, plain_tensors_in
from meshard.weights import SummonedUnit


def _poison_of(dtype: torch.dtype) -> float | int | None:
    """Return a value that no initialisation writes; None if the dtype has none to spare."""
    if dtype.is_floating_point and dtype.itemsize > 1:
        return math.nan
    if dtype in (torch.int16, torch.int32, torch.int64):
        return torch.iinfo(dtype).min
    return None


def _new_poisoned(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return memory for ``like`` that shows which elements have not been written to."""
    new = torch.empty_like(like, device=device)
    poison = _poison_of(new.dtype)
    return new if poison is None else new.fill_(poison)


def _is_untouched(tensor: torch.Tensor) -> bool:
    """Whether a part of what ``_new_poisoned`` returned has not been written to."""
    poison = _poison_of(tensor.dtype)
    if poison is None:
        return False
    untouched = tensor.isnan() if poison != poison else tensor == poison
    return bool(untouched.any())


def _leave_meta(group: ParamGroup) -> list[ShardedParam]:
    """Allocate the shards that are on the meta device; return which those are."""
    group.reshard()
    group.finish_pending_step()
    group.finish_copies()
    group.storage.take_replacements()
    params = sharded_params(group)
    new = [param for param in params if local_of(param.sharded).is_meta]
    for param in new:
        _allocate(param, group)
    group.adopt_edits()  # moves them into one buffer
    group.storage.check_materialised()
    return new


def _allocate(param: ShardedParam, group: ParamGroup) -> None:
    """Allocate a shard. The parameter stays the same object, which an optimizer may hold."""
    old = param.sharded
    local = torch.empty_like(local_of(old), device=group.spec.location.device)
    param.make_sharded(local, group.spec.mesh_info, requires_grad=old.requires_grad)
    attributes = dict(vars(old))
    # Not set_local: the device of a DTensor is that of its first local tensor for good.
    torch.utils.swap_tensors(old, param.sharded)
    vars(old).update(attributes)
    param.sharded = old


def _unsharded_copy(param: ShardedParam, device: torch.device, *, is_new: bool) -> nn.Parameter:
    """Return a plain parameter of the global shape, in the dtype of the shard.

    **Collective:** the mesh of the parameter, unless it is new.
    """
    sharded = param.sharded
    if is_new:
        meta = torch.empty(sharded.shape, dtype=sharded.dtype, device="meta")
        value = _new_poisoned(meta, device)
    else:
        local = local_of(sharded).to(device)  # the process groups of the mesh serve no other
        value = place_like(sharded, local).full_tensor().detach().clone()
    return nn.Parameter(value, requires_grad=False)


AnyModule = TypeVar("AnyModule", bound=nn.Module)
Init = Callable[[nn.Module], Any]
_RESETS = ("reset_parameters", "_reset_parameters")  # torch's MultiheadAttention has the second


def materialize(module: AnyModule, *, init: Init | None = None) -> AnyModule:
    """Initialise the parameters and buffers of a sharded ``module`` like those of a plain one.

    Calls ``reset_parameters()`` (or ``_reset_parameters()``) of every module inside that has it,
    children before their parents, while its parameters are unsharded. Meta tensors get memory;
    what has values already keeps them unless a module resets it. The values are, bit for bit,
    those of the same calls on the unsharded model on one process with the random number generator
    of the first rank. If constructors draw random numbers in these methods only, and modules are
    registered in the order in which they are built, these are the values of
    ``torch.manual_seed(s); Model()`` on the device of the mesh. A tied parameter has the values of
    its last owner.

    **Collective:** every rank of the mesh. One broadcast of the state of the first rank's random
    number generator, and a gather of each parameter that has values already. Afterwards, a rank
    whose generator was in the same state goes on as one process would; that of another rank is as
    it was before.
    **Stream:** the current one.
    **Lifetime:** one unit, and the units around it, are unsharded at a time; a module that has
    both a reset and units inside has all of them unsharded.

    Args:
        module: A module that ``fully_shard`` was applied to, or one around such modules.
        init: Called with every module inside instead, as ``module.apply(init)`` would: for
            example the ``_init_weights`` of a Hugging Face model. It may write to parameters of
            the units around the module it is given, not to those of units further inside.

    Returns:
        ``module``.

    Raises:
        ValueError: Modules hold meta tensors and nothing would initialise them, or a parameter
            belongs to a unit around ``module``. Nothing has been changed.
        RuntimeError: A parameter or a buffer that was on the meta device was not initialised,
            ``init`` wrote to a unit that is sharded, or a forward or backward is running.

    >>> import meshard
    >>> with torch.device("meta"):
    ...     model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> _ = meshard.fully_shard_units(model)
    >>> _ = torch.manual_seed(0)
    >>> _ = meshard.materialize(model)
    >>> _ = torch.manual_seed(0)
    >>> bool((model[0].weight.full_tensor() == nn.Linear(4, 4).weight).all())
    True
    """
    if init is None:
        _check_resets(module)
    _check_owners(module)
    groups = [unit.group for unit in units_in(module) if unit.group is not None]
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
    """One walk over a model, children first.

    Args:
        init: The user's function, called instead of ``reset_parameters``.
        device: Where tensors that belong to no unit get memory.
    """

    def __init__(self, init: Init | None, device: torch.device) -> None:
        self.untouched: list[str] = []
        self._init = init
        self._device = device
        self._seen: set[nn.Module] = set()
        self._summoned: dict[Unit, SummonedUnit] = {}
        self._new: dict[ShardedParam, str] = {}  # of summoned units: no values yet
        self._given: dict[torch.Tensor, tuple[str, torch.Tensor]] = {}  # by meta tensor

    def run(self, root: nn.Module) -> None:
        """Initialise everything inside ``root``, and list what was not in ``untouched``."""
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
        summoned = self._summon_for(fqn, module)
        self._give_memory(fqn, module)
        for name, child in module.named_children():
            self._visit(f"{fqn}.{name}" if fqn else name, child)
        if self._init is not None:
            self._call_init(fqn, module, self._init)
        else:
            reset = _reset_of(module)
            if reset is not None:
                reset()
        # A unit of several modules stays unsharded until all of them have been visited.
        self._finish([unit for unit in summoned if len(unit.modules) == 1])

    def _summon_for(self, fqn: str, module: nn.Module) -> list[Unit]:
        """Unshard what initialising ``module`` may write to."""
        wanted = dict.fromkeys(units_of(module), fqn)
        if self._init is None and _reset_of(module) is not None:
            for name, inner in module.named_modules(prefix=fqn):
                for unit in units_of(inner):
                    wanted.setdefault(unit, name)
        wanted = {unit: name for unit, name in wanted.items() if unit not in self._summoned}
        for unit, name in wanted.items():
            self._summon(unit, name)
        return [unit for unit in wanted if unit in self._summoned]

    def _summon(self, unit: Unit, fqn: str) -> None:
        group = unit.group
        if group is None or isinstance(group.storage, ReplicatedParams):
            return
        unit.lifecycle.check_between_steps(unit, "materialize")
        group.check_not_summoned("materialized")
        new = _leave_meta(group)
        self._new.update({param: f"{fqn}.{param.fqn}" if fqn else param.fqn for param in new})
        unsharded = [
            _unsharded_copy(param, group.spec.device, is_new=param in new)
            for param in sharded_params(group)
        ]
        self._summoned[unit] = SummonedUnit(unit, SummonOptions("materialize"), unsharded)

    def _finish(self, units: list[Unit]) -> None:
        """Check and write back what was initialised, and reshard."""
        for unit in units:
            summoned = self._summoned[unit]
            values = summoned.edited_values()
            for param in summoned.params:
                name = self._new.pop(param, None)
                installed = param.installed()[0]
                if name is not None and installed is not None and _is_untouched(installed):
                    self.untouched.append(name)
            summoned.close()
            summoned.write(values)
            del self._summoned[unit]

    def _give_memory(self, fqn: str, module: nn.Module) -> None:
        """Give memory to meta tensors that ``module`` holds and that belong to no unit."""
        held: list[dict[str, Any]] = [module._parameters, module._buffers]
        for position in held:
            for name, tensor in position.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if tensor not in self._given:
                    new = _new_poisoned(tensor.detach(), self._device)
                    if isinstance(tensor, nn.Parameter):
                        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
                    self._given[tensor] = (f"{fqn}.{name}" if fqn else name, new)
                position[name] = self._given[tensor][1]

    def _call_init(self, fqn: str, module: nn.Module, init: Init) -> None:
        inside = [unit for unit in units_in(module) if unit not in self._summoned]
        before = [unit.group.storage.version for unit in inside if unit.group is not None]
        init(module)
        after = [unit.group.storage.version for unit in inside if unit.group is not None]
        if before != after:
            raise RuntimeError(
                f"init({fqn or '(root)'}) wrote to parameters of a unit inside it, which holds "
                "shards only; write to them when init is called with the module that holds them, "
                "or with one of the same unit."
            )


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    for name in _RESETS:
        reset = getattr(module, name, None)
        if callable(reset):
            return reset  # type: ignore[no-any-return]
    return None


def _check_resets(root: nn.Module) -> None:
    """Raise if a module holds meta tensors that nothing would initialise."""
    helpless: list[str] = []
    seen: set[nn.Module] = set()

    def look(fqn: str, module: nn.Module) -> None:
        if module in seen or _reset_of(module) is not None:
            return  # a reset may initialise everything inside the module
        seen.add(module)
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        names = [*module._parameters, *module._buffers]
        if any(tensor.is_meta for tensor in tensors):
            helpless.append(f"{fqn or '(root)'} ({own_class(module).__name__}: {', '.join(names)})")
        for name, child in module.named_children():
            look(f"{fqn}.{name}" if fqn else name, child)

    look("", root)
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
                    f"parameter {f'{fqn}.{name}' if fqn else name!r} is a DTensor of no unit "
                    "inside this module; call materialize on the module that fully_shard was "
                    "applied to, or on the root."
                )


def _mesh_infos(groups: list[ParamGroup]) -> list[MeshInfo]:
    """Return the data-parallel meshes, largest first, and one for each axis of other kinds."""
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
    """Draw the random numbers of the first rank of all meshes on every rank."""
    generators: list[tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], None]]]
    generators = [(torch.get_rng_state, torch.set_rng_state)]
    if device.type != "cpu":
        accelerator = torch.get_device_module(device.type)
        generators.append(
            (
                lambda: accelerator.get_rng_state(device),
                lambda state: accelerator.set_rng_state(state, device),
            )
        )
    own = [get_state() for get_state, _ in generators]
    first = [state.clone() for state in own]
    for (_, set_state), state in zip(generators, first, strict=True):
        for mesh_info in meshes:
            overwrite_by_first_rank(state, mesh_info, device, label="(materialize)")
        set_state(state)
    try:
        yield
    finally:
        for (_, set_state), before, state in zip(generators, own, first, strict=True):
            if not torch.equal(before, state):
                set_state(before)


# --- the same values on all ranks ----------------------------------------------------------

# Each rank keeps one part of the values that it has before sharding. Different values would become
# a model that no rank ever had, and replicas would differ for good.

_CHUNK = 1 << 20  # elements: a checksum needs no more memory than this many int64
_INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def take_values_of_first_rank(
    named: Iterable[tuple[str, torch.Tensor]], mesh_info: MeshInfo, device: torch.device
) -> None:
    """Overwrite tensors by those of the first rank of the mesh, one at a time.

    **Collective:** all ranks of the mesh. **Stream:** the current one.

    Args:
        named: Names and tensors, the same on every rank.
        mesh_info: The mesh.
        device: Where its groups communicate; a tensor elsewhere is copied there and back.

    Raises:
        ValueError: A tensor is on the meta device.
    """
    for name, tensor in named:
        if tensor.is_meta:
            raise ValueError(
                f"sync_init=True has no values to send for {name!r}, which is on the meta device; "
                "leave sync_init out and call meshard.materialize(model) after sharding."
            )
        local = local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach()
        overwrite_by_first_rank(local, mesh_info, device, label="(sync_init)")


def overwrite_by_first_rank(
    local: torch.Tensor, mesh_info: MeshInfo, device: torch.device, *, label: str
) -> None:
    """Overwrite ``local`` by that of the first rank of the mesh.

    **Collective:** all ranks of the mesh. **Stream:** the current one.

    Args:
        local: A plain tensor, or a subclass that has ``__tensor_flatten__``.
        mesh_info: The mesh.
        device: Where its groups communicate; a tensor elsewhere is copied there and back.
        label: What observers see in the place of a unit.
    """
    for plain in plain_tensors_in(local):
        buffer = plain.to(device).contiguous()
        broadcast_from_first(buffer, mesh_info.shard_group, label=label)
        if mesh_info.replicate_group is not None:
            broadcast_from_first(buffer, mesh_info.replicate_group, label=label)
        if buffer.data_ptr() != plain.data_ptr():
            plain.copy_(buffer)


def check_same_start(
    named: list[tuple[str, nn.Parameter]], mesh_info: MeshInfo, device: torch.device, unit: str
) -> None:
    """Raise if the ranks are about to shard different parameters, or other values, as one unit.

    ``MESHARD_DEBUG=1`` asks for this check.

    **Collective:** all ranks of the mesh; two small all-gathers per axis of the mesh.

    Args:
        named: Names and values of the unit's parameters.
        mesh_info: The mesh.
        device: Where its groups communicate.
        unit: The unit in the error; it has no name yet.

    Raises:
        RuntimeError: Naming the first parameter and the ranks that differ.
    """
    text = "\n".join(f"{name} {tuple(param.shape)} {param.dtype}" for name, param in named)
    outline = torch.tensor([len(named), zlib.crc32(text.encode())], device=device)
    outlines = _of_all_ranks(outline, mesh_info)
    ranks = mesh_info.mesh.mesh.flatten().tolist()
    if not bool((outlines == outlines[0]).all()):
        counts = [f"rank {r}: {int(row[0])}" for r, row in zip(ranks, outlines, strict=True)]
        raise RuntimeError(
            f"the ranks are about to shard different parameters as one unit ({unit}); numbers of "
            f"parameters: {', '.join(counts)}, with other names, shapes or dtypes. Build the same "
            "model on every rank, and call fully_shard on its modules in the same order."
        )
    if not named:
        return
    sums = _of_all_ranks(torch.tensor([_checksum(p) for _, p in named], device=device), mesh_info)
    differs = (sums != sums[0]).any(dim=0).tolist()
    if not any(differs):
        return
    first = differs.index(True)
    others = [
        r for r, row in zip(ranks, sums[:, first].tolist(), strict=True) if row != sums[0, first]
    ]
    raise RuntimeError(
        f"the ranks bring different values to one unit ({unit}): of its {len(named)} parameters "
        f"{sum(differs)} differ, first {named[first][0]!r}, where rank(s) "
        f"{', '.join(map(str, others))} differ from rank {ranks[0]}. Seed every rank alike before "
        "building the model, load the same file on every rank, or call "
        "fully_shard_units(..., sync_init=True)."
    )


def _of_all_ranks(row: torch.Tensor, mesh_info: MeshInfo) -> torch.Tensor:
    """Return every rank's ``row [n]`` as ``[ranks, n]``, in the order of the mesh."""
    rows = gather_from_all(row, mesh_info.shard_group, label="(same start)")
    if mesh_info.replicate_group is not None:
        rows = gather_from_all(rows, mesh_info.replicate_group, label="(same start)")
    return rows.view(-1, row.numel())


@torch.no_grad()
def _checksum(param: torch.Tensor) -> int:
    """Return 64 bits that depend on every bit of ``param`` and on its position."""
    local = local_of(param) if isinstance(param, DTensor) else param.detach()
    if local.is_meta:
        return 0
    return sum(map(_checksum_of_plain, plain_tensors_in(local))) % 2**63


def _checksum_of_plain(local: torch.Tensor) -> int:
    flat = local.contiguous().view(-1)
    bits = flat.view(_INT_OF_SIZE[flat.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for number, chunk in enumerate(bits.split(_CHUNK)):
        weights = torch.arange(chunk.numel(), device=bits.device).add_(number * _CHUNK)
        weights.mul_(0x9E3779B97F4A7C1).bitwise_or_(1)  # odd, so that no bit is multiplied away
        total += weights.mul_(chunk).sum()
    return int(total)
