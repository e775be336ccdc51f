"""Optimizers that step whole matrices, each on one rank."""

from __future__ import annotations

import functools
import hashlib
import heapq
import inspect
import itertools
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from meshard._comm.blocking import exchange_numbers
from meshard._comm.communicator import Communicator, profiled
from meshard._engine.manual_unshard import listed
from meshard._engine.param_group import owner_of, sharded_params_of
from meshard._engine.unit import Unit, require_units
from meshard._mesh.boxes import box_at, coordinate_of
from meshard._torch.dtensor import gradient_dtype, is_placed_like, is_plain, place_like, plain_of
from meshard._torch.patches import params_in
from meshard._torch.private import DispatchMode
from meshard.optim.exchange import ExchangeInFlight, Layout, MeshRanks, Route
from meshard.optim.flat import (
    POINTWISE,
    FlatStepper,
    StateOnRead,
    are_same,
    check_is_no_instance,
    loss_of,
    objects_in,
)
from meshard.optim.hooks import find_overlapped
from meshard.optim.owner_state import load_states, states_as_shards

Select = Callable[[str, torch.Tensor], bool]
Cost = Callable[[str, torch.Tensor], float]
MakeInner = Callable[[list[dict[str, Any]]], Optimizer]

_MIB = 2**20
# By such parts of their names are embeddings known that are parameters of their own.
_EMBEDDINGS = ("emb", "position")
# Names of the modules that turn the last hidden state into scores, in models of the field.
_HEADS = ("head", "lm_head", "output", "out", "classifier", "score", "embed_out", "unembed")


@dataclass(frozen=True, slots=True, eq=False)
class OwnedParam:
    """A parameter that one rank steps as a whole."""

    fqn: str
    param: torch.Tensor  # sharded
    unit: Unit
    layout: Layout
    owner: int  # a rank of the group of its mesh
    cost: float


class Bucket:
    """Parameters of one mesh and dtype that travel together, and the optimizer of this rank's own.

    ``placeholders`` are ordinary parameters of the whole shape, by position in ``members``, for
    those that this rank owns. Between steps they take no memory.
    """

    def __init__(
        self, number: int, ranks: MeshRanks, members: Sequence[OwnedParam], make: MakeInner
    ) -> None:
        self.label = f"(owners, bucket {number})"
        self.ranks = ranks
        self.members = members
        self.placeholders = {
            position: _placeholder(member.param, ranks.device)
            for position, member in enumerate(members)
            if member.owner == ranks.own
        }
        self.inner: Optimizer | None = None
        if self.placeholders:
            self.inner = make([{"params": list(self.placeholders.values())}])
            _check_holds(self.inner, self.placeholders.values())
        self.has_stepped = False
        # What the optimizer has written to its param group in the last step, such as a count.
        self.written: dict[str, Any] = {}
        self._routes: dict[tuple[Any, ...], Route] = {}

    @property
    def comm(self) -> Communicator:
        """Of the root of the first parameter. The first use of the root makes it."""
        unit = self.members[0].unit
        assert unit.lifecycle is not None
        return unit.group.comm

    def route(self, positions: Sequence[int], *, times: int = 1, to_owners: bool) -> Route:
        """Return the route of members, each ``times`` times: values, then gradients."""
        key = (*positions, times, to_owners)
        if key not in self._routes:
            chosen = [self.members[position] for position in positions] * times
            layouts, owners = [each.layout for each in chosen], [each.owner for each in chosen]
            self._routes[key] = Route.of(layouts, owners, self.ranks, to_owners=to_owners)
        return self._routes[key]


