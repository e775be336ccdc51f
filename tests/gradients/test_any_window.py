"""Any window of microbatches: what it must leave and send.

Gradients are integers, small enough that sums of them are exact in every dtype on the way. Divided
by a power of two they stay exact, so nothing but the right bits will do; by other factors they are
within a bound that counts the roundings.

Random programs (``tests.support.programs``) have one model and factors that are exact. Here shapes,
dtypes and factors are drawn, and what each unit sends is counted, which programs do not compare.
"""

import math
from dataclasses import dataclass, field
from functools import reduce

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import meshard
from tests.support import strategies
from tests.support.models import Table, Tables
from tests.support.threads import run_threads

MAX_MICROBATCHES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    shape: tuple[int, ...]
    dim: int = 0  # that is sharded
    dtype: torch.dtype = torch.float32
    is_frozen: bool = False

    def chunk_rows(self, shards: int) -> int:
        return math.ceil(self.shape[self.dim] / shards)

    def slot_numel(self, shards: int) -> int:
        return math.prod(self.shape) // max(self.shape[self.dim], 1) * self.chunk_rows(shards)

    def shard_of(self, whole: torch.Tensor, shards: int, rank: int) -> torch.Tensor:
        rows, count = self.chunk_rows(shards), self.shape[self.dim]
        start = min(rank * rows, count)
        return whole.narrow(self.dim, start, min(rows, count - start))


