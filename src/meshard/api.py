"""The call that shards a module: ``fully_shard``."""

from __future__ import annotations

import atexit
import dataclasses
import itertools
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy as TorchCPUOffloadPolicy
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import OffloadPolicy as TorchOffloadPolicy
from torch.distributed.tensor import Replicate, Shard

from meshard._comm.communicator import CommStream
from meshard._engine.build import (
    Collected,
    allocate,
    collect,
    commit,
    plan,
    refuse_shared_memory,
    resolve_mesh_info,
)
from meshard._engine.hooks import UnitHook
from meshard._engine.unit import Unit, UnitSettings, unit_of, with_siblings
from meshard._mesh.mesh_info import MeshInfo, device_of, post_forward_pg
from meshard._optimizer_hooks import watch_optimizers
from meshard._params.unit_params import MemoryLocation, leave_out
from meshard._torch.private import (
    TrainingState,
    accumulation_hooks_of,
    gradient_hooks_of,
    register_as_sharded,
    state_of,
    too_new,
)
from meshard._torch.user_line import listed, warn_user
from meshard.fsdp_module import FSDPModule
from meshard.policies import (
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacementResult,
    list_of,
)

Module = TypeVar("Module", bound=nn.Module)
PlacementFn = Callable[[nn.Parameter], "Shard | Replicate | ShardPlacementResult | None"]
# The fields of torch's policy, up to torch 2.15.
_POLICY_FIELDS = {
    "param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs", "param_dtype_override_fn",
}  # fmt: skip


@overload
def fully_shard(
    module: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: TorchMixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: TorchOffloadPolicy | None = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    unshard_on_access: bool = False,
) -> FSDPModule: ...
@overload
def fully_shard(
    module: list[Module],
    mesh: DeviceMesh | None = None,
    *,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: TorchMixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: TorchOffloadPolicy | None = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    unshard_on_access: bool = False,
) -> list[FSDPModule]: ...
def fully_shard(
    module: nn.Module | list[Module],
    mesh: DeviceMesh | None = None,
    *,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: TorchMixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: TorchOffloadPolicy | None = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    unshard_on_access: bool = False,
) -> Any:
    """Shard the parameters of ``module`` over ``mesh``, in place, as one unit.

    Call it bottom-up, on each layer and then on the root: parameters that are already in a unit
    stay there. One all-gather unshards a unit before its forward and backward; one reduce-scatter
    (and one all-reduce on a 2D mesh) reduces its gradients after. Outside of that, parameters are
    DTensors that hold this rank's shard. Build the optimizer last. On an accelerator, inputs of the
    outermost module that are in host memory are copied to the device.

    **Collective:** every rank of the mesh, in the same order, with the same values.

    Args:
        module: The module, or a list of modules that become one unit.
        mesh: 1D shards (FSDP); 2D ``(replicate, shard)`` replicates over the first axis (HSDP).
            None: 1D over the default group. If there is none, it is initialised from torchrun's
            environment, or else as a group of one rank.
        reshard_after_forward: True reshards after forward, False keeps parameters unsharded for
            backward, an int reshards over so many neighbouring ranks. None: True, but False for
            the root.
        shard_placement_fn: Called with each parameter; returns ``Shard(dim)``, None for dim 0,
            ``Replicate()`` to all-reduce its gradient, or a ``ShardPlacementResult`` with a mesh.
        mp_policy: dtypes for compute, communication and accumulation.
        offload_policy: Where shards live. None: on the device of the mesh, as in torch.
        ignored_params: Parameters to leave as they are, gradients too.
        dp_mesh_dims: Names of the data-parallel axes of ``mesh``, if it has others. Parameters are
            ordinary tensors, or DTensors on ``mesh`` that are replicated along the named axes.
        unshard_on_access: Unshard the unit together with the unit around it, whose forward reads
            its parameters, as ``nn.MultiheadAttention`` reads ``out_proj.weight``.

    Returns:
        ``module``, the same object; its class is now also a subclass of ``FSDPModule``.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: Something cannot be sharded as asked; the module is left as it was.
        NotImplementedError: A parameter with ``fsdp_pre_all_gather`` cannot be sharded as asked; or
            ``mp_policy`` has a field that torch has added since 2.15.

    >>> import torch
    >>> model = torch.nn.Sequential(fully_shard(torch.nn.Linear(8, 8)), torch.nn.Linear(8, 1))
    >>> _ = fully_shard(model)
    >>> model(torch.ones(2, 8)).sum().backward()
    >>> model[0].weight.grad.shape, type(model[0].weight.grad).__name__
    (torch.Size([8, 8]), 'DTensor')
    """
    modules = _check_modules(module)
    policy = as_policy(mp_policy)
    no_offload: tuple[Any, ...] = (None, TorchOffloadPolicy, OffloadPolicy)  # the classes: as torch
    if offload_policy in no_offload:
        offload_policy = None
    elif not isinstance(offload_policy, TorchOffloadPolicy):
        hint = " (an instance: CPUOffloadPolicy())" if isinstance(offload_policy, type) else ""
        raise TypeError(f"offload_policy must be an OffloadPolicy{hint}, got {offload_policy!r}.")
    check_mesh(mesh)
    ignored = as_set(ignored_params)
    found = collect(modules, ignored)
    refuse_shared_memory(found, modules)
    _warn_about_hooks(found)
    mesh_info = resolve_mesh_info(mesh if mesh is not None else default_mesh(), dp_mesh_dims)
    plans = plan(found, mesh_info, shard_placement_fn, policy)
    device = device_of(mesh_info.mesh)
    host = _host_location(offload_policy, device)
    units = []
    with torch.inference_mode(mode=False):  # inference tensors would have no version counters
        for each in plans:
            settings = _settings(reshard_after_forward, each.mesh_info, unshard_on_access)
            units.append(allocate(each, modules, policy=policy, settings=settings, host=host))
    if device.type != "cpu":
        inner = itertools.chain.from_iterable(each.modules() for each in modules)
        move_buffers(inner, device)
    commit(units, plans, modules, FSDPModule, "FSDP")
    for sharded in modules:
        register_as_sharded(sharded, StageState(units[0], policy))
    leave_out(ignored, modules)
    watch_optimizers()
    return module