class _BucketStep:
    """The step of one bucket: ``arrive``, ``finish``, ``run``, ``leave`` and ``finish``.

    Tensors of the bucket are numbered: first the values of the parameters that have a gradient,
    then their gradients.
    """

    def __init__(self, bucket: Bucket, dtype: torch.dtype | None) -> None:
        """``dtype`` is that in which gradients are sent; None: their own."""
        self.bucket = bucket
        self._positions = [
            position
            for position, member in enumerate(bucket.members)
            if member.param.grad is not None
        ]
        self._values = [plain_of(bucket.members[position].param) for position in self._positions]
        self._grads = [_gradient_of(bucket.members[position]) for position in self._positions]
        grad_dtypes = {grad.dtype for grad in self._grads}
        # Of values and of gradients; the second may be sent in another dtype.
        self._dtypes = (
            bucket.members[0].param.dtype,
            functools.reduce(torch.promote_types, grad_dtypes) if grad_dtypes else torch.float32,
        )
        self._sent_dtype = dtype or self._dtypes[1]
        self._whole: dict[int, torch.Tensor] = {}  # of the parameters that this rank owns
        self._in_flight: list[ExchangeInFlight] = []

    def _whole_of(self, number: int) -> torch.Tensor:
        if number not in self._whole:
            is_gradient, index = divmod(number, len(self._positions))
            shape = self.bucket.members[self._positions[index]].layout.shape
            self._whole[number] = torch.empty(
                shape, dtype=self._dtypes[is_gradient], device=self.bucket.ranks.device
            )
        return self._whole[number]

    def arrive(self) -> None:
        """Send values and gradients of this rank's shards to their owners."""
        values, grads, whole_of = self._values, self._grads, self._whole_of
        dtype, grad_dtype = self._dtypes[0], self._sent_dtype
        if dtype == grad_dtype:
            self._start(values + grads, whole_of, dtype, is_arrival=True)
        else:
            self._start(values, whole_of, dtype, is_arrival=True)
            self._start(grads, lambda n: whole_of(len(values) + n), grad_dtype, is_arrival=True)

    def run(self, group: dict[str, Any]) -> None:
        """Step what this rank owns, with the hyperparameters of ``group``."""
        bucket, inner, count = self.bucket, self.bucket.inner, len(self._positions)
        if inner is None:
            return
        own = inner.param_groups[0]
        given = {key: value for key, value in group.items() if key != "params"}
        own.update(given)
        stepped = {
            number: bucket.placeholders[position]
            for number, position in enumerate(self._positions)
            if position in bucket.placeholders
        }
        for number, placeholder in stepped.items():
            placeholder.grad_dtype = None  # None: a .grad of any dtype is accepted
            placeholder.data = self._whole_of(number)
            placeholder.grad = self._whole_of(count + number)
        try:
            with profiled("optimizer", bucket.label):
                _step(inner, is_first=not bucket.has_stepped)
            bucket.has_stepped = True
            # A step may replace ``.data``.
            self._whole = {number: each.data for number, each in stepped.items()}
        finally:
            for placeholder in stepped.values():
                _empty(placeholder)
        bucket.written = {
            key: value
            for key, value in own.items()
            if key != "params" and (key not in given or _differ(value, given[key]))
        }

    def leave(self) -> None:
        """Send the new values to all ranks that hold shards of them."""
        whole, values = self._whole, self._values
        self._start(values, whole.__getitem__, self._dtypes[0], is_arrival=False)
        self._whole = {}

    def abandon(self) -> None:
        """Give up after an error."""
        for exchange in self._in_flight:
            exchange.abandon()
        self._in_flight = []

    def _start(
        self,
        shards: list[torch.Tensor],
        whole_of: Callable[[int], torch.Tensor],
        dtype: torch.dtype,
        *,
        is_arrival: bool,
    ) -> None:
        if not shards:
            return
        bucket, times = self.bucket, len(shards) // len(self._positions)
        ends = (shards.__getitem__, whole_of)
        source, target = ends if is_arrival else reversed(ends)
        route = bucket.route(self._positions, times=times, to_owners=is_arrival)
        self._in_flight.append(
            route.start(source, target, dtype, bucket.ranks, bucket.comm, bucket.label)
        )

    def finish(self) -> None:
        """Wait until what was sent has arrived."""
        while self._in_flight:
            self._in_flight[0].finish()
            del self._in_flight[0]


