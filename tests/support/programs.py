"""Random programs of users, and a player that runs them beside one process.

A program is data that Hypothesis draws and shrinks: a model and how it is sharded, and windows of
microbatches with what users do in between. Ranks run it on the sharded model; each also runs it on
the plain model with the batches of all ranks. Activations and gradients of activations are
integers (see ``integer_model``), so that all sums are exact and both agree bit for bit.
"""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import dataclass, field
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
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import meshard
from meshard import CPUOffloadPolicy, FSDPModule, GradientSync, MixedPrecisionPolicy
from tests.support.integer_model import LEARNING_RATE, integer_loss, ternary

DIM, NUM_BLOCKS, NUM_EXPERTS = 5, 2, 2
MESHES = [(2, 2), (1,), (2,), (3,), (4,), (1, 2), (2, 1), (1, 1)]
SYNC = {"N": GradientSync.NONE, "R": GradientSync.REDUCE_SCATTER, "F": GradientSync.FULL}
POLICIES = {
    "float32": MixedPrecisionPolicy(),
    "bfloat16": MixedPrecisionPolicy(torch.bfloat16),
    "bfloat16, added in float32": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
}
BETWEEN = ["nothing", "evaluation", "inference", "unused forward", "part", "unshard", "copy"]
# Not inlet.bias: so each rank's activations require gradients, and checkpoints pass them on.
FREEZABLE = [
    "inlet.weight",
    "outlet.bias",
    *(f"blocks.{block}.inner.up.weight" for block in range(NUM_BLOCKS)),
    *(f"blocks.{block}.experts.0.bias" for block in range(NUM_BLOCKS)),
]


# --- programs ------------------------------------------------------------------------------


@dataclass
class Layout:
    """How a model is cut into units. ``reshard`` is by unit: blocks from the first, the root."""

    mesh: tuple[int, ...]
    inner_units: tuple[bool, ...]
    block_units: tuple[bool, ...]
    joins_blocks: bool  # in one unit, instead of one each
    reshard: tuple[bool | int | None, ...]
    shards_last_dim: bool
    input_buffers: int | None  # at most, of reductions


@dataclass
class Microbatch:
    seed: int
    mode: str
    mode_of_first: str  # of the first block, in a microbatch that is not the last
    used: tuple[tuple[bool, ...], ...]  # by rank: which experts
    twice: bool
    between: str  # forward and backward


@dataclass
class Window:
    before: list[tuple[Any, ...]]
    microbatches: list[Microbatch]
    clips: bool = False  # by a norm that is not reached
    fails: tuple[str, int, int] | None = None  # what, in which microbatch, before which block


@dataclass
class Program:
    """One program. It runs on ``num_ranks`` ranks."""

    layout: Layout
    checkpoints: tuple[bool | None, ...]  # by block: use_reentrant, or none
    policy: str
    offloads: bool
    optimizer: str
    momentum: float
    factor: float | None
    sets_to_none: bool
    frozen: tuple[str, ...] = ()  # before it is sharded
    windows: list[Window] = field(default_factory=list)

    @property
    def num_ranks(self) -> int:
        return math.prod(self.layout.mesh)


@st.composite
def layouts(draw: st.DrawFn, num_ranks: int | None = None) -> Layout:
    meshes = [each for each in MESHES if num_ranks in (None, math.prod(each))]
    mesh = draw(st.sampled_from(meshes))
    flags = st.tuples(*[st.booleans()] * NUM_BLOCKS)
    reshard = st.sampled_from([None, True, False, *([2] if mesh[-1] == 4 else [])])
    return Layout(
        mesh=mesh,
        inner_units=draw(flags),
        block_units=draw(flags),
        joins_blocks=draw(st.booleans()),
        reshard=draw(st.tuples(*[reshard] * (NUM_BLOCKS + 1))),
        shards_last_dim=draw(st.booleans()),
        input_buffers=draw(st.sampled_from([None, 1, 2])),
    )