# torch's pipeline schedules call ``fully_shard.state(module)``.
setattr(fully_shard, "state", state_of)  # noqa: B010  # mypy refuses the assignment


# --- checks --------------------------------------------------------------------------------


def as_set(ignored: Iterable[nn.Parameter] | None) -> set[nn.Parameter]:
    """Return ``ignored_params``, any iterable, as a set."""
    if isinstance(ignored, torch.Tensor):
        raise TypeError("ignored_params must be a set of parameters, got one; pass {param}.")
    given = () if ignored is None else ignored
    return set(list_of("ignored_params", given, torch.Tensor, "a set of parameters"))


def check_module(module: object, caller: str, or_else: str = "") -> None:
    """Raise unless ``module`` is a module that is neither sharded nor replicated yet."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{caller} needs an nn.Module{or_else}, got {type(module).__name__}.")
    if isinstance(module, TorchFSDPModule) or unit_of(module) is not None:
        name = type(module).__name__.removeprefix("FSDP").removeprefix("Replicated")
        raise ValueError(
            f"{caller} was applied to a {name} that is sharded or replicated already; apply one of "
            "fully_shard and replicate, once, to each module."
        )


def _check_modules(module: nn.Module | list[Module]) -> list[nn.Module]:
    modules: list[nn.Module] = list(module) if isinstance(module, (list, tuple)) else [module]
    if not modules:
        raise ValueError("fully_shard got an empty list of modules; pass at least one.")
    for each in modules:
        check_module(each, "fully_shard", " or a list of them")
        if isinstance(each, (nn.ModuleList, nn.ModuleDict)) and not has_forward(each):
            raise ValueError(
                f"fully_shard cannot hook a {type(each).__name__}, because it has no forward; "
                "apply it to the modules inside, one by one, and to the module around it."
            )
    listed = Counter(modules)
    for outer in modules if len(modules) > 1 else ():
        inner = next((each for each in outer.modules() if listed[each] > (each is outer)), None)
        if inner is not None:
            raise ValueError(
                f"in the list, a {type(inner).__name__} is inside a {type(outer).__name__}, or "
                "given twice; list it once, or not: the unit has what is inside its modules."
            )
    return modules


def has_forward(module: nn.Module) -> bool:
    """Whether ``module`` can be called: a ``ModuleList`` cannot."""
    return type(module).forward is not nn.Module.forward


def check_mesh(mesh: object) -> None:
    """Raise a TypeError unless ``mesh`` is a mesh or None."""
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh or None, got {type(mesh).__name__}.")


def _warn_about_hooks(found: Iterable[Collected]) -> None:
    """Warn of hooks on parameters, which will not run, because shards replace the parameters."""
    hooked = [
        each.fqn
        for each in found
        if gradient_hooks_of(each.param) or accumulation_hooks_of(each.param)
    ]
    if hooked:
        warn_user(
            f"hooks on gradients of {listed(hooked)} will not run any more: fully_shard replaces "
            "parameters by shards. Register them on the parameters that the module has after it."
        )


def as_policy(mp_policy: TorchMixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """Return ``mp_policy``, which may be torch's, as a policy of meshard."""
    if not isinstance(mp_policy, TorchMixedPrecisionPolicy):
        raise TypeError(f"mp_policy must be a MixedPrecisionPolicy, got {mp_policy!r}.")
    fields = {each.name for each in dataclasses.fields(TorchMixedPrecisionPolicy)}
    for name in sorted(fields - _POLICY_FIELDS):
        if getattr(mp_policy, name) != getattr(TorchMixedPrecisionPolicy(), name):
            raise too_new(f"{name} of MixedPrecisionPolicy")
    if isinstance(mp_policy, MixedPrecisionPolicy):
        return mp_policy
    return MixedPrecisionPolicy(
        **{name: getattr(mp_policy, name) for name in fields & _POLICY_FIELDS}
    )


