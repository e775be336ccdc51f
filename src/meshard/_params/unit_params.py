"""The parameters of a unit, sharded and unsharded, and the interface that the engine uses.

Tensors outlive their role: an optimizer that was built before ``fully_shard`` holds parameters that
no module has any more, and would train nothing. So such a tensor has a tag with its role. Meshard's
hooks on optimizers check the tags. ``fully_shard`` checks them too: if two modules share a
parameter, an earlier call may have replaced it in only one of them, and the other module still
holds the original tensor.
"""

from __future__ import annotations

import abc
import copy
import enum
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement

from meshard._comm.communicator import Communicator, Handle
from meshard._comm.host_copies import HostCopies
from meshard._mesh.layout import FlatLayout, ParamLayout
from meshard._mesh.mesh_info import MeshInfo
from meshard._mesh.placement import DTensorPlacement, MissingSum
from meshard._torch.dtensor import (
    as_parameter,
    copy_dtensor,
    is_plain,
    local_of,
    make_dtensor,
    place_like,
    plain_of,
)
from meshard._torch.private import without_torch_function


class TensorTag(enum.Enum):
    """The role of a tensor in the unit that tagged it."""

    ORIGINAL = enum.auto()  # a parameter that fully_shard has replaced
    # A tensor that was replaced, or that never came into use. Three examples: a user has assigned
    # another tensor in place of a sharded parameter; a user has assigned an unsharded tensor, and
    # the unit has copied this rank's part of it; two owners of a tied parameter got two tensors,
    # and the unit uses one of them.
    REPLACED_LATER = enum.auto()
    LEFT_OUT = enum.auto()  # no unit has it: it is in ignored_params, or a warning has named it
    UNSHARDED = enum.auto()  # the unsharded parameter, which modules hold in forward and backward
    SUMMONED = enum.auto()  # what a module held inside ``unsharded_params``, once that is over


_LEFT_OUT = "_meshard_left_out"  # an attribute of modules: see leave_out


def tag_tensor(tensor: torch.Tensor, tag: TensorTag, fqn: str) -> None:
    """Attach to ``tensor`` its role, and the dotted name by which errors call it."""
    # The attribute holds ``tag.name``, a string. torch.save pickles attributes, and the tensor may
    # be loaded where meshard, and so the enum, is not installed.
    tensor._meshard_tag = (tag.name, fqn)  # type: ignore[attr-defined]


def prepare_tag(tensor: torch.Tensor) -> list[str | None]:
    """Attach an empty tag, and return it. The caller sets ``tag[:] = tag.name, fqn`` later.

    For that it need not keep ``tensor``, which may be freed meanwhile.
    """
    tag: list[str | None] = [None, ""]
    tensor._meshard_tag = tag  # type: ignore[attr-defined]
    return tag


def tag_of(tensor: torch.Tensor) -> tuple[TensorTag | None, str]:
    """Return what ``tag_tensor`` attached; ``(None, "")`` for a tensor without a tag."""
    name, fqn = getattr(tensor, "_meshard_tag", (None, ""))
    return None if name is None else TensorTag[name], fqn


def leave_out(ignored: Collection[torch.Tensor], modules: Iterable[nn.Module]) -> None:
    """Tag ``ignored``, which are in no unit on purpose, so that no warning names them.

    Modules also keep the names of the ignored parameters that they hold. Other tensors may take
    these names: in a deep copy, on leaving the meta device, or by ``load_state_dict(assign=True)``.
    ``tag_left_out`` tags these tensors too.
    """
    for param in ignored:
        if tag_of(param)[0] is None:
            tag_tensor(param, TensorTag.LEFT_OUT, "")
    for module in modules if ignored else ():
        for inner in module.modules():
            names = {name for name, param in inner._parameters.items() if param in ignored}
            if names:
                inner.__dict__[_LEFT_OUT] = names.union(inner.__dict__.get(_LEFT_OUT, ()))


def tag_left_out(modules: Iterable[nn.Module]) -> None:
    """Tag the parameters that now have the names which ``leave_out`` noted."""
    for module in modules:
        for inner in module.modules():
            for name in inner.__dict__.get(_LEFT_OUT, ()):
                param = inner._parameters.get(name)
                if param is not None and tag_of(param)[0] is None:
                    tag_tensor(param, TensorTag.LEFT_OUT, "")


