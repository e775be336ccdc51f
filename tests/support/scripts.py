"""Scripts of what users do, and an exact model that runs them too.

Hypothesis writes a script of operations; all ranks run it on threads, and a model of one process
runs it beside them. Gradients are integers, another one for every element, and factors powers of
two, so that every intermediate is exact in float32 and in the float64 of the model: the two must
agree bit for bit after every operation, partials included.
"""

from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Shard

import meshard
from tests.support.models import Tables
from tests.support.strategies import MODES, Mesh, num_ranks

SHAPES = [[(3,), (2, 2)], [(5,)], [(1,)]]  # the root's last
PARAMS = [(u, p) for u, shapes in enumerate(SHAPES) for p in range(len(shapes))]
LEARNING_RATE = 0.25


class Stop(Exception):
    """Raised in the middle of a forward."""


def gradient(seed, rank, param):
    generator = torch.Generator().manual_seed(1000 * seed + 10 * rank + param)
    unit, place = PARAMS[param]
    return torch.randint(-8, 9, SHAPES[unit][place], generator=generator).double()


def add(old, new):
    """Add two values of which either may be None, for there is none."""
    return new if old is None else old if new is None else old + new


def nothing():
    return [None] * len(PARAMS)


@dataclass
class Model:
    """What should happen: values and gradients whole, what is pending where it is held."""

    mesh: Mesh
    values: list = field(default_factory=lambda: [torch.zeros(SHAPES[u][p]) for u, p in PARAMS])
    grads: list = field(default_factory=nothing)
    frozen: set = field(default_factory=set)
    factor: float | None = None
    is_open: bool = False
    is_window: bool = False  # also on a flat mesh, where nothing is pending after R

    def __post_init__(self):
        self.values = [value.double() for value in self.values]
        self.close()

    def close(self):
        """Hold nothing that is not in ``.grad``."""
        self.whole = [nothing() for _ in range(num_ranks(self.mesh))]  # per rank
        self.partials = [nothing() for _ in range(self.replicas)]  # means over shard groups
        self.is_open = False

    @property
    def replicas(self):
        return self.mesh[0] if len(self.mesh) == 2 else 1

    @property
    def divisor(self):
        return self.factor or num_ranks(self.mesh)

    def microbatch(self, seed, mode, masks, fails):
        if fails:
            if self.is_window:  # half a window is void
                self.grads = nothing()
                self.close()
                self.is_window = False
            return
        for rank, mask in enumerate(masks):
            for param, used in enumerate(mask):
                if used and param not in self.frozen:
                    new = gradient(seed, rank, param)
                    self.whole[rank][param] = add(self.whole[rank][param], new)
        self.is_open = True  # also if no rank had a gradient: none can know that yet
        if mode != "N":
            self.reduce_scatter()
        if mode == "F" or (mode == "R" and len(self.mesh) == 1):
            self.all_reduce()
        self.is_window = mode != "F"

    def reduce_scatter(self):
        for rank, row in enumerate(self.whole):
            partials = self.partials[rank // self.mesh[-1]]
            for param, value in enumerate(row):
                if value is not None:
                    share = value * self.replicas / self.divisor
                    partials[param] = add(partials[param], share)
        self.whole = [nothing() for _ in self.whole]

    def all_reduce(self):
        for partials in self.partials:
            for param, value in enumerate(partials):
                if value is not None:
                    self.grads[param] = add(self.grads[param], value / self.replicas)
        self.close()

    def held_by(self, rank):
        """Return what ``pending_gradients`` shows this rank: parameter to whole partial or None."""
        partials = self.partials[rank // self.mesh[-1]]
        shown = {param: value for param, value in enumerate(partials) if value is not None}
        for param, value in enumerate(self.whole[rank]):
            if value is not None:
                shown[param] = None
        return shown

    def zero(self, how):
        zeros = [None if grad is None else torch.zeros_like(grad) for grad in self.grads]
        self.grads = zeros if how == "zeros" else nothing()
        self.close()
        self.is_window = False

    def step(self):
        self.is_window = False
        for param, grad in enumerate(self.grads):
            if grad is not None:
                self.values[param] = self.values[param] - LEARNING_RATE * grad


@st.composite
def scripts(draw):
    mesh = draw(st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (4, 1), (1, 2), (2, 1)]))
    mask = st.tuples(*[st.booleans()] * len(PARAMS))
    microbatch = st.tuples(
        st.just("microbatch"),
        st.sampled_from("NRFF"),
        st.tuples(*[mask] * num_ranks(mesh)),
        st.sampled_from([False] * 7 + [True]),
    )
    other = st.one_of(
        st.tuples(st.just("zero"), st.sampled_from(["module", "none", "zeros"])),
        st.tuples(st.just("step")),
        st.tuples(st.just("factor"), st.sampled_from([1.0, 0.5, 8.0])),
        st.tuples(st.just("freeze"), st.sampled_from(range(len(PARAMS)))),
        st.tuples(st.just("thaw"), st.sampled_from(range(len(PARAMS)))),
        st.tuples(st.just("evaluate")),
        st.tuples(st.just("unshard"), st.sampled_from([0, 1])),
        st.tuples(st.just("reshard"), st.sampled_from([0, 1])),
        st.tuples(st.just("keep"), st.booleans()),
        st.tuples(st.just("last"), st.booleans()),
        st.tuples(st.just("finalize")),
    )
    return mesh, draw(st.lists(st.one_of(microbatch, microbatch, other), max_size=10))


