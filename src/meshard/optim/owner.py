"""Optimizers that step unsharded matrices, each on one rank."""

from __future__ import annotations

import functools
import heapq
import inspect
import itertools
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from meshard._comm.blocking import exchange_numbers, ranks_that_differ
from meshard._engine.param_group import owner_of as param_group_of
from meshard._engine.param_group import sharded_params_of
from meshard._engine.unit import require_units
from meshard._torch.dtensor import gradient_dtype as dtype_of_gradient
from meshard._torch.dtensor import is_plain, plain_of
from meshard._torch.user_line import listed
from meshard.optim.exchange import Layout, MeshRanks
from meshard.optim.flat import (
    POINTWISE,
    FlatStepper,
    LeftOut,
    MakeOptimizer,
    StateOnRead,
    are_same,
    check_is_no_instance,
    check_makes_optimizers,
    objects_in,
)
from meshard.optim.hooks import find_overlapped
from meshard.optim.owner_state import load_states, states_as_shards
from meshard.optim.owner_step import (
    Bucket,
    BucketStep,
    OwnedParam,
    check_holds,
    placeholder_for,
)
from meshard.policies import check_bool, check_positive

Select = Callable[[str, torch.Tensor], bool]
Cost = Callable[[str, torch.Tensor], float]
Chosen = list[tuple[str, torch.Tensor]]  # parameters with their names

_MIB = 2**20
# Embeddings that are bare parameters are recognised by these parts of their own names.
_EMBEDDINGS = ("emb", "position")
# Usual names of the module that computes scores from the last hidden state.
_HEADS = ("head", "lm_head", "output", "out", "classifier", "score", "embed_out", "unembed")