class Extent(NamedTuple):
    """Where the elements of a parameter lay in memory before ``fully_shard``."""

    storage: object  # the same object for all tensors of one storage
    first: int  # byte offset of the first element
    end: int  # byte offset behind the last element
    has_gaps: bool  # whether other elements lie in between, as for a column of a matrix
    stride: tuple[int, ...]


def extent_of(original: torch.Tensor) -> Extent | None:
    """Return the extent of a parameter (of a DTensor: of its local tensor).

    Returns None if that tensor is empty or of a subclass.
    """
    local = plain_of(original)
    if not is_plain(local) or not local.numel():
        return None
    # An object attached to the storage identifies the memory. The address cannot: on the meta
    # device there is none, and another tensor may get it once the original parameter is freed.
    storage = local.untyped_storage().__dict__.setdefault("_meshard_identity", object())
    dims = zip(local.shape, local.stride(), strict=True)
    count = int(1 + sum((size - 1) * stride for size, stride in dims))
    first = int(local.storage_offset()) * local.element_size()
    end = first + count * local.element_size()
    has_gaps = count > local.numel()
    return Extent(storage, first, end, has_gaps=has_gaps, stride=local.stride())


GradientHook = Callable[[torch.Tensor], object]
GradientHookMaker = Callable[[int], GradientHook]  # returns the hook of the parameter at an index


