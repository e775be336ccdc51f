"""Random programs of users, a player that runs them on ranks, and the oracle on one process.

A program is data that Hypothesis draws: a model, how it is cut into units, settings, and operations
in any order. Every rank also holds the plain model, computes the gradients of all ranks with it and
does the sums of a window by hand. Activations and gradients of activations are integers (see
``integer_model``) and factors are powers of two, so that all sums are exact: after each operation
parameters, gradients and partials must agree bit for bit.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Shard
from torch.utils.checkpoint import checkpoint

import meshard
from meshard import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from tests.support.integer_model import LEARNING_RATE, integer_loss, ternary
from tests.support.strategies import MODES
from tests.support.threads import run_threads

DIM, NUM_BLOCKS, NUM_EXPERTS, MAX_RANKS = 5, 2, 2, 4
MESHES = [(2,), (1,), (2, 2), (3,), (4,), (1, 2), (2, 1), (4, 1), (1, 1)]
UNITS = ["blocks.0.inner", "blocks.1.inner", "blocks", "blocks.0", "blocks.1"]  # as they are made
POLICIES = {
    "float32": MixedPrecisionPolicy(),
    "bfloat16": MixedPrecisionPolicy(torch.bfloat16),
    "bfloat16, added in float32": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
}
BETWEEN = ["nothing", "evaluation", "inference", "unused forward", "part", "unshard", "copy"]
# Not inlet.bias: so each rank's activations require gradients, and checkpoints pass them on.
FREEZABLE = ["outlet.bias", "inlet.weight"]
FREEZABLE += [
    f"blocks.{block}.{name}" for block in "01" for name in ("inner.up.weight", "experts.0.bias")
]
EDITABLE = [f"blocks.0.{name}" for name in ("inner.up.bias", "inner.down.weight", "experts.1.bias")]
TIED = {"outlet.weight": "inlet.weight"}
FULL_STATE = StateDictOptions(full_state_dict=True)


# --- programs ------------------------------------------------------------------------------


class _Literal:
    """Its repr is what one would write: without what is as by default."""

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in given_fields(self).items())
        return f"{type(self).__name__}({given})"


def given_fields(literal: Any) -> dict[str, Any]:
    fields = dataclasses.fields(literal)
    values = {each.name: (getattr(literal, each.name), each.default) for each in fields}
    return {name: value for name, (value, default) in values.items() if value != default}


@dataclass(frozen=True, repr=False)
class Layout(_Literal):
    """How a model is cut into units: names, each with its ``reshard_after_forward``."""

    mesh: tuple[int, ...] = (2,)
    units: tuple[tuple[str, bool | int | None], ...] = ()
    reshard: bool | int | None = None  # of the root
    shards_last_dim: bool = False
    input_buffers: int | None = None  # at most, of reductions


@dataclass(frozen=True, repr=False)
class Microbatch(_Literal):
    """A forward and a backward. The inputs of each rank follow from its place in the program."""

    mode: str = "F"
    mode_of_first: str | None = None  # of the first block, where it is a unit
    skips: tuple[int, ...] = ()  # by rank: which experts it does not use, as bits
    twice: bool = False
    between: str = "nothing"  # forward and backward
    is_last: bool = True  # as set_is_last_backward says
    is_seen: bool = True  # compared at once, which waits for reductions
    fails: tuple[str, int] | None = None  # in what, before which block

    def skips_of(self, rank: int) -> int:
        return self.skips[rank] if rank < len(self.skips) else 0


Operation = Any  # a Microbatch, or a tuple: the name of a method of Player, and its arguments


@dataclass(frozen=True, repr=False)
class Program(_Literal):
    """One program. It runs on ``num_ranks`` ranks."""

    operations: tuple[Operation, ...] = ()
    kind: str = "fully_shard"
    layout: Layout = Layout()
    checkpoints: tuple[bool | None, ...] = (None,) * NUM_BLOCKS  # use_reentrant, or none
    policy: str = "float32"
    has_many_dtypes: bool = False
    offloads: bool = False
    optimizer: str = "ordinary"
    momentum: float = 0.0
    frozen: tuple[str, ...] = ()  # before it is sharded
    bucket_options: tuple[float, bool] = (25.0, True)  # of replicate: MiB, whether as views

    @property
    def num_ranks(self) -> int:
        return math.prod(self.layout.mesh)

    @property
    def is_replicated(self) -> bool:
        return self.kind == "replicate"


@st.composite
def layouts(draw: st.DrawFn, num_ranks: int | None = None) -> Layout:
    mesh = draw(st.sampled_from([m for m in MESHES if num_ranks in (None, math.prod(m))]))
    reshard = st.sampled_from([None, True, False, *([2] if mesh[-1] == 4 else [])])
    units = draw(st.dictionaries(st.sampled_from(UNITS), reshard))
    for name in ("blocks.0", "blocks.1") if "blocks" in units else ():
        units.pop(name, None)
    return Layout(
        mesh=mesh,
        units=tuple((name, units[name]) for name in UNITS if name in units),
        reshard=draw(reshard),
        shards_last_dim=draw(st.booleans()),
        input_buffers=draw(st.sampled_from([None, 1, 2])),
    )


def microbatches(*, may_fail: bool = False) -> st.SearchStrategy[Microbatch]:
    failures = st.tuples(st.sampled_from(["forward", "backward"]), st.integers(0, NUM_BLOCKS))
    return st.builds(
        Microbatch,
        mode=st.sampled_from("FNR"),
        mode_of_first=st.sampled_from([None, None, *"FNR"]),
        skips=st.lists(st.integers(0, 2**NUM_EXPERTS - 1), max_size=MAX_RANKS).map(tuple),
        twice=st.booleans(),
        between=st.sampled_from(BETWEEN),
        is_last=st.sampled_from([True, True, False]),
        is_seen=st.booleans(),
        fails=failures if may_fail else st.none(),
    )


def others() -> st.SearchStrategy[tuple[Any, ...]]:
    """Operations that are no microbatch, except ``shard_again``."""
    edits = st.sampled_from(["drop", "double", "replace", "alias", "own"])
    return st.one_of(
        st.tuples(st.sampled_from(["step", "step", "finalize", "clip", "evaluate", "infer"])),
        st.tuples(st.just("zero"), st.sampled_from(["module", "none", "zeros"])),
        st.tuples(st.just("factor"), st.sampled_from([1.0, 0.5, 8.0])),
        st.tuples(st.sampled_from(["freeze", "thaw"]), st.sampled_from(FREEZABLE)),
        st.tuples(st.just("edit"), edits, st.sampled_from(EDITABLE)),
        st.tuples(st.sampled_from(["unshard", "reshard"]), st.integers(0, NUM_BLOCKS - 1)),
        st.tuples(st.just("keep"), st.booleans(), st.booleans()),
        st.tuples(st.sampled_from(["save", "load", "save_full", "save_optimizer"])),
        st.tuples(st.just("copy"), st.booleans()),
    )


@st.composite
def programs(
    draw: st.DrawFn,
    num_ranks: int | None = None,
    *,
    kind: str | None = None,
    max_operations: int = 12,
) -> Program:
    """Programs of both kinds, or of one."""

    def choose(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    kind = kind or choose("fully_shard", "fully_shard", "replicate")
    layout, policy = draw(layouts(num_ranks)), choose(*POLICIES)
    fields: dict[str, Any] = {}
    other = others()
    if kind == "replicate":
        layout = Layout((math.prod(layout.mesh),))
        fields["bucket_options"] = choose((25.0, True), (2e-4, True), (2e-4, False))
        fields["optimizer"] = choose("ordinary", "overlap")
    else:
        other |= st.tuples(st.just("shard_again"), layouts(math.prod(layout.mesh)))
        fields["offloads"] = choose(False, False, True)
        fields["optimizer"] = choose("ordinary", "flat", "overlap")
    often = microbatches()
    kinds = [often, often, often, often | microbatches(may_fail=True), other, other]
    each = st.sampled_from(kinds).flatmap(lambda kind: kind)  # one_of would weigh every operation
    return Program(
        operations=tuple(draw(st.lists(each, max_size=max_operations))),
        kind=kind,
        layout=layout,
        checkpoints=draw(st.tuples(*[st.sampled_from([None, True, False])] * NUM_BLOCKS)),
        policy=policy,
        has_many_dtypes=choose(False, policy == "float32"),
        momentum=choose(0.0, 0.5),
        frozen=tuple(draw(st.lists(st.sampled_from(FREEZABLE), max_size=2, unique=True))),
        **fields,
    )


# --- the model -----------------------------------------------------------------------------


class Stop(Exception):
    """Raised in the middle of a forward or backward."""


class _StopBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise Stop


class Layer(nn.Linear):
    """Computes in the dtype of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class Inner(nn.Module):
    """Two layers beside a residual path.

    Each path rounds its gradient: their sum is then exact, in bfloat16 too, in whatever order
    autograd adds.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = Layer(DIM, hidden), Layer(hidden, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ternary(x + self.down(ternary(self.up(ternary(x)))))


class Block(nn.Module):
    """Two layers that may be recomputed, experts that ranks choose, and a parameter without use."""

    def __init__(self, hidden: int, use_reentrant: bool | None) -> None:
        super().__init__()
        self.inner = Inner(hidden)
        self.experts = nn.ModuleList(Layer(DIM, DIM) for _ in range(NUM_EXPERTS))
        self.unused = nn.Parameter(torch.empty(3))
        self.use_reentrant = use_reentrant

    def forward(
        self, x: torch.Tensor, side: torch.Tensor | None, *, skips: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.use_reentrant is None or not torch.is_grad_enabled():
            x = self.inner(x)
        else:
            x = checkpoint(self.inner, x, use_reentrant=self.use_reentrant)
        for number, expert in enumerate(self.experts):
            x = x if skips >> number & 1 else ternary(x + expert(ternary(x)))
        return (x if side is None else ternary(x + side)), x


class Net(nn.Module):
    """Blocks between two layers with one weight."""

    def __init__(self, program: Program, checkpoints: tuple[bool | None, ...]) -> None:
        super().__init__()
        self.inlet, self.outlet = Layer(DIM, DIM), Layer(DIM, DIM)
        self.outlet.weight = self.inlet.weight
        self.blocks = nn.ModuleList(
            Block(3 + 2 * number, each) for number, each in enumerate(checkpoints)
        )
        for block in self.blocks if program.has_many_dtypes else ():
            block.inner.down.double()
            block.experts[1].bfloat16()
        self.fails: tuple[str, int] | None = None  # what, and before which block
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randint(-2, 3, param.shape, generator=generator) / 2)

    def _may_stop(self, place: int, x: torch.Tensor) -> torch.Tensor:
        if self.fails == ("forward", place):
            raise Stop
        return _StopBackward.apply(x) if self.fails == ("backward", place) else x

    def forward(self, x: torch.Tensor, skips: int = 0, twice: bool = False) -> torch.Tensor:
        x, side = ternary(self.inlet(x)), None
        for number, block in enumerate(self.blocks):
            x, side = block(self._may_stop(number, x), side, skips=skips)
            if twice:
                x, _ = block(x, side, skips=skips)
        return ternary(self.outlet(self._may_stop(NUM_BLOCKS, x)))


# --- the oracle ----------------------------------------------------------------------------

Sums = dict[str, torch.Tensor]


def _add(into: Sums, name: str, new: torch.Tensor) -> None:
    into[name] = into[name] + new if name in into else new


class Oracle:
    """The plain model, whose ``.grad`` is what ranks must show, and what they must hold beside it.

    The units of the first block, and all others, may reduce to different degrees.
    """

    def __init__(self, program: Program, device: str) -> None:
        self.program, self.device, self.num_ranks = program, device, program.num_ranks
        self.net: Any = Net(program, (None,) * NUM_BLOCKS).to(device)
        for name in program.frozen:
            self.net.get_parameter(name).requires_grad_(False)
        self.params = dict(self.net.named_parameters())
        self.optimizer = torch.optim.SGD(self.net.parameters(), LEARNING_RATE, program.momentum)
        self.dtype = POLICIES[program.policy].param_dtype or torch.float32
        # Sums of bfloat16 are exact up to 256: of 4 ranks, 3 microbatches and 2 calls of a block.
        self.is_narrow = self.dtype is not torch.float32 or program.has_many_dtypes
        self.factor = 4.0 if program.num_ranks == 3 else None  # a third is not exact
        self.saved: Sums | None = None
        self.start(program.layout.mesh)

    def start(self, mesh: tuple[int, ...]) -> None:
        self.replicas = mesh[0] if len(mesh) == 2 else 1
        self.is_flat = len(mesh) == 1
        self.zero(to_none=True)

    def zero(self, *, to_none: bool) -> None:
        self.optimizer.zero_grad(to_none)
        self.whole: list[Sums] = [{} for _ in range(self.num_ranks)]
        self.partials: list[Sums] = [{} for _ in range(self.replicas)]  # means over shard groups
        self.open: set[bool] = set()  # those of the first block or not, which hold something
        self.windows: set[bool] = set()  # likewise; also where nothing is held after R
        self.count = 0  # microbatches that .grad or a sum may have

    def inputs(self, seed: int) -> torch.Tensor:
        """Return ``[ranks, rows, DIM]``."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.num_ranks, 1 if self.is_narrow else 2, DIM)
        return torch.randint(-1, 2, shape, generator=generator).float().to(self.device)

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        """Compute in the dtype of the policy."""
        if self.program.policy == "float32":
            return self.net(x, *args)
        cast = {name: param.to(self.dtype) for name, param in self.params.items()}
        return torch.func.functional_call(self.net, cast, (x.to(self.dtype), *args)).float()

    def backward(
        self, seed: int, microbatch: Microbatch, modes: tuple[str, str], *, ends: bool
    ) -> None:
        """Do what a microbatch of all ranks does; ``modes`` of the others and the first block."""
        trained = {name: param for name, param in self.params.items() if param.requires_grad}
        for rank, x in enumerate(self.inputs(seed)):
            loss = integer_loss(self.forward(x, microbatch.skips_of(rank), microbatch.twice))
            found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
            for name, gradient in zip(trained, found, strict=True):
                if gradient is not None:
                    _add(self.whole[rank], name, gradient.double())
        self.count += 1
        for is_first in (False, True):
            mode = modes[is_first]
            self.open.add(is_first)  # also if no rank had a gradient: none can know that yet
            self.windows.add(is_first)
            if mode != "N":
                self.reduce(is_first, over_replicas=mode == "F")
            if mode == "F" and ends:
                self.windows.discard(is_first)

    def reduce(self, is_first: bool, *, over_replicas: bool) -> None:
        if self.program.is_replicated and not over_replicas:
            return  # replicas hold whole gradients until all are reduced

        def taken(sums: Sums) -> Iterator[tuple[str, torch.Tensor]]:
            for name in [name for name in sums if name.startswith("blocks.0.") == is_first]:
                yield name, sums.pop(name)

        divisor = (self.factor or self.num_ranks) / self.replicas
        for rank, sums in enumerate(self.whole):
            for name, value in taken(sums):
                _add(self.partials[rank * self.replicas // self.num_ranks], name, value / divisor)
        if over_replicas or self.is_flat:
            for sums in self.partials:
                for name, value in taken(sums):
                    param, new = self.params[name], value / self.replicas
                    old = 0.0 if param.grad is None else param.grad
                    param.grad = (old + new).to(param.dtype)
            self.open.discard(is_first)

    def finalize(self) -> None:
        for is_first in (False, True):
            self.reduce(is_first, over_replicas=True)
        self.windows.clear()

    def held_by(self, rank: int) -> dict[str, torch.Tensor | None]:
        """Return what ``pending_gradients`` shows this rank: a partial, or None for a whole one."""
        partials = self.partials[rank * self.replicas // self.num_ranks]
        return {**partials, **dict.fromkeys(self.whole[rank])}


# --- the player ----------------------------------------------------------------------------


def own_part(unsharded: torch.Tensor, like: Any) -> torch.Tensor:
    """Return this rank's part of ``unsharded``, cut as ``like``."""
    for axis, placement in enumerate(getattr(like, "placements", ())):
        if isinstance(placement, Shard):
            parts = unsharded.chunk(like.device_mesh.size(axis), placement.dim)
            place = like.device_mesh.get_local_rank(axis)
            empty = unsharded.narrow(placement.dim, 0, 0)
            unsharded = parts[place] if place < len(parts) else empty
    return unsharded


def _refusal(action: Callable[[], object]) -> str:
    try:
        action()
    except RuntimeError as error:
        if "unit" not in str(error):
            raise
        return str(error)
    return ""


class Player:
    """Runs a program on one rank, beside its oracle."""

    def __init__(self, program: Program, device: str = "cpu") -> None:
        # Of checkpoints whose input needs no gradient, and late edits.
        warnings.simplefilter("ignore")
        self.program, self.device, self.rank = program, device, dist.get_rank()
        self.oracle = Oracle(program, device)
        self.model = self.shard(program.layout)
        self.optimizer = self.make_optimizer()
        self.steps_in_backward = program.optimizer == "overlap"
        self.place, self.where = 0, ""

    def shard(self, layout: Layout) -> Any:
        program = self.program
        model: Any = Net(program, program.checkpoints).to(self.device)
        for name, param in self.oracle.params.items():
            model.get_parameter(name).requires_grad_(param.requires_grad)
        mesh = init_device_mesh(self.device, layout.mesh)
        kwargs: dict[str, Any] = {"mp_policy": POLICIES[program.policy]}
        if program.is_replicated:
            cap, as_views = program.bucket_options
            kwargs |= {"bucket_cap_mb": cap, "gradient_as_bucket_view": as_views}
            meshard.replicate(model, mesh, **kwargs)
        else:
            if layout.shards_last_dim:
                kwargs["shard_placement_fn"] = lambda param: Shard(param.dim() - 1)
            if program.offloads:
                kwargs["offload_policy"] = CPUOffloadPolicy(pin_memory=self.device != "cpu")
            for name, reshard in (*layout.units, ("", layout.reshard)):
                unit = model.get_submodule(name)
                unit = [*unit] if name == "blocks" else unit
                meshard.fully_shard(unit, mesh, reshard_after_forward=reshard, **kwargs)
            if layout.input_buffers is not None:
                model.set_reduce_scatter_max_input_buffers(layout.input_buffers)
        self.has_first = "blocks.0" in dict(layout.units)
        if self.oracle.factor is not None:
            model.set_gradient_divide_factor(self.oracle.factor)
        return model

    def make_optimizer(self) -> torch.optim.Optimizer:
        params, options = list(self.model.parameters()), {"lr": LEARNING_RATE}
        options["momentum"] = self.program.momentum
        if self.program.optimizer == "ordinary":
            return torch.optim.SGD(params, **options)
        make = getattr(meshard, f"{self.program.optimizer}_optimizer")
        return make(self.model, torch.optim.SGD, params, **options)  # type: ignore[no-any-return]

    def play(self, place: int, operation: Operation) -> None:
        self.place, self.where = place, f"operation {place}, {operation!r}"
        if isinstance(operation, Microbatch):
            if self.oracle.is_narrow and self.oracle.count == 3:
                return  # its sums would not be exact
            self.microbatch(operation)
            if operation.is_seen:
                self.check()
            return
        name, *arguments = operation
        if name != "zero":
            meshard.pending_gradients(self.model)  # waits for what is on its way
        getattr(self, f"do_{name}")(*arguments)
        self.check()

    # --- microbatches --------------------------------------------------------------------

    def microbatch(self, microbatch: Microbatch) -> None:
        model, oracle, mode = self.model, self.oracle, microbatch.mode
        is_last, first = microbatch.is_last, microbatch.mode_of_first or mode
        if self.steps_in_backward:
            is_last = is_last and mode == "F"
        if not self.has_first or (self.steps_in_backward and is_last):
            first = mode  # a step is of all units
        model.set_gradient_sync(MODES[mode])
        if self.has_first:
            model.blocks[0].set_gradient_sync(MODES[first])
        if self.program.is_replicated:
            is_last = True
        else:
            model.set_is_last_backward(is_last)
        x = oracle.inputs(self.place)[self.rank]
        if microbatch.fails is not None:
            self.fail(microbatch, *microbatch.fails, x)
            return
        loss = self.loss(microbatch, x)
        after = self.interrupt(microbatch.between, x)
        loss.backward()
        after()
        oracle.backward(self.place, microbatch, (mode, first), ends=is_last)
        if self.steps_in_backward and is_last and mode == "F":
            left = [name for name, p in model.named_parameters() if p.grad is not None]
            assert not left, f"{self.where}: gradients are left of {left}, on rank {self.rank}"
            self.optimizer.step()
            oracle.optimizer.step()
            self.do_zero("none")

    def loss(self, microbatch: Microbatch, x: torch.Tensor) -> torch.Tensor:
        out = self.model(x, microbatch.skips_of(self.rank), microbatch.twice)
        return integer_loss(out.float())

    def fail(self, microbatch: Microbatch, what: str, place: int, x: torch.Tensor) -> None:
        """Half a window is void."""
        meshard.pending_gradients(self.model)
        if self.steps_in_backward or self.program.is_replicated:
            # Before a unit is stepped, or a bucket complete on some ranks alone: they would wait.
            place = NUM_BLOCKS
        self.model.fails = (what, place)
        try:
            self.loss(microbatch, x).backward()
        except Stop:
            pass
        else:
            raise AssertionError(f"{self.where}: nothing was raised")
        finally:
            self.model.fails = None
        if what == "backward" or self.program.is_replicated or self.steps_in_backward:
            self.model.state_dict()  # an emergency checkpoint
            if self.program.is_replicated:
                self.model.reset_iter_state()
            self.do_zero("none")
        elif self.oracle.windows:
            self.oracle.zero(to_none=True)

    def interrupt(self, what: str, x: torch.Tensor) -> Callable[[], Any]:
        """Do something between a forward and its backward; return what to do after it."""
        model = self.model
        if what == "evaluation":
            with torch.no_grad():
                model(x, 2, True)
        elif what == "inference":
            with torch.inference_mode():
                model(x)
        elif what == "unused forward":
            model(x)
        elif what == "part" and isinstance(model.blocks[1], FSDPModule):
            with torch.no_grad():
                model.blocks[1](x, None, skips=0)
        elif what == "copy":
            [copy.deepcopy(param.detach()) for param in model.parameters()]
        elif what == "unshard" and not self.program.is_replicated:
            handle = model.unshard(async_op=True)
            if x[0, 0] < 0 or self.rank == 0:  # ranks may wait at different moments
                handle.wait()
            return lambda: (handle.wait(), model.reshard())
        return lambda: None

    # --- other operations ----------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held beside ``.grad``, nor in it if units are stepped in backward."""
        oracle = self.oracle
        return not (oracle.open or oracle.windows or (self.steps_in_backward and oracle.count))

    def do_zero(self, how: str) -> None:
        to_none = how == "none" or self.steps_in_backward  # which frees what it has used
        if how == "module":
            self.model.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=to_none)
        self.oracle.zero(to_none=to_none or how == "module")

    def expect_refusal(self, action: Callable[[], object], *, expected: bool) -> bool:
        refusal = _refusal(action)
        wanted = "a refusal" if expected else "none"
        assert bool(refusal) == expected, (
            f"{self.where} on rank {self.rank}: {refusal}, not {wanted}"
        )
        return expected

    def do_step(self) -> None:
        if self.steps_in_backward:
            return
        if not self.expect_refusal(self.optimizer.step, expected=bool(self.oracle.open)):
            self.oracle.optimizer.step()
            self.oracle.windows.clear()

    def do_factor(self, factor: float) -> None:
        set_it, is_open = self.model.set_gradient_divide_factor, bool(self.oracle.windows)
        if not self.expect_refusal(lambda: set_it(factor), expected=is_open):
            self.oracle.factor = factor

    def do_freeze(self, name: str, to: bool = False) -> None:
        if self.is_idle or not (self.program.is_replicated or self.steps_in_backward):
            for each in (self.model, self.oracle.net):
                each.get_parameter(name).requires_grad_(to)

    def do_thaw(self, name: str) -> None:
        self.do_freeze(name, True)

    def do_edit(self, how: str, name: str) -> None:
        for net in () if self.steps_in_backward else (self.model, self.oracle.net):
            param = net.get_parameter(name)
            if how == "drop":
                param.grad = None
            elif how == "own":
                param.grad = torch.ones_like(param.detach())
            elif param.grad is not None and how == "double":
                param.grad.mul_(2)
            elif param.grad is not None:
                param.grad = param.grad * 2 if how == "replace" else param.grad.detach()

    def do_clip(self) -> None:
        """By a norm that is not reached."""
        if self.is_idle and not self.steps_in_backward:
            norm = meshard.clip_grad_norm_(self.model, 1e9)
            wanted = nn.utils.clip_grad_norm_(self.oracle.net.parameters(), 1e9)
            torch.testing.assert_close(norm, wanted, check_dtype=False)

    def _evaluate(self, model: nn.Module) -> None:
        x = self.oracle.inputs(self.place)[self.rank]
        with torch.no_grad():
            found, wanted = model(x).float(), self.oracle.forward(x)
        assert torch.equal(found, wanted), (
            f"{self.where} on rank {self.rank}: {found}, not {wanted}"
        )

    def do_evaluate(self) -> None:
        if self.rank == 0 or not self.program.is_replicated:  # replicas need no other rank
            self._evaluate(self.model)

    def do_infer(self) -> None:
        with torch.inference_mode():
            self._evaluate(self.model)

    def do_unshard(self, block: int) -> None:
        if isinstance(unit := self.model.blocks[block], FSDPModule):
            unit.unshard()
            unit.reshard()

    def do_reshard(self, block: int) -> None:
        if isinstance(unit := self.model.blocks[block], FSDPModule):
            unit.reshard()

    def do_keep(self, forward: bool, backward: bool) -> None:
        if not self.program.is_replicated:
            self.model.set_reshard_after_forward(not forward)
            self.model.set_reshard_after_backward(not backward)

    def do_finalize(self) -> None:
        if self.is_idle or not self.steps_in_backward:
            meshard.finalize_gradients(self.model)
            self.oracle.finalize()

    def do_save(self) -> None:
        if not self.expect_refusal(self.model.state_dict, expected=bool(self.oracle.open)):
            self.saved = {name: value.clone() for name, value in self.model.state_dict().items()}
            params = self.oracle.params.items()
            self.oracle.saved = {name: param.detach().clone() for name, param in params}

    def do_load(self) -> None:
        if self.oracle.saved is not None:
            self.model.load_state_dict(self.saved)
            with torch.no_grad():
                for name, value in self.oracle.saved.items():
                    self.oracle.params[name].copy_(value)

    def do_save_full(self) -> None:
        if not self.is_idle:
            return
        found = get_model_state_dict(self.model, options=FULL_STATE)
        saved = {name: value.clone() for name, value in found.items()}  # on one rank, they alias
        for name, value in self.oracle.net.state_dict().items():
            value = value.to(saved[name].device)
            assert torch.equal(saved[name], value), f"{self.where}: {name} on rank {self.rank}"
        with torch.no_grad():
            for param in self.model.parameters():
                param.zero_()
        set_model_state_dict(self.model, saved, options=FULL_STATE)

    def do_save_optimizer(self) -> None:
        if self.is_idle:
            self.renew_optimizer(self.optimizer.state_dict())

    def renew_optimizer(self, state: dict[str, Any]) -> None:
        if self.steps_in_backward:
            for each in meshard.OverlappedOptimizer.attached_to(self.model):
                each.detach()
        self.optimizer = self.make_optimizer()
        self.optimizer.load_state_dict(state)

    def do_copy(self, adopts: bool) -> None:
        if not self.is_idle:
            return
        if self.program.is_replicated:
            self.do_zero("none")  # copies of replicas have no gradients
        copied = copy.deepcopy(self.model)
        self._evaluate(copied)
        if adopts:
            state = self.optimizer.state_dict()
            self.model = copied
            self.renew_optimizer(state)

    def do_shard_again(self, layout: Layout) -> None:
        """Go on with another mesh and other units, without gradients and momentum."""
        if not self.is_idle:
            return
        state = get_model_state_dict(self.model, options=FULL_STATE)
        self.model = self.shard(layout)
        set_model_state_dict(self.model, state, options=FULL_STATE)
        self.optimizer = self.make_optimizer()
        self.oracle.start(layout.mesh)
        self.oracle.optimizer.state.clear()
        self.oracle.saved = None

    # --- comparison ----------------------------------------------------------------------

    def check(self) -> None:
        """Compare every parameter, gradient and partial, bit for bit."""
        oracle, params = self.oracle, dict(self.model.named_parameters())
        pending = meshard.pending_gradients(self.model)
        shown = {TIED.get(name, name): partial for name, partial in pending.items()}
        held = oracle.held_by(self.rank)
        for name, wanted in oracle.params.items():
            self.same("parameter", name, params[name].detach(), wanted.detach())
            if not (self.steps_in_backward and oracle.count):
                self.same("gradient", name, params[name].grad, wanted.grad)
            is_same = (name in shown) == (name in held)
            assert is_same, f"{self.at('pending gradient', name)}: {name in shown}"
            if name in held:
                self.same("partial", name, shown[name], held[name])
                if shown[name] is not None:
                    assert isinstance(shown[name].placements[0], Partial), self.at("partial", name)
        assert bool(pending) == bool(oracle.open), f"{self.where}: pending are {pending}"

    def at(self, what: str, name: str) -> str:
        modules = self.model.named_modules()
        units = [path for path, module in modules if isinstance(module, FSDPModule)]
        unit = max((path for path in units if name.startswith(path)), key=len, default="")
        return f"{self.where}: {what} of {name} (unit {unit or '(root)'}) on rank {self.rank}"

    def same(self, what: str, name: str, found: Any, wanted: torch.Tensor | None) -> None:
        is_there = f"{self.at(what, name)}: {found}, not {wanted}"
        assert (found is None) == (wanted is None), is_there
        if found is not None and wanted is not None:
            local = found.to_local() if hasattr(found, "to_local") else found
            wanted = own_part(wanted, found).to(local.device)  # shards may be in host memory
            is_same = torch.equal(local, wanted.to(local.dtype))
            assert is_same, f"{self.at(what, name)}: {local}, not {wanted}"


def play(program: Program, device: str = "cpu") -> None:
    """Run a program: a function for the ranks of its mesh."""
    player = Player(program, device)
    for place, operation in enumerate(program.operations):
        player.play(place, operation)
    player.where = f"operation {len(program.operations)}, the end"
    player.check()


# --- failures ------------------------------------------------------------------------------

_found: dict[Program, AssertionError] = {}  # Hypothesis plays what has failed again


def run(program: Program, on: Callable[..., Any] = run_threads, *, seconds: float = 25) -> None:
    """Play a program on its ranks; if it fails, fail with the shortest program that does.

    Hypothesis would take minutes for that: it does not know which parts depend on each other.
    """

    def failure(program: Program, timeout: float = 120) -> Exception | None:
        try:
            on(play, program.num_ranks, program, timeout=timeout)
        except Exception as error:
            return error
        return None

    if program in _found:
        raise _found[program]
    if (error := failure(program)) is None:
        return
    shortest, end, is_done = program, time.monotonic() + seconds, False
    while not is_done:
        is_done = True
        for simpler in _simpler(shortest, str(error)):
            if time.monotonic() > end:
                break
            if (other := failure(simpler, timeout=20)) is not None:
                shortest, error, is_done = simpler, other, False
                break
    _found[program] = AssertionError(f"{error}\nTo play it again: run({shortest!r})")
    raise _found[program] from error


def _simpler(program: Program, error: str) -> Iterator[Program]:
    """Yield programs with one thing less, the most promising first."""
    operations, place = program.operations, re.search(r"operation (\d+)", error)
    if place is not None and int(place[1]) + 1 < len(operations):
        yield dataclasses.replace(program, operations=operations[: int(place[1]) + 1])
    for number in reversed(range(len(operations))):
        yield dataclasses.replace(
            program, operations=operations[:number] + operations[number + 1 :]
        )
    for simpler in _with_defaults(program, keep=("operations",)):
        yield simpler
    for layout in _with_defaults(program.layout):
        yield dataclasses.replace(program, layout=layout)
    for number, operation in enumerate(operations):
        for simpler in _with_defaults(operation) if isinstance(operation, Microbatch) else ():
            changed = (*operations[:number], simpler, *operations[number + 1 :])
            yield dataclasses.replace(program, operations=changed)


def _with_defaults(literal: Any, keep: tuple[str, ...] = ()) -> Iterator[Any]:
    """Yield what has all fields as by default, and what has one of them so."""
    given = {name: value for name, value in given_fields(literal).items() if name not in keep}
    defaults = {each.name: each.default for each in dataclasses.fields(literal)}
    if len(given) > 1:
        yield dataclasses.replace(literal, **{name: defaults[name] for name in given})
    for name in given:
        yield dataclasses.replace(literal, **{name: defaults[name]})
