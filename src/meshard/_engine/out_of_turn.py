"""Units that are unsharded out of turn: gathered before their use, or kept beyond it.

``Prefetcher`` starts gathers ahead of use, in the order that the schedule predicts.

``RetainedUnits`` keeps units unsharded beyond their forward or backward if no hook could gather
them again in time. There are two such cases. First, a backward with ``create_graph=True`` makes a
graph whose nodes have saved unsharded parameters. A second backward runs these nodes before it
calls any hook of a unit. Second, if ``forward`` of a unit returns no tensor (but an object of the
user's own class, for example), there is nothing to put a hook on. Retained units are resharded
after a backward that frees the last of these graphs. If the graphs were dropped (which is noticed
in the first case only), or the shards have changed, the next forward begins by resharding them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch.autograd.graph import increment_version

from meshard._engine.param_group import ParamState, refuse_transforms
from meshard._engine.schedule import ForwardCall, ForwardPass, StepSchedule
from meshard._engine.unit import Unit, alive
from meshard._torch.dtensor import plain_of
from meshard._torch.private import keeps_graph, skip_dynamo
from meshard._torch.user_line import warn_user

# --- gathered ahead ---------------------------------------------------------------------------


class Prefetcher:
    """Gathers of units, ahead of their use. ``units`` are in the order of their numbers."""

    def __init__(self, units: Sequence[weakref.ref[Unit]]) -> None:
        self._units = units
        self._prefetched: list[Unit] = []

    def after_entry(self, unit: Unit, schedule: StepSchedule) -> list[Unit]:
        return self._chosen_or(unit, unit.settings.forward_prefetch, schedule.next_in_forward())

    def after_backward_of(
        self, unit: Unit, forward_pass: ForwardPass, call: ForwardCall
    ) -> list[Unit]:
        chosen = unit.settings.backward_prefetch
        following = self._chosen_or(unit, chosen, forward_pass.next_in_backward(call))
        return [each for each in following if chosen or each.settings.unshard_in_backward]

    def _chosen_or(
        self, unit: Unit, chosen: list[weakref.ref[Unit]], predicted: int | None
    ) -> list[Unit]:
        if not chosen:
            following = None if predicted is None else self._units[predicted]()
            return [] if following is None else [following]
        # Units of other roots are left out: their gathers would be dropped when the forward or
        # backward of this root ends.
        return [each for each in alive(chosen) if each.root is unit.root]

    def unshard(
        self, unit: Unit, up_next: list[Unit], *, in_forward: bool, keep_shard: bool
    ) -> None:
        """Unshard a unit that is about to compute, and start gathering ``up_next``.

        ``in_forward``: look for the user's edits of the shards, and gather no post-forward shards.
        ``keep_shard``: keep a post-forward shard, if the unit has a group for it.
        """
        is_cold = unit.group.state is ParamState.SHARDED
        if is_cold:
            _start_unshard(unit, in_forward=in_forward)
            # This gather was not started ahead, so compute has to wait for it below. Start the next
            # gathers before that wait, so that they run meanwhile.
            self._start(up_next, in_forward=in_forward)
        unit.group.finish_unshard(unit.settings.post_forward_group if keep_shard else None)
        if not is_cold:
            self._start(up_next, in_forward=in_forward)

    def _start(self, units: list[Unit], *, in_forward: bool) -> None:
        for unit in units:
            if unit.params and unit.group.state is ParamState.SHARDED:
                if in_forward:
                    unit.group.forget_stale()
                _start_unshard(unit, in_forward=in_forward)
                self._prefetched.append(unit)
            if unit.siblings:  # a forward enters them together with the unit
                self._start(unit.siblings, in_forward=in_forward)

    def drop_unused(self) -> None:
        """Drop the gathers that neither a forward, a backward nor an ``unshard()`` has used."""
        for unit in self._prefetched:
            if unit.group.state is ParamState.GATHERING and unit.group.manual_unshard is None:
                unit.group.reshard()
        self._prefetched.clear()


def _start_unshard(unit: Unit, *, in_forward: bool) -> None:
    is_freed_after = unit.settings.reshard_after_backward
    unit.group.start_unshard(only_for_backward=not in_forward and is_freed_after)


# --- kept beyond a forward or backward ----------------------------------------------------------


class _SecondOrder:
    """Stands for the graph that one backward makes.

    After that backward, only hooks in the graph refer to this object. So a weak reference to it
    tells whether the graph is alive.
    """

    was_used = False  # whether the backward that runs goes through this graph

    @skip_dynamo
    def record_use(self, _: torch.Tensor) -> None:
        self.was_used = True


class RetainedUnits:
    """The units of a root that stay unsharded because a graph may read them again."""

    def __init__(self) -> None:
        self._units: list[weakref.ref[Unit]] = []
        self._graphs: list[weakref.ref[_SecondOrder]] = []
        # An estimate of how many passes in which a unit returned no tensor are still to have their
        # backward. Each backward that frees its graph counts as that of one such pass.
        self._num_hidden = 0
        self._hidden_in: ForwardPass | None = None  # the last such pass
        self._making: _SecondOrder | None = None  # set while a create_graph=True backward runs
        self._frees = False

    def take_over(self, other: RetainedUnits) -> None:
        """Also retain the units that ``other`` retains. These units are under this root now."""
        self._units += other._units
        self._graphs += other._graphs
        self._num_hidden += other._num_hidden

    def begin_backward(self) -> None:
        """Record whether the backward makes a new graph, and whether it frees the one it uses."""
        self._making = _SecondOrder() if torch.is_grad_enabled() else None
        self._frees = bool(self._units) and not keeps_graph()

    def on_backward(self, unit: Unit, gradient: torch.Tensor) -> torch.Tensor | None:
        """Retain a unit whose backward begins, if this backward makes a graph.

        ``gradient`` is the gradient of an output of the unit. Returns the tensor that autograd must
        use instead; None: ``gradient`` itself.
        """
        if self._making is None:
            return None
        self.retain(unit)
        watched = gradient
        if not gradient.requires_grad:
            # The gradient is a constant, as that of ``sum()`` is. Only a tensor that requires grad
            # can have a hook.
            try:
                watched = gradient.detach().requires_grad_()
            except RuntimeError as error:
                refuse_transforms(unit.label, error)
                raise
        watched.register_hook(self._making.record_use)
        return None if watched is gradient else watched

    def retain(self, unit: Unit) -> None:
        if not unit.step.is_retained:
            unit.step.is_retained = True
            unit.group.record_version()  # to notice when the unsharded copy is stale
            self._units.append(weakref.ref(unit))

    def retain_hidden(self, unit: Unit, output: object, forward_pass: ForwardPass) -> None:
        """Retain a unit for the backward of this forward, because its output has no tensor."""
        if unit not in _warned:
            _warned.add(unit)
            warn_user(
                f"unit {unit.label!r} returned a {type(output).__name__} in which no tensor was "
                "found, so the beginning of its backward cannot be seen; it stays unsharded until "
                "a backward ended. Return the tensors that gradients come back through, and zeros "
                "if only other ranks have any, which would wait for this one; if they are inside "
                "an object, make its class a dataclass, or register it "
                "(torch.export.register_dataclass, torch.utils._pytree.register_pytree_node).",
            )
        if self._hidden_in is not forward_pass:
            self._hidden_in = forward_pass
            self._num_hidden += 1
        self.retain(unit)

    def end_backward(self) -> None:
        """Release the units after a backward, unless another backward may need them."""
        if self._making is not None and self._units:
            self._graphs.append(weakref.ref(self._making))
        self._making = None
        if not self._units:
            return
        graphs = alive(self._graphs)
        if self._frees:
            self._num_hidden = max(0, self._num_hidden - 1)
            graphs = [graph for graph in graphs if not graph.was_used]
        for graph in graphs:
            graph.was_used = False
        self._graphs = [weakref.ref(graph) for graph in graphs]
        if not graphs and not self._num_hidden:
            self.release()

    def begin_forward(self) -> None:
        """Reshard the units before a forward, if any unit is stale or no graph is left."""
        if not self._units:
            return
        units = alive(self._units)
        stale = {unit for unit in units if unit.group.is_stale}
        if not stale and (self._num_hidden or alive(self._graphs)):
            return
        self.release()
        for unit in units:
            if unit in stale and unit.group.state is not ParamState.INSTALLED:
                # Graphs that are still alive may have saved older values of these parameters.
                # Raise the versions of the unsharded copies, which gathers fill again, so that
                # autograd refuses a backward through such a graph.
                params = (param for param in unit.params if param.unsharded is not param.sharded)
                increment_version([plain_of(param.unsharded) for param in params])
            if unit.group.state is ParamState.UNSHARDED:
                unit.group.reshard()

    def release(self) -> None:
        """Retain nothing. The caller reshards the units."""
        for unit in alive(self._units):
            unit.step.is_retained = False
        self._units.clear()
        self._graphs.clear()
        self._num_hidden = 0
        self._hidden_in = self._making = None
        self._frees = False


_warned: weakref.WeakSet[Unit] = weakref.WeakSet()
