"""Which gradients travel together, where parameters are kept whole?

Those that are complete at about the same time: a bucket waits for its last gradient. Before the
first backward nobody knows when that is, so buckets follow the reverse of the order in which the
module lists its parameters; at the start of the second iteration they are made once more, in the
order in which gradients arrived on the first rank.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from meshard._comm.setup_communicator import broadcast_from_first
from meshard._params.plain_param import PlainParam
from meshard._runtime.gradient_state import GradientState
from meshard._runtime.group_tensors import Place
from meshard._runtime.hooks import gradient_hook_maker
from meshard._runtime.param_group import ParamGroup
from meshard._runtime.plain_grads import PlainGrads, Replaced
from meshard._runtime.plain_tensors import PlainTensors
from meshard._runtime.unit import Unit
from meshard.policies import MixedPrecisionPolicy

_FIRST_CAP = 2**20  # bytes: it should leave while most of backward is still to come


def partition(params: Sequence[nn.Parameter], cap: int) -> list[list[int]]:
    """Cut a list of parameters into buckets.

    Args:
        params: In the order in which gradients are expected.
        cap: Bytes that a bucket may have, unless one parameter alone has more.

    Returns:
        Places in ``params``. Each bucket is of one dtype, and the first one small.

    >>> half = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    >>> partition([nn.Parameter(torch.zeros(4)), half, nn.Parameter(torch.zeros(4))], cap=64)
    [[0, 2], [1]]
    """
    buckets: list[list[int]] = []
    open_buckets: dict[torch.dtype, tuple[list[int], int]] = {}
    for place, param in enumerate(params):
        num_bytes = param.numel() * param.element_size()
        bucket, size = open_buckets.get(param.dtype, ([], 0))
        limit = min(cap, _FIRST_CAP) if not buckets or bucket is buckets[0] else cap
        if not bucket or size + num_bytes > limit:
            bucket, size = [], 0
            buckets.append(bucket)
        bucket.append(place)
        open_buckets[param.dtype] = bucket, size + num_bytes
    return buckets


def join_two(buckets: list[list[int]], dtypes: Sequence[torch.dtype]) -> None:
    """Make one of the last two buckets of one dtype; of the last two, if each has another dtype.

    Args:
        buckets: At least two, as ``partition`` returns them.
        dtypes: Of the parameters.

    >>> buckets = [[0], [1], [2], [3]]
    >>> join_two(buckets, [torch.float32, torch.float32, torch.float32, torch.bfloat16])
    >>> buckets
    [[0], [1, 2], [3]]
    """
    seen: dict[torch.dtype, int] = {}
    for number in range(len(buckets) - 1, -1, -1):
        later = seen.setdefault(dtypes[buckets[number][0]], number)
        if later != number:
            break
    else:
        number, later = len(buckets) - 2, len(buckets) - 1
    buckets[number] = buckets[number] + buckets.pop(later)


class Buckets:
    """The buckets of one replicated module, a unit each: the first to be reduced is the innermost.

    Args:
        units: Outermost first, without parameters as yet.
        params: What they share out, in the order of the module.
        place: Mesh and device.
        policy: dtypes.
        cap: Bytes of a bucket.
        are_views: Whether ``.grad`` are views of the buckets.
    """

    def __init__(
        self,
        units: list[Unit],
        params: list[PlainParam],
        *,
        place: Place,
        policy: MixedPrecisionPolicy,
        cap: int,
        are_views: bool,
    ) -> None:
        self.units = units
        self._params = params
        self._place = place
        self._policy = policy
        self._cap = cap
        self._are_views = are_views
        self._arrivals: dict[int, None] = {}  # a set that keeps the order
        self._recorders: list[torch.utils.hooks.RemovableHandle] = []
        self.replaced = Replaced()
        order = list(range(len(params)))[::-1]
        self._fill(order)
        self._record()

    def _fill(self, order: list[int]) -> None:
        """Give each unit its parameters."""
        parts = partition([self._params[place].sharded for place in order], self._cap)
        dtypes = [self._params[place].sharded.dtype for place in order]
        while len(parts) > len(self.units):  # of which there are as many as buckets at first
            join_two(parts, dtypes)
        for number, unit in enumerate(reversed(self.units)):
            if number < len(parts):
                self._give(unit, [self._params[order[place]] for place in parts[number]])
            else:
                unit.group = unit.gradients = None

    def _give(self, unit: Unit, params: list[PlainParam]) -> None:
        lifecycle = getattr(unit, "lifecycle", None)
        tensors = PlainTensors(
            params,
            place=self._place,
            param_dtype=self._policy.param_dtype,
            gradient_hook=gradient_hook_maker(unit),
        )
        unit.group = ParamGroup(tensors)
        unit.gradients = GradientState(
            unit.group,
            reduce_dtype=self._policy.reduce_dtype,
            accumulate_dtype=self._policy.accumulate_dtype,
        )
        self._tell(unit.gradients)
        unit.group.accumulated = weakref.ref(unit.gradients)
        if lifecycle is not None:
            tensors.label = unit.label
            unit.group.comm = unit.settings.comm.apply_to(lifecycle.comm, self._place.device)

    def _tell(self, gradients: GradientState) -> None:
        """Let a bucket know what holds for all."""
        assert isinstance(gradients.sharded, PlainGrads)
        gradients.sharded.are_views = self._are_views
        gradients.sharded.replaced = self.replaced

    def __deepcopy__(self, memo: dict[int, Any]) -> Buckets:
        """Be the buckets of the units' copies, which have the order that was found by then."""
        copied = copy.copy(self)
        copied.units = [memo[id(unit)] for unit in self.units]
        copied._params, copied._recorders, copied.replaced = [], [], Replaced()
        for unit in copied.units:
            if unit.gradients is not None:
                copied._tell(unit.gradients)
        return copied

    def _take_from(self, unit: Unit) -> None:
        """Have a unit's parameters, and their gradients, belong to nobody."""
        if unit.group is None or unit.gradients is None:
            return
        assert isinstance(unit.group.tensors, PlainTensors)
        assert isinstance(unit.gradients.sharded, PlainGrads)
        unit.gradients.sharded.give_away()
        unit.group.tensors.let_go()

    # --- the order of the first backward -----------------------------------------------------

    def _record(self) -> None:
        for index, param in enumerate(self._params):
            if param.unsharded.is_floating_point() and param.unsharded.requires_grad:
                hook = partial(_note_arrival, weakref.ref(self), index)
                self._recorders.append(param.unsharded.register_post_accumulate_grad_hook(hook))

    def note_arrival(self, index: int) -> None:
        """Note that the gradient of parameter ``index`` is there."""
        self._arrivals.setdefault(index)

    def begin_iteration(self) -> bool:
        """A forward begins. Make the buckets anew, if it is time to.

        **Collective:** the mesh, in the first forward after a backward has ended: the first rank
        says in which order its gradients came.

        Returns:
            Whether they will not be made anew again.
        """
        # All of this is the same on all ranks, as what runs forward and backward is.
        if self.units[0].lifecycle.backward_number < 2 or any(map(_is_in_use, self.units)):
            return False
        for handle in self._recorders:
            handle.remove()
        order = self._agreed_order()
        for unit in self.units:
            self._take_from(unit)
        self._fill(order)
        return True

    def _agreed_order(self) -> list[int]:
        """Return the first rank's order: what got no gradient comes last."""
        late = [i for i in reversed(range(len(self._params))) if i not in self._arrivals]
        order = torch.tensor([*self._arrivals, *late], device=self._place.device)
        roles = self._place.roles
        assert roles.replicate_group is not None
        broadcast_from_first(order, roles.replicate_group, label="(order of gradients)")
        return [int(index) for index in order.tolist()]


def _is_in_use(unit: Unit) -> bool:
    """Whether a graph, a window, a reduction or an optimizer counts on a unit's parameters."""
    grads = unit.gradients
    return (
        unit.step.awaits_gradients
        or bool(unit.on_reduced)
        or (grads is not None and (grads.is_window_open or grads.num_in_flight > 0))
    )


def _note_arrival(ref: weakref.ref[Buckets], index: int, _: Any) -> None:
    buckets = ref()
    if buckets is not None:
        buckets.note_arrival(index)