class OwnerOptimizer(StateOnRead):
    """An optimizer that steps each selected parameter on one rank: see ``owner_optimizer``.

    ``param_groups`` has the selected parameters first, and then those of the fallback, if any.
    ``state`` has the state of a selected parameter on its owner, of the whole shape, and an empty
    dict on other ranks.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],  # of the selected parameters, and of the fallback
        members: Sequence[OwnedParam],
        all_ranks: Mapping[DeviceMesh, MeshRanks],
        *,
        make: MakeInner,
        make_fallback: MakeInner,
        bucket_bytes: float,
        gradient_dtype: torch.dtype | None,
        name: str,
        digest: int,
    ) -> None:
        common = set.intersection(*(set(group) for group in groups)) - {"params", "param_names"}
        defaults = {key: value for key, value in groups[0].items() if key in common}
        super().__init__(Optimizer(groups, defaults))
        self._members = members
        self._all_ranks = all_ranks
        self._make = make
        self._bucket_bytes = bucket_bytes
        self._gradient_dtype = gradient_dtype
        self._name = name
        self._digest = digest
        self._stepper = FlatStepper(make_fallback)
        self._flat_steppers = [self._stepper]
        self._planned = objects_in(self.param_groups)
        self._made: list[Bucket] | None = None
        owner_optimizers.add(self)

    # --- for users -------------------------------------------------------------------------

    @property
    def owners(self) -> dict[str, int]:
        """The global rank that steps each selected parameter, by the parameter's name."""
        return {
            member.fqn: self._all_ranks[_mesh_of(member.param)].ranks[member.owner]
            for member in self._members
        }

    def steps_one_of(self, ids: Container[int]) -> bool:
        """Whether a parameter with one of these ids is stepped as a whole."""
        return any(id(member.param) in ids for member in self._members)

    def report(self) -> str:
        """Return a line on how the work is divided, for ``describe``."""
        costs = defaultdict[int, float](float)
        for member in self._members:
            costs[self._all_ranks[_mesh_of(member.param)].ranks[member.owner]] += member.cost
        num_ranks = len({rank for each in self._all_ranks.values() for rank in each.ranks})
        most = max(costs.values()) * num_ranks / (sum(costs.values()) or 1)
        return (
            f"{self._name} steps {len(self._members)} parameters, each on one of {num_ranks} ranks "
            f"({len(costs)} own some); the busiest has {most:.2f} times the mean work"
        )

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient.

        ``closure`` computes the loss and its gradients, and is called first, once.

        **Collective:** all ranks of the meshes of selected parameters, with gradients for the same
        parameters. **Stream:** the current one, which waits for the exchanges.

        Raises:
            RuntimeError: Gradients are pending (see ``meshard.pending_gradients``); the parameters
                have changed since the optimizer was made; ranks have selected other parameters; the
                optimizer communicates in its step, or keeps a number for all its parameters
                together. Some parameters may be stepped then, and others not.
        """
        loss = loss_of(closure)
        self._check_params()
        steps = [_BucketStep(bucket, self._gradient_dtype) for bucket in self._buckets()]
        try:
            # While one bucket is stepped, the next one arrives and the one before leaves.
            steps[0].arrive()
            self._step_fallback()
            for number, present in enumerate(steps):
                present.finish()
                if number + 1 < len(steps):
                    steps[number + 1].arrive()
                present.run(self.param_groups[0])
                if number:
                    steps[number - 1].finish()
                present.leave()
            steps[-1].finish()
        except BaseException:
            for each in steps:
                each.abandon()
            raise
        for bucket in self._buckets():
            self._show_state(bucket)
        written = [bucket.written for bucket in self._buckets()]
        self.param_groups[0].update(_merged(written, self._name))
        return loss

    def _step_fallback(self) -> None:
        if len(self.param_groups) > 1:
            self._stepper.take(self.param_groups[1:], self._state)
            self._stepper.run()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters, as a rank of any mesh can load it.

        State of the shape of a selected parameter is a DTensor with its placements. Other tensors
        are DTensors that the same axes cut along dim 0. Numbers are the same on every rank.

        **Collective:** all ranks of the meshes of selected parameters.
        """
        packed = super().state_dict()
        number_of = {id(member.param): number for number, member in enumerate(self._members)}
        written = []
        for bucket in self._buckets():
            states, of_ranks = states_as_shards(bucket)
            written += of_ranks
            for member, state in zip(bucket.members, states, strict=True):
                packed["state"].pop(number_of[id(member.param)], None)
                if state:
                    packed["state"][number_of[id(member.param)]] = state
        packed["param_groups"][0].update(_merged(written, self._name))
        packed["state"] = dict(sorted(packed["state"].items()))
        return packed

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` of an optimizer with the same parameters returned.

        State of selected parameters may be DTensors of any mesh, or whole tensors, as those of the
        ordinary optimizer in one process. It keeps its dtypes.

        **Collective:** all ranks of the meshes of selected parameters.

        Raises:
            ValueError: There are other param groups, or groups of another size.
        """
        # The given dict may name parameters as it likes; their order is that of this optimizer.
        order = [each for group in state_dict["param_groups"] for each in group["params"]]
        keys = dict(zip(map(id, (member.param for member in self._members)), order, strict=False))
        chosen = set(keys.values())
        params = dict(zip(order, params_in(self), strict=False))
        others = {
            key: {name: _cut_like(params.get(key), value) for name, value in state.items()}
            for key, state in state_dict["state"].items()
            if key not in chosen
        }
        super().load_state_dict({**state_dict, "state": others})
        for bucket in self._buckets():
            saved = [state_dict["state"].get(keys[id(each.param)], {}) for each in bucket.members]
            load_states(bucket, saved)
            self._show_state(bucket)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse further parameters, but for the groups that the optimizer is made with."""
        if hasattr(self, "_members"):
            raise NotImplementedError(
                "owner_optimizer has chosen the owners of its parameters; make it anew for others, "
                "and load its state_dict."
            )
        super().add_param_group(param_group)

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse pickling and copying: the state is spread over ranks."""
        raise TypeError(
            "what owner_optimizer returns can be neither pickled nor copied; save its state_dict()."
        )

    # --- inside ----------------------------------------------------------------------------

    def _show_state(self, bucket: Bucket) -> None:
        for position, member in enumerate(bucket.members):
            placeholder = bucket.placeholders.get(position)
            inner = {} if bucket.inner is None else bucket.inner.state
            self._state[member.param] = {} if placeholder is None else inner[placeholder]

    def _check_params(self) -> None:
        changed = [each.fqn for each in self._members if owner_of(each.param) is None]
        if changed:
            raise RuntimeError(
                f"parameters {listed(changed)} were replaced since owner_optimizer was called; "
                "make it anew, and load its state_dict."
            )
        if not are_same(objects_in(self.param_groups), self._planned):
            raise RuntimeError(
                "param_groups has other parameters than owner_optimizer chose; make it anew."
            )

    def _buckets(self) -> list[Bucket]:
        """Return the buckets. **Collective:** the first call."""
        if self._made is None:
            for ranks in self._all_ranks.values():
                self._check_agreement(ranks)
            made: list[Bucket] = []
            for ranks, members in self._chosen_together():
                made.append(Bucket(len(made), ranks, members, self._make))
            self._made = made
        return self._made

    def _check_agreement(self, ranks: MeshRanks) -> None:
        purpose = "comparison of what owner_optimizer steps on each rank"
        rows = exchange_numbers([self._digest], ranks.group, ranks.device, purpose=purpose)
        different = [rank for rank, row in zip(ranks.ranks, rows, strict=True) if row != rows[0]]
        if different:
            raise RuntimeError(
                f"ranks {', '.join(map(str, different))} have selected other parameters, shapes or "
                f"options for {self._name} than rank {ranks.ranks[0]}; call owner_optimizer alike "
                "on every rank."
            )

    def _chosen_together(self) -> Iterator[tuple[MeshRanks, list[OwnedParam]]]:
        """Iterate over the members of the buckets, in the same order on all ranks.

        A bucket takes the next costliest parameter of each owner, until the busiest has enough. So
        all owners work at the same time.
        """
        alike: dict[tuple[Any, ...], list[OwnedParam]] = {}
        for member in self._members:
            param = member.param
            key = (_mesh_of(param), param.dtype, gradient_dtype(param))
            alike.setdefault(key, []).append(member)
        for (mesh, *_), members in alike.items():
            queues: dict[int, list[OwnedParam]] = {}
            for member in sorted(members, key=lambda each: -each.cost):
                queues.setdefault(member.owner, []).append(member)
            rounds = itertools.zip_longest(*queues.values())
            bucket: list[OwnedParam] = []
            sizes = defaultdict[int, int](int)
            for chosen in rounds:
                bucket += filter(None, chosen)
                for member in filter(None, chosen):
                    sizes[member.owner] += member.param.numel() * member.param.itemsize
                if max(sizes.values()) >= self._bucket_bytes:
                    yield self._all_ranks[mesh], bucket
                    bucket, sizes = [], defaultdict(int)
            if bucket:
                yield self._all_ranks[mesh], bucket


# All that are alive, for ``describe``.
owner_optimizers: weakref.WeakSet[OwnerOptimizer] = weakref.WeakSet()


def owner_optimizer(
    module: nn.Module,
    optimizer: type[Optimizer] | Callable[..., Optimizer],
    *,
    select: Select | None = None,
    fallback: type[Optimizer] | Callable[..., Optimizer] | None = torch.optim.AdamW,
    fallback_kwargs: dict[str, Any] | None = None,
    bucket_mb: float = 25,
    gradient_dtype: torch.dtype | None = None,
    cost: Cost | None = None,
    **optimizer_kwargs: Any,
) -> OwnerOptimizer:
    """Step whole matrices by an ordinary optimizer, each on one rank, with one process's numbers.

    Muon, Shampoo and SOAP need a whole matrix, and a shard is not one. Here each selected parameter
    has an owner among the ranks of its mesh. In a step, the owner receives the shards of value and
    gradient, steps the whole matrix by ``optimizer``, and sends every rank its new shard. The other
    parameters are stepped as shards by ``fallback``.

    Args:
        module: With units in it. Build the optimizer after the last ``fully_shard`` or
            ``replicate``, with the same arguments on every rank.
        optimizer: A class of optimizers, or a function that makes one from param groups. It sees
            ordinary tensors. It must treat each parameter by itself, and not communicate.
        select: Called with the name and the sharded parameter, returns whether ``optimizer`` steps
            it. None: matrices, but for those of embeddings and of the head, as the author of Muon
            advises (https://kellerjordan.github.io/posts/muon/). They are known by the class
            ``nn.Embedding``, by ``get_output_embeddings()``, by a name with ``emb`` or
            ``position`` in it, and by a module named ``head``, ``lm_head``, ``output``, ``out``,
            ``classifier``, ``score``, ``embed_out`` or ``unembed``. ``owners`` of what is returned
            lists what was selected.
        fallback: Steps the trainable parameters that are not selected. None: nothing does.
        fallback_kwargs: Arguments of ``fallback``.
        bucket_mb: A rank's matrices are stepped in buckets of so many MiB of values or more. One
            bucket arrives and one leaves while one is stepped.
        gradient_dtype: In which gradients are sent to the owners. None: in their own dtype.
            Values always keep theirs.
        cost: Called like ``select``, returns the relative time of a step of the parameter. Owners
            are chosen by it, the costliest first, each to the rank that has the least so far. None:
            the arithmetic of products of the matrix with its transpose.
        **optimizer_kwargs: Arguments of ``optimizer``.

    Returns:
        An optimizer. ``param_groups[0]`` has the selected parameters, and ``param_groups[1]`` those
        of the fallback; a scheduler scales the learning rates of both.

    Raises:
        TypeError: ``optimizer`` makes no ``Optimizer``, or one that is refused (``LBFGS``,
            ``SparseAdam``, one that needs a closure).
        ValueError: There is no unit in ``module``, or no parameter is selected; one that is
            selected is in no unit, a tensor subclass, or stepped in backward by
            ``overlap_optimizer``; or an argument is not as described here.

    >>> import torch, meshard
    >>> model = meshard.fully_shard(torch.nn.Sequential(torch.nn.Linear(4, 8)))
    >>> optimizer = meshard.owner_optimizer(model, torch.optim.Muon, lr=0.02)
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.owners
    {'0.weight': 0}
    """
    check_is_no_instance("owner_optimizer", optimizer)
    units = {unit.group: unit for unit in require_units(module)}
    if not bucket_mb > 0:
        raise ValueError(f"bucket_mb must be positive, got {bucket_mb!r}.")
    chosen, others = _selected(module, select)
    all_ranks = {mesh: MeshRanks(mesh) for mesh in dict.fromkeys(_mesh_of(p) for _, p in chosen)}
    make = functools.partial(optimizer, **optimizer_kwargs)
    groups = [_template(make, chosen, all_ranks)]
    make_fallback: Any = functools.partial(fallback or torch.optim.SGD, **(fallback_kwargs or {}))
    if fallback is not None and others:
        template = make_fallback(others)
        groups += template.param_groups
        if type(template) in POINTWISE:
            make_fallback = type(template)
    name = getattr(optimizer, "__name__", type(optimizer).__name__)
    described = [(fqn, tuple(p.shape), str(p.dtype)) for fqn, p in chosen]
    digest = hashlib.sha256(repr((described, bucket_mb, str(gradient_dtype))).encode()).digest()
    return OwnerOptimizer(
        groups,
        _with_owners(chosen, units, all_ranks, cost or _cost_of_products),
        all_ranks,
        make=make,
        make_fallback=make_fallback,
        bucket_bytes=bucket_mb * _MIB,
        gradient_dtype=gradient_dtype,
        name=name,
        digest=int.from_bytes(digest[:7], "little"),
    )


def _selected(
    module: nn.Module, select: Select | None
) -> tuple[list[tuple[str, torch.Tensor]], list[torch.Tensor]]:
    """Return the selected parameters with their names, and the other trainable ones."""
    named = [(fqn, param) for fqn, param in module.named_parameters() if param.requires_grad]
    sharded = sharded_params_of([param for _, param in named])
    is_chosen = select or _is_hidden_matrix(module)
    chosen, others = [], []
    for (fqn, _), param in zip(named, sharded, strict=True):
        if is_chosen(fqn, param):
            _check_can_be_owned(fqn, param)
            chosen.append((fqn, param))
        else:
            others.append(param)
    if not chosen:
        raise ValueError(
            "owner_optimizer selects no parameter; the default takes trainable matrices in units, "
            "but for embeddings and heads. Pass select=."
        )
    overlapped = find_overlapped([param for _, param in chosen])
    if overlapped is not None:
        name = next(fqn for fqn, param in chosen if param is overlapped)
        raise ValueError(
            f"parameter {name!r} is stepped by overlap_optimizer already; call its detach() first, "
            "or leave the parameter out with select=."
        )
    return chosen, others


def _is_hidden_matrix(module: nn.Module) -> Select:
    """Return the default of ``select``: a matrix in a unit, of neither an embedding nor a head."""
    left_out: set[int] = set()
    for name, each in module.named_modules():
        heads = [getattr(each, "get_output_embeddings", lambda: None)()]
        if isinstance(each, nn.Embedding) or name.rpartition(".")[2] in _HEADS:
            heads.append(each)
        for head in filter(None, heads):
            left_out.update(map(id, sharded_params_of(list(head.parameters(recurse=False)))))
    return lambda fqn, param: (
        param.dim() == 2
        and id(param) not in left_out
        and not any(part in fqn for part in _EMBEDDINGS)
        and owner_of(param) is not None
    )


def _check_can_be_owned(fqn: str, param: torch.Tensor) -> None:
    if owner_of(param) is None:
        raise ValueError(
            f"parameter {fqn!r} is in no unit, so no mesh says which ranks could own it; apply "
            "fully_shard or replicate to the module around it, or leave it out with select=."
        )
    if not is_plain(plain_of(param)):
        raise ValueError(
            f"parameter {fqn!r} is a {type(plain_of(param)).__name__}, which cannot be put "
            "together from parts; leave it out with select=."
        )


def _template(
    make: MakeInner,
    chosen: Sequence[tuple[str, torch.Tensor]],
    all_ranks: Mapping[DeviceMesh, MeshRanks],
) -> dict[str, Any]:
    """Return the param group of ``optimizer`` with the selected parameters."""
    placeholders = [_placeholder(p, all_ranks[_mesh_of(p)].device) for _, p in chosen]
    template = make([{"params": placeholders}])
    _check_optimizer(template)
    _check_holds(template, placeholders)
    return {**template.param_groups[0], "params": [param for _, param in chosen]}


def _check_optimizer(template: object) -> None:
    name = type(template).__name__
    if not isinstance(template, Optimizer):
        raise TypeError(f"optimizer must be a class of optimizers or make one, got a {name}.")
    if isinstance(template, torch.optim.SparseAdam):
        raise TypeError(f"{name} takes sparse gradients, and reduced gradients are dense.")
    closure = inspect.signature(type(template).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"the step of {name} needs a closure: it computes the loss anew, so all parameters "
            "must be there at once; build it on module.parameters()."
        )
    if any(group.get("differentiable") for group in template.param_groups):
        raise ValueError("owner_optimizer has no differentiable step.")


def _check_holds(made: Optimizer, params: Iterable[torch.Tensor]) -> None:
    given = list(params)
    held = [param for group in made.param_groups for param in group["params"]]
    if len(made.param_groups) != 1 or not are_same(held, given):
        raise ValueError(
            f"the {type(made).__name__} does not hold the parameters that it was to be made for, "
            "in one group; make it from the param groups that are passed."
        )


def _with_owners(
    chosen: Sequence[tuple[str, torch.Tensor]],
    units: Mapping[Any, Unit],  # by their ParamGroup
    all_ranks: Mapping[DeviceMesh, MeshRanks],
    cost: Cost,
) -> list[OwnedParam]:
    """Give each parameter an owner: the costliest first, each to the rank with the least so far."""
    costs = {fqn: float(cost(fqn, param)) for fqn, param in chosen}
    # For each mesh a heap: the ranks of its group, with the cost that each has so far.
    loads = {
        mesh: [(0.0, rank) for rank in range(len(each.ranks))] for mesh, each in all_ranks.items()
    }
    owners = {}
    for fqn, param in sorted(chosen, key=lambda each: -costs[each[0]]):
        heap = loads[_mesh_of(param)]
        load, rank = heap[0]
        heapq.heapreplace(heap, (load + costs[fqn], rank))
        owners[fqn] = rank
    return [
        OwnedParam(
            fqn, param, units[owner_of(param)], Layout.of_param(param), owners[fqn], costs[fqn]
        )
        for fqn, param in chosen
    ]


def _cost_of_products(_: str, param: torch.Tensor) -> float:
    """Return the multiplications of ``M @ M.T``, its square, and that times ``M``."""
    if param.dim() < 2:
        return float(param.numel())
    short, long = sorted((param.shape[0], math.prod(param.shape[1:])))
    return float(short * short * (2 * long + short) + 1)


def _mesh_of(param: torch.Tensor) -> DeviceMesh:
    if isinstance(param, DTensor):
        return param.device_mesh
    owner = owner_of(param)
    assert owner is not None  # ``_check_can_be_owned`` has checked it
    return owner.spec.mesh_info.mesh


def _gradient_of(member: OwnedParam) -> torch.Tensor:
    grad = member.param.grad
    assert grad is not None
    if isinstance(grad, DTensor) and not is_placed_like(grad, member.param):
        raise RuntimeError(
            f"the gradient of {member.fqn!r} has placements {grad.placements}, and the parameter "
            "has others; redistribute it before step()."
        )
    return plain_of(grad)


def _cut_like(param: torch.Tensor | None, value: Any) -> Any:
    """Return this rank's shard of ``value`` if that is a whole tensor for a sharded parameter."""
    if (
        not isinstance(param, DTensor)
        or not isinstance(value, torch.Tensor)
        or isinstance(value, DTensor)
        or value.shape != param.shape
    ):
        return value
    place = coordinate_of(param.device_mesh)
    box = box_at(value.shape, param.device_mesh, param.placements, place)
    return place_like(param, value[box.slices].to(plain_of(param).device, copy=True))


# --- the ordinary optimizer --------------------------------------------------------------------


def _placeholder(param: torch.Tensor, device: torch.device) -> nn.Parameter:
    """Return a parameter of the whole shape that takes the memory of one element."""
    one = torch.zeros((), dtype=param.dtype, device=device)
    return nn.Parameter(one.expand(param.shape))


def _empty(placeholder: nn.Parameter) -> None:
    """Drop value and gradient of a placeholder; its shape stays."""
    placeholder.grad = None
    one = torch.zeros((), dtype=placeholder.dtype, device=placeholder.device)
    placeholder.data = one.expand(placeholder.shape)


class _RefuseCollectives(DispatchMode):  # type: ignore[misc]  # an Any
    """Raises where an optimizer communicates: other ranks do not step the same parameters."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise RuntimeError(
                f"{self._name} communicates in its step ({func}), but each parameter is stepped on "
                "one rank only; build it on module.parameters(), or switch that off."
            )
        return func(*args, **(kwargs or {}))


def _step(inner: Optimizer, *, is_first: bool) -> None:
    """Step, without the hooks of torch, which the user's optimizer has called already."""
    step = getattr(type(inner).step, "__wrapped__", type(inner).step)
    if is_first:
        with _RefuseCollectives(type(inner).__name__):
            step(inner)
    else:
        step(inner)


def _merged(written: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return what all optimizers have written to their param groups; raise if they differ."""
    result: dict[str, Any] = {}
    for each in written:
        for key, value in each.items():
            if not isinstance(value, int) or result.setdefault(key, value) != value:
                raise RuntimeError(
                    f"{name} writes {key!r} into its param group, a number for all its parameters "
                    "together, but each rank steps some of them only; build it on "
                    "module.parameters(). Parameters have been stepped once."
                )
    return result


def _differ(value: object, other: object) -> bool:
    if value is other:
        return False
    return isinstance(value, torch.Tensor) or isinstance(other, torch.Tensor) or value != other
