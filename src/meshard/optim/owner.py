"""Optimizers that step unsharded matrices, each on one rank."""

from __future__ import annotations

import functools
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from typing_extensions import override

from meshard._comm.blocking import ranks_that_differ
from meshard._engine.param_group import owner_of as param_group_of
from meshard._engine.param_group import sharded_params_of
from meshard._engine.unit import require_units
from meshard._optimizer_hooks import find_overlapped
from meshard._torch.dtensor import gradient_dtype as dtype_of_gradient
from meshard._torch.dtensor import is_plain, plain_of
from meshard._torch.user_line import listed
from meshard.optim.exchange import Layout
from meshard.optim.mapping import (
    MakeOptimizer,
    MappedOptimizer,
    check_makes_optimizers,
    check_template,
)
from meshard.optim.owner_state import load_states, state_in_shards
from meshard.optim.owner_step import (
    Batch,
    Member,
    StepOptions,
    placeholder_for,
    step_batches,
)
from meshard.policies import check_positive

Select = Callable[[str, torch.Tensor], bool]

_MIB = 2**20
# Embeddings that are bare parameters are recognised by these parts of their own names.
_EMBEDDINGS = ("emb", "position")
# Usual names of the module that computes scores from the last hidden state.
_HEADS = ("head", "lm_head", "output", "out", "classifier", "score", "embed_out", "unembed")