class _ParamsBySetattr:
    """The ``_parameters`` of a module whose class has a ``__setattr__`` of its own.

    Such a class may keep other references to its parameters up to date, as torch's RNNs do. So
    parameters are assigned by ``setattr``.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.get = module._parameters.get

    def __setitem__(self, name: str, param: nn.Parameter) -> None:
        module = self._module()
        if module is not None:
            setattr(module, name, param)


ParamDict = dict[str, "nn.Parameter | None"] | _ParamsBySetattr


def _param_dict(module: nn.Module) -> ParamDict:
    if type(module).__setattr__ is not nn.Module.__setattr__:
        return _ParamsBySetattr(module)
    return module._parameters


class UnitParam(abc.ABC):
    """A parameter of a unit, with every ``(module, attribute)`` that holds it."""

    sharded: nn.Parameter  # what modules hold outside of the unit's forward and backward
    unsharded: nn.Parameter  # what modules hold during these
    extent: Extent | None = None  # of the parameter that fully_shard replaced

    def __init__(
        self,
        fqn: str,
        owners: Sequence[tuple[nn.Module, str]],
        layout: ParamLayout,
        *,
        keeps_dtype: bool = False,
    ) -> None:
        self.fqn = fqn  # dotted name from the unit's module
        self.layout = layout
        self.keeps_dtype = keeps_dtype  # modules compute in its own dtype, not in param_dtype
        self._owners: list[tuple[weakref.ref[nn.Module], str]] = []  # several if it is tied
        # For each owner the dict in which to set the parameter, and its key there. They are kept,
        # because each step needs them often.
        self.owner_dicts: list[tuple[ParamDict, str]] = []
        for module, name in owners:
            self.add_owner(module, name)

    def compute_dtype(self, dtype: torch.dtype, param_dtype: torch.dtype | None) -> torch.dtype:
        """Return the dtype of the unsharded parameter, given the ``dtype`` of the shard."""
        if self.keeps_dtype or param_dtype is None or not dtype.is_floating_point:
            return dtype
        return param_dtype

    @abc.abstractmethod
    def for_copy(self, memo: dict[int, Any]) -> UnitParam:
        """Return a parameter without owners, with a deep copy of the sharded parameter.

        ``memo``, that of ``copy.deepcopy``, then maps the unsharded parameter to the same copy. So
        the copy of a module holds a sharded parameter, even if the module is unsharded now.
        """

    # --- owners ----------------------------------------------------------------------------

    def add_owner(self, module: nn.Module, name: str) -> None:
        self._owners.append((weakref.ref(module), name))
        self.owner_dicts.append((_param_dict(module), name))

    @property
    def owners(self) -> list[tuple[nn.Module, str]]:
        """Every ``(module, attribute)`` that holds the parameter, of modules that are alive."""
        owners = ((module_ref(), name) for module_ref, name in self._owners)
        return [(module, name) for module, name in owners if module is not None]

    def install(self, param: nn.Parameter) -> None:
        """Make every owner hold ``param``, without ``nn.Module.__setattr__`` where possible."""
        for parameters, name in self.owner_dicts:
            parameters[name] = param

    def installed(self) -> list[nn.Parameter | None]:
        return [module._parameters.get(name) for module, name in self.owners]

    def replacements(self) -> list[nn.Parameter]:
        """Return what owners hold that is neither the sharded nor the unsharded parameter."""
        found = []
        for installed in self.installed():
            if installed is None:
                raise RuntimeError(
                    f"parameter {self.fqn!r} was removed from its module after fully_shard; "
                    "remove it before, or set requires_grad to False."
                )
            if installed is not self.sharded and installed is not self.unsharded:
                found.append(installed)
        return found


class ShardedParam(UnitParam):
    """A parameter that is a DTensor while sharded.

    Unsharded it is an ordinary tensor or, under tensor parallelism for example, a DTensor as the
    user placed it. If it is a DTensor, ``dtensor_placement`` has its placements, sharded and
    unsharded, and ``layout`` is that of the unsharded DTensor's local tensor.
    """

    def __init__(
        self,
        fqn: str,
        owners: Sequence[tuple[nn.Module, str]],
        layout: ParamLayout,
        dtensor_placement: DTensorPlacement | None = None,
        *,
        keeps_dtype: bool = False,
    ) -> None:
        super().__init__(fqn, owners, layout, keeps_dtype=keeps_dtype)
        self.dtensor_placement = dtensor_placement
        # Whether its gradient must go through ``plain_gradient``.
        self.needs_conversion = dtensor_placement is not None

    def make_sharded(
        self, local: torch.Tensor, mesh_info: MeshInfo, *, requires_grad: bool
    ) -> None:
        """Create the sharded parameter over ``local``, this rank's shard of it."""
        self._shard_rank = mesh_info.shard_rank
        dtensor = self._over_mesh(local, mesh_info, mesh_info.placements(self.layout.shard_dim))
        self.sharded = as_parameter(dtensor, requires_grad=requires_grad)

    def make_unsharded(self, plain: nn.Parameter, hook: GradientHook) -> None:
        """Make the unsharded parameter. Autograd calls ``hook`` when it has added to ``.grad``."""
        self.unsharded = self.as_used(plain)
        tag_tensor(self.unsharded, TensorTag.UNSHARDED, self.fqn)
        if self.unsharded.is_floating_point():
            flag = self.unsharded.requires_grad
            self.unsharded.requires_grad_(True)  # torch refuses the hook on a frozen tensor
            self.unsharded.register_post_accumulate_grad_hook(hook)
            self.unsharded.requires_grad_(flag)

    def for_copy(self, memo: dict[int, Any]) -> ShardedParam:
        copied = copy.copy(self)
        copied._owners, copied.owner_dicts, copied.extent = [], [], None
        copied.sharded = copy_dtensor(self.sharded, memo)
        memo[id(self.unsharded)] = copied.sharded
        return copied

    def shard_of(self, unsharded: torch.Tensor, copied_to: torch.device | None = None) -> DTensor:
        """Return this rank's shard of ``unsharded``, which has the global shape.

        The shard is a view of ``unsharded``; with ``copied_to``, it is a copy on that device.
        """
        local = unsharded.detach()
        if self.dtensor_placement is not None:
            local = self.dtensor_placement.cut(local)
        own = self.layout.own_part(local, self._shard_rank)
        if copied_to is not None:
            own = own.clone() if own.device == copied_to else own.to(copied_to)
        return place_like(self.sharded, own)

    def partial_of(self, local: torch.Tensor, mesh_info: MeshInfo) -> DTensor:
        placements = mesh_info.partial_placements(self.layout.shard_dim)
        return self._over_mesh(local, mesh_info, placements)

    def _over_mesh(
        self, local: torch.Tensor, mesh_info: MeshInfo, data_placements: tuple[Placement, ...]
    ) -> DTensor:
        if self.dtensor_placement is None:
            return make_dtensor(local, mesh_info.mesh, data_placements, self.layout.shape)
        placed = self.dtensor_placement.while_sharded(data_placements)
        return make_dtensor(local, placed.mesh, placed.placements, placed.shape)

    def as_used(self, unsharded: nn.Parameter) -> nn.Parameter:
        """Return ``unsharded`` as modules use it: as a DTensor if the user's parameter was one."""
        if self.dtensor_placement is None:
            return unsharded
        used = self.dtensor_placement.in_use
        dtensor = make_dtensor(unsharded.data, used.mesh, used.placements, used.shape)
        return nn.Parameter(dtensor, requires_grad=unsharded.requires_grad)

    def plain_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the local tensor of ``gradient``, a DTensor, in the placements of the parameter.

        On data-parallel axes the gradient keeps its own placements. **Collective:** only if it
        differs on other axes, as a partial sum under sequence parallelism does. The ranks of the
        axes that change then redistribute it.
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
                f"over {used.mesh}; along data-parallel axes it must be replicated or a partial "
                "sum."
            )
        if target != gradient.placements:
            gradient = gradient.redistribute(placements=target)
        return gradient.to_local()

    def missing_sum_of(self, gradient: torch.Tensor) -> MissingSum | None:
        """Return the sum over axes of another parallelism that ``gradient`` lacks.

        Returns None if it lacks no sum, or if its placements must change in other ways too.
        """
        placement = self.dtensor_placement
        if placement is None or not isinstance(gradient, DTensor):
            return None
        if gradient.device_mesh != placement.in_use.mesh:
            return None  # ``plain_gradient`` raises the error for this case
        return placement.missing_sum(gradient.placements)


