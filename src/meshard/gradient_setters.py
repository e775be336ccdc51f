"""How far are the gradients of a sharded module reduced, and by what are they divided?"""

from __future__ import annotations

from collections.abc import Callable

import torch

from meshard._runtime.sharded_grads import ShardedGrads
from meshard._runtime.unit import DivideFactor, ReduceHook, check_divide_factor
from meshard.policies import GradientSync
from meshard.reduce_hooks import OnStream
from meshard.setters import check_bool, own_unit, reached_units


class GradientSetters:
    """The part of ``FSDPModule`` that is about gradients."""

    def set_gradient_sync(self, mode: GradientSync, *, recurse: bool = True) -> None:
        """Choose how far the gradients of the following backwards are reduced.

        Args:
            mode: NONE, REDUCE_SCATTER or FULL.
            recurse: Also for the units inside.

        Raises:
            TypeError: ``mode`` is not a ``GradientSync``.
        """
        if not isinstance(mode, GradientSync):
            raise TypeError(f"mode must be a meshard.GradientSync, got {mode!r}.")
        for unit in reached_units(self, recurse):
            unit.settings.sync = mode
            if mode is not GradientSync.NONE:
                unit.settings.sync_when_on = mode

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Reduce gradients at all, or not (``GradientSync.NONE``).

        Turned on again, gradients are reduced as far as before: after
        ``set_requires_all_reduce(False)`` that is ``REDUCE_SCATTER``.
        """
        check_bool("requires_gradient_sync", requires_gradient_sync)
        for unit in reached_units(self, recurse):
            chosen = unit.settings.sync_when_on if requires_gradient_sync else GradientSync.NONE
            unit.settings.sync = chosen

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Reduce across replicas (``FULL``), or inside the shard group only (``REDUCE_SCATTER``).

        While gradient sync is off this is remembered, and holds once it is on again.
        """
        check_bool("requires_all_reduce", requires_all_reduce)
        chosen = GradientSync.FULL if requires_all_reduce else GradientSync.REDUCE_SCATTER
        for unit in reached_units(self, recurse):
            unit.settings.sync_when_on = chosen
            if unit.settings.sync is not GradientSync.NONE:
                unit.settings.sync = chosen

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether the step follows the next backward.

        After a backward that is not the last, reductions may still be on their way when it
        returns, to overlap with the next microbatch. Holds for the whole root.
        """
        check_bool("is_last_backward", is_last_backward)
        own_unit(self).lifecycle.is_last_backward = is_last_backward

    def set_gradient_divide_factor(
        self, factor: DivideFactor | None, *, recurse: bool = True
    ) -> None:
        """Divide gradients by ``factor`` in all, instead of by the ranks of their parameter's mesh.

        Args:
            factor: A positive number; or a callable or a 0-d tensor that gives one (or a 0-d
                tensor) when gradients are reduced, as for a count of tokens over all ranks: read
                once per backward, which waits for a tensor on a device. It must be the same on
                every rank, and for all microbatches of a window. None: the number of ranks.
            recurse: Also for the units inside.

        Raises:
            TypeError: ``factor`` is none of these.
            ValueError: ``factor`` is not positive and finite.
            RuntimeError: A window is open: part of it was divided by the old factor. A callable or
                a tensor whose value changes within a window raises in backward.
        """
        chosen = factor
        if isinstance(factor, torch.Tensor):
            if factor.dim():
                check_divide_factor(factor)
        elif factor is not None and not callable(factor):
            chosen = check_divide_factor(factor)
        units = list(reached_units(self, recurse))
        for unit in units:
            if unit.gradients is not None and unit.gradients.is_window_open:
                raise RuntimeError(
                    f"unit {unit.label!r} is in the middle of a window, whose gradients must all "
                    "be divided by the same factor; set it before the first microbatch."
                )
        for unit in units:
            unit.settings.divide_factor = chosen

    def set_reduce_scatter_divide_factor(self, factor: DivideFactor) -> None:
        """Do what ``set_gradient_divide_factor`` does; FSDP2's older name for it."""
        self.set_gradient_divide_factor(factor)

    def set_keep_gradient_memory(self, keep_gradient_memory: bool, *, recurse: bool = True) -> None:
        """Keep the memory of sharded gradients from step to step.

        The ``.grad`` of a unit's parameters are views of one flat tensor in any case, and in small
        units on the CPU the same DTensors in every step, unless somebody holds one, or has put an
        attribute or a graph on it. With this, they are the same DTensors at the same addresses in
        every unit, and no step allocates gradients; who keeps a ``.grad`` beyond ``zero_grad()``
        sees the next one in it. It costs the memory of a gradient shard while the unit has none,
        mostly in forward. Gradients of parameters that are narrower than ``accumulate_dtype`` are
        copies, made anew in each step.

        Args:
            keep_gradient_memory: Whether to.
            recurse: Also for the units inside.
        """
        check_bool("keep_gradient_memory", keep_gradient_memory)
        for unit in reached_units(self, recurse):
            if unit.gradients is not None and isinstance(unit.gradients.sharded, ShardedGrads):
                unit.gradients.sharded.keep_memory(keep_gradient_memory)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Give parameters that no rank used a gradient of zero instead of None.

        What is communicated is the same: unused parameters always have their place in it.
        """
        check_bool("reduce_scatter_unused_params", reduce_scatter_unused_params)
        for unit in reached_units(self, recurse):
            unit.settings.zero_unused = reduce_scatter_unused_params

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accept FSDP2's setting: meshard always sums and divides by itself."""
        check_bool("enable", enable)

    def set_all_reduce_hook(
        self,
        hook: Callable[[torch.Tensor], None] | None,
        *,
        stream: torch.Stream | None = None,
        recurse: bool = True,
    ) -> None:
        """Have ``hook(shard)`` change reduced gradients in place.

        Called for each unit once per window with what is about to be added to ``.grad``, after the
        reduction over replicas. A second call replaces the hook; ``meshard.register_reduce_hook``
        chains several.

        Args:
            hook: Gets the flat shard ``[shard_numel]``. None: take the hook off.
            stream: Run the hook on it; the current stream waits. None: the current stream.
            recurse: Also for the units inside.

        Raises:
            TypeError: ``hook`` cannot be called.
            ValueError: There is a stream, but the mesh is on the CPU.
        """
        if hook is not None and not callable(hook):
            raise TypeError(f"hook must be callable or None, got {hook!r}.")
        for unit in reached_units(self, recurse):
            on_cpu = unit.group is not None and unit.group.place.device.type == "cpu"
            if stream is not None and on_cpu:
                raise ValueError("a CPU mesh has no streams; leave stream out.")
            hooks = [other for other in unit.settings.reduce_hooks if not other.is_all_reduce]
            if hook is not None:
                after = hook if stream is None else OnStream(hook, stream)
                hooks.append(ReduceHook(after=after, is_all_reduce=True))
            unit.settings.reduce_hooks[:] = hooks