@st.composite
def _windows(draw: st.DrawFn, num_ranks: int) -> Window:
    masks = st.tuples(*[st.tuples(*[st.booleans()] * NUM_EXPERTS)] * num_ranks)
    microbatch = st.builds(
        Microbatch,
        seed=st.integers(0, 99),
        mode=st.sampled_from("NRF"),
        mode_of_first=st.sampled_from("NRF"),
        used=masks,
        twice=st.booleans(),
        between=st.sampled_from(BETWEEN),
    )
    operation = st.one_of(
        st.tuples(st.sampled_from(["freeze", "thaw"]), st.sampled_from(FREEZABLE)),
        st.tuples(st.sampled_from(["evaluate", "infer", "save", "save_full", "save_optimizer"])),
        st.tuples(st.just("copy"), st.booleans()),
        st.tuples(st.just("keep"), st.booleans(), st.booleans()),
        st.tuples(st.just("shard_again"), layouts(num_ranks)),
    )
    microbatches = draw(st.lists(microbatch, min_size=1, max_size=3))
    failure = st.tuples(
        st.sampled_from(["forward", "backward"]),
        st.integers(0, len(microbatches) - 1),
        st.integers(0, NUM_BLOCKS),
    )
    return Window(
        before=draw(st.lists(operation, max_size=3)),
        microbatches=microbatches,
        clips=draw(st.booleans()),
        fails=draw(st.none() | st.none() | failure),
    )


@st.composite
def programs(draw: st.DrawFn, num_ranks: int | None = None) -> Program:
    layout = draw(layouts(num_ranks))
    num_ranks = math.prod(layout.mesh)
    factors = [1.0, 2.0] if num_ranks == 3 else [None, 1.0, 2.0]  # a third is not exact
    return Program(
        layout=layout,
        checkpoints=draw(st.tuples(*[st.sampled_from([None, True, False])] * NUM_BLOCKS)),
        policy=draw(st.sampled_from(sorted(POLICIES))),
        offloads=draw(st.sampled_from([False, False, True])),
        optimizer=draw(st.sampled_from(["ordinary", "flat", "overlap"])),
        momentum=draw(st.sampled_from([0.0, 0.5])),
        factor=draw(st.sampled_from(factors)),
        sets_to_none=draw(st.booleans()),
        frozen=tuple(draw(st.lists(st.sampled_from(FREEZABLE), max_size=2, unique=True))),
        windows=draw(st.lists(_windows(num_ranks), min_size=1, max_size=3)),
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


class Inner(nn.Module):
    """Two layers beside a residual path.

    Each path rounds its gradient: their sum is then exact, in bfloat16 too, in whatever order
    autograd adds.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, hidden), nn.Linear(hidden, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ternary(x + self.down(ternary(self.up(ternary(x)))))


class Block(nn.Module):
    """Two layers that may be recomputed, experts that ranks choose, and a parameter without use."""

    def __init__(self, hidden: int, use_reentrant: bool | None) -> None:
        super().__init__()
        self.inner = Inner(hidden)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(NUM_EXPERTS))
        self.unused = nn.Parameter(torch.empty(3))
        self.use_reentrant = use_reentrant

    def forward(
        self, x: torch.Tensor, side: torch.Tensor | None, *, used: tuple[bool, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.use_reentrant is None or not torch.is_grad_enabled():
            x = self.inner(x)
        else:
            x = checkpoint(self.inner, x, use_reentrant=self.use_reentrant)
        for expert, is_used in zip(self.experts, used, strict=True):
            x = ternary(x + expert(ternary(x))) if is_used else x
        return (x if side is None else ternary(x + side)), x


class Net(nn.Module):
    """Blocks between two layers with one weight."""

    def __init__(self, checkpoints: tuple[bool | None, ...]) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.outlet.weight = self.inlet.weight
        self.blocks = nn.ModuleList(
            Block(3 + 2 * number, each) for number, each in enumerate(checkpoints)
        )
        self.fails: tuple[str, int] | None = None  # what, and before which block
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randint(-2, 3, param.shape, generator=generator) / 2)

    def _may_stop(self, place: int, x: torch.Tensor) -> torch.Tensor:
        if self.fails == ("forward", place):
            raise Stop
        return _StopBackward.apply(x) if self.fails == ("backward", place) else x

    def forward(
        self, x: torch.Tensor, used: tuple[bool, ...] = (True,) * NUM_EXPERTS, twice: bool = False
    ) -> torch.Tensor:
        x, side = ternary(self.inlet(x)), None
        for number, block in enumerate(self.blocks):
            x, side = block(self._may_stop(number, x), side, used=used)
            if twice:
                x, _ = block(x, side, used=used)
        return ternary(self.outlet(self._may_stop(NUM_BLOCKS, x)))


def inputs_of(seed: int, rows: int) -> torch.Tensor:
    """Return ``[ranks, rows, DIM]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, (dist.get_world_size(), rows, DIM), generator=generator).float()


