"""Use ``play`` for random graphs: what a loss does with outputs and parameters of a sharded model.

A program is data that Hypothesis draws: how a model is cut into units, and steps of forwards, terms
of losses and backwards, in which something may raise. ``play`` runs the same code on a plain model,
once for each rank, and then on ranks, and compares gradients, parameters and collectives.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import meshard
from meshard import CommLedger, FSDPModule
from tests.support.replicated import SMALL
from tests.support.strategies import MODES
from tests.support.threads import run_threads

DIM, ALL = 4, 15  # the size of everything; all ranks, as bits
UNITS = ["blocks.0.inner", "blocks.1.inner", "blocks.0", "blocks.1", "tower", "head", "probe"]
PARAMS = ["outlet.weight", "inlet.bias", "head.weight", "probe.weight", "tower.weight"]
PARAMS += [f"blocks.{i}.{name}" for i in (0, 1) for name in ("inner.up.weight", "scale")]
CHECKPOINTS = ["reentrant", "recomputed"]  # of a block, with all units inside
HOWS = ["plain", "plain", "no_grad", "detached", "twice", "forces", "trained", *CHECKPOINTS]
HOWS += ["reentrant function", "recomputed function"]  # inside a unit
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda w: w * 1,
    "t": lambda w: w.t() if w.dim() == 2 else w,
    "slice": lambda w: w[1:3],
    "flat": lambda w: w.view(-1)[::2],
    "detached": lambda w: w.detach(),
}
GRADIENTS = ["penalty", "gradient"]
KINDS = ["out", "out", "inner", "tower", "head", "probe", "head on a copy", "read", "read", "read"]
KINDS += ["read in a checkpoint", "weight", *GRADIENTS]


# --- programs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forward:
    blocks: tuple[str, str] = ("plain", "plain")
    tower: str = "plain"
    experts: tuple[int, ...] = (3,) * 4  # by rank, as bits
    needs_grad: bool = True  # the input


@dataclass(frozen=True)
class Term:
    """A summand of the next backward."""

    kind: str
    of: int = 0  # which forward
    place: int = 0  # which block
    param: str = "outlet.weight"
    view: str = "whole"
    ranks: int = ALL  # whose losses have it, as bits
    is_early: bool = True  # it is computed at once, not just before the backward


@dataclass(frozen=True)
class Backward:
    """A backward of all terms since the last one."""

    keeps: bool = False
    times: int = 1


@dataclass(frozen=True)
class Chunks:
    """A head called in chunks with a backward each, and then the backward of the features."""

    of: int = 0
    num: int = 2
    name: str = "head"
    keeps: bool = False


@dataclass(frozen=True)
class Evaluation:
    pass


@dataclass(frozen=True)
class Failure:
    kind: str = "raise"  # or "hook" or "node", which raise in backward
    place: int = 0  # the n-th time that the step passes a place where it may raise
    error: str = "Exception"
    recovery: str = "nothing"


@dataclass(frozen=True)
class Step:
    microbatches: tuple[tuple[str, tuple[Any, ...]], ...]  # of a mode and statements each
    fails: Failure | None = None


@dataclass(frozen=True)
class Program:
    steps: tuple[Step, ...]
    mesh: tuple[int, ...] = (2,)
    units: tuple[tuple[str, bool | int | None], ...] | None = ()  # None: replicate
    reshard: bool | int | None = None  # of the root
    frozen: str = "none"  # parameters that begin so


@st.composite
def statements(draw: st.DrawFn, is_replicated: bool) -> tuple[Any, ...]:
    """Draw a microbatch that a plain model can run."""
    made: list[Any] = []
    forwards: list[Forward] = []
    kinds = st.sampled_from(["term"] * 5 + ["backward"] * 2 + ["forward", "chunks", "evaluation"])
    for kind in ["forward", "term", *draw(st.lists(kinds, max_size=7)), "term", "backward"]:
        of = draw(st.integers(0, max(0, len(forwards) - 1)))
        if kind == "forward":
            hows, bits = st.sampled_from(HOWS), st.integers(0, 3)
            if is_replicated:
                # Refused where a parameter is used outside of the checkpoint too.
                hows = hows.filter(lambda how: "reentrant" not in how)
            blocks = draw(st.tuples(hows, hows))
            differ = st.just((3,) * 4) | st.tuples(bits, bits, bits, bits)
            # A backward inside a forward must reach the same units on all ranks.
            experts = (3,) * 4 if "trained" in blocks else draw(differ)
            tower = draw(st.sampled_from(["plain", "detached", "none"]))
            forwards.append(Forward(blocks, tower, experts, draw(st.booleans())))
            made.append(forwards[-1])
        elif kind == "term":
            is_reentrant = any("reentrant" in how for how in forwards[of].blocks)
            cannot = GRADIENTS if is_reentrant or not forwards[of].needs_grad else []
            cannot = [*cannot, *(["tower"] if forwards[of].tower == "none" else [])]
            term = Term(
                kind=draw(st.sampled_from([each for each in KINDS if each not in cannot])),
                of=of,
                place=draw(st.integers(0, 1)),
                param=draw(st.sampled_from(PARAMS)),
                view=draw(st.sampled_from(list(VIEWS))),
                ranks=draw(st.just(ALL) | st.integers(0, ALL)),
                is_early=draw(st.booleans()),
            )
            made.append(term)
        elif kind == "chunks":
            name, num = draw(st.sampled_from(["head", "probe"])), draw(st.integers(1, 3))
            made.append(Chunks(of, num, name))
        elif kind == "evaluation":
            made.append(Evaluation())
        else:
            made.append(Backward(draw(st.booleans()), draw(st.sampled_from([1, 1, 2]))))
    for place, each in enumerate(made):  # keep the graphs that are used later
        if isinstance(each, (Backward, Chunks)):
            later = {s.of for s in made[place + 1 :] if isinstance(s, (Term, Chunks))}
            ends = [n for n, s in enumerate(made[:place]) if isinstance(s, Backward)]
            first = max(ends, default=-1) + 1
            terms = {s.of for s in made[first:place] if isinstance(s, Term)}
            if isinstance(each, Chunks):
                made[place] = Chunks(each.of, each.num, each.name, each.of in later | terms)
            else:
                made[place] = Backward(each.keeps or bool(later & terms), each.times)
    return tuple(made)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    mesh = draw(st.sampled_from([(2,), (2,), (3,), (4,), (2, 2)]))
    reshard = st.sampled_from([None, True, False, *([2] if mesh == (4,) else [])])
    units = draw(st.dictionaries(st.sampled_from(UNITS), reshard))
    is_replicated = len(mesh) == 1 and draw(st.sampled_from([False] * 5 + [True]))
    failures = st.builds(
        Failure,
        kind=st.sampled_from(["raise", "hook", "node"]),
        place=st.integers(0, 20),
        error=st.sampled_from(["Exception", "KeyboardInterrupt"]),
        recovery=st.sampled_from(["nothing", "reset", "save"]),
    )
    inner = statements(is_replicated)
    window = st.lists(st.tuples(st.sampled_from("NRFF"), inner), max_size=1)
    steps = st.builds(
        lambda first, last, fails: Step((*first, ("F", last)), fails),
        st.just([]) | window,
        inner,
        st.none() | st.none() | failures,
    )
    return Program(
        steps=tuple(draw(st.lists(steps, min_size=1, max_size=3))),
        mesh=mesh,
        units=None if is_replicated else tuple((n, units[n]) for n in UNITS if n in units),
        reshard=draw(reshard),
        frozen=draw(st.sampled_from(["none", "none", "blocks.0", "blocks.1.inner", "head"])),
    )


# --- the model -----------------------------------------------------------------------------------


class Stop(Exception):
    """Raised in the middle of a step."""


class Interrupt(KeyboardInterrupt):
    """Raised in the middle of a step."""


class _Stops(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: "Run") -> torch.Tensor:
        ctx.run = run
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.run.stop()


@dataclass
class Run:
    """One run of one step."""

    program: Program
    rank: int
    fails: Failure | None = None
    count: int = 0
    is_between: bool = False  # it has failed between forward and backward
    kept: set[str] = field(default_factory=set)  # units that a forward must have left unsharded
    unsharded: list[Any] = field(default_factory=list)  # by the loss
    keeps: bool = False  # a backward of it has kept its graph
    unused: set[Any] = field(default_factory=set)  # forwards without a backward

    def stop(self, *_: Any) -> None:
        assert self.fails is not None
        raise Stop if self.fails.error == "Exception" else Interrupt

    def may_stop(self, x: torch.Tensor, *, is_between: bool = False) -> torch.Tensor:
        self.count += 1
        if self.fails is None or self.count != self.fails.place + 1:
            return x
        if self.fails.kind == "raise":
            self.is_between = is_between
            self.stop()
        if not x.requires_grad:
            return x
        if self.fails.kind == "node":
            return _Stops.apply(x, self)
        x.register_hook(self.stop)
        return x


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 5), nn.Linear(5, DIM)

    def forward(self, x: torch.Tensor, run: Run, how: str) -> torch.Tensor:
        def function(x: torch.Tensor) -> torch.Tensor:
            return self.down(run.may_stop(torch.tanh(self.up(x))))

        if how.endswith("function") and torch.is_grad_enabled():
            return checkpoint(function, x, use_reentrant=how.startswith("reentrant"))
        return function(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.scale = nn.Parameter(torch.empty(DIM))

    def forward(
        self, x: torch.Tensor, run: Run, how: str, experts: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tanh(x + run.may_stop(self.inner(x, run, how)))
        for number, expert in enumerate(self.experts):
            x = torch.tanh(x + expert(x)) if experts >> number & 1 else x
        return run.may_stop(x), x * self.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.outlet, self.tower = (nn.Linear(DIM, DIM) for _ in range(3))
        self.head, self.probe = (nn.Linear(DIM, 3) for _ in range(2))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        generator = torch.Generator().manual_seed(0)
        for param in self.double().parameters():
            param.data = torch.randn(param.shape, generator=generator, dtype=torch.float64) / 2

    def forward(self, x: torch.Tensor, given: Forward, run: Run) -> list[torch.Tensor]:
        x, found = torch.tanh(self.inlet(x)), []
        for block, how in zip(self.blocks, given.blocks, strict=True):
            experts = given.experts[run.rank]
            x, side = run_block(block, run.may_stop(x), run, how, experts)
            found.append(side)
        if given.tower != "none":
            found.append(torch.tanh(self.tower(x.detach() if given.tower == "detached" else x)))
        return [torch.tanh(self.outlet(run.may_stop(x))), *found]


def run_block(block: Any, x: torch.Tensor, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    how = given[1]
    if how == "no_grad":
        with torch.no_grad():
            return block(x, *given)
    if how in CHECKPOINTS and torch.is_grad_enabled():
        return checkpoint(block, x, *given, use_reentrant=how == "reentrant")
    if how == "detached":
        return block(x.detach(), *given)
    if how == "twice":
        return block(block(x, *given)[0], *given)
    if how in ("forces", "trained"):
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            y, side = block(inner, *given)
            if how == "trained":
                y.square().sum().backward()
                return x + inner.grad, side.detach()
            (gradient,) = torch.autograd.grad(y.square().sum(), inner, create_graph=True)
            return torch.tanh(x + gradient), side
    return block(x, *given)


# --- a step --------------------------------------------------------------------------------------


def unit_around(program: Program, name: str) -> str:
    units = ["", *(unit for unit, _ in program.units or ())]
    return max((unit for unit in units if f"{name}.".startswith(f"{unit}." * bool(unit))), key=len)


def may_wait(term: Term, run: Run) -> bool:
    """Whether a forward may run between this term and its backward."""
    name = term.param if is_read(term) else term.kind.split()[0]
    if not is_read(term) and name not in ("head", "probe"):
        return True
    unit = unit_around(run.program, name)
    return unit in run.kept or unit == name or run.program.units is None


def weight_of(model: nn.Module, name: str, run: Run) -> torch.Tensor:
    param = model.get_parameter(name)
    if isinstance(param, DTensor):
        unit = unit_around(run.program, name)
        assert unit not in run.kept, f"{name} is sharded, and its unit {unit!r} must be kept"
        run.unsharded.append(model.get_submodule(unit))
        run.unsharded[-1].unshard()
    return model.get_parameter(name)


def head_of(model: nn.Module, name: str, run: Run) -> Any:
    head = model.get_submodule(name)
    if not isinstance(head, FSDPModule):
        weight_of(model, f"{name}.weight", run)
    run.kept.clear()
    return head


def goes_through(term: Term) -> bool:
    """Whether a backward of this term goes through the forward."""
    return term.kind not in ("weight", "head on a copy")


def is_read(term: Term) -> bool:
    return term.kind.startswith("read") or term.kind == "weight"


def value_of(term: Term, model: nn.Module, forward: Any, run: Run) -> torch.Tensor:
    given, x, (h, *found) = forward
    kind, is_used = term.kind, term.ranks >> run.rank & 1
    # Other collectives, as the pages say: checkpoints, forwards without grad, heads called alone.
    if {"no_grad", *CHECKPOINTS} & {*given.blocks} or "head" in kind or "probe" in kind:
        is_used = True
    if is_read(term) and term.param.startswith(("head", "probe", "tower")):
        is_used = True  # of units that have not run in the forward
    is_used, nothing = is_used or kind == "weight", h.sum() * 0
    if kind in GRADIENTS:
        y = h.square().sum()
        run.kept.clear()
        (gradient,) = torch.autograd.grad(
            y, x, create_graph=kind == "penalty", retain_graph=True, allow_unused=True
        )
        return nothing if gradient is None else (gradient * h.mean()).square().sum() + nothing
    if kind in ("head", "probe", "head on a copy"):
        head = head_of(model, kind[:4] if kind.startswith("head") else kind, run)
        return head(h.detach() if "copy" in kind else h).square().sum()
    weight = weight_of(model, term.param, run) if is_read(term) else h  # on all ranks
    if not is_used:
        return nothing
    if kind == "out":
        return (h * 1.5).sin().sum()
    if kind in ("inner", "tower"):
        return found[-1 if kind == "tower" else term.place].sin().sum() + nothing

    def read(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.tanh(VIEWS[term.view](weight) * h.mean()).sum()

    run.may_stop(nothing, is_between=True)
    if kind == "weight":
        return VIEWS[term.view](weight).square().sum()
    if kind == "read":
        return read(h, weight)
    return checkpoint(read, h, weight, use_reentrant=False)


def kept_by(program: Program, given: Forward) -> set[str]:
    """Return the units that a forward leaves unsharded for losses."""
    kept = {name for name, reshard in program.units or () if reshard is False}
    kept -= {"head", "probe", *(["tower"] if given.tower == "none" else [])}
    for number, how in enumerate(given.blocks):
        if how in ("forces", "trained"):  # which have had a backward
            kept = {name for name in kept if not name.startswith(f"blocks.{number}")}
    return kept | (
        {""} if program.reshard in (None, False) and program.units is not None else set()
    )


def inputs(*numbers: int) -> torch.Tensor:
    seed = sum(number * 100**place for place, number in enumerate(numbers))
    return torch.randn(2, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def take(model: Any, step: Step, number: int, run: Run) -> None:
    """Run a step up to the optimizer, on a sharded or a plain model."""
    is_sharded = isinstance(model, FSDPModule)
    for of_step, (mode, made) in enumerate(step.microbatches):
        if is_sharded:
            model.set_gradient_sync(MODES[mode])
        forwards: list[Any] = []
        terms: list[Any] = []
        for place, each in enumerate(made):
            if isinstance(each, Forward):
                x = inputs(number, of_step, place, run.rank).requires_grad_(each.needs_grad)
                forwards.append((each, x, model(x, each, run)))
                run.unused.add((of_step, len(forwards) - 1))
                run.kept = kept_by(run.program, each)
            elif isinstance(each, Evaluation):
                with torch.no_grad():
                    model(inputs(number, of_step, place, run.rank), Forward(), run)
                run.kept.clear()
            elif isinstance(each, Term):
                terms.append((each, get := partial(value_of, each, model, forwards[each.of], run)))
                if each.is_early and may_wait(each, run):
                    terms[-1] = each, partial(lambda value: value, get())
            elif isinstance(each, Chunks):
                in_chunks(model, each, forwards[each.of][2][0], run)
                run.unused.discard((of_step, each.of))
                run.keeps |= each.keeps
            else:
                # What runs backwards comes first, and what runs forwards before reads.
                late = sorted(terms, key=lambda t: (t[0].kind not in GRADIENTS, is_read(t[0])))
                total = sum((get() for _, get in late), torch.zeros(()))
                total = run.may_stop(total, is_between=True)
                for time in range(each.times if total.requires_grad else 0):
                    total.backward(retain_graph=each.keeps or time < each.times - 1)
                run.keeps |= each.keeps
                run.unused -= {(of_step, t.of) for t, _ in terms if goes_through(t)}
                run.kept.clear()
                terms.clear()
    while run.unsharded:  # not before: a later backward may go through what has read them
        run.unsharded.pop().reshard()


def in_chunks(model: Any, given: Chunks, h: torch.Tensor, run: Run) -> None:
    copied = h.detach().requires_grad_()
    for chunk in copied.tensor_split(given.num):
        head = head_of(model, given.name, run)
        run.may_stop(head(chunk).sin().sum(), is_between=True).backward()
    h.backward(copied.grad, retain_graph=given.keeps)


# --- a program -----------------------------------------------------------------------------------


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def values_of(model: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    grads = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    return grads, {name: param.detach().clone() for name, param in model.named_parameters()}


def made(program: Program) -> Net:
    net = Net()
    for name, param in net.named_parameters():
        param.requires_grad_(not name.startswith(program.frozen))
    return net


def raises(net: Net, program: Program, step: Step, number: int) -> bool:
    try:
        take(copy.deepcopy(net), step, number, Run(program, 0, step.fails))
    except (Stop, Interrupt):
        return True
    return False


def reference(program: Program) -> list[Any]:
    """Return gradients and then parameters of each step on a plain model; None: it raises."""
    net, found = made(program), []
    optimizer, num_ranks = optimizer_of(net), math.prod(program.mesh)
    for number, step in enumerate(program.steps):
        if step.fails is not None and raises(net, program, step, number):
            found.append(None)
            continue
        for rank in range(num_ranks):
            take(net, step, number, Run(program, rank))
        grads, _ = values_of(net)
        optimizer.step()
        optimizer.zero_grad()
        found.append((grads, values_of(net)[1]))
    return found


def shard(program: Program) -> Any:
    net, mesh = made(program), init_device_mesh("cpu", program.mesh)
    if program.units is None:
        meshard.replicate(net, mesh, bucket_cap_mb=SMALL)
    else:
        for name, reshard in (*program.units, ("", program.reshard)):
            meshard.fully_shard(net.get_submodule(name), mesh, reshard_after_forward=reshard)
    net.set_gradient_divide_factor(1.0)
    return net


def compare(what: str, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, one in found.items():
        other = wanted[name]
        where = f"{what} of {name} on rank {dist.get_rank()}"
        if one is None or other is None:
            assert one is other, f"{where} is {one}, not {other}"
            continue
        if isinstance(one, DTensor):
            cut = [p if isinstance(p, Shard) else Replicate() for p in one.placements]
            other = distribute_tensor(other, one.device_mesh, cut, src_data_rank=None).to_local()
            one = one.to_local()
        most = 1e-11 * max(1.0, float(wanted[name].abs().max()))
        assert torch.allclose(one, other, rtol=1e-12, atol=most), f"{where} is {one}, not {other}"


def on_rank(program: Program, references: list[Any]) -> list[Any]:
    """Run a program on one rank, and return the collectives of each step."""
    model, events = shard(program), []
    params = dict(model.named_parameters())  # a forward may leave others
    optimizer = optimizer_of(model)
    for number, (step, wanted) in enumerate(zip(program.steps, references, strict=True)):
        try:
            with CommLedger(model) as ledger:
                if wanted is None:
                    fail(model, optimizer, program, step, number)
                else:
                    run = Run(program, dist.get_rank())
                    take(model, step, number, run)
                    finish(model, run)
                    compare("gradient", {n: p.grad for n, p in params.items()}, wanted[0])
                    optimizer.step()
                    optimizer.zero_grad()
                    compare("parameter", {n: p.detach() for n, p in params.items()}, wanted[1])
        except Exception as error:
            raise AssertionError(f"step {number}: {type(error).__name__}: {error}") from error
        events.append([(each.op, each.unit, each.payload_bytes) for each in ledger.events])
    model.reset_iter_state()
    return events


def fail(model: Any, optimizer: Any, program: Program, step: Step, number: int) -> None:
    assert step.fails is not None
    run = Run(program, 0, step.fails)
    try:
        take(model, step, number, run)
    except (Stop, Interrupt):
        pass
    else:
        raise AssertionError("nothing was raised")
    if run.is_between or step.fails.recovery == "reset":
        model.reset_iter_state()
    optimizer.zero_grad()
    if step.fails.recovery == "save":
        model.state_dict()


def finish(model: Any, run: Run) -> None:
    """Reduce what is pending, which a step must refuse."""
    try:
        meshard.clip_grad_norm_(model, 1e99)
    except RuntimeError as error:
        if "finalize_gradients" not in str(error) or not (run.unused or run.keeps):
            raise
        meshard.finalize_gradients(model)


def play(program: Program) -> None:
    """Play a program on its ranks; raise if anything is wrong."""
    ranks = math.prod(program.mesh)
    events = run_threads(on_rank, ranks, program, reference(program), timeout=30)
    for rank, found in enumerate(events):
        assert found == events[0], f"rank {rank} issued {found}, rank 0 {events[0]}"
