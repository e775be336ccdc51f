"""Does every parameter get its own gradient, whichever ranks and microbatches use it?"""

import copy
import math

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import CommLedger, GradientSync
from tests.support import strategies
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.threads import run_threads

MODES = {
    "N": GradientSync.NONE,
    "R": GradientSync.REDUCE_SCATTER,
    "F": GradientSync.FULL,
}


class Table(nn.Module):
    """Parameters whose gradients are chosen freely: ``sum(param * given gradient)``."""

    def __init__(self, shapes):
        super().__init__()
        self.params = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)

    def forward(self, x, gradients):
        terms = [
            (p * g).sum() for p, g in zip(self.params, gradients, strict=True) if g is not None
        ]
        return x + sum(terms) if terms else x


class Tables(nn.Module):
    """Units of a table each, and a table that the root owns."""

    def __init__(self, shapes_per_unit):
        super().__init__()
        self.units = nn.ModuleList(Table(shapes) for shapes in shapes_per_unit)

    def forward(self, gradients):
        x = torch.zeros((), requires_grad=True) * 1.0
        for unit, own in zip(self.units, gradients, strict=True):
            x = unit(x, own)
        return x


def integer_gradients(shapes_per_unit, masks, seed):
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            # Times -1.0: a zero becomes -0.0, which must not be taken for a mark of non-use.
            torch.randint(-8, 9, shape, generator=generator) * -1.0 if used else None
            for shape, used in zip(shapes, mask, strict=True)
        ]
        for shapes, mask in zip(shapes_per_unit, masks, strict=True)
    ]


@st.composite
def windows(draw):
    mesh = draw(strategies.meshes())
    num_units = draw(st.integers(1, 2))
    shapes = [
        draw(st.lists(strategies.param_shapes(), min_size=1, max_size=3)) for _ in range(num_units)
    ]
    schedule = draw(strategies.schedules(4))
    ranks = strategies.num_ranks(mesh)
    masks = [
        [
            [draw(st.lists(st.booleans(), min_size=len(s), max_size=len(s))) for s in shapes]
            for _ in range(ranks)
        ]
        for _ in schedule
    ]
    factor = draw(st.sampled_from([None, 1.0, 0.5, 4.0, 256.0]))
    policy = draw(
        st.sampled_from([{}, {"reduce_dtype": torch.bfloat16}, {"reduce_dtype": torch.float64}])
    )
    return mesh, shapes, schedule, masks, factor, policy


def oracle(shapes, schedule, masks, total):
    """Exact sums over all microbatches and ranks, divided once; None where nobody had any."""
    expected = [[None] * len(unit) for unit in shapes]
    for k in range(len(schedule)):
        for rank, mask in enumerate(masks[k]):
            for u, unit in enumerate(integer_gradients(shapes, mask, 100 * k + rank)):
                for p, gradient in enumerate(unit):
                    if gradient is not None:
                        before = expected[u][p]
                        expected[u][p] = gradient if before is None else before + gradient
    return {
        f"units.{u}.params.{p}": None if value is None else value / total
        for u, unit in enumerate(expected)
        for p, value in enumerate(unit)
    }


def run_window(mesh_shape, shapes, schedule, masks, factor, policy):
    mesh = init_device_mesh("cpu", mesh_shape)
    model = Tables(shapes)
    kwargs = {"mp_policy": meshard.MixedPrecisionPolicy(**policy)}
    for unit in model.units:
        meshard.fully_shard(unit, mesh, **kwargs)
    meshard.fully_shard(model, mesh, **kwargs)
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    rank = dist.get_rank()
    with CommLedger(model) as ledger:
        for k, sync in enumerate(schedule):
            model.set_gradient_sync(MODES[sync])
            model(integer_gradients(shapes, masks[k][rank], 100 * k + rank)).backward()
    events = [(event.op, event.unit, event.payload_bytes) for event in ledger.events]
    return full_grads(model), events


@given(window=windows())
def test_any_schedule_mesh_and_use_gives_the_exact_sum(window):
    mesh, shapes, schedule, masks, factor, policy = window
    ranks = strategies.num_ranks(mesh)
    results = run_threads(run_window, ranks, mesh, shapes, schedule, masks, factor, policy)
    total = float(ranks) if factor is None else factor
    expected = oracle(shapes, schedule, masks, total)
    for name in list(expected):  # an empty parameter has nothing to be used
        u, p = int(name.split(".")[1]), int(name.split(".")[3])
        if 0 in shapes[u][p]:
            for grads, _ in results:
                grads.pop(name)
            expected[name] = "empty"
    expected = {name: value for name, value in expected.items() if value != "empty"}
    is_exact = (total.as_integer_ratio()[0] & (total.as_integer_ratio()[0] - 1)) == 0
    for grads, events in results:
        assert [event[:2] for event in events] == [event[:2] for event in results[0][1]]
        if is_exact and "reduce_dtype" not in policy:
            assert_same(grads, expected, bitwise=True)
        else:
            dtype = (
                torch.bfloat16 if policy.get("reduce_dtype") == torch.bfloat16 else torch.float32
            )
            assert_same(grads, expected, dtype)