# --- the player ----------------------------------------------------------------------------


def own_part(unsharded: torch.Tensor, like: Any) -> torch.Tensor:
    """Return this rank's part of ``unsharded``, cut as the DTensor ``like``."""
    for axis, placement in enumerate(like.placements):
        if isinstance(placement, Shard):
            parts = unsharded.chunk(like.device_mesh.size(axis), placement.dim)
            place = like.device_mesh.get_local_rank(axis)
            empty = unsharded.narrow(placement.dim, 0, 0)
            unsharded = parts[place] if place < len(parts) else empty
    return unsharded


class Player:
    """Runs a program on one rank."""

    def __init__(self, program: Program, device: str = "cpu") -> None:
        self.program = program
        self.device = device
        self.rank = dist.get_rank()
        self.plain = Net((None,) * NUM_BLOCKS).to(device)
        for name in program.frozen:
            self.plain.get_parameter(name).requires_grad_(False)
        self.model = self.shard(program.layout)
        self.dtype = POLICIES[program.policy].param_dtype or torch.float32
        # Sums of bfloat16 are exact up to 256: of 4 ranks, 3 microbatches and 2 calls of a block.
        self.rows = 2 if self.dtype is torch.float32 else 1
        self.optimizer = self.make_optimizer()
        params = self.plain.parameters()
        self.plain_optimizer = torch.optim.SGD(params, LEARNING_RATE, program.momentum)
        self.where = ""

    def shard(self, layout: Layout) -> Any:
        model: Any = Net(self.program.checkpoints)
        for name, param in self.plain.named_parameters():
            model.get_parameter(name).requires_grad_(param.requires_grad)
        mesh = init_device_mesh(self.device, layout.mesh)
        kwargs: dict[str, Any] = {"mp_policy": POLICIES[self.program.policy]}
        if layout.shards_last_dim:
            kwargs["shard_placement_fn"] = lambda param: Shard(param.dim() - 1)
        if self.program.offloads:
            kwargs["offload_policy"] = CPUOffloadPolicy(pin_memory=self.device != "cpu")
        shards = list(zip(model.blocks, layout.reshard, strict=False))
        for (block, reshard), is_unit in zip(shards, layout.inner_units, strict=True):
            if is_unit:
                meshard.fully_shard(block.inner, mesh, reshard_after_forward=reshard, **kwargs)
        if layout.joins_blocks:
            blocks, reshard = [*model.blocks], layout.reshard[0]
            meshard.fully_shard(blocks, mesh, reshard_after_forward=reshard, **kwargs)
        for (block, reshard), is_unit in zip(shards, layout.block_units, strict=True):
            if is_unit and not layout.joins_blocks:
                meshard.fully_shard(block, mesh, reshard_after_forward=reshard, **kwargs)
        meshard.fully_shard(model, mesh, reshard_after_forward=layout.reshard[-1], **kwargs)
        model.set_gradient_divide_factor(self.program.factor)
        if layout.input_buffers is not None:
            model.set_reduce_scatter_max_input_buffers(layout.input_buffers)
        return model

    def make_optimizer(self) -> torch.optim.Optimizer:
        params, options = list(self.model.parameters()), {"lr": LEARNING_RATE}
        options["momentum"] = self.program.momentum
        if self.program.optimizer == "flat":
            return meshard.flat_optimizer(self.model, torch.optim.SGD, params, **options)
        if self.program.optimizer == "overlap":
            return meshard.overlap_optimizer(self.model, torch.optim.SGD, params, **options)
        return torch.optim.SGD(params, **options)

    @property
    def steps_in_backward(self) -> bool:
        return self.program.optimizer == "overlap"

    def play(self) -> None:
        for number, window in enumerate(self.program.windows):
            for operation in window.before:
                self.where = f"window {number}, {operation}"
                getattr(self, f"do_{operation[0]}")(*operation[1:])
                self.check_state()
            self.where = f"window {number}"
            self.play_window(window)

    def play_window(self, window: Window) -> None:
        if window.fails is not None:
            self.play_failure(window, *window.fails)
        for number, microbatch in enumerate(window.microbatches):
            is_last = number == len(window.microbatches) - 1
            loss, after = self.forward(microbatch, is_last=is_last)
            loss.backward()
            after()
            self.plain_backward(microbatch)
        for param in self.plain.parameters():
            if param.grad is not None:
                param.grad /= self.program.factor or dist.get_world_size()
        self.check_gradients()
        if window.clips and not self.steps_in_backward:
            norm = meshard.clip_grad_norm_(self.model, 1e9)
            wanted = torch.nn.utils.clip_grad_norm_(self.plain.parameters(), 1e9)
            torch.testing.assert_close(norm, wanted)
            self.check_gradients()
        self.optimizer.step()
        self.plain_optimizer.step()
        self.check_state()
        for each in (self.optimizer, self.plain_optimizer):
            # Gradients of a step in backward are freed.
            each.zero_grad(self.program.sets_to_none or self.steps_in_backward)

    def play_failure(self, window: Window, what: str, last: int, place: int) -> None:
        """Run the window until it raises, and drop it."""
        if self.steps_in_backward:
            place = NUM_BLOCKS  # before a unit has been stepped
        for microbatch in window.microbatches[:last]:
            self.forward(microbatch, is_last=False)[0].backward()
        microbatch = window.microbatches[last]
        self.model.fails = (what, place)
        try:
            loss, _ = self.forward(microbatch, is_last=last == len(window.microbatches) - 1)
            loss.backward()
        except Stop:
            pass
        else:
            raise AssertionError(f"{self.where}: nothing was raised")
        finally:
            self.model.fails = None
        self.model.state_dict()  # an emergency checkpoint
        self.optimizer.zero_grad()
        self.plain_optimizer.zero_grad()
        self.check_state()

    def forward(self, microbatch: Microbatch, *, is_last: bool) -> Any:
        """Return the loss, and what is to be done after its backward."""
        model, used = self.model, microbatch.used[self.rank]
        model.set_gradient_sync(SYNC["F" if is_last else microbatch.mode])
        if not is_last and isinstance(model.blocks[0], FSDPModule):
            model.blocks[0].set_gradient_sync(SYNC[microbatch.mode_of_first])
        model.set_is_last_backward(is_last)
        x = self.inputs(microbatch.seed)[self.rank]
        loss = integer_loss(model(x, used, microbatch.twice).float())
        return loss, self.interrupt(microbatch.between, x) if model.fails is None else None

    def interrupt(self, what: str, x: torch.Tensor) -> Any:
        """Do something between a forward and its backward; return what to do after it."""
        model = self.model
        if what == "evaluation":
            with torch.no_grad():
                model(x, (True, False), twice=True)
        elif what == "inference":
            with torch.inference_mode():
                model(x)
        elif what == "unused forward":
            model(x)
        elif what == "part" and isinstance(model.blocks[1], FSDPModule):
            with torch.no_grad():
                model.blocks[1](x, None, used=(True, True))
        elif what == "copy":
            [copy.deepcopy(param.detach()) for param in model.parameters()]
        elif what == "unshard":
            handle = model.unshard(async_op=True)
            if x[0, 0] < 0 or self.rank == 0:  # ranks may wait at different moments
                handle.wait()
            return lambda: (handle.wait(), model.reshard())
        return lambda: None

    def inputs(self, seed: int) -> torch.Tensor:
        return inputs_of(seed, self.rows).to(self.device)

    def plain_forward(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        """Compute in the dtype of the policy."""
        cast = {name: param.to(self.dtype) for name, param in self.plain.named_parameters()}
        out = torch.func.functional_call(self.plain, cast, (x.to(self.dtype), *args))
        return out.float()

    def plain_backward(self, microbatch: Microbatch) -> None:
        for x, used in zip(self.inputs(microbatch.seed), microbatch.used, strict=True):
            integer_loss(self.plain_forward(x, used, microbatch.twice)).backward()

    # --- between windows -----------------------------------------------------------------

    def do_freeze(self, name: str) -> None:
        for each in (self.model, self.plain):
            each.get_parameter(name).requires_grad_(False)

    def do_thaw(self, name: str) -> None:
        for each in (self.model, self.plain):
            each.get_parameter(name).requires_grad_(True)

    def do_evaluate(self) -> None:
        x = self.inputs(100)[self.rank]
        with torch.no_grad():
            assert torch.equal(self.model(x).float(), self.plain_forward(x)), self.where

    def do_infer(self) -> None:
        x = self.inputs(101)[self.rank]
        with torch.inference_mode():
            assert torch.equal(self.model(x).float(), self.plain_forward(x)), self.where

    def do_keep(self, forward: bool, backward: bool) -> None:
        self.model.set_reshard_after_forward(not forward)
        self.model.set_reshard_after_backward(not backward)

    def do_save(self) -> None:
        saved = {name: value.clone() for name, value in self.model.state_dict().items()}
        with torch.no_grad():
            for param in self.model.parameters():
                param.zero_()
        self.model.load_state_dict(saved)

    def do_save_full(self) -> None:
        options = StateDictOptions(full_state_dict=True)
        found = get_model_state_dict(self.model, options=options)
        saved = {name: value.clone() for name, value in found.items()}  # on one rank, they alias
        for name, value in self.plain.state_dict().items():
            value = value.to(saved[name].device)
            assert torch.equal(saved[name], value), f"{self.where}: {name}"
        with torch.no_grad():
            for param in self.model.parameters():
                param.zero_()
        set_model_state_dict(self.model, saved, options=options)

    def do_save_optimizer(self) -> None:
        self.renew_optimizer(self.optimizer.state_dict())

    def renew_optimizer(self, state: dict[str, Any]) -> None:
        if self.steps_in_backward:
            attached = meshard.OverlappedOptimizer.attached_to(self.model)
            for each in attached:
                each.detach()
        self.optimizer = self.make_optimizer()
        self.optimizer.load_state_dict(state)

    def do_copy(self, adopts: bool) -> None:
        copied, x = copy.deepcopy(self.model), self.inputs(102)[self.rank]
        with torch.no_grad():
            assert torch.equal(copied(x).float(), self.plain_forward(x)), self.where
        if adopts:
            state = self.optimizer.state_dict()
            self.model = copied
            self.renew_optimizer(state)

    def do_shard_again(self, layout: Layout) -> None:
        """Go on with another mesh and other units, without gradients and momentum."""
        options = StateDictOptions(full_state_dict=True)
        state = get_model_state_dict(self.model, options=options)
        self.model = self.shard(layout)
        set_model_state_dict(self.model, state, options=options)
        self.optimizer = self.make_optimizer()
        self.plain_optimizer.zero_grad()
        self.plain_optimizer.state.clear()

    # --- comparison ----------------------------------------------------------------------

    def check_gradients(self) -> None:
        for (name, plain), param in self.pairs():
            where, found = f"{self.where}: gradient of {name} on rank {self.rank}", param.grad
            if self.steps_in_backward:
                assert found is None, where
                continue
            assert (found is None) == (plain.grad is None), f"{where}: {found}, not {plain.grad}"
            if found is not None:
                self.check(found, plain.grad, where)

    def check_state(self) -> None:
        for (name, plain), param in self.pairs():
            self.check(param, plain, f"{self.where}: {name} on rank {self.rank}")

    def pairs(self) -> Any:
        params = self.model.parameters()
        return zip(self.plain.named_parameters(), params, strict=True)

    def check(self, found: Any, unsharded: torch.Tensor, where: str) -> None:
        local, wanted = found.detach().to_local(), own_part(unsharded.detach(), found)
        wanted = wanted.to(local.device)  # shards may be in host memory
        assert torch.equal(local, wanted), f"{where}: {local}, not {wanted}"


def play(program: Program, device: str = "cpu") -> None:
    """Run a program: a function for the ranks of its mesh."""
    warnings.simplefilter("ignore")  # of checkpoints whose input needs no gradient, and late edits
    Player(program, device).play()