# --- settings ------------------------------------------------------------------------------


def _settings(
    reshard_after_forward: Any, mesh_info: MeshInfo, unshard_on_access: bool
) -> UnitSettings:
    chosen, count = reshard_after_forward, mesh_info.shard_count
    is_gathered = mesh_info.shard_axis is not None
    settings = UnitSettings(reshard_after_forward=chosen, unshard_on_access=unshard_on_access)
    if chosen is None or isinstance(chosen, bool):
        return settings
    if not isinstance(chosen, int):
        raise TypeError(f"reshard_after_forward must be a bool, an int or None, got {chosen!r}.")
    if chosen < 1 or (is_gathered and count % chosen):
        raise ValueError(
            f"reshard_after_forward={chosen} must divide the {count} ranks of the shard axis; "
            "use True to reshard over all of them, False to keep parameters unsharded."
        )
    if chosen in (1, count) or not is_gathered:
        settings.reshard_after_forward = chosen > 1
    else:
        settings.post_forward_group = post_forward_pg(mesh_info, chosen)
    return settings


# --- memory --------------------------------------------------------------------------------


def _host_location(
    policy: TorchOffloadPolicy | None, device: torch.device
) -> MemoryLocation | None:
    """Return the host memory where a policy puts shards; None: they are on ``device``."""
    if not isinstance(policy, TorchCPUOffloadPolicy):
        return None
    return MemoryLocation.host_memory(device, pin=policy.pin_memory)


