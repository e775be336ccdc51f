"""How does a sharded module communicate: on which groups, with whose collectives and memory?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch

from meshard._comm.checked import share
from meshard._comm.customised import GroupMemory
from meshard._geometry.mesh_roles import group_for_scatter
from meshard._runtime.unit import CommSettings, Unit
from meshard.policies import AllGather, ReduceScatter
from meshard.setters import check_bool, own_unit, reached_units


class CommSetters:
    """The part of ``FSDPModule`` that is about communication. Call these between steps."""

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Reduce gradients on a process group of their own, so that gathers need not queue.

        A backend may run one collective of a group after the other (NCCL does); with a second
        group of the same ranks, a reduce-scatter and an all-gather travel at the same time.

        **Collective:** all ranks of the shard group, the first time for a mesh. Destroyed with the
        other groups by ``destroy_process_group()``.

        Args:
            enable: Use the second group; False goes back to the group that gathers.
            recurse: Also for the units inside.
        """
        check_bool("enable", enable)
        for unit in _units_at_rest(self, recurse):
            if unit.group is not None:
                roles = unit.group.place.roles
                unit.settings.scatter_group = group_for_scatter(roles) if enable else None

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Bound how many units may have whole gradients on their way at once.

        Each takes the bytes of its unit's whole gradients. With 1, a unit waits for the unit before
        it to be reduced; more hide slow reductions. The default is 3; 2 are in use unless replicas
        are reduced over as well.

        Args:
            max_input_buffers: At least 1; the one that is being filled counts.
            recurse: Also for the units inside.

        Raises:
            TypeError: It is not an int.
            ValueError: It is less than 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {max_input_buffers!r}.")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be at least 1, got {max_input_buffers}.")
        for unit in reached_units(self, recurse):
            unit.settings.max_input_buffers = max_input_buffers

    def set_custom_all_gather(self, comm: AllGather, *, recurse: bool = True) -> None:
        """Gather this unit with ``comm`` instead of the backend's all-gather.

        Not used by groups of one rank. ``meshard.CommLedger`` and ``MESHARD_DEBUG`` see it.

        Args:
            comm: See ``meshard.AllGather``; one written for FSDP2 fits.
            recurse: Also for the units inside. (FSDP2 does not, and does nothing on a root whose
                children own all parameters.)

        Raises:
            TypeError: ``comm`` cannot be called, or has no ``allocate``.
            ValueError: Memory of the process group was asked for.
        """
        _replace(self, recurse, all_gather=_checked("set_custom_all_gather", comm))

    def set_custom_reduce_scatter(self, comm: ReduceScatter, *, recurse: bool = True) -> None:
        """Reduce the gradients of this unit with ``comm`` instead of the backend's reduce-scatter.

        It is given SUM; meshard divides before and after.

        Args:
            comm: See ``meshard.ReduceScatter``; one written for FSDP2 fits.
            recurse: Also for the units inside.

        Raises:
            TypeError: ``comm`` cannot be called, or has no ``allocate``.
            ValueError: Memory of the process group was asked for.
        """
        _replace(self, recurse, reduce_scatter=_checked("set_custom_reduce_scatter", comm))

    def set_allocate_memory_from_process_group_for_comm(
        self, enable: bool, *, recurse: bool = True
    ) -> None:
        """Take the buffers of this unit's collectives from the process group's own allocator.

        What an all-gather yields and what a reduce-scatter is given and yields. NCCL may then send
        without copying.

        Args:
            enable: Do so.
            recurse: Also for the units inside.

        Raises:
            RuntimeError: The backend has no memory to give (gloo has none).
            ValueError: A custom collective was set, which allocates by itself.
        """
        check_bool("enable", enable)
        for unit in reached_units(self, recurse):
            if enable and unit.group is not None:
                GroupMemory(unit.group.place.device).of(unit.group.place.roles.shard_group)
        _replace(self, recurse, from_group=enable)

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Not built: meshard does not gather through symmetric memory yet."""
        raise NotImplementedError(
            "gathering through symmetric memory is not built; use set_custom_all_gather, or "
            "set_allocate_memory_from_process_group_for_comm."
        )

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Have the next gather wait for ``event`` instead of all that is queued when it starts.

        For an optimizer that steps on a stream of its own. Used once: record and set a new one
        after each step. **Stream:** the event must come after the optimizer's step, and that after
        the backward. On a CPU mesh the host has waited already.

        Args:
            event: Recorded after the step.

        Raises:
            TypeError: It is not an event.
        """
        if not hasattr(event, "wait") or not hasattr(event, "record"):
            raise TypeError(f"event must be a torch.Event, got {event!r}.")
        own_unit(self).lifecycle.comm.gather_after(event)


def share_comm_ctx(modules: list[Any]) -> None:
    """Have several roots communicate on the same streams, as the stages of a pipeline do.

    Without it every root has streams of its own, and memory that one has freed cannot serve
    another. Call it after the last ``fully_shard``, between steps.

    Args:
        modules: Modules that ``fully_shard`` was applied to.

    Raises:
        ValueError: One of them is not sharded, or they are on different devices.

    >>> import torch, meshard
    >>> stages = [meshard.fully_shard(torch.nn.Linear(2, 2)) for _ in range(2)]
    >>> meshard.share_comm_ctx(stages)
    """
    units = [own_unit(module) for module in modules if _check_sharded(module)]
    devices = {unit.group.place.device.type for unit in units if unit.group is not None}
    if len(devices) > 1:
        raise ValueError(f"modules that share streams must be on one device, got {devices}.")
    for unit in units[1:]:
        unit.lifecycle.use(share(units[0].lifecycle.comm, unit.lifecycle.comm))


def _check_sharded(module: Any) -> bool:
    if not isinstance(module, CommSetters):
        raise ValueError(
            f"share_comm_ctx needs modules sharded by fully_shard, got {type(module).__name__}."
        )
    return True


def _units_at_rest(module: Any, recurse: bool) -> list[Unit]:
    units = list(reached_units(module, recurse))
    for unit in units:
        unit.lifecycle.finish_reductions()
    return units


def _checked(setter: str, comm: Any) -> Any:
    if not callable(comm) or not hasattr(comm, "allocate"):
        raise TypeError(f"{setter} needs an object with allocate() and __call__(), got {comm!r}.")
    return comm


def _replace(module: Any, recurse: bool, **changes: Any) -> None:
    units = list(reached_units(module, recurse))
    settings = [_changed(unit, changes) for unit in units]  # all are checked before one is changed
    for unit, chosen in zip(units, settings, strict=True):
        _put(unit, chosen)


def _changed(unit: Unit, changes: dict[str, Any]) -> CommSettings:
    chosen: CommSettings = replace(unit.settings.comm, **changes)
    if chosen.from_group and (chosen.all_gather or chosen.reduce_scatter):
        raise ValueError(
            "memory of the process group and a custom collective exclude each other, because a "
            "custom collective allocates by itself; set only one of them."
        )
    return chosen


def _put(unit: Unit, chosen: CommSettings) -> None:
    unit.lifecycle.finish_reductions()
    unit.settings.comm = chosen
    if unit.group is not None:
        unit.group.comm = chosen.apply_to(unit.lifecycle.comm, unit.group.place.device)