def diverge(schedule):
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})

    class Pick(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = model

        def forward(self, x, which):
            return self.experts[which](x)

    net = Pick()
    plain = copy.deepcopy(net)
    meshard.fully_shard(net, init_device_mesh("cpu", (2, 2)))
    xs = torch.randn(4, 3, 4)
    rank = dist.get_rank()
    pick = ["a", "b", "b", "a"]
    for sync in schedule:
        net.set_gradient_sync(MODES[sync])
        net(xs[rank], pick[rank]).sum().backward()
        for other in range(4):
            (plain(xs[other], pick[other]).sum() / 4).backward()
    assert_same(full_grads(net), full_grads(plain))


def test_ranks_that_use_different_parameters_of_the_same_size_stay_apart(run_ranks):
    for schedule in ("F", "RF", "NF", "RNRF"):
        run_ranks(diverge, 4, schedule)


def freeze_and_thaw():
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    plain = copy.deepcopy(model)
    for layer in (model[0], model[2]):
        meshard.fully_shard(layer, mesh)
    meshard.fully_shard(model, mesh)
    both = (model, plain)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in both]
    xs = torch.randn(2, 3, 4)
    for frozen in ((), ("0.weight",), ("0.weight", "2.weight", "2.bias"), ("2.bias",), ()):
        for each, x in zip(both, (xs[dist.get_rank()], xs.flatten(0, 1)), strict=True):
            for name, param in each.named_parameters():
                param.requires_grad_(name not in frozen)
            each(x).square().mean().backward()
        assert_same(full_grads(model), full_grads(plain))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same(full_state(model), full_state(plain))


def test_parameters_may_be_frozen_and_thawed_between_steps(run_ranks):
    run_ranks(freeze_and_thaw, 2)


def float_window(mesh_shape, schedule, wire_dtype, seed):
    """Return the first parameter's gradient and the exact sum, for gradients that are floats."""
    mesh = init_device_mesh("cpu", mesh_shape)
    policy = meshard.MixedPrecisionPolicy(reduce_dtype=wire_dtype)
    model = meshard.fully_shard(Tables([[(7, 3)]]), mesh, mp_policy=policy)
    generator = torch.Generator().manual_seed(seed)
    ranks = dist.get_world_size()
    all_gradients = torch.randn(len(schedule), ranks, 7, 3, generator=generator)
    for k, sync in enumerate(schedule):
        model.set_gradient_sync(MODES[sync])
        model([[all_gradients[k, dist.get_rank()]]]).backward()
    return next(model.parameters()).grad.full_tensor(), all_gradients


@given(
    mesh=strategies.meshes(),
    schedule=strategies.schedules(5),
    wire_dtype=st.sampled_from([None, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_floats_stay_within_the_derived_bound_and_are_deterministic(
    mesh, schedule, wire_dtype, seed
):
    """(K + log2 D + 2) eps of the accumulate dtype, and one rounding to the wire per collective."""
    ranks = strategies.num_ranks(mesh)
    args = (mesh, schedule, wire_dtype, seed)
    first, second = run_threads(float_window, ranks, *args), run_threads(float_window, ranks, *args)
    for (grad, gradients), (again, _) in zip(first, second, strict=True):
        assert torch.equal(grad, again)
        assert torch.equal(grad, first[0][0])  # every replica, bit for bit
        exact = gradients.double().sum((0, 1)) / ranks
        magnitude = gradients.double().abs().sum((0, 1)) / ranks
        sums = len(schedule) + math.ceil(math.log2(ranks)) + 2 + len(mesh)
        bound = sums * torch.finfo(torch.float32).eps * magnitude
        if wire_dtype == torch.bfloat16:
            # To nearest is half an eps: into the reduce-scatter, into the all-reduce, in its sums.
            roundings = 1 + (len(mesh) == 2) * (1 + mesh[0])
            bound = bound + roundings * torch.finfo(torch.bfloat16).eps / 2 * magnitude * 1.01
        assert ((grad.double() - exact).abs() <= bound).all()