def move_buffers(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Move buffers from the CPU to ``device``. A buffer that modules share stays one tensor."""
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_cpu:
                if buffer not in moved:
                    moved[buffer] = buffer.to(device)
                module._buffers[name] = moved[buffer]


# --- the default mesh ----------------------------------------------------------------------

# The default mesh of each default group. After ``destroy_process_group`` and another
# ``init_process_group``, the new group has the name of the old one. A mesh looks up its group by
# name, so a mesh of the old group would use the new one, which may have another size. Both
# references are weak, because a mesh keeps its group alive, with the group's threads and sockets.
_default_meshes: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[DeviceMesh]]
_default_meshes = weakref.WeakKeyDictionary()


def default_mesh() -> DeviceMesh:
    """Return a 1D mesh over the default group: the same one, as long as anything refers to it."""
    device_type = _default_device_type()
    if not dist.is_initialized():
        _init_default_group(device_type)
    world = dist.group.WORLD
    assert world is not None
    mesh = _default_meshes[world]() if world in _default_meshes else None
    if mesh is None or mesh.device_type != device_type:
        mesh = init_device_mesh(device_type, (dist.get_world_size(),))
        _default_meshes[world] = weakref.ref(mesh)
    return mesh


def _default_device_type() -> str:
    """Return the type of the accelerator that the default group can serve; else the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or (dist.is_initialized() and dist.get_backend() == "gloo"):
        return "cpu"
    return accelerator.type


def _init_default_group(device_type: str) -> None:
    if device_type != "cpu":  # torchrun numbers the ranks of a host
        module = torch.get_device_module(device_type)
        module.set_device(int(os.environ.get("LOCAL_RANK", module.current_device())))
    if all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        dist.init_process_group()
        atexit.register(_destroy_group, dist.group.WORLD)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not in torch's stubs
        dist.init_process_group(store=store, rank=0, world_size=1)


def _destroy_group(ours: dist.ProcessGroup | None) -> None:
    if dist.is_initialized() and ours is dist.group.WORLD:
        dist.destroy_process_group()


class StageState(UnitHook):
    """The answers to what programs ask of torch's private state of a module, under torch's names.

    Schedules of ``torch.distributed.pipelining`` turn reductions off. After the last backward they
    go through the states of all units of the stage, and reduce the parameter group of each. Here
    one state stands for all units. Trainers and tensor subclasses read what is below. All other
    names raise an AttributeError.
    """

    def __init__(self, unit: Unit, policy: MixedPrecisionPolicy) -> None:
        vars(self).update(_unit=weakref.ref(unit), _mp_policy=policy)

    def _alive(self) -> Unit:
        unit = self._unit()
        assert unit is not None  # its module is gone, and a program kept this state
        return unit

    @property
    def all_states(self) -> list[StageState]:
        """A list of this state only, which stands for all units."""
        return [self]

    @property
    def _state_ctx(self) -> StageState:
        return self

    _fsdp_param_group = _comm_ctx = _state_ctx
    _fsdp_param_groups = all_states  # since torch 2.13

    def post_backward(self) -> None:
        """Reduce all gradients of the stage, as far as the ``GradientSync`` of its units says."""
        self._alive().lifecycle.finish_split_backward()

    def finalize_backward(self) -> None:
        """Do nothing: ``post_backward`` waits for the reductions."""

    _root_post_backward_final_callback = _lazy_init = finalize_backward

    @property
    def post_forward_mesh_info(self) -> MeshInfo | None:
        """The mesh of the unit; None if ``set_reshard_after_forward(False)`` holds."""
        unit = self._alive()
        is_kept = unit.settings.reshard_after_forward is False or not unit.params
        return None if is_kept else unit.group.spec.mesh_info

    @property
    def _reshard_after_forward(self) -> bool:
        unit = self._alive()
        is_chosen = self.post_forward_mesh_info is not None
        return is_chosen and not (unit.is_root and unit.settings.reshard_after_forward is None)

    @property
    def _training_state(self) -> Any:
        """The state of the step, as ``fsdp_pre_all_gather`` reads it."""
        lifecycle = self._alive().lifecycle
        if lifecycle.is_idle:
            return TrainingState.IDLE
        return TrainingState.FORWARD if lifecycle.backward is None else TrainingState.PRE_BACKWARD

    @property
    def all_gather_stream(self) -> Any:
        """The stream on which units are gathered."""
        unit = self._alive()
        with unit.lifecycle.comm.on_stream(CommStream.GATHER):
            return torch.get_device_module(unit.group.spec.device).current_stream()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"meshard has no {name!r}, a private name of torch's fully_shard: call the public "
            "methods of the module, such as unshard(), reshard(), set_reshard_after_forward() and "
            "set_modules_to_forward_prefetch(). docs/migrate/from-fsdp2.md lists what is answered."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "post_forward_mesh_info":
            self.__getattr__(name)
        for each in with_siblings(self._alive()):
            if value is None:
                each.settings.reshard_after_forward, each.settings.post_forward_group = False, None
            elif not each.settings.reshard_after_forward:
                each.settings.reshard_after_forward = True