class OwnerOptimizer(MappedOptimizer):
    """An optimizer that steps each selected parameter on one rank: see ``owner_optimizer``.

    Its one param group has the selected parameters. ``state`` has the state of a parameter on its
    owner, of the unsharded shape, and an empty dict on other ranks. The next step uses what is
    changed in it.
    """

    _maker = "owner_optimizer"

    def __init__(
        self,
        template: Optimizer,
        chosen: list[Member],
        batches: list[Batch],
        *,
        name: str,
        gradient_dtype: torch.dtype | None,
    ) -> None:
        """Take the hyperparameters of ``template``."""
        template.param_groups[0]["params"] = [member.param for member in chosen]
        template.state.clear()  # that of placeholders, if the constructor has made one
        super().__init__(template)
        self._chosen = chosen
        dealt = {
            member.fqn: rank
            for batch in batches
            for rank, part in zip(batch.layout.ranks, batch.members, strict=True)
            for member in part
        }
        #: The global rank that steps each selected parameter, by the parameter's name.
        self.owners = {member.fqn: dealt[member.fqn] for member in chosen}
        self._batches = batches
        self._name = name
        self._gradient_dtype = gradient_dtype
        self._is_compared = self._has_stepped = False
        # What the last step has written to param groups, such as a count. Ranks that own nothing
        # learn it by state_dict().
        self._written: dict[str, int] = {}
        _alive.add(self)

    # --- for users -------------------------------------------------------------------------

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient.

        ``closure`` computes the loss and its gradients, and is called first, once. An exception of
        the optimizer is raised in the first step on all ranks of the mesh of the parameter.
        Otherwise ranks that did not raise wait for the one that did.

        **Collective:** all ranks of the meshes of selected parameters, with gradients for the same
        parameters. **Stream:** the current one, which waits for the exchanges.

        Raises:
            RuntimeError: Gradients are pending (see ``meshard.pending_gradients``); parameters have
                changed since the optimizer was made; ranks have selected other parameters; the
                optimizer writes to its param group what is no count of steps. That is found only
                after some parameters were stepped: load a checkpoint before you go on.
        """
        loss = self._loss_of(closure)
        (group,) = self.param_groups
        self._compare()
        options = StepOptions(
            hyperparameters={key: value for key, value in group.items() if key != "params"},
            sent_dtype=self._gradient_dtype,
            first_of=None if self._has_stepped else self._name,
        )
        step_batches(self._batches, self.state, options)
        group.update(options.written)
        self._written = options.written
        self._has_stepped = True
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
        self._compare()
        packed = super().state_dict()
        sharded: dict[torch.Tensor, dict[str, Any]] = {}
        for batch in self._batches:
            states, written = state_in_shards(batch, self.state, self._written)
            sharded.update(states)
            packed["param_groups"][0].update(written)
        params = self.param_groups[0]["params"]
        packed["state"] = {
            number: sharded[param] for number, param in enumerate(params) if sharded[param]
        }
        return packed

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` of an optimizer with the same parameters returned.

        State may be DTensors of any mesh, or unsharded tensors, as those of the ordinary optimizer
        in one process. It keeps its dtypes, and may share the memory of the given tensors. Param
        groups after the first are left out.

        **Collective:** all ranks of the meshes of selected parameters. **Stream:** the current one.

        Raises:
            RuntimeError: As ``step``, if this is the first call of the two.
            ValueError: The param group is of another size, or ranks load states of different forms.
        """
        self._compare()
        # Optimizers of earlier versions had a second group, of what was not selected.
        groups, saved = state_dict["param_groups"][:1], state_dict["state"]
        super().load_state_dict({**state_dict, "param_groups": groups, "state": {}})
        self._written = {}
        group = self.param_groups[0]
        keeps_counts = not (group.get("capturable") or group.get("fused"))
        # The keys of parameters are arbitrary; only their order counts.
        keys = dict(zip(group["params"], groups[0]["params"], strict=True))
        for batch in self._batches:
            own = [saved.get(keys[member.param], {}) for member in batch]
            load_states(batch, own, self.state, keeps_counts=keeps_counts)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse new param groups after construction."""
        if self.param_groups:
            raise NotImplementedError(
                "owner_optimizer has chosen the owners of its parameters; make it anew for others, "
                "and load its state_dict."
            )
        super().add_param_group(param_group)

    # --- inside ----------------------------------------------------------------------------

    def _compare(self) -> None:
        """Raise unless parameters are as they were dealt out, by all ranks alike.

        **Collective:** all ranks of the meshes of selected parameters, the first time.
        """
        if list(map(id, self.param_groups[0]["params"])) != [id(each) for _, each in self._chosen]:
            raise RuntimeError(
                "param_groups has other parameters than owner_optimizer chose; make it anew."
            )
        of_mesh: dict[DeviceMesh, list[Any]] = {}
        for batch in self._batches:
            dtypes = sorted({str(member.param.dtype) for member in batch})
            if len(dtypes) > 1:
                raise RuntimeError(
                    f"{next(iter(batch)).fqn!r} and others were of one dtype when owner_optimizer "
                    f"was called, and now are of {listed(dtypes)}; make it anew, and load its "
                    "state_dict."
                )
            names = [[member.fqn for member in part] for part in batch.members]
            told = names, dtypes, batch.layout.shape, batch.layout.placements
            of_mesh.setdefault(batch.layout.mesh, [batch.layout]).append(told)
        for layout, *described in () if self._is_compared else of_mesh.values():
            purpose = "comparison of what owner_optimizer steps on each rank"
            value = described, self._gradient_dtype
            different = ranks_that_differ(value, layout.group, layout.device, purpose=purpose)
            if different:
                raise RuntimeError(
                    f"ranks {', '.join(str(layout.ranks[each]) for each in different)} have "
                    f"selected other parameters than rank {layout.ranks[0]} for {self._name}, or "
                    "with other shapes or options; call owner_optimizer alike on every rank."
                )
        self._is_compared = True


# All OwnerOptimizers that are alive.
_alive: weakref.WeakSet[OwnerOptimizer] = weakref.WeakSet()


def owner_reports(ids: Container[int]) -> list[str]:
    """Return a line for each optimizer that owns a parameter with one of ``ids``."""
    return [
        _report(optimizer)
        for optimizer in _alive
        if any(id(member.param) in ids for member in optimizer._chosen)
    ]


def _report(optimizer: OwnerOptimizer) -> str:
    costs = {rank: 0.0 for batch in optimizer._batches for rank in batch.layout.ranks}
    for batch in optimizer._batches:
        for rank, part in zip(batch.layout.ranks, batch.members, strict=True):
            costs[rank] += len(part) * _cost(batch.layout.shape)
    num_own = sum(map(bool, costs.values()))
    most = max(costs.values()) * len(costs) / sum(costs.values())
    return (
        f"{optimizer._name} steps {len(optimizer._chosen)} parameters, each on one of {len(costs)} "
        f"ranks ({num_own} own some); the busiest has {most:.2f} times the mean work"
    )


def owner_optimizer(
    module: nn.Module,
    optimizer: type[Optimizer] | Callable[..., Optimizer],
    *,
    select: Select | None = None,
    bucket_mb: float = 25,
    gradient_dtype: torch.dtype | None = None,
    **optimizer_kwargs: Any,
) -> OwnerOptimizer:
    """Step unsharded matrices by an ordinary optimizer, each on one rank.

    Muon, Shampoo and SOAP need a whole matrix, and a shard is not one. Here each selected parameter
    has an owner among the ranks of its mesh. In a step, the owner receives the shards of value and
    gradient, steps the unsharded matrix by ``optimizer``, and sends every rank its new shard. The
    numbers are those of one process. The other parameters need an optimizer of their own.

    This communicates nothing; the first step compares the ranks.

    Args:
        module: With units in it. Build the optimizer after the last ``fully_shard`` or
            ``replicate``, with the same arguments on every rank.
        optimizer: A class of optimizers, or a function that makes one from param groups. It sees
            ordinary tensors. It must treat each parameter by itself, and not communicate.
        select: Called with the name and the sharded parameter of each that is not frozen now,
            returns whether ``optimizer`` steps it. None: matrices, but for those of embeddings and
            of the head, as the author of Muon advises (https://kellerjordan.github.io/posts/muon/).
            Embeddings are known by the class ``nn.Embedding``, or by ``emb`` or ``position`` in the
            parameter's own name. Heads are known by ``get_output_embeddings()``, or by the name of
            a module outside of lists: ``head``, ``lm_head``, ``output``, ``out``, ``classifier``,
            ``score``, ``embed_out`` or ``unembed``. ``owners`` of what is returned lists what was
            selected.
        bucket_mb: Matrices of one shape are exchanged in one batch, or in several, so that no owner
            sends many more MiB than this at once. One batch arrives and one leaves while one is
            stepped.
        gradient_dtype: The dtype in which gradients are sent to the owners. None: their own dtype.
            Values always keep theirs.
        **optimizer_kwargs: Arguments of ``optimizer``.

    Returns:
        An optimizer with one param group.

    Raises:
        RuntimeError: A forward or backward is under way.
        TypeError: ``optimizer`` makes no ``Optimizer``, or one that is refused (``LBFGS``,
            ``SparseAdam``, one that needs a closure).
        ValueError: There is no unit in ``module``, or no parameter is selected; one that is
            selected is in no unit, or a tensor subclass; one is stepped in backward by
            ``overlap_optimizer``; or an argument is not as described here.
        Exception: What ``optimizer`` raises when it is made.

    >>> import torch, meshard
    >>> model = meshard.fully_shard(torch.nn.Sequential(torch.nn.Linear(4, 8)))
    >>> matrices = meshard.owner_optimizer(model, torch.optim.Muon, lr=0.02)
    >>> matrices.owners
    {'0.weight': 0}
    >>> rest = [each for name, each in model.named_parameters() if name not in matrices.owners]
    >>> vectors = torch.optim.AdamW(rest, lr=1e-3)
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> for each in (matrices, vectors):
    ...     each.step()
    """
    check_makes_optimizers("owner_optimizer", optimizer)
    if select is not None and not callable(select):
        raise TypeError(f"select must be a function or None, got {select!r}.")
    check_positive("bucket_mb", bucket_mb)
    is_dtype = isinstance(gradient_dtype, torch.dtype) and gradient_dtype.is_floating_point
    if gradient_dtype is not None and not is_dtype:
        raise ValueError(f"gradient_dtype must be a floating torch.dtype, got {gradient_dtype!r}.")
    for unit in require_units(module):
        unit.lifecycle.check_between_steps(unit, "owner_optimizer")
    chosen = _selected(module, select or _is_hidden_matrix(module))
    make = functools.partial(optimizer, **optimizer_kwargs)
    return OwnerOptimizer(
        _template(make, chosen, is_fused=bool(optimizer_kwargs.get("fused"))),
        chosen,
        list(_dealt(chosen, make, bucket_mb * _MIB)),
        name=getattr(optimizer, "__name__", type(optimizer).__name__),
        gradient_dtype=gradient_dtype,
    )


# --- who steps what --------------------------------------------------------------------------


def _selected(module: nn.Module, is_chosen: Select) -> list[Member]:
    """Return the selected parameters. Frozen ones are not asked for."""
    named = [(fqn, param) for fqn, param in module.named_parameters() if param.requires_grad]
    sharded = sharded_params_of([param for _, param in named])
    chosen = [
        Member(fqn, param)
        for (fqn, _), param in zip(named, sharded, strict=True)
        if is_chosen(fqn, param)
    ]
    if not chosen:
        raise ValueError(
            "owner_optimizer selects no parameter; the default takes trainable matrices in units, "
            "but for embeddings and heads. Pass select=."
        )
    overlapped = find_overlapped([member.param for member in chosen])
    for fqn, param in chosen:
        if param is overlapped:
            raise ValueError(f"parameter {fqn!r} is stepped by overlap_optimizer already.")
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
    return chosen


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


def _dealt(chosen: list[Member], make: MakeOptimizer, max_bytes: float) -> Iterator[Batch]:
    """Iterate over the batches, in the same order on all ranks.

    The matrices of one shape go round the ranks, those first that have the least to do so far. So a
    batch has a place for a matrix on every rank, or for several; the last places may be empty.
    """
    kinds: dict[tuple[Layout, torch.dtype, torch.dtype], list[Member]] = {}
    for member in chosen:
        param = member.param
        kinds.setdefault((_layout_of(param), param.dtype, dtype_of_gradient(param)), []).append(
            member
        )
    costs = defaultdict[tuple[DeviceMesh, int], float](float)  # of each rank of a mesh, so far
    number = 0
    for (layout, dtype, _), members in sorted(
        kinds.items(), key=lambda each: -_cost(each[0][0].shape)
    ):
        mesh, count = layout.mesh, len(layout.ranks)
        order = sorted(range(count), key=lambda rank: costs[mesh, rank])
        num_bytes = layout.shape.numel() * dtype.itemsize * layout.num_replicas
        size = count * max(1, math.ceil(max_bytes / max(1, num_bytes)))
        for begin in range(0, len(members), size):
            by_owner: list[list[Member]] = [[] for _ in order]
            for place, member in enumerate(members[begin : begin + size]):
                by_owner[order[place % count]].append(member)
                costs[mesh, order[place % count]] += _cost(layout.shape)
            yield Batch(f"(owners, batch {number})", layout, by_owner, make)
            number += 1


def _layout_of(param: torch.Tensor) -> Layout:
    if isinstance(param, DTensor):
        return Layout(param.device_mesh, param.shape, tuple(param.placements))
    group = param_group_of(param)  # of replicate: every rank has all of it
    assert group is not None  # ``_selected`` has checked it
    mesh = group.spec.mesh_info.mesh
    return Layout(mesh, param.shape, (Replicate(),) * mesh.ndim)


def _cost(shape: torch.Size) -> float:
    """Return the number of multiplications in ``A = M @ M.T``, ``A @ A`` and ``A @ M``."""
    if len(shape) < 2:
        return float(shape.numel() + 1)
    short, long = sorted((shape[0], math.prod(shape[1:])))
    return float(short * short * (2 * long + short) + 1)


def _template(make: MakeOptimizer, chosen: list[Member], *, is_fused: bool) -> Optimizer:
    """Return the ordinary optimizer on tensors without memory, with the checks of what it is."""
    # Some optimizers make their state at once. On the meta device it takes no memory, but fused
    # optimizers refuse that device.
    device = _layout_of(chosen[0].param).device if is_fused else torch.device("meta")
    placeholders = [placeholder_for(member.param, device) for member in chosen]
    template = make([{"params": placeholders}])
    check_template("owner_optimizer", template)
    held = [id(param) for group in template.param_groups for param in group["params"]]
    if len(template.param_groups) != 1 or sorted(held) != sorted(map(id, placeholders)):
        raise ValueError(
            f"the {type(template).__name__} does not hold the parameters that it was to be made "
            "for, in one group; make it from the param groups that are passed."
        )
    return template