class Player:
    """Runs a script on one rank."""

    def __init__(self, mesh_shape):
        mesh = init_device_mesh("cpu", mesh_shape)
        self.net = Tables(SHAPES)
        for unit in self.net.units:
            meshard.fully_shard(unit, mesh)
        meshard.fully_shard(self.net, mesh)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=LEARNING_RATE)
        tables = [*self.net.units, self.net]
        self.params = [tables[u].params[p] for u, p in PARAMS]
        self.names = {id(param): name for name, param in self.net.named_parameters()}
        self.model = Model(mesh_shape)
        if dist.get_world_size() == 3:  # a third is not exact: no script without a factor
            self.do_factor(-1, 4.0)

    def gradients(self, seed, mask):
        drawn = [
            gradient(seed, dist.get_rank(), param).float() if used else None
            for param, used in enumerate(mask)
        ]
        return [[drawn[PARAMS.index((u, p))] for p in range(len(SHAPES[u]))] for u in range(3)]

    def play(self, place, operation):
        name, *args = operation
        getattr(self, f"do_{name}")(place, *args)
        if name != "last":
            self.check(place, operation)

    def do_microbatch(self, place, mode, masks, fails):
        self.net.set_gradient_sync(MODES[mode])
        grads = self.gradients(place, masks[dist.get_rank()])
        if fails:

            def stop(*_):
                raise Stop

            handle = self.net.units[1].register_forward_pre_hook(stop)
            with pytest.raises(Stop):
                self.net(grads)
            handle.remove()
        else:
            self.net(grads).backward()
        self.model.microbatch(place, mode, masks, fails)

    def do_zero(self, place, how):
        if how == "module":
            self.net.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=how == "none")
        self.model.zero(how)

    def refused(self, action):
        try:
            action()
        except RuntimeError as error:
            if "unit" not in str(error):
                raise
            return True
        return False

    def do_step(self, place):
        self.net.set_is_last_backward(True)
        meshard.pending_gradients(self.net)  # finishes what is on its way
        if self.refused(self.optimizer.step):
            assert self.model.is_open
        else:
            assert not self.model.is_open
            self.model.step()

    def do_factor(self, place, factor):
        meshard.pending_gradients(self.net)
        if not self.refused(lambda: self.net.set_gradient_divide_factor(factor)):
            assert not self.model.is_window
            self.model.factor = factor
        else:
            assert self.model.is_window

    def do_freeze(self, place, param):
        self.params[param].requires_grad_(False)
        self.model.frozen.add(param)

    def do_thaw(self, place, param):
        self.params[param].requires_grad_(True)
        self.model.frozen.discard(param)

    def do_evaluate(self, place):
        with torch.no_grad():
            self.net(self.gradients(place, (True,) * len(PARAMS)))

    def do_unshard(self, place, unit):
        self.net.units[unit].unshard()
        self.net.units[unit].reshard()

    def do_reshard(self, place, unit):
        self.net.units[unit].reshard()

    def do_keep(self, place, keep):
        self.net.set_reshard_after_forward(not keep)
        self.net.set_reshard_after_backward(not keep)

    def do_last(self, place, is_last):
        self.net.set_is_last_backward(is_last)

    def do_finalize(self, place):
        meshard.finalize_gradients(self.net)
        self.model.reduce_scatter()
        self.model.all_reduce()
        self.model.is_window = False

    def check(self, place, operation):
        """Compare every parameter, gradient and partial, bit for bit."""
        pending = meshard.pending_gradients(self.net)
        assert bool(pending) is self.model.is_open
        rank = dist.get_rank()
        held = self.model.held_by(rank)
        assert set(pending) == {self.names[id(self.params[param])] for param in held}
        for number, (param, value, grad) in enumerate(
            zip(self.params, self.model.values, self.model.grads, strict=True)
        ):
            where = f"operation {place} {operation}, parameter {number} on rank {rank}"
            self.same(param, value, f"{where}: value")
            assert (param.grad is None) == (grad is None), where
            if grad is not None:
                self.same(param.grad, grad, f"{where}: gradient")
            if number in held:
                partial = pending[self.names[id(param)]]
                assert (partial is None) == (held[number] is None), where
                if partial is not None:
                    assert partial.placements == (Partial("avg"), Shard(0)), where
                    self.same(partial, held[number], f"{where}: partial")

    def same(self, found, whole, where):
        """Compare this rank's shard with its part of ``whole``."""
        local, shards = found.to_local(), self.model.mesh[-1]
        rows = -(-whole.shape[0] // shards)
        start = rows * (dist.get_rank() % shards)
        assert torch.equal(local.double(), whole[start : start + rows]), f"{where}: {local}"


def play(mesh_shape, script):
    player = Player(mesh_shape)
    for place, operation in enumerate(script):
        player.play(place, operation)
