"""Initialization of sharded parameters.

Random numbers drawn for a shard are not the shard of those drawn for the whole parameter, and on
ranks that are seeded alike every shard would be the same. So modules are initialised on whole
tensors, which every rank draws alike, and each rank keeps its part.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshard._engine.param_group import ParamGroup
from meshard._engine.unit import Unit, own_class, owned_names, units_in, units_of
from meshard._mesh.mesh_info import MeshInfo
from meshard._params.sharded_param import ShardedParam
from meshard._torch.dtensor import local_of, place_like
from meshard.same_start import overwrite_by_first_rank


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


class UnitForInit:
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
        device = self._group.spec.device
        for param, is_new in zip(self._group.params, self._is_new, strict=True):
            sharded = param.sharded
            assert isinstance(sharded, DTensor)
            if is_new:
                shape = torch.empty(sharded.shape, dtype=sharded.dtype, device="meta")
                unsharded_param = new_poisoned(shape, device)
            else:
                local = local_of(sharded).to(device)  # the groups of the mesh serve no other
                unsharded_param = place_like(sharded, local).full_tensor().detach().clone()
            param.install(nn.Parameter(unsharded_param, requires_grad=sharded.requires_grad))

    @staticmethod
    def _give_memory(group: ParamGroup) -> set[int]:
        """Allocate the shards that are on the meta device; return which those are."""
        group.tensors.take_replacements()
        found = set()
        for index, param in enumerate(group.params):
            local = local_of(param.sharded)
            if local.is_meta:
                found.add(index)
                assert isinstance(param, ShardedParam)
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
            unsharded = next(iter(param.installed()), None)  # init may have replaced it
            param.install(param.sharded)
            if unsharded is None or unsharded is param.sharded:
                continue
            if is_new and is_untouched(unsharded):
                untouched.append(f"{self._fqn}.{param.fqn}" if self._fqn else param.fqn)
            part = param.own_part(unsharded)
            local_of(param.sharded).copy_(part)
        return untouched


def _leave_meta(param: ShardedParam, group: ParamGroup) -> None:
    """Give a shard memory, under the parameter object that an optimizer may hold."""
    old = param.sharded
    local = torch.empty_like(local_of(old), device=group.spec.location.device)
    param.make_sharded(local, group.spec.mesh_info, requires_grad=old.requires_grad)
    attributes = dict(vars(old))
    # Not set_local: the device of a DTensor is that of its first local tensor for good.
    torch.utils.swap_tensors(old, param.sharded)
    vars(old).update(attributes)
    param.sharded = old


AnyModule = TypeVar("AnyModule", bound=nn.Module)
Init = Callable[[nn.Module], Any]
_RESETS = ("reset_parameters", "_reset_parameters")  # torch's MultiheadAttention has the second


def materialize(module: AnyModule, *, init: Init | None = None) -> AnyModule:
    """Initialise the parameters and buffers of a sharded ``module`` like those of a plain one.

    Calls ``reset_parameters()`` (or ``_reset_parameters()``) of every module inside that has it,
    children before the module around them, while its parameters are whole. Meta tensors get
    memory; what has values already is drawn anew, and keeps them where nothing resets it. The
    values are, bit for bit, those of the same calls on the unsharded model on one process with
    the generator of the first rank. If constructors draw by these calls only, and modules are
    registered in the order in which they are built, that is ``torch.manual_seed(s); Model()``,
    on the device of the mesh. A tied parameter has what the last of its owners draws.

    **Collective:** every rank of the mesh. One broadcast of the state of the random number
    generator of the first rank, and a gather of each parameter that has values already; none for
    a meta model. A rank whose generator was in the same state goes on as one process would; that
    of any other rank is left as it was. **Lifetime:** the parameters of one unit, and of the units
    around it, are whole at a time; a module that has both a reset and units inside has all of
    them whole.

    Args:
        module: A module that ``fully_shard`` was applied to, or one around such modules.
        init: Called with every module inside instead, as ``module.apply(init)`` would: for
            example the ``_init_weights`` of a Hugging Face model. It may write to parameters of
            the units around the module it is given, not to those of units further inside.

    Returns:
        ``module``.

    Raises:
        ValueError: Modules hold meta tensors and have nothing that would initialise them (nothing
            has been changed then), or a parameter belongs to a unit around ``module``.
        RuntimeError: A parameter or a buffer that was on the meta device was not initialised, or
            ``init`` wrote to a unit that is not whole.

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
        init: What the user gave instead of ``reset_parameters``.
        device: Where tensors that belong to no unit get memory.
    """

    def __init__(self, init: Init | None, device: torch.device) -> None:
        self.untouched: list[str] = []
        self._init = init
        self._device = device
        self._seen: set[nn.Module] = set()
        self._open: dict[Unit, UnitForInit] = {}
        self._given: dict[torch.Tensor, tuple[str, torch.Tensor]] = {}  # by the meta tensor before

    def run(self, root: nn.Module) -> None:
        """Initialise everything inside ``root``; what was forgotten is in ``untouched`` then."""
        try:
            self._visit("", root)
            self.untouched += [
                name for name, tensor in self._given.values() if is_untouched(tensor)
            ]
        finally:
            self._close(list(self._open))

    def _visit(self, fqn: str, module: nn.Module) -> None:
        if module in self._seen:
            return
        self._seen.add(module)
        opened = self._open_units(fqn, module)
        self._give_memory(fqn, module)
        for name, child in module.named_children():
            self._visit(f"{fqn}.{name}" if fqn else name, child)
        if self._init is not None:
            self._call_init(fqn, module, self._init)
        else:
            reset = _reset_of(module)
            if reset is not None:
                reset()
        # A unit of several modules stays open until the last of them has been visited.
        self._close([unit for unit in opened if len(unit.modules) == 1])

    def _open_units(self, fqn: str, module: nn.Module) -> list[Unit]:
        """Make whole what initialising ``module`` may write to."""
        wanted = dict.fromkeys(units_of(module), fqn)
        if self._init is None and _reset_of(module) is not None:
            for name, inner in module.named_modules(prefix=fqn):
                for unit in units_of(inner):
                    wanted.setdefault(unit, name)
        opened = []
        for unit, name in wanted.items():
            if unit.group is not None and unit not in self._open:
                self._open[unit] = UnitForInit(unit, name)
                opened.append(unit)
        return opened

    def _close(self, units: list[Unit]) -> None:
        for unit in units:
            self.untouched += self._open.pop(unit).close()

    def _give_memory(self, fqn: str, module: nn.Module) -> None:
        """Give memory to meta tensors that ``module`` holds and that belong to no unit."""
        held: list[dict[str, Any]] = [module._parameters, module._buffers]
        for position in held:
            for name, tensor in position.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if tensor not in self._given:
                    new = new_poisoned(tensor.detach(), self._device)
                    if isinstance(tensor, nn.Parameter):
                        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
                    self._given[tensor] = (f"{fqn}.{name}" if fqn else name, new)
                position[name] = self._given[tensor][1]

    def _call_init(self, fqn: str, module: nn.Module, init: Init) -> None:
        inside = [unit for unit in units_in(module) if unit not in self._open]
        before = [unit.group.tensors.version for unit in inside if unit.group is not None]
        init(module)
        after = [unit.group.tensors.version for unit in inside if unit.group is not None]
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
            return  # what has a reset may initialise all that is inside
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
    """Return the data-parallel mesh, and the axes of other parallelisms, each like one."""
    meshes = {
        param.dtensor_placement.in_use.mesh: None
        for group in groups
        for param in group.params
        if isinstance(param, ShardedParam) and param.dtensor_placement is not None
    }
    axes = [MeshInfo.of(mesh[name]) for mesh in meshes for name in mesh.mesh_dim_names or ()]
    return [groups[0].spec.mesh_info, *axes]


@contextlib.contextmanager
def _random_state(meshes: list[MeshInfo], device: torch.device) -> Iterator[None]:
    """Let every rank draw what the first rank of all meshes would."""
    sources: list[Any] = [torch.default_generator]
    if device.type != "cpu":
        sources.append(_DeviceGenerator(device))
    own = [source.get_state() for source in sources]
    shared = [state.clone() for state in own]
    for source, state in zip(sources, shared, strict=True):
        for mesh_info in meshes:
            overwrite_by_first_rank(state, mesh_info, device, label="(materialize)")
        source.set_state(state)
    try:
        yield
    finally:
        for source, before, drawn_from in zip(sources, own, shared, strict=True):
            if not torch.equal(before, drawn_from):
                source.set_state(before)


class _DeviceGenerator:
    """The default generator of an accelerator, with the two methods of ``torch.Generator``."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device.type)
        self._device = device

    def get_state(self) -> torch.Tensor:
        """Return the state, a tensor of bytes on the host."""
        return self._module.get_rng_state(self._device)  # type: ignore[no-any-return]

    def set_state(self, state: torch.Tensor) -> None:
        """Go on from ``state``."""
        self._module.set_rng_state(state, self._device)