# A step calls the functions below several times for each unit. For speed, their loops avoid calls
# of Python functions.


def take_flags(params: Sequence[UnitParam], before: Sequence[bool]) -> list[bool]:
    """Make ``requires_grad`` of sharded and unsharded parameters equal again, and return it.

    ``before`` are the flags that both had (at first it is empty): where one of them has another
    one now, the user has set it. If both have, the sharded parameter counts.
    """
    with without_torch_function():
        flags = list(map(_SHARDED_FLAG, params))
        present = list(map(_UNSHARDED_FLAG, params))
    if flags == present:
        return flags
    for index, param in enumerate(params):
        if before and flags[index] is before[index]:
            flags[index] = present[index]
        param.sharded.requires_grad_(flags[index])
        param.unsharded.requires_grad_(flags[index])
    return flags


def take_frozen(params: Sequence[UnitParam]) -> int:
    """Freeze the unsharded parameters whose sharded ones were frozen; return how many."""
    with without_torch_function():
        if list(map(_SHARDED_FLAG, params)) == list(map(_UNSHARDED_FLAG, params)):
            return 0
        frozen = [p for p in params if _UNSHARDED_FLAG(p) and not _SHARDED_FLAG(p)]
    for param in frozen:
        param.unsharded.requires_grad_(False)
    return len(frozen)


_SHARDED_FLAG = attrgetter("sharded.requires_grad")
_UNSHARDED_FLAG = attrgetter("unsharded.requires_grad")


# --- all parameters of a unit --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemoryLocation:
    """A device, and whether memory there is pinned."""

    device: torch.device  # the device of the mesh, the CPU, or meta
    is_pinned: bool = False  # page-locked host memory: copies to and from a device are asynchronous

    @classmethod
    def host_memory(cls, device: torch.device, *, pin: bool) -> MemoryLocation:
        """Return host memory for tensors of ``device``; ``pin`` has no effect for the CPU."""
        return cls(torch.device("cpu"), pin and device.type != "cpu")

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=self.device, pin_memory=self.is_pinned)

    def buffer_for(self, layout: FlatLayout) -> torch.Tensor:
        """Return an uninitialised flat shard of a unit."""
        numel, dtype = layout.shard_form
        return torch.empty(numel, dtype=dtype, device=self.device, pin_memory=self.is_pinned)


META = MemoryLocation(torch.device("meta"))


