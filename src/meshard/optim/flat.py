"""Optimizers on flat shards.

An ordinary optimizer on sharded parameters dispatches every operation of every parameter through
DTensor, which takes longer than the arithmetic if shards are small. A pointwise optimizer treats
each element by itself, so it can step a slice of a unit's flat shard, with many parameters in it,
as one tensor. The optimizer that users hold has the ordinary ``param_groups`` and ``state``. An
inner one of the same class steps the slices and has their state. The state of single parameters is
made when a user reads ``state``.
"""

from __future__ import annotations

import inspect
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from meshard._engine.param_group import ParamGroup, owners_of, sharded_params_of
from meshard._engine.unit import require_units
from meshard._mesh.boxes import box_at, coordinate_of
from meshard._params.flat_params import FlatParams
from meshard._torch.dtensor import local_of, place_like, plain_of, scalar_reads
from meshard._torch.patches import params_in
from meshard._torch.user_line import listed, warn_user
from meshard.optim.flat_slices import FlatSlice, Member, State, States, history_of
from meshard.policies import list_of

POINTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
# Bytes of parameters that are stepped at once. torch's foreach kernels make one or two temporary
# tensors of that size and pass over all of it several times, so it should fit into a cache.
_PORTION = 2**20

Params = Iterable[nn.Parameter] | Iterable[dict[str, Any]]
OptimGroups = Sequence[dict[str, Any]]
MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizer]


def objects_in(optim_groups: OptimGroups) -> list[object]:
    """Return the parameters in order, with None after each group.

    So the list differs after a parameter has moved from one group to the next.
    """
    return [each for group in optim_groups for each in (*group["params"], None)]


def are_same(found: Sequence[object], before: Sequence[object]) -> bool:
    """Whether both have the same objects in the same order."""
    return len(found) == len(before) and all(map(is_, found, before))


