"""Use ``run`` to play random programs of users on ranks, beside the oracle on one process.

A program is data that Hypothesis draws: a model, how it is cut into units, settings, and operations
in any order. Every rank also holds the plain model, computes the gradients of all ranks with it and
does the sums of a window by hand. Activations and gradients of activations are integers (see
``integer_model``) and factors are powers of two, so that all sums are exact: after each operation
parameters, gradients and partials must agree bit for bit.

``run`` plays a program. If it fails, it fails with the shortest program found that does, as a
command that plays it again. A new operation is a method ``do_...`` of ``Player`` and a line in
``others``; what it changes in the plain model, it does to ``self.oracle``.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import re
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

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
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import meshard
from meshard import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from tests.support.integer_model import LEARNING_RATE, integer_loss, ternary
from tests.support.rank_pool import shared_pool
from tests.support.strategies import MODES
from tests.support.threads import run_threads

DIM, NUM_BLOCKS, NUM_EXPERTS, MAX_RANKS = 5, 2, 2, 4
MESHES = [(2,), (2, 2), (2, 1), (2, 2), (1,), (3,), (4,), (1, 2), (4, 1), (1, 1)]  # two axes often
UNITS = ["blocks.0.inner", "blocks.1.inner", "blocks", "blocks.0", "blocks.1"]  # as they are made
POLICIES = {
    "float32": MixedPrecisionPolicy(),
    "bfloat16": MixedPrecisionPolicy(torch.bfloat16),
    "bfloat16, added in float32": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
}
BETWEEN = ["nothing", "evaluation", "inference", "unused forward", "part", "unshard", "copy"]
# Not inlet.bias: so each rank's activations require gradients, and checkpoints pass them on.
FREEZABLE = ["outlet.bias", "inlet.weight", "blocks.0.inner.up.weight", "blocks.0.experts.0.bias"]
FREEZABLE += ["blocks.1.inner.up.weight", "blocks.1.experts.0.bias"]
EDITABLE = [f"blocks.0.{name}" for name in ("inner.up.bias", "inner.down.weight", "experts.1.bias")]
TIED = {"outlet.weight": "inlet.weight"}
FULL_STATE = StateDictOptions(full_state_dict=True)


# --- programs ------------------------------------------------------------------------------


class Literal:
    """A dataclass whose repr is what one would write: without what is as by default."""

    def given(self) -> dict[str, Any]:
        fields = dataclasses.fields(self)
        values = {each.name: (getattr(self, each.name), each.default) for each in fields}
        return {name: value for name, (value, default) in values.items() if value != default}

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.given().items())
        return f"{type(self).__name__}({given})"


@dataclass(frozen=True, repr=False)
class Layout(Literal):
    """How a model is cut into units: names, each with its ``reshard_after_forward``."""

    mesh: tuple[int, ...] = (2,)
    units: tuple[tuple[str, bool | int | None], ...] = ()
    reshard: bool | int | None = None  # of the root
    shards_last_dim: bool = False
    input_buffers: int | None = None  # at most, of reductions


@dataclass(frozen=True, repr=False)
class Microbatch(Literal):
    """A forward and a backward. The inputs of each rank follow from its place in the program."""

    mode: str = "F"
    mode_of_first: str | None = None  # of the first block, where it is a unit
    skips: tuple[int, ...] = (0,) * MAX_RANKS  # by rank: which experts it does not use, as bits
    twice: bool = False  # whether each block is called twice
    between: str = "nothing"  # forward and backward
    is_last: bool = True  # as set_is_last_backward says
    is_seen: bool = True  # compared at once, which waits for reductions
    fails: tuple[str, int] | None = None  # in what, before which block; ("loss", 0): above all


Operation = Microbatch | tuple[Any, ...]  # ("step",) plays Player.do_step, with what follows


@dataclass(frozen=True, repr=False)
class Program(Literal):
    """One program. It runs on ``num_ranks`` ranks."""

    operations: tuple[Operation, ...]
    buckets: tuple[float, bool] | None = None  # of replicate: MiB, whether as views; or none
    layout: Layout = Layout()
    checkpoints: tuple[bool | None, ...] = (None,) * NUM_BLOCKS  # use_reentrant, or none
    policy: str = "float32"
    has_many_dtypes: bool = False
    offloads: bool = False
    optimizer: str = "ordinary"
    momentum: float = 0.0
    frozen: tuple[str, ...] = ()  # before it is sharded

    @property
    def num_ranks(self) -> int:
        return math.prod(self.layout.mesh)

    @property
    def is_replicated(self) -> bool:
        return self.buckets is not None


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
        skips=st.tuples(*[st.integers(0, 2**NUM_EXPERTS - 1)] * MAX_RANKS),
        twice=st.booleans(),
        between=st.sampled_from(BETWEEN),
        is_last=st.sampled_from([True, True, False]),
        is_seen=st.booleans(),
        fails=failures if may_fail else st.none(),
    )


def others() -> st.SearchStrategy[tuple[Any, ...]]:
    """Operations that are no microbatch, except ``shard_again``."""
    edits = st.sampled_from(["drop", "double", "replace", "alias", "own"])
    zero = st.tuples(st.just("zero"), st.sampled_from(["module", "none", "zeros"]))
    return st.one_of(
        zero,
        zero,
        st.tuples(st.sampled_from(["step", "step", "finalize", "clip"])),
        st.tuples(st.just("evaluate"), st.sampled_from(["no_grad", "inference_mode"])),
        st.tuples(st.just("factor"), st.sampled_from([1.0, 0.5, 8.0])),
        st.tuples(st.just("train"), st.sampled_from(FREEZABLE), st.booleans()),
        st.tuples(st.just("edit"), edits, st.sampled_from(EDITABLE)),
        st.tuples(st.just("reshard"), st.integers(0, NUM_BLOCKS - 1), st.booleans()),
        st.tuples(st.just("keep"), st.booleans(), st.booleans()),
        st.tuples(st.sampled_from(["save", "load", "save_full", "save_optimizer"])),
        st.tuples(st.just("copy"), st.booleans()),
    )


@st.composite
def programs(
    draw: st.DrawFn, num_ranks: int | None = None, *, replicates: bool | None = None
) -> Program:
    """Programs of ``fully_shard`` and of ``replicate``, or of one of them."""

    def choose(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    layout, policy, other = draw(layouts(num_ranks)), choose(*POLICIES), others()
    if choose(False, False, True) if replicates is None else replicates:
        layout = Layout((math.prod(layout.mesh),))
        fields = {"buckets": choose((25.0, True), (3e-5, True), (3e-5, False))}
        fields["optimizer"] = choose("ordinary", "overlap")
    else:
        other |= st.tuples(st.just("shard_again"), layouts(math.prod(layout.mesh)))
        fields = {"offloads": choose(False, False, True)}
        fields["optimizer"] = choose("ordinary", "local", "overlap")
    often = microbatches()
    kinds = [often, often, often, often | microbatches(may_fail=True), other, other]
    each = st.sampled_from(kinds).flatmap(lambda kind: kind)  # one_of would weigh every operation
    some = st.lists(each, min_size=6, max_size=12)  # fewer find nothing
    return Program(
        operations=tuple(draw(some)),
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


def _stop(*_: object) -> NoReturn:
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
        self, x: torch.Tensor, side: torch.Tensor | None = None, *, skips: int = 0
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
        block: Any
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
            _stop()
        if self.fails == ("backward", place):
            x.register_hook(_stop)
        return x

    def forward(self, x: torch.Tensor, skips: int = 0, twice: bool = False) -> torch.Tensor:
        x, side = ternary(self.inlet(x)), None
        for number, block in enumerate(self.blocks):
            x, side = block(self._may_stop(number, x), side, skips=skips)
            if twice:
                x, _ = block(x, side, skips=skips)
        return ternary(self.outlet(self._may_stop(NUM_BLOCKS, x))).float()


# --- the oracle ----------------------------------------------------------------------------

Sums = dict[str, Any]  # by parameter name


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
        # Three replicas send sums times 3, see ``resolve_divisors``: then of one microbatch only.
        self.is_narrow = self.dtype is not torch.float32 or program.has_many_dtypes
        self.most = 1 if program.is_replicated and program.num_ranks == 3 else 3
        self.factor = 4.0 if program.num_ranks == 3 else None  # a third is not exact
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

    @property
    def is_full(self) -> bool:
        """Whether the sum with one more microbatch might not be exact."""
        return self.is_narrow and self.count >= self.most

    def inputs(self, seed: int) -> torch.Tensor:
        """Return ``[ranks, rows, DIM]``."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.num_ranks, 1 if self.is_narrow else 2, DIM)
        return torch.randint(-1, 2, shape, generator=generator).float().to(self.device)

    def backward(
        self, seed: int, microbatch: Microbatch, modes: tuple[str, str], *, ends: bool
    ) -> None:
        """Do what a microbatch of all ranks does; ``modes`` of the others and the first block."""
        trained = {name: param for name, param in self.params.items() if param.requires_grad}
        for x, skips, sums in zip(self.inputs(seed), microbatch.skips, self.whole, strict=False):
            loss = integer_loss(self.net(x.to(self.dtype), skips, microbatch.twice))
            found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
            for name, gradient in zip(trained, found, strict=True):
                if gradient is not None:
                    sums[name] = sums.get(name, 0.0) + gradient.double()
        self.count += 1
        for is_first in (False, True):
            self.open.add(is_first)  # also if no rank had a gradient: none can know that yet
            self.windows.add(is_first)
            if modes[is_first] != "N":
                self.reduce(is_first, over_replicas=modes[is_first] == "F")
            if modes[is_first] == "F" and ends:
                self.windows.discard(is_first)

    def reduce(self, is_first: bool, *, over_replicas: bool) -> None:
        if self.program.is_replicated and not over_replicas:
            return  # replicas hold whole gradients until all are reduced

        def taken(sums: Sums) -> Iterator[tuple[str, torch.Tensor]]:
            for name in [name for name in sums if name.startswith("blocks.0.") == is_first]:
                yield name, sums.pop(name)

        divisor = (self.factor or self.num_ranks) / self.replicas
        for rank, sums in enumerate(self.whole):
            partials = self.partials[rank * self.replicas // self.num_ranks]
            for name, value in taken(sums):
                partials[name] = partials.get(name, 0.0) + value / divisor
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

    def held_by(self, rank: int) -> Sums:
        """Return what ``pending_gradients`` shows this rank: a partial, or None for a whole one."""
        partials = self.partials[rank * self.replicas // self.num_ranks]
        return {**partials, **dict.fromkeys(self.whole[rank])}


# --- the player ----------------------------------------------------------------------------


def cloned(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() for name, value in state.items()}


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
        self.saved: list[Any] = []  # states of the model and of the oracle

    def shard(self, layout: Layout) -> Any:
        program, mesh = self.program, init_device_mesh(self.device, layout.mesh)
        model: Any = Net(program, program.checkpoints).to(self.device)
        for name, param in self.oracle.params.items():
            model.get_parameter(name).requires_grad_(param.requires_grad)
        kwargs: dict[str, Any] = {"mp_policy": POLICIES[program.policy]}
        if program.buckets is not None:
            cap, as_views = program.buckets
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
        params = list(self.model.parameters())
        options: Any = {"lr": LEARNING_RATE, "momentum": self.program.momentum}
        if self.program.optimizer == "ordinary":
            return torch.optim.SGD(params, **options)
        make = getattr(meshard, f"{self.program.optimizer}_optimizer")
        return make(self.model, torch.optim.SGD, params, **options)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held beside ``.grad``, nor in it if units are stepped in backward."""
        oracle = self.oracle
        return not (oracle.open or oracle.windows or (self.steps_in_backward and oracle.count))

    def play(self, place: int, operation: Operation) -> None:
        """Play one operation and compare; an error tells which operation it was."""
        try:
            if not isinstance(operation, Microbatch):
                name, *arguments = operation
                if name != "zero":
                    meshard.pending_gradients(self.model)  # waits for what is on its way
                getattr(self, f"do_{name}")(*arguments)
                self.check()
            elif not self.oracle.is_full:
                self.microbatch(place, operation)
                if operation.is_seen:
                    self.check()
        except Exception as error:
            text = f"operation {place}, {operation!r}: {type(error).__name__}: {error}"
            raise AssertionError(text) from error

    # --- microbatches --------------------------------------------------------------------

    def microbatch(self, place: int, microbatch: Microbatch) -> None:
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
        x = oracle.inputs(place)[self.rank]
        if microbatch.fails is not None:
            self.fail(microbatch, *microbatch.fails, x)
            return
        loss = self.loss(microbatch, x)
        after = self.interrupt(microbatch.between, x)
        loss.backward()
        after()
        oracle.backward(place, microbatch, (mode, first), ends=is_last)
        if self.steps_in_backward and is_last and mode == "F":
            left = [name for name, param in model.named_parameters() if param.grad is not None]
            assert not left, f"gradients are left of {left}"
            self.optimizer.step()
            oracle.optimizer.step()
            self.do_zero("none")

    def loss(self, microbatch: Microbatch, x: torch.Tensor) -> torch.Tensor:
        return integer_loss(self.model(x, microbatch.skips[self.rank], microbatch.twice))

    def fail(self, microbatch: Microbatch, what: str, place: int, x: torch.Tensor) -> None:
        """Raise in the middle: half a window is void."""
        meshard.pending_gradients(self.model)
        if self.steps_in_backward or self.program.is_replicated:
            # Before a unit is stepped, or a bucket complete on some ranks alone: they would wait.
            place = NUM_BLOCKS
        self.model.fails = (what, place)
        try:
            loss = self.loss(microbatch, x)
            if what == "loss":
                loss.register_hook(_stop)
            loss.backward()
        except Stop:
            pass
        else:
            raise AssertionError("nothing was raised")
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
                model.blocks[1](x)
        elif what == "copy":
            [copy.deepcopy(param.detach()) for param in model.parameters()]
        elif what == "unshard" and not self.program.is_replicated:
            handle = model.unshard(async_op=True)
            if x[0, 0] < 0 or self.rank == 0:  # ranks may wait at different moments
                handle.wait()
            return lambda: (handle.wait(), model.reshard())
        return lambda: None

    # --- other operations ----------------------------------------------------------------

    def is_done(self, action: Callable[[], object], *, refused: bool) -> bool:
        """Call what must be refused, or must not."""
        try:
            action()
        except RuntimeError as error:
            if not refused or "unit" not in str(error):
                raise
        else:
            assert not refused, "it should have been refused"
        return not refused

    def do_zero(self, how: str) -> None:
        to_none = how == "none" or self.steps_in_backward  # which frees what it has used
        if how == "module":
            self.model.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=to_none)
        self.oracle.zero(to_none=to_none or how == "module")

    def do_step(self) -> None:
        if self.steps_in_backward:
            return
        if self.is_done(self.optimizer.step, refused=bool(self.oracle.open)):
            self.oracle.optimizer.step()
            self.oracle.windows.clear()

    def do_finalize(self) -> None:
        if self.is_idle or not self.steps_in_backward:
            meshard.finalize_gradients(self.model)
            self.oracle.finalize()

    def do_factor(self, factor: float) -> None:
        set_it, is_open = self.model.set_gradient_divide_factor, bool(self.oracle.windows)
        if self.is_done(lambda: set_it(factor), refused=is_open):
            self.oracle.factor = factor

    def do_train(self, name: str, trains: bool) -> None:
        if self.is_idle or not (self.program.is_replicated or self.steps_in_backward):
            for net in (self.model, self.oracle.net):
                net.get_parameter(name).requires_grad_(trains)

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
            # Not by torch's clip_grad_norm_, which rounds the norm of each gradient to its dtype.
            grads = [p.grad.double() for p in self.oracle.net.parameters() if p.grad is not None]
            wanted = nn.utils.get_total_norm(grads)
            torch.testing.assert_close(norm.double(), wanted.double(), rtol=1e-6, atol=0.0)

    def do_evaluate(self, grad_mode: str) -> None:
        if self.program.is_replicated and self.rank > 0:
            return  # replicas need no other rank
        x = self.oracle.inputs(0)[self.rank]
        with getattr(torch, grad_mode)():
            found, wanted = self.model(x), self.oracle.net(x.to(self.oracle.dtype))
        assert torch.equal(found, wanted), f"the model returned {found}, not {wanted}"

    def do_reshard(self, block: int, unshards: bool) -> None:
        if isinstance(unit := self.model.blocks[block], FSDPModule):
            if unshards:
                unit.unshard()
            unit.reshard()

    def do_keep(self, forward: bool, backward: bool) -> None:
        if not self.program.is_replicated:
            self.model.set_reshard_after_forward(not forward)
            self.model.set_reshard_after_backward(not backward)

    def do_save(self) -> None:
        if self.is_done(self.model.state_dict, refused=bool(self.oracle.open)):
            self.saved = [cloned(net.state_dict()) for net in (self.model, self.oracle.net)]

    def do_load(self) -> None:
        for net, state in zip((self.model, self.oracle.net), self.saved, strict=False):
            net.load_state_dict(state)

    @property
    def gathers(self) -> bool:
        """Whether torch can gather a full state dict now.

        Not of CUDA tensors on gloo ranks, where it crashes (pytorch/pytorch#152645).
        """
        return self.is_idle and (self.device == "cpu" or dist.get_world_size() == 1)

    def do_save_full(self) -> None:
        if self.gathers:
            # Cloned: on one rank they are the parameters themselves.
            saved = cloned(get_model_state_dict(self.model, options=FULL_STATE))
            for name, value in self.oracle.net.state_dict().items():
                self.same("saved value", name, saved[name], value)
            with torch.no_grad():
                for param in self.model.parameters():
                    param.zero_()
            set_model_state_dict(self.model, saved, options=FULL_STATE)

    def do_save_optimizer(self) -> None:
        if self.is_idle and self.steps_in_backward:  # by this optimizer as long as the model lives
            self.optimizer.load_state_dict(self.optimizer.state_dict())
        elif self.is_idle:
            self.renew_optimizer(self.optimizer.state_dict())

    def renew_optimizer(self, state: dict[str, Any]) -> None:
        self.optimizer = self.make_optimizer()
        self.optimizer.load_state_dict(state)

    def do_copy(self, adopts: bool) -> None:
        if not self.is_idle:
            return
        self.do_zero("none")  # copies have no gradients
        original, self.model = self.model, copy.deepcopy(self.model)
        self.do_evaluate("no_grad")
        if adopts:
            self.renew_optimizer(self.optimizer.state_dict())
        else:
            self.model = original

    def do_shard_again(self, layout: Layout) -> None:
        """Go on with another mesh and other units, without gradients and momentum."""
        if self.gathers:
            state = get_model_state_dict(self.model, options=FULL_STATE)
            self.model = self.shard(layout)
            set_model_state_dict(self.model, state, options=FULL_STATE)
            self.optimizer, self.saved = self.make_optimizer(), []
            self.oracle.start(layout.mesh)
            self.oracle.optimizer.state.clear()

    # --- comparison ----------------------------------------------------------------------

    def check(self) -> None:
        """Compare every parameter, gradient and partial, bit for bit."""
        oracle, params = self.oracle, dict(self.model.named_parameters())
        pending = meshard.pending_gradients(self.model)
        shown = {TIED.get(name, name): partial for name, partial in pending.items()}
        held = oracle.held_by(self.rank)
        for name, wanted in oracle.params.items():
            self.same("value", name, params[name].detach(), wanted.detach())
            if not (self.steps_in_backward and oracle.count):
                self.same("gradient", name, params[name].grad, wanted.grad)
            self.same("partial", name, shown.get(name), held.get(name))
        assert shown.keys() == held.keys(), f"pending are {[*shown]}, not {[*held]}"
        assert bool(pending) == bool(oracle.open), f"pending are {pending}"

    def same(self, what: str, name: str, found: Any, wanted: torch.Tensor | None) -> None:
        local, part = found, wanted
        if isinstance(found, DTensor) and wanted is not None:
            local, mesh = found.to_local(), found.device_mesh
            cut = [each if isinstance(each, Shard) else Replicate() for each in found.placements]
            part = distribute_tensor(wanted, mesh, cut, src_data_rank=None).to_local()
        is_same = local is part  # both are None
        if local is not None and part is not None:
            is_same = torch.equal(local, part.to(local))
        if what == "partial" and found is not None:
            is_same = is_same and isinstance(found.placements[0], Partial)
        if not is_same:
            units = [path for path, m in self.model.named_modules() if isinstance(m, FSDPModule)]
            unit = max((path for path in units if name.startswith(path)), key=len, default="")
            where = f"{what} of {name} (unit {unit or '(root)'}) on rank {self.rank}"
            raise AssertionError(f"{where} is {local}, not {part}")


def play(program: Program, device: str = "cpu") -> None:
    """Run a program: a function for the ranks of its mesh."""
    player = Player(program, device)
    for place, operation in enumerate(program.operations):
        player.play(place, operation)
    player.check()


# --- failures ------------------------------------------------------------------------------

_shortest: dict[Any, AssertionError] = {}  # Hypothesis plays failures again


def run(program: Program, **how: bool) -> None:
    """Play a program as ``failure`` does; if it fails, fail with the shortest that does."""
    key = (program, *how)
    if key not in _shortest:
        if (error := failure(program, **how)) is None:
            return
        shortest, error = shorten(program, error, **how)
        call = f"run({shortest!r}{''.join(f', {name}=True' for name in how)})"
        command = f'python -c "from tests.support.programs import *; {call}"'
        _shortest[key] = AssertionError(f"{error}\nTo play it again:\n{command}")
    raise _shortest[key]


def failure(
    program: Program,
    *,
    on_processes: bool = False,
    timeout: float = 120,
) -> Exception | None:
    """Play a program on its ranks; return how it fails.

    Args:
        program: What to play.
        on_processes: And not on threads.
        timeout: Seconds.
    """
    on = shared_pool().run if on_processes else run_threads
    try:
        on(play, program.num_ranks, program, timeout=timeout)
    except Exception as error:
        return error
    return None


def shorten(program: Program, error: Exception, **how: bool) -> tuple[Program, Exception]:
    """Return a program of as little as possible that fails too, and how.

    Hypothesis would take minutes: it does not know which parts depend on each other.
    """
    end = time.monotonic() + 20
    failed_in = re.search(r"operation (\d+)", str(error))
    length = int(failed_in[1]) + 1 if failed_in else len(program.operations)
    first = dataclasses.replace(program, operations=program.operations[:length])
    candidates, place, num_passed = [first, *simpler(program)], 0, 0
    while num_passed < len(candidates) and time.monotonic() < end:
        candidate = candidates[place % len(candidates)]
        other = failure(candidate, timeout=10, **how)
        if other is None:
            place, num_passed = place + 1, num_passed + 1
        else:  # go on at this place: what came before it is needed, most likely
            program, error, num_passed = candidate, other, 0
            candidates = [*simpler(program)]
    return program, error


def simpler(literal: Literal) -> Iterator[Any]:
    """Yield what has an item less in one of its lists, or fewer fields that are not as by default.

    From the last: what is before it keeps its place.
    """
    given, replace = literal.given(), functools.partial(dataclasses.replace, literal)
    for name in ("operations", "units", "frozen"):
        items = given.get(name, ())
        for place in reversed(range(len(items))):
            yield replace(**{name: items[:place] + items[place + 1 :]})
    defaults = {each.name: each.default for each in dataclasses.fields(literal)}
    optional = {name: defaults[name] for name in given if name != "operations"}
    yield from [replace(**optional)] if len(optional) > 1 else []
    for name, default in optional.items():
        yield replace(**{name: default})
    for name, value in given.items():
        for each in simpler(value) if isinstance(value, Literal) else ():
            yield replace(**{name: each})
    operations = given.get("operations", ())
    for place, operation in enumerate(operations):
        for each in simpler(operation) if isinstance(operation, Literal) else ():
            yield replace(operations=(*operations[:place], each, *operations[place + 1 :]))