class ReplicaParts:
    """How ``R`` replicas cut each shard once more: along the same dim, into ``R`` chunks of rows.

    A part is a DTensor over the rows of the shard that this rank owns. It has the shape of the
    parameter, and is sharded on both axes of the mesh.
    """

    def __init__(self, params: Sequence[ShardedParam], mesh_info: MeshInfo) -> None:
        assert mesh_info.replicate_group is not None
        self.group = mesh_info.replicate_group
        self.rank = self.group.rank()
        self.layouts = [  # of this rank's shards
            ParamLayout(
                param.layout.local_shape(mesh_info.shard_rank),
                param.layout.shard_dim,
                self.group.size(),
            )
            for param in params
        ]
        self._params, self._mesh_info = params, mesh_info
        self._parts: list[tuple[torch.Tensor | None, DTensor | None]] = [(None, None)] * len(params)

    def part(self, index: int) -> DTensor:
        """Return this rank's part of a sharded parameter: a view of its present shard."""
        shard = local_of(self._params[index].sharded)
        known, part = self._parts[index]
        if part is None or known is not shard:
            part = self.cut(index, shard)
            self._parts[index] = shard, part
        return part

    def cut(self, index: int, local: torch.Tensor) -> DTensor:
        """Return this rank's part of ``local``, which has the shape of the shard."""
        param, own = self._params[index].layout, self.layouts[index].own_part(local, self.rank)
        placements = self._mesh_info.owned_placements(param.shard_dim)
        return make_dtensor(own.detach(), self._mesh_info.mesh, placements, param.shape)


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Mesh, device and memory of the parameters of one unit."""

    mesh_info: MeshInfo
    device: torch.device
    # Where shards, gradients and optimizer state live under a CPUOffloadPolicy; None without it.
    host: MemoryLocation | None = None

    @property
    def location(self) -> MemoryLocation:
        return self.host if self.host is not None else MemoryLocation(self.device)


class UnitParams(abc.ABC):
    """Sharded and unsharded parameters of one unit, with the memory behind them."""

    params: Sequence[UnitParam]  # in the order of the module, or of a bucket of ``replicate``
    spec: GroupSpec
    label: str = ""  # the name of the unit, for errors and logs; ``Root`` sets it
    # The communicator of the root, or a variant with the user's collectives. It is set when a unit
    # of the root is first used. Before that it is this placeholder.
    comm: Communicator = Communicator()
    layout: FlatLayout  # how the shards lie in one buffer, or would lie if they were in one
    compute_dtypes: list[torch.dtype]  # of the unsharded parameters, and of their gradients
    host_copies: HostCopies | None = None  # None if shards live on the device
    is_offloaded: bool = False  # meshard.offload has moved the shards away
    # Set if ``.grad`` and optimizer state are of this rank's parts of the shards only.
    parts: ReplicaParts | None = None
    custom_name: str | None = None  # of the first parameter whose shard has fsdp_pre_all_gather

    def _read_dtypes(self) -> None:
        self.compute_dtypes = [param.unsharded.dtype for param in self.params]

    @abc.abstractmethod
    def start_gather(self, comm: Communicator) -> Handle:
        """Start gathering the shards. The result is ``[ranks, n]``.

        **Collective:** the shard group. **Stream:** the comm stream for gathers.
        **Lifetime:** the shards must not be edited until the handle is released.
        """

    @abc.abstractmethod
    def all_gather_copy_out(self, gathered: torch.Tensor) -> None:
        """Allocate the unsharded parameters and fill them from ``gathered [ranks, n]``."""

    @abc.abstractmethod
    def free_unsharded(self) -> None:
        """Free the memory of the unsharded parameters."""

    @property
    @abc.abstractmethod
    def version(self) -> int:
        """A number that grows with each edit that raises a version counter, until ``rebuild``.

        Under ``replicate`` only parameters with a cast copy count: only a copy can be out of date.
        """

    @property
    def has_replacements(self) -> bool:
        """Whether users may have put other tensors in place of ours."""
        # Called before most gathers, so it calls no Python function for each parameter.
        for param in self.params:
            for parameters, name in param.owner_dicts:
                installed = parameters.get(name)
                if installed is not param.sharded and installed is not param.unsharded:
                    return True
        return False

    @abc.abstractmethod
    def take_replacements(self) -> bool:
        """Adopt tensors that users have put in place of ours. Return whether to ``rebuild``."""

    @abc.abstractmethod
    def rebuild(self) -> None:
        """Build storage and hooks anew for the adopted parameters. The unit must be resharded."""

    @abc.abstractmethod
    def for_copy(self, params: Sequence[UnitParam], gradient_hook: GradientHookMaker) -> UnitParams:
        """Return a copy of this object for a copied unit. ``params`` are the copied parameters."""

    @abc.abstractmethod
    def check_materialised(self) -> None:
        """Raise a RuntimeError if shards are on meta, or ``meshard.offload`` has moved them."""


Storages = list[tuple[torch.UntypedStorage, int]]  # with the numbers of bytes that they had


def resize(storages: Storages, *, to_zero: bool = False) -> None:
    """Resize ``storages`` to zero, or back to the size that they had."""
    for storage, num_bytes in storages:
        size = 0 if to_zero else num_bytes
        if storage.nbytes() != size:  # resize_ to the same size would copy the memory
            storage.resize_(size)