class FlatStepper:
    """An inner optimizer that steps parameters as slices where it can, one by one where not.

    *Loose* parameters are stepped one by one, with the state that users see: those in no unit or of
    ``replicate``, tensor subclasses, and all if the optimizer is not pointwise. The state of other
    parameters is in their slice, until it is *exposed*, that is, written to the state that users
    see. The next step then reads it from there, and finds slices anew. ``group`` is that of the
    unit whose pending step ``expose`` waits for; None: no step is ever pending.
    """

    def __init__(self, make: MakeOptimizer, group: ParamGroup | None = None) -> None:
        self._make = make  # called with param groups that have all hyperparameters
        self._is_pointwise = make in POINTWISE
        self._group = (lambda: None) if group is None else weakref.ref(group)
        # Ids of parameters that had no gradient in a step in which others of their slice had one.
        # Since that step each is a slice of its own.
        self._apart: set[int] = set()
        self._inner: Optimizer | None = None
        # For each param group of the inner optimizer, the index of the user's group it was made of.
        self._numbers: list[int] = []
        self.slices: list[FlatSlice] = []
        self._loose: list[torch.Tensor] = []
        self._state: States = {}  # the state of the optimizer that users hold
        self._exposed: dict[tuple[int, int], torch.Tensor] = {}  # see ExposedMemory
        self._planned: list[object] = []  # the objects of the present plan: see _objects_in

    @property
    def is_flat(self) -> bool:
        """Whether no parameter is loose."""
        return not self._loose

    def take(self, optim_groups: OptimGroups, state: States) -> None:
        """Take gradients and hyperparameters as they are now; ``run`` steps by them.

        ``state`` is that of the optimizer that users hold, and ``expose`` writes to it.
        """
        self._state = state
        if self._inner is None or not are_same(self._objects_in(optim_groups), self._planned):
            self._plan(optim_groups)
        # Parameters without a gradient are set apart from their slices by a new plan. Then check
        # again: the new plan may also join parameters whose step counts have become equal, and one
        # of these may lack a gradient.
        while lacking := [param for each in self.slices for param in each.take_gradient()]:
            self._apart.update(map(id, lacking))
            self._plan(optim_groups)
        inner = self._inner
        assert inner is not None
        for number, own in zip(self._numbers, inner.param_groups, strict=True):
            group = optim_groups[number]
            own.update((key, value) for key, value in group.items() if key != "params")
        for param in self._loose:
            inner.state.pop(param, None)
            known = state.get(param)
            if known:
                inner.state[param] = known

    def run(self) -> None:
        """Step by what ``take`` took. Loose parameters must have their gradients in ``.grad``."""
        inner = self._inner
        assert inner is not None
        try:
            (self._step_loose if self._loose else self._step)(inner)
        finally:
            for flat_slice in self.slices:
                flat_slice.flat.grad = None  # otherwise zero_grad would not free the gradients
        for param in self._loose:
            if param in inner.state:
                self._state[param] = inner.state[param]

    def expose(self) -> None:
        """Write the state of slices to the state that users see, which the next step reads."""
        group = self._group()
        if group is not None:
            group.finish_pending_step()
        inner = self._inner
        if inner is None or not self.slices:
            return
        for flat_slice in self.slices:
            own = inner.state.get(flat_slice.flat, {})
            flat_slice.expose(own, self._state)
            tensors = [value for value in own.values() if isinstance(value, torch.Tensor)]
            self._exposed.update({(each.data_ptr(), each.numel()): each for each in tensors})
        self._inner, self.slices = None, []

    def release(self) -> None:
        """Expose the state, and drop references to the memory of slices and of their state."""
        self.expose()
        self._exposed, self._planned = {}, []

    def _step_loose(self, inner: Optimizer) -> None:
        """Step, with collective reads of scalars, because loose parameters may be DTensors.

        Raises a RuntimeError if the optimizer writes to its param groups.
        """
        given = [dict(group) for group in inner.param_groups]
        with scalar_reads.inside_step():
            self._step(inner)
        for before, group in zip(given, inner.param_groups, strict=True):
            written = [key for key in group if group[key] is not before.get(key)]
            if written:
                raise RuntimeError(
                    f"{type(inner).__name__} writes {written[0]!r} into its param groups; in "
                    "backward each unit has an optimizer of its own, so that this would be of one "
                    "unit only. Build it on module.parameters() as usual, and the module anew: one "
                    "unit has been stepped."
                )

    # --- what is stepped as one -------------------------------------------------------------

    def _objects_in(self, optim_groups: OptimGroups) -> list[object]:
        """Return what a plan depends on: the parameters, and the local tensors of slices."""
        locals_ = [local_of(param) for each in self.slices for param in each.params]
        return [*objects_in(optim_groups), *locals_]

    def _plan(self, optim_groups: OptimGroups) -> None:
        """Find slices anew, and make the optimizer that steps them."""
        self.expose()
        self._inner = None
        self._find_slices(optim_groups)
        inner = self._make_inner(optim_groups)
        self._hold_states(optim_groups)
        for flat_slice in self.slices:
            own = flat_slice.take_state(self._state, self._exposed)
            if own:
                inner.state[flat_slice.flat] = own
        self._exposed = {}
        self._planned = self._objects_in(optim_groups)
        self._inner = inner  # set last: after an interrupt above, the next step plans again

    def _find_slices(self, optim_groups: OptimGroups) -> None:
        # By id of a parameter, the index of its param group.
        numbers = {id(each): i for i, group in enumerate(optim_groups) for each in group["params"]}
        params = [param for group in optim_groups for param in group["params"]]
        self.slices = []
        for owner in owners_of(params) if self._is_pointwise else ():
            owner.adopt_edits()
            if isinstance(owner.unit_params, FlatParams):
                owner.slice_holders.add(self)
                self.slices += self._slices_of(owner.unit_params, numbers)
        in_slices = {id(param) for each in self.slices for param in each.params}
        self._loose = [param for param in params if id(param) not in in_slices]

    def _slices_of(self, unit_params: FlatParams, numbers: dict[int, int]) -> Iterator[FlatSlice]:
        """Iterate over the longest ranges of a unit that can be stepped as one."""
        shard = unit_params.flat_shard
        for segment, flat in zip(shard.layout.segments, shard.segments, strict=True):
            keyed = []
            for each in segment.ranges:
                param = unit_params.params[each.index].sharded
                numel = shard.locals[each.index].numel()
                apart = id(param) if id(param) in self._apart else None
                key = numbers.get(id(param)), apart, history_of(self._state.get(param, {}))
                keyed.append((key, Member(param, each.offset, numel)))
            for (number, *_), members in groupby(keyed, itemgetter(0)):
                if number is not None:
                    yield FlatSlice(flat, [member for _, member in members], number)

    def _make_inner(self, optim_groups: OptimGroups) -> Optimizer:
        made: list[dict[str, Any]] = []
        self._numbers = []
        loose_ids = set(map(id, self._loose))
        for number, group in enumerate(optim_groups):
            loose = [param for param in group["params"] if id(param) in loose_ids]
            flat: list[torch.Tensor] = [each.flat for each in self.slices if each.number == number]
            flat += [param for param in loose if not isinstance(param, DTensor)]
            # torch's foreach kernels do not take plain tensors and DTensors together.
            sharded = [param for param in loose if isinstance(param, DTensor)]
            for portion in [*self._portions_of(flat), *self._portions_of(sharded)] or [[]]:
                made.append({**group, "params": portion})
                self._numbers.append(number)
        inner = self._make(made)
        held = {id(param) for group in inner.param_groups for param in group["params"]}
        if held != {id(param) for group in made for param in group["params"]}:
            raise RuntimeError(
                f"the {type(inner).__name__} that steps one unit does not hold the parameters it "
                "was to be made for; make it from the param groups that are passed, and not from "
                "module.parameters()."
            )
        step: Any = type(inner).step
        # The step without torch's wrappers. The first calls the hooks of ``step``, which the
        # user's optimizer has called already. Pointwise optimizers of torch have a second wrapper,
        # for differentiable steps.
        bare = inspect.unwrap(step) if self._is_pointwise else getattr(step, "__wrapped__", step)
        self._step: Callable[[Optimizer], object] = bare
        return inner

    def _hold_states(self, optim_groups: OptimGroups) -> None:
        """Keep the states that users see alive until the stream of the step has copied them."""
        owner = self._group()
        if owner is not None:
            params = [param for group in optim_groups for param in group["params"]]
            values = [value for each in params for value in self._state.get(each, {}).values()]
            tensors = [plain_of(each) for each in values if isinstance(each, torch.Tensor)]
            owner.comm.hold_until_done(tensors)

    def _portions_of(self, params: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Cut ``params`` into lists that are stepped at once: see ``_PORTION``."""
        portion: list[torch.Tensor] = []
        room = _PORTION
        for param in params:
            num_bytes = plain_of(param).nbytes
            # An optimizer that is not pointwise may need its whole group at once.
            if portion and num_bytes > room and self._is_pointwise:
                yield portion
                portion, room = [], _PORTION
            portion.append(param)
            room -= num_bytes
        if portion:
            yield portion


def flat_optimizer(
    module: nn.Module,
    optimizer: type[Optimizer],
    param_groups: Params | None = None,
    **optimizer_kwargs: Any,
) -> FlatOptimizer:
    """Return an optimizer that steps ``module`` as ``optimizer`` would, on its flat shards.

    The numbers are the same, but the host needs a fraction of the time: there is about one kernel
    sequence per unit and set of hyperparameters, where an ordinary optimizer has one per parameter.
    Parameters of ``replicate`` are stepped as by the ordinary optimizer.

    Args:
        module: With units in it. Build the optimizer after the last ``fully_shard``.
        optimizer: One of torch's pointwise optimizers: ``SGD``, ``Adam``, ``AdamW``, ``Adagrad``,
            ``Adadelta``, ``Adamax``, ``RMSprop``, ``NAdam``, ``RAdam``, ``ASGD``, ``Rprop``.
        param_groups: As for that optimizer; None: all parameters of ``module`` that are not frozen
            now. If another one gets a gradient later, ``step`` warns of it.
        **optimizer_kwargs: Passed on to ``optimizer``.

    Returns:
        An optimizer with the ``param_groups``, ``state`` and ``state_dict`` of the ordinary one.

    Raises:
        TypeError: ``optimizer`` is none of these classes. A subclass of one is refused too.
        ValueError: There is no unit in ``module``, or ``differentiable=True``.

    >>> import torch, meshard
    >>> layer = meshard.fully_shard(torch.nn.Linear(2, 2))
    >>> optimizer = meshard.flat_optimizer(layer, torch.optim.AdamW, lr=1e-3)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    """
    check_is_no_instance("flat_optimizer", optimizer)
    if optimizer not in POINTWISE:
        names = ", ".join(each.__name__ for each in POINTWISE)
        raise TypeError(
            f"flat_optimizer steps many parameters as one tensor, which is right for {names}; "
            f"{getattr(optimizer, '__name__', optimizer)!r} is none of them: build it on "
            "module.parameters() as usual."
        )
    require_units(module)
    make: Callable[..., Optimizer] = optimizer
    template = make(list_params(module, param_groups), **optimizer_kwargs)
    if any(group.get("differentiable") for group in template.param_groups):
        raise ValueError("flat_optimizer has no differentiable step; use the ordinary optimizer.")
    flat = FlatOptimizer(template)
    flat._left_out = LeftOut(module) if param_groups is None else None
    return flat


def check_is_no_instance(caller: str, optimizer: object) -> None:
    """Raise a TypeError if ``optimizer`` is an optimizer instead of a class."""
    if isinstance(optimizer, Optimizer):
        name = type(optimizer).__name__
        raise TypeError(
            f"{caller} builds the optimizer itself: pass the class and its arguments, as in "
            f"{caller}(module, {name}, lr=...), got {name}(...)."
        )


def check_makes_optimizers(caller: str, optimizer: object) -> None:
    """Raise a TypeError unless ``optimizer`` is a class of optimizers, or a function like one."""
    check_is_no_instance(caller, optimizer)
    if not callable(optimizer) or isinstance(optimizer, nn.Module):
        raise TypeError(
            f"optimizer must be a class of optimizers or make one, got {type(optimizer).__name__}."
        )


def list_params(module: nn.Module, param_groups: Params | None) -> list[Any]:
    """Return ``param_groups`` as a list; None: all trainable parameters of ``module``."""
    if param_groups is None:
        return [param for param in module.parameters() if param.requires_grad]
    what = "an iterable of parameters or of dicts of optimizer arguments"
    # Tuples come from module.named_parameters(), which newer torch accepts.
    return list_of("param_groups", param_groups, (torch.Tensor, dict, tuple), what)


class LeftOut:
    """The parameters that an optimizer would have taken, had they not been frozen.

    Modules are held weakly, and parameters by module and name: ``Module.to`` cannot swap a tensor
    that has a weak reference.
    """

    def __init__(
        self, module: nn.Module, is_wanted: Callable[[str, torch.Tensor], bool] = lambda *_: True
    ) -> None:
        self._places = [
            (f"{prefix}.{name}" if prefix else name, weakref.ref(each), name)
            for prefix, each in module.named_modules()
            for name, param in each._parameters.items()
            if param is not None
            and not param.requires_grad
            and is_wanted(f"{prefix}.{name}" if prefix else name, param)
        ]

    def warn_if_thawed(self, optimizer: Optimizer) -> None:
        """Warn once if one of them has a gradient, by which ``optimizer`` does not step it."""
        thawed = {
            fqn: param
            for fqn, module, name in self._places
            if (param := getattr(module(), "_parameters", {}).get(name)) is not None
            and param.requires_grad
        }
        if not thawed:
            return
        held = set(map(id, params_in(optimizer)))
        sharded = sharded_params_of(list(thawed.values()))
        missed = [
            fqn
            for fqn, param in zip(thawed, sharded, strict=True)
            if param.grad is not None and id(param) not in held
        ]
        if missed:
            self._places = []
            warn_user(
                f"parameters {listed(missed)} have gradients, and this {type(optimizer).__name__} "
                "neither steps them nor clears their gradients, because they were frozen when it "
                "was made; make the optimizer anew, or make it before you freeze parameters. "
                "Ignore this if another optimizer steps them."
            )


class StateOnRead(Optimizer):
    """An optimizer whose steppers write the state of single parameters when ``state`` is read."""

    _left_out: LeftOut | None = None  # None: the user has chosen the parameters

    def __init__(self, template: Optimizer) -> None:
        """Take over the param groups and the state of ``template``."""
        self._flat_steppers: list[FlatStepper] = []
        super().__init__(template.param_groups, template.defaults)
        self._state.update(template.state)

    @property
    def state(self) -> defaultdict[torch.Tensor, State]:
        """The state of each parameter. Reading it waits for all steps that have been begun.

        The next step uses what you change in it. After that step, read ``state`` anew before you
        change it again.
        """
        for stepper in self._flat_steppers:
            stepper.expose()
        return self._state

    @state.setter
    def state(self, value: defaultdict[torch.Tensor, State]) -> None:
        for stepper in self._flat_steppers:
            stepper.release()
        self._state = value

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of an optimizer with the same param groups, sharded or not.

        A tensor of the shape of a parameter is a DTensor that is placed like the parameter, or
        unsharded: then this rank's part is taken. Not a collective, unless a deferred step is due
        that communicates.
        """
        order = [each for group in state_dict["param_groups"] for each in group["params"]]
        params = dict(zip(order, params_in(self), strict=False))
        state = {
            key: {name: cut_like(params.get(key), value) for name, value in own.items()}
            for key, own in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": state})

    def _loss_of(self, closure: Callable[[], Any] | None) -> Any:
        """Begin a step: return what its closure returns, and warn of what is not stepped."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._left_out is not None:
            self._left_out.warn_if_thawed(self)
        return loss

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        given = dict(state)
        self.state = given.pop("state")
        for each in self._state.values():
            if isinstance(each.get("step"), (int, float)):  # saved by a torch before 1.12
                each["step"] = torch.tensor(float(each["step"]), device="cpu")
        super().__setstate__(given)


def cut_like(param: torch.Tensor | None, value: Any) -> Any:
    """Return this rank's shard if ``value`` is unsharded and ``param`` is a DTensor of its shape.

    Otherwise return ``value`` itself.
    """
    is_unsharded = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    if not isinstance(param, DTensor) or not is_unsharded or value.shape != param.shape:
        return value
    place = coordinate_of(param.device_mesh)
    box = box_at(value.shape, param.device_mesh, param.placements, place)
    return place_like(param, value[box.slices].to(plain_of(param).device, copy=True))


class FlatOptimizer(StateOnRead):
    """An optimizer on slices of flat shards: see ``flat_optimizer``.

    Parameters in no unit or of ``replicate``, and tensor subclasses, are stepped one by one.
    """

    def __init__(self, template: Optimizer) -> None:
        super().__init__(template)
        self._class: MakeOptimizer = type(template)
        self._stepper = FlatStepper(self._class)
        self._flat_steppers = [self._stepper]

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_class": self._class}

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_class" in state:  # a copy or an unpickled one; not load_state_dict
            self._stepper = FlatStepper(state["_class"])
            self._flat_steppers = [self._stepper]
        super().__setstate__(state)

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient. Not a collective, but every rank must step.

        ``closure`` computes the loss anew, and is called first.

        Raises:
            RuntimeError: Gradients are pending: see ``meshard.pending_gradients``. Or you have set
                one whose placements are not those of its parameter.
        """
        loss = self._loss_of(closure)
        self._stepper.take(self.param_groups, self._state)
        self._stepper.run()
        return loss