class OwnerOptimizer(StateOnRead):
    """An optimizer that steps each selected parameter on one rank: see ``owner_optimizer``.

    ``param_groups[0]`` has the selected parameters, and ``param_groups[1]``, if there is one, those
    of the fallback. ``state`` has the state of a selected parameter on its owner, of the unsharded
    shape, and an empty dict on other ranks. The next step uses what is changed in it.
    """

    _is_made = False

    def __init__(
        self,
        groups: list[dict[str, Any]],
        members: Sequence[OwnedParam],
        make: MakeOptimizer,
        fallback: Any,  # a class of POINTWISE
        *,
        name: str,
        bucket_bytes: float,
        gradient_dtype: torch.dtype | None,
        keeps_values: bool,
    ) -> None:
        # Some schedulers look into ``defaults`` for what every group has.
        common = set.intersection(*(set(group) for group in groups)) - {"params", "param_names"}
        super().__init__(Optimizer(groups, {key: groups[0][key] for key in sorted(common)}))
        self._members = members
        self._make = make
        self._name = name
        self._bucket_bytes = bucket_bytes
        self._gradient_dtype = gradient_dtype
        self._keeps_values = keeps_values
        self._stepper = FlatStepper(fallback)
        self._flat_steppers = [self._stepper]
        self._planned = objects_in(self.param_groups)
        self._made: list[Bucket] | None = None
        self._has_stepped = False
        self._is_made = True
        _alive[self] = None

    # --- for users -------------------------------------------------------------------------

    @property
    def owners(self) -> dict[str, int]:
        """The global rank that steps each selected parameter, by the parameter's name."""
        return {each.fqn: each.ranks.ranks[each.owner] for each in self._members}

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient.

        ``closure`` computes the loss and its gradients, and is called first, once. An exception of
        the optimizer, but not of the fallback, is raised in the first step on all ranks of the mesh
        of the parameter. Otherwise ranks that did not raise wait for the one that did.

        **Collective:** all ranks of the meshes of selected parameters, with gradients for the same
        parameters. **Stream:** the current one, which waits for the exchanges.

        Raises:
            RuntimeError: Gradients are pending (see ``meshard.pending_gradients``); parameters have
                changed since the optimizer was made; ranks have selected other parameters; the
                optimizer communicates in its step, or writes to its param group what is no count of
                steps. The last two are found only after some parameters were stepped: load a
                checkpoint before you go on.
        """
        loss = self._loss_of(closure)
        self._check_params()
        steps = [
            BucketStep(bucket, self._gradient_dtype, keeps_values=self._keeps_values)
            for bucket in self._buckets()
        ]
        for each in steps:
            self._take_state(each.bucket)
        if self._keeps_values:
            self._find_edits(steps)
        try:
            # While one bucket is stepped, the next one arrives and the one before leaves.
            steps[0].arrive()
            if len(self.param_groups) > 1:
                self._stepper.take(self.param_groups[1:], self._state)
                self._stepper.run()
            for number, present in enumerate(steps):
                present.finish()
                if number + 1 < len(steps):
                    steps[number + 1].arrive()
                self._run(present)
                if number:
                    steps[number - 1].finish()
                present.leave()
            steps[-1].finish()
        except BaseException:
            for each in steps:
                each.abandon()
            raise
        finally:
            for each in steps:
                self._show_state(each.bucket)
        self._has_stepped = True
        for each in steps:
            each.mark()
            self.param_groups[0].update(each.bucket.written)
        return loss

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters in a form that loads onto any mesh.

        State of the shape of a sharded parameter is a DTensor with its placements. State of another
        shape is sharded along dim 0 by the same mesh axes. That of parameters of ``replicate`` is
        unsharded. Numbers are the same on every rank.

        **Collective:** all ranks of the meshes of selected parameters. **Stream:** the current one.

        Raises:
            NotImplementedError: A state is neither a tensor nor a plain value.
            RuntimeError: As ``step``, if this is the first call of the two.
        """
        packed = super().state_dict()
        numbers = {id(member.param): number for number, member in enumerate(self._members)}
        for bucket in self._buckets():
            self._take_state(bucket)
            states, written = states_as_shards(bucket)
            packed["param_groups"][0].update(written)
            for member, state in zip(bucket.members, states, strict=True):
                packed["state"].pop(numbers[id(member.param)], None)
                if state:
                    packed["state"][numbers[id(member.param)]] = state
        packed["state"] = dict(sorted(packed["state"].items()))
        return packed

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` of an optimizer with the same parameters returned.

        State of selected parameters may be DTensors of any mesh, or unsharded tensors, as those of
        the ordinary optimizer in one process. It keeps its dtypes, and may share the memory of the
        given tensors.

        **Collective:** all ranks of the meshes of selected parameters. **Stream:** the current one.

        Raises:
            RuntimeError: As ``step``, if this is the first call of the two.
            ValueError: There are other param groups, or groups of another size, or ranks load
                states of different forms.
        """
        # The keys of parameters are arbitrary; only their order counts.
        order = [each for group in state_dict["param_groups"] for each in group["params"]]
        keys = dict(zip((id(member.param) for member in self._members), order, strict=False))
        chosen = set(keys.values())
        others = {key: each for key, each in state_dict["state"].items() if key not in chosen}
        super().load_state_dict({**state_dict, "state": others})
        group = self.param_groups[0]
        keeps_counts = not (group.get("capturable") or group.get("fused"))
        buckets, states = self._buckets(), state_dict["state"]
        try:
            for bucket in buckets:
                saved = [states.get(keys[id(each.param)], {}) for each in bucket.members]
                load_states(bucket, saved, keeps_counts=keeps_counts)
        finally:
            for bucket in buckets:
                self._show_state(bucket)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse new param groups after construction."""
        if self._is_made:
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

    def _find_edits(self, steps: list[BucketStep]) -> None:
        """Let values be sent again in buckets of which any rank has edited a shard."""
        of_mesh: dict[MeshRanks, list[BucketStep]] = {}
        for each in steps:
            of_mesh.setdefault(each.bucket.ranks, []).append(each)
        for ranks, own in of_mesh.items():
            edited = [int(each.was_edited()) for each in own]
            purpose = f"comparison of edits before a step of owner_optimizer({self._name})"
            rows = exchange_numbers(edited, ranks.group, ranks.device, purpose=purpose)
            for each, column in zip(own, zip(*rows, strict=True), strict=True):
                each.sends_values = any(column)

    def _run(self, present: BucketStep) -> None:
        """Step what this rank owns. In the first step an exception is raised on all ranks."""
        error: Exception | None = None
        try:
            present.run(self.param_groups[0], is_first=not self._has_stepped)
        except Exception as raised:
            if self._has_stepped:
                raise
            error = raised
        if self._has_stepped:
            return
        ranks, purpose = present.bucket.ranks, f"first step of owner_optimizer({self._name})"
        number = [int(error is not None)]
        rows = exchange_numbers(number, ranks.group, ranks.device, purpose=purpose)
        if error is not None:
            raise error
        raised_on = [rank for rank, row in zip(ranks.ranks, rows, strict=True) if row[0]]
        if raised_on:
            raise RuntimeError(f"{self._name} has raised an exception on rank {raised_on[0]}.")

    def _take_state(self, bucket: Bucket) -> None:
        """Let the optimizer of a bucket use what the user has changed in ``state``."""
        for position, placeholder in bucket.placeholders.items():
            given = self._state.get(bucket.members[position].param)
            if given:
                bucket.make_inner()
            if bucket.inner is not None:
                bucket.inner.state.pop(placeholder, None)
                if given:
                    bucket.inner.state[placeholder] = given

    def _show_state(self, bucket: Bucket) -> None:
        """Let ``state`` have what this rank owns of a bucket."""
        for position, member in enumerate(bucket.members):
            placeholder = bucket.placeholders.get(position)
            inner = {} if bucket.inner is None else bucket.inner.state
            self._state[member.param] = {} if placeholder is None else inner.get(placeholder, {})

    def _check_params(self) -> None:
        changed = [each.fqn for each in self._members if param_group_of(each.param) is None]
        if changed:
            raise RuntimeError(
                f"parameters {listed(changed)} were replaced since owner_optimizer was called; "
                "make it anew, and load its state_dict."
            )
        for bucket in self._made or ():
            dtypes = {member.param.dtype for member in bucket.members}
            if len(dtypes) > 1:
                raise RuntimeError(
                    f"{bucket.members[0].fqn!r} and others were of one dtype when owner_optimizer "
                    f"was called, and now are of {listed(sorted(map(str, dtypes)))}; make it anew, "
                    "and load its state_dict."
                )
        if not are_same(objects_in(self.param_groups), self._planned):
            raise RuntimeError(
                "param_groups has other parameters than owner_optimizer chose; make it anew."
            )

    def _buckets(self) -> list[Bucket]:
        """Return the buckets. **Collective:** the first call."""
        if self._made is None:
            chosen = list(self._chosen_together())
            for ranks in dict.fromkeys(members[0].ranks for members in chosen):
                self._check_agreement(ranks, [each for each in chosen if each[0].ranks is ranks])
            self._made = [
                Bucket(number, members, self._make) for number, members in enumerate(chosen)
            ]
        return self._made

    def _check_agreement(self, ranks: MeshRanks, buckets: list[list[OwnedParam]]) -> None:
        """Raise unless all ranks of a mesh exchange the same parameters. **Collective:** these."""
        described = [
            [(each.fqn, each.layout, each.param.dtype, each.owner) for each in members]
            for members in buckets
        ]
        different = ranks_that_differ(
            (described, self._gradient_dtype, self._keeps_values),
            ranks.group,
            ranks.device,
            purpose="comparison of what owner_optimizer steps on each rank",
        )
        if different:
            others = ", ".join(str(ranks.ranks[position]) for position in different)
            raise RuntimeError(
                f"ranks {others} have selected other parameters than rank {ranks.ranks[0]} for "
                f"{self._name}, or with other shapes, owners or options; call owner_optimizer "
                "alike on every rank."
            )

    def _chosen_together(self) -> Iterator[list[OwnedParam]]:
        """Iterate over the members of the buckets, in the same order on all ranks.

        A bucket takes the next costliest parameter of each owner, until one owner has enough to
        send. So all owners work at the same time.
        """
        alike: dict[tuple[Any, ...], list[OwnedParam]] = {}
        for member in self._members:
            key = member.ranks, member.param.dtype, dtype_of_gradient(member.param)
            alike.setdefault(key, []).append(member)
        for members in alike.values():
            queues: dict[int, list[OwnedParam]] = {}
            for member in sorted(members, key=lambda each: -each.cost):
                queues.setdefault(member.owner, []).append(member)
            bucket: list[OwnedParam] = []
            sizes = defaultdict[int, int](int)  # bytes of new values that each owner sends
            for one_of_each in itertools.zip_longest(*queues.values()):
                for member in filter(None, one_of_each):
                    bucket.append(member)
                    num_bytes = member.param.numel() * member.param.itemsize
                    sizes[member.owner] += num_bytes * member.layout.num_replicas(member.ranks)
                if max(sizes.values()) >= self._bucket_bytes:
                    yield bucket
                    bucket, sizes = [], defaultdict(int)
            if bucket:
                yield bucket


# All OwnerOptimizers that are alive, in the order in which they were made.
_alive: weakref.WeakKeyDictionary[OwnerOptimizer, None] = weakref.WeakKeyDictionary()


def owner_reports(ids: Container[int]) -> list[str]:
    """Return a line for each optimizer that owns a parameter with one of ``ids``."""
    return [
        _report(optimizer)
        for optimizer in _alive
        if any(id(member.param) in ids for member in optimizer._members)
    ]


def _report(optimizer: OwnerOptimizer) -> str:
    costs = defaultdict[int, float](float)
    for member in optimizer._members:
        costs[member.ranks.ranks[member.owner]] += member.cost
    num_ranks = len({rank for member in optimizer._members for rank in member.ranks.ranks})
    most = max(costs.values()) * num_ranks / (sum(costs.values()) or 1)
    return (
        f"{optimizer._name} steps {len(optimizer._members)} parameters, each on one of {num_ranks} "
        f"ranks ({len(costs)} own some); the busiest has {most:.2f} times the mean work"
    )


def owner_optimizer(
    module: nn.Module,
    optimizer: type[Optimizer] | Callable[..., Optimizer],
    *,
    select: Select | None = None,
    fallback: type[Optimizer] | None = torch.optim.AdamW,
    fallback_kwargs: dict[str, Any] | None = None,
    bucket_mb: float = 25,
    gradient_dtype: torch.dtype | None = None,
    keep_values: bool = False,
    cost: Cost | None = None,
    **optimizer_kwargs: Any,
) -> OwnerOptimizer:
    """Step unsharded matrices by an ordinary optimizer, each on one rank.

    Muon, Shampoo and SOAP need a whole matrix, and a shard is not one. Here each selected parameter
    has an owner among the ranks of its mesh. In a step, the owner receives the shards of value and
    gradient, steps the unsharded matrix by ``optimizer``, and sends every rank its new shard. The
    numbers are those of one process. The other parameters are stepped as shards by ``fallback``.

    This communicates nothing; the first step compares the ranks.

    Args:
        module: With units in it. Build the optimizer after the last ``fully_shard`` or
            ``replicate``, with the same arguments on every rank.
        optimizer: A class of optimizers, or a function that makes one from param groups. It sees
            ordinary tensors. It must treat each parameter by itself, and not communicate.
        select: Called with the name and the sharded parameter, returns whether ``optimizer`` steps
            it. None: matrices, but for those of embeddings and of the head, as the author of Muon
            advises (https://kellerjordan.github.io/posts/muon/). Embeddings are known by the class
            ``nn.Embedding``, or by ``emb`` or ``position`` in the parameter's own name. Heads are
            known by ``get_output_embeddings()``, or by the name of a module outside of lists:
            ``head``, ``lm_head``, ``output``, ``out``, ``classifier``, ``score``, ``embed_out`` or
            ``unembed``. ``owners`` of what is returned lists what was selected.
        fallback: Steps the trainable parameters that are not selected, as ``flat_optimizer`` does.
            None: nothing does. Parameters that are frozen now are not stepped later either; if one
            gets a gradient, ``step`` warns of it.
        fallback_kwargs: Arguments of ``fallback``.
        bucket_mb: Parameters are exchanged in buckets. A bucket is closed once one owner has this
            many MiB to send. One bucket arrives and one leaves while one is stepped.
        gradient_dtype: The dtype in which gradients are sent to the owners. None: their own dtype.
            Values always keep theirs.
        keep_values: Owners keep the unsharded values between steps, so that only gradients are sent
            to them, and a third of the bytes is saved. This takes the memory of one more shard of
            the selected parameters on each rank. Edits of parameters are found by their versions,
            which ranks exchange before each step; an edit through ``.data``, by ``torch._foreach``
            functions or by another optimizer may leave no trace there, and is lost.
        cost: Called like ``select``, returns the relative time of a step of the parameter. Owners
            are chosen by it, the costliest first, each to the rank that has the least so far. None:
            the arithmetic of products of the matrix with its transpose.
        **optimizer_kwargs: Arguments of ``optimizer``.

    Returns:
        An optimizer, whose ``param_groups`` a scheduler scales together.

    Raises:
        RuntimeError: A forward or backward is under way.
        TypeError: ``optimizer`` makes no ``Optimizer``, or one that is refused (``LBFGS``,
            ``SparseAdam``, one that needs a closure), or ``fallback`` is no class that
            ``flat_optimizer`` takes.
        ValueError: There is no unit in ``module``, or no parameter is selected; one that is
            selected is in no unit, or a tensor subclass; one is stepped in backward by
            ``overlap_optimizer``; or an argument is not as described here.
        Exception: What ``optimizer`` and ``fallback`` raise when they are made.

    >>> import torch, meshard
    >>> model = meshard.fully_shard(torch.nn.Sequential(torch.nn.Linear(4, 8)))
    >>> optimizer = meshard.owner_optimizer(model, torch.optim.Muon, lr=0.02)
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.owners
    {'0.weight': 0}
    """
    _check_functions(optimizer, select, cost)
    _check_fallback(fallback, fallback_kwargs)
    check_positive("bucket_mb", bucket_mb)
    is_dtype = isinstance(gradient_dtype, torch.dtype) and gradient_dtype.is_floating_point
    if gradient_dtype is not None and not is_dtype:
        raise ValueError(f"gradient_dtype must be a floating torch.dtype, got {gradient_dtype!r}.")
    check_bool("keep_values", keep_values)
    for unit in require_units(module):
        unit.lifecycle.check_between_steps(unit, "owner_optimizer")
    chosen, others = _selected(module, select)
    members = _with_owners(chosen, cost or _cost_of_products)
    make = functools.partial(optimizer, **optimizer_kwargs)
    groups = [_template(make, members, is_fused=bool(optimizer_kwargs.get("fused")))]
    if fallback is not None and others:
        make_fallback: Any = fallback
        groups += make_fallback(others, **(fallback_kwargs or {})).param_groups
    owner = OwnerOptimizer(
        groups,
        members,
        make,
        fallback,
        name=getattr(optimizer, "__name__", type(optimizer).__name__),
        bucket_bytes=bucket_mb * _MIB,
        gradient_dtype=gradient_dtype,
        keeps_values=keep_values,
    )
    is_chosen = select or _is_hidden_matrix(module)
    owner._left_out = LeftOut(module) if fallback is not None else LeftOut(module, is_chosen)
    return owner


def _check_functions(optimizer: object, select: object, cost: object) -> None:
    check_makes_optimizers("owner_optimizer", optimizer)
    for name, function in {"select": select, "cost": cost}.items():
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be a function or None, got {function!r}.")


def _check_fallback(fallback: object, fallback_kwargs: object) -> None:
    check_is_no_instance("owner_optimizer", fallback)
    if fallback is not None and fallback not in POINTWISE:
        names = ", ".join(each.__name__ for each in POINTWISE)
        raise TypeError(
            f"fallback steps shards, which is right for {names}; "
            f"{getattr(fallback, '__name__', fallback)!r} is none of them: pass fallback=None, and "
            "give the other parameters an optimizer of their own."
        )
    if fallback_kwargs is not None and not isinstance(fallback_kwargs, dict):
        raise TypeError(f"fallback_kwargs must be a dict or None, got {fallback_kwargs!r}.")
    if fallback is None and fallback_kwargs:
        raise ValueError("fallback_kwargs are given, and fallback=None; pass a fallback, or none.")


def _selected(module: nn.Module, select: Select | None) -> tuple[Chosen, list[torch.Tensor]]:
    """Return the selected parameters with their names, and the other trainable ones."""
    named = [(fqn, param) for fqn, param in module.named_parameters() if param.requires_grad]
    sharded = sharded_params_of([param for _, param in named])
    overlapped = find_overlapped(sharded)
    if overlapped is not None:
        names = [fqn for (fqn, _), param in zip(named, sharded, strict=True) if param is overlapped]
        raise ValueError(
            f"parameter {names[0]!r} is stepped by overlap_optimizer already; call its detach() "
            "first."
        )
    is_chosen = select or _is_hidden_matrix(module)
    chosen: Chosen = []
    others = []
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
    return chosen, others


def _is_hidden_matrix(module: nn.Module) -> Select:
    """Return the default of ``select``: a matrix in a unit, of neither an embedding nor a head."""
    left_out: set[int] = set()
    for name, each in module.named_modules():
        parts = name.split(".")
        is_head = parts[-1] in _HEADS and not any(part.isdigit() for part in parts)
        found = [each] if is_head or isinstance(each, nn.Embedding) else []
        found += filter(None, [getattr(each, "get_output_embeddings", lambda: None)()])
        for layer in found:
            left_out.update(map(id, sharded_params_of(list(layer.parameters(recurse=False)))))
    return lambda fqn, param: (
        param.dim() == 2
        and id(param) not in left_out
        and not any(part in fqn.rpartition(".")[2] for part in _EMBEDDINGS)
        and param_group_of(param) is not None
    )


def _check_can_be_owned(fqn: str, param: torch.Tensor) -> None:
    if param_group_of(param) is None:
        raise ValueError(
            f"parameter {fqn!r} is in no unit, so no mesh says which ranks could own it; apply "
            "fully_shard or replicate to the module around it, or leave it out with select=."
        )
    if not is_plain(plain_of(param)):
        raise ValueError(
            f"parameter {fqn!r} is a {type(plain_of(param)).__name__}, which cannot be put "
            "together from parts; leave it out with select=."
        )


def _with_owners(chosen: Chosen, cost: Cost) -> list[OwnedParam]:
    """Give each parameter an owner: the costliest first, each to the rank with the least so far."""
    ranks = {
        mesh: MeshRanks(mesh) for mesh in dict.fromkeys(_mesh_of(param) for _, param in chosen)
    }
    # For each mesh a heap: the ranks of its group, with the cost that each has so far.
    loads = {mesh: [(0.0, rank) for rank in range(len(each.ranks))] for mesh, each in ranks.items()}
    costs = {fqn: float(cost(fqn, param)) for fqn, param in chosen}
    for fqn, each in costs.items():
        if not 0 < each < math.inf:
            raise ValueError(f"cost must return a positive number, got {each!r} for {fqn!r}.")
    owners = {}
    for fqn, param in sorted(chosen, key=lambda each: -costs[each[0]]):
        heap = loads[_mesh_of(param)]
        load, rank = heap[0]
        heapq.heapreplace(heap, (load + costs[fqn], rank))
        owners[fqn] = rank
    return [
        OwnedParam(
            fqn, param, ranks[_mesh_of(param)], Layout.of_param(param), owners[fqn], costs[fqn]
        )
        for fqn, param in chosen
    ]


def _cost_of_products(_: str, param: torch.Tensor) -> float:
    """Return the number of multiplications in ``A = M @ M.T``, ``A @ A`` and ``A @ M``."""
    if param.dim() < 2:
        return float(param.numel() + 1)
    # By the shape only: indexing a DTensor would communicate.
    short, long = sorted((param.shape[0], math.prod(param.shape[1:])))
    return float(short * short * (2 * long + short) + 1)


def _mesh_of(param: torch.Tensor) -> DeviceMesh:
    if isinstance(param, DTensor):
        return param.device_mesh
    group = param_group_of(param)
    assert group is not None  # ``_check_can_be_owned`` has checked it
    return group.spec.mesh_info.mesh


def _template(
    make: MakeOptimizer, members: Sequence[OwnedParam], *, is_fused: bool
) -> dict[str, Any]:
    """Return the param group of ``optimizer`` with the selected parameters."""
    # Some optimizers make their state at once. On the meta device it takes no memory, but fused
    # optimizers refuse that device.
    device = members[0].ranks.device if is_fused else torch.device("meta")
    placeholders = [placeholder_for(member.param, device) for member in members]
    template = make([{"params": placeholders}])
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
    check_holds(template, placeholders)
    if template.param_groups[0].get("differentiable"):
        raise ValueError("owner_optimizer has no differentiable step.")
    return {**template.param_groups[0], "params": [member.param for member in members]}