Uses = list[list[bool] | None]  # per unit: which parameters are used; None: the unit is not run


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Microbatches that end with F, for units of which the last is the root."""

    mesh: tuple[int, ...]
    params: list[list[Param]]  # of each unit
    modes: list[str]  # per microbatch, one letter per unit
    uses: list[list[Uses]]  # per microbatch and rank
    factor: float
    policy: dict[str, torch.dtype] = field(default_factory=dict)

    @property
    def shards(self) -> int:
        return self.mesh[-1]

    @property
    def replicas(self) -> int:
        return math.prod(self.mesh[:-1])

    def compute_dtype(self, param: Param) -> torch.dtype:
        return self.policy.get("param_dtype", param.dtype)

    def wire_dtype(self, unit: int) -> torch.dtype:
        dtypes = [self.compute_dtype(p) for p in self.params[unit] if not p.is_frozen]
        return self.policy.get("reduce_dtype") or reduce(torch.promote_types, dtypes)

    def accumulate_dtype(self, unit: int) -> torch.dtype:
        dtypes = [param.dtype for param in self.params[unit]]
        return self.policy.get("accumulate_dtype") or reduce(
            torch.promote_types, dtypes, torch.float32
        )

    def trains(self, unit: int) -> bool:
        return any(not param.is_frozen for param in self.params[unit])

    @property
    def amplitude(self) -> int:
        """The largest gradient with which every intermediate has few enough digits.

        With R replicas a partial is a multiple of R/c, so an odd R costs digits.
        """
        dtypes = {torch.float32, *self.policy.values()}
        dtypes |= {param.dtype for unit in self.params for param in unit}
        most = min(round(1 / torch.finfo(dtype).eps) * 2 for dtype in dtypes)
        odd = self.replicas // (self.replicas & -self.replicas)
        return min(8, most // (len(self.modes) * self.replicas * self.shards * odd))

    def gradients(self, k: int, rank: int) -> list[list[torch.Tensor | None] | None]:
        """Return the whole gradients of one microbatch of one rank, as ``Tables`` takes them."""
        generator = torch.Generator().manual_seed(100 * k + rank)
        most = self.amplitude

        def row(unit, use):
            drawn = [torch.randint(-most, most + 1, p.shape, generator=generator) for p in unit]
            # Times -1.0: a zero becomes -0.0, which must not be taken for a mark of non-use.
            return use and [g * -1.0 if used else None for g, used in zip(drawn, use, strict=True)]

        return [row(*each) for each in zip(self.params, self.uses[k][rank], strict=True)]


def build(window: Window) -> torch.nn.Module:
    """Return the sharded model of ``window``. Collective."""
    mesh = init_device_mesh("cpu", window.mesh)
    shapes = [[param.shape for param in unit] for unit in window.params]
    model = Tables(shapes, [[param.dtype for param in unit] for unit in window.params])
    tables = [*model.units, model]
    dims = {}
    for table, unit in zip(tables, window.params, strict=True):
        for tensor, param in zip(table.params, unit, strict=True):
            dims[tensor] = Shard(param.dim)
            tensor.requires_grad_(not param.is_frozen)
    for table in tables:
        meshard.fully_shard(
            table,
            mesh,
            shard_placement_fn=dims.get,
            mp_policy=meshard.MixedPrecisionPolicy(**window.policy),
        )
    model.set_gradient_divide_factor(window.factor)
    return model


def run_window(window: Window) -> tuple[list[list[torch.Tensor | None]], list[object]]:
    """Run ``window`` on this rank; return its shards of gradients per unit, and its events."""
    model = build(window)
    tables = [*model.units, model]
    with meshard.CommLedger(model) as ledger:
        for k, modes in enumerate(window.modes):
            for table, mode in zip(tables, modes, strict=True):
                table.set_gradient_sync(strategies.MODES[mode], recurse=False)
            model(window.gradients(k, dist.get_rank())).backward()
    assert not meshard.pending_gradients(model)
    shards = [
        [None if p.grad is None else p.grad.to_local().clone() for p in table.params]
        for table in tables
    ]
    return shards, ledger.events


def sums(window: Window) -> list[list[tuple[torch.Tensor, torch.Tensor] | None]]:
    """Return the sum and the sum of magnitudes of all gradients, exactly; None: there are none."""
    ranks = range(window.replicas * window.shards)
    drawn = [window.gradients(k, rank) for k in range(len(window.modes)) for rank in ranks]

    def of_param(unit: int, index: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        rows = [rows[unit] for rows in drawn if rows[unit] is not None]
        used = [row[index].double() for row in rows if row[index] is not None]
        is_frozen = window.params[unit][index].is_frozen
        return (sum(used), sum(map(torch.abs, used))) if used and not is_frozen else None

    return [
        [of_param(unit, index) for index in range(len(params))]
        for unit, params in enumerate(window.params)
    ]


def growth_of_errors(window: Window, unit: int, param: Param) -> float:
    """Return by how much of the sum of magnitudes a gradient may be off: one factor per rounding.

    (K + log2 D + 2) eps of the accumulate dtype, a rounding to the wire per collective and per sum
    that is made there, one to the dtype of the parameter, and one of the float64 compared with.
    """

    def rounded(dtype: torch.dtype, times: int) -> float:
        # As a logarithm: 1 + eps / 2 of float64 is 1 in float64.
        return times * math.log1p(torch.finfo(dtype).eps / 2)

    ranks = window.replicas * window.shards
    in_accumulator = 2 * (len(window.modes) + math.ceil(math.log2(ranks)) + 2)
    on_wire = 1 + window.replicas * (len(window.mesh) == 2)
    grown = rounded(window.accumulate_dtype(unit), in_accumulator)
    grown += rounded(window.wire_dtype(unit), on_wire)
    return math.expm1(grown + rounded(param.dtype, 1) + rounded(torch.float64, 1))


@st.composite
def params(draw: st.DrawFn) -> Param:
    shape = draw(strategies.param_shapes())
    return Param(
        shape=shape,
        dim=draw(st.integers(0, len(shape) - 1)),
        dtype=draw(strategies.dtypes()),
        is_frozen=draw(st.sampled_from([False] * 5 + [True])),
    )


@st.composite
def windows(draw: st.DrawFn) -> Window:
    """Windows on any mesh, of one or two units and a root that may own parameters itself."""
    mesh = draw(strategies.meshes())
    units = draw(st.lists(st.lists(params(), min_size=1, max_size=3), min_size=1, max_size=2))
    units.append(draw(st.lists(params(), max_size=2)))
    letters = st.text("NRF", min_size=len(units), max_size=len(units))
    modes = [*draw(st.lists(letters, max_size=MAX_MICROBATCHES - 1)), "F" * len(units)]
    policy = {}
    for name in ("param_dtype", "reduce_dtype", "accumulate_dtype"):
        dtype = draw(st.none() | strategies.dtypes())
        if dtype is not None:
            policy[name] = dtype
    powers = st.integers(-4, 8).map(lambda power: 2.0**power)  # by which sums stay exact
    factors = st.sampled_from([math.prod(mesh), mesh[-1], 1.0, 3.0, 0.5, 300.0])
    return Window(
        mesh=mesh,
        params=units,
        modes=modes,
        uses=[_draw_uses(draw, units, math.prod(mesh)) for _ in modes],
        factor=float(draw(factors | powers | powers)),
        policy=policy,
    )


def _draw_uses(draw: st.DrawFn, units: list[list[Param]], num_ranks: int) -> list[Uses]:
    """Draw what each rank uses; a unit is run by all ranks or by none.

    Some unit with parameters is run always: a backward that meets none is not noticed.
    """
    always = {len(units) - 1} if units[-1] else {0, len(units) - 1}
    per_unit = []
    for number, unit in enumerate(units):
        is_run = number in always or draw(st.sampled_from([True, True, True, False]))
        bits = draw(st.integers(0, 2 ** (num_ranks * len(unit)) - 1))
        flags = [bool(bits >> place & 1) for place in range(num_ranks * len(unit))]
        rows = [flags[rank * len(unit) : (rank + 1) * len(unit)] for rank in range(num_ranks)]
        per_unit.append(rows if is_run else [None] * num_ranks)
    return [[rows[rank] for rows in per_unit] for rank in range(num_ranks)]


@given(window=windows())
@example(  # few that are drawn have several shards and several replicas
    window=Window(
        mesh=(2, 2),
        params=[
            [Param(shape=(3,), dtype=torch.bfloat16), Param(shape=(5, 3))],
            [Param(shape=(2,))],
        ],
        modes=["RN", "NR", "FF"],
        uses=[[[[True, True], [True]]] * 4] * 3,
        factor=4.0,
    )
)
def test_any_window_leaves_the_right_sums_and_sends_the_same_on_all_ranks(window):
    ranks = math.prod(window.mesh)
    results = run_threads(run_window, ranks, window)
    for _, events in results:
        assert events == results[0][1]
    is_exact = math.log2(window.factor).is_integer()
    for u, row in enumerate(sums(window)):
        for p, total in enumerate(row):
            param = window.params[u][p]
            if 0 in param.shape:
                continue  # has nothing that could be used
            for rank, (shards, _) in enumerate(results):
                found, where = shards[u][p], f"unit {u} parameter {p} on rank {rank}"
                assert (found is None) == (total is None), where
                if total is None:
                    continue
                exact, magnitude = (
                    param.shard_of(value / window.factor, window.shards, rank % window.shards)
                    for value in total
                )
                assert found.dtype == param.dtype and found.shape == exact.shape, where
                bound = 0.0 if is_exact else growth_of_errors(window, u, param) * magnitude
                assert ((found.double() - exact).abs() <= bound).all(), where
                replica_0 = results[rank % window.shards][0][u][p]
                assert torch.equal(found, replica_0), where


@pytest.mark.slow
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
    ranks = math.prod(mesh)
    generator = torch.Generator().manual_seed(seed)
    gradients = torch.randn(len(schedule), ranks, 7, 3, generator=generator)
    exact = gradients.double().sum((0, 1)) / ranks
    magnitude = gradients.double().abs().sum((0, 1)) / ranks
    num_sums = len(schedule) + math.ceil(math.log2(ranks)) + 2 + len(mesh)
    bound = num_sums * torch.finfo(torch.float32).eps * magnitude
    if wire_dtype == torch.bfloat16:
        # To nearest is half an eps: into the reduce-scatter, into the all-reduce, in its sums.
        roundings = 1 + (len(mesh) == 2) * (1 + mesh[0])
        bound = bound + roundings * torch.finfo(torch.bfloat16).eps / 2 * magnitude * 1.01
    policy = meshard.MixedPrecisionPolicy(reduce_dtype=wire_dtype)

    def gradient():
        model = meshard.fully_shard(
            Table([(7, 3)]), init_device_mesh("cpu", mesh), mp_policy=policy
        )
        for number, mode in enumerate(schedule):
            model.set_gradient_sync(strategies.MODES[mode])
            model(torch.zeros(()), [gradients[number, dist.get_rank()]]).backward()
        return model.params[0].grad.full_tensor()

    first, *others = run_threads(gradient, ranks) + run_threads(gradient, ranks)
    assert all(torch.equal(first, other) for other in others)  # every replica, bit for bit
    assert ((first.double() - exact).abs() <= bound).all()
