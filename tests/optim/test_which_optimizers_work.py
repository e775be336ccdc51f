"""Which optimizers work on shards: each is trained beside one process.

The table of docs/reference/optimizers.md says how that ended.
All ranks have the same batch, so that gradients are those of one process, bit for bit, and only the
optimizer can differ.
"""

import inspect
import re
import warnings
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard.optim.local_step import POINTWISE
from tests import ROOT
from tests.optim import stand_in_optimizers as stand_ins
from tests.support.models import Made, UnevenMlp, seeded
from tests.support.parity import full_state
from tests.support.ranks import on_ranks

STEPS = 4
WAYS = ("sharded", "overlapped", "local", "owned", "replicated")
# What a message says, in the words of the page.
REASONS = {
    "which is right for SGD": "not pointwise",
    "dense gradients|gradients are dense": "reduced gradients are dense",
    "LBFGS": "needs all parameters at once",
    "writes .* into its param group": "needs all parameters at once",
    "mixed torch.Tensor and DTensor": "its states are plain tensors",
    "Adafactor needs norms": "DTensor lacks an operation",
    "in-place operations that require placement changes": "DTensor lacks an operation",
    "flatten unevenly sharded": "DTensor lacks an operation",
    "does not have a sharding strategy": "DTensor lacks an operation",
}
# What the page says of other torches below its table: the first cells of a row.
CELLS_OF_2_11 = {"`Muon`, fewer rows than ranks": ["to rounding", "to rounding"]}
CELLS_OF_2_15 = {"`Rprop`": ["exact"]}
# Of a parameter's way, by the norm: how far it may be from that of one process.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 0.05}


def even():
    """Return a model whose shards on two ranks are whole blocks of ``EightBitAdam``."""
    layers = [nn.Linear(7, 16), nn.Linear(16, 8)]
    return Made(lambda m, x: m.layers[1](torch.tanh(m.layers[0](x))).tanh(), layers=layers)


def sparse():
    layers = [nn.Embedding(11, 5, sparse=True)]
    return Made(lambda m, x: m.layers[0]((5 + 2 * x).long().clamp(0, 10)), layers=layers)


def matrices(params):
    return [param for param in params if param.dim() == 2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One optimizer, and what it trains."""

    name: str
    cls: type[torch.optim.Optimizer]
    options: dict = field(default_factory=dict)
    model: object = UnevenMlp  # makes it
    choose: object = list  # of the parameters, those that it takes
    dtype: torch.dtype = torch.float32  # the coarsest in which it computes


def of_torch(name, where="", **kwargs):
    return Row(name=f"`{name}`{where}", cls=getattr(torch.optim, name), **kwargs)


def stand_in(name, cls, **kwargs):
    return Row(name=f"{name} (stand-in)", cls=cls, **kwargs)


MUON = {"choose": matrices, "dtype": torch.bfloat16}
LBFGS = {"options": {"lr": 0.1, "max_iter": 3}}


ROWS = [
    of_torch("SGD", options={"lr": 0.05, "momentum": 0.9}),
    of_torch("Adam"),
    of_torch("AdamW"),
    of_torch("Adagrad"),
    of_torch("Adadelta"),
    of_torch("Adamax"),
    of_torch("RMSprop"),
    of_torch("NAdam"),
    of_torch("RAdam"),
    of_torch("ASGD"),
    of_torch("Rprop"),
    of_torch("Adafactor"),
    of_torch("Muon", model=even, **MUON),
    of_torch("Muon", ", fewer rows than ranks", **MUON),
    of_torch("LBFGS", model=even, **LBFGS),
    of_torch("LBFGS", ", uneven shards", **LBFGS),
    of_torch("SparseAdam", model=sparse),
    stand_in("Lion", stand_ins.Lion),
    stand_in("LAMB", stand_ins.Lamb),
    stand_in("LARS", stand_ins.Lars),
    stand_in("Shampoo", stand_ins.Shampoo, model=even),
    stand_in("`Adafactor` of transformers", stand_ins.TransformersAdafactor, model=even),
    stand_in("Prodigy", stand_ins.Prodigy),
    stand_in("8-bit Adam, as of torchao", stand_ins.EightBitAdam, model=even),
]


def trained(row, model, make):
    """Return all parameters after some steps of what ``make`` returns."""
    optimizer = make(model, row.choose(model.parameters()))
    for step in range(STEPS):
        inputs = torch.randn(6, 7, generator=torch.Generator().manual_seed(step))

        def closure(inputs=inputs):
            optimizer.zero_grad()
            loss = model(inputs).square().sum()
            loss.backward()
            return loss

        if row.cls is torch.optim.LBFGS:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return full_state(model)


def made(row, way, shape):
    """Return the model of ``row`` as it is trained in ``way``, and what makes its optimizer."""
    model, mesh = seeded(row.model()), init_device_mesh("cpu", shape)
    if way == "replicated":
        meshard.replicate(model, mesh)
    else:
        for unit in (*model.layers, model):
            meshard.fully_shard(unit, mesh)
    if way == "overlapped":
        return model, lambda m, params: meshard.overlap_optimizer(m, row.cls, params, **row.options)
    if way == "local":
        return model, lambda m, params: meshard.local_optimizer(m, row.cls, params, **row.options)
    if way == "owned":
        return model, lambda m, params: owner_optimizer(m, row, params)
    return model, lambda m, params: row.cls(params, **row.options)


def owner_optimizer(model, row, params):
    chosen = set(map(id, params))
    return meshard.owner_optimizer(
        model, row.cls, select=lambda _, p: id(p) in chosen, **row.options
    )


def outcome(row, way, shape, start, expected):
    """Return how training in ``way`` ends; ``expected`` is what one process makes of ``start``."""
    try:
        found = trained(row, *made(row, way, shape))
    except (RuntimeError, TypeError, ValueError) as error:
        reasons = [words for text, words in REASONS.items() if re.search(text, str(error))]
        return f"refused: {reasons[0]}" if reasons else f"fails: {error}"
    ways = {name: value - start[name] for name, value in expected.items()}
    distances = {name: float((found[name] - expected[name]).norm()) for name in ways}
    if not any(distances.values()):
        return "exact"
    limit = ROUNDING[row.dtype]
    too_far = [name for name, way in ways.items() if distances[name] > limit * float(way.norm())]
    return "wrong: it reads numbers" if too_far else "to rounding"


def outcomes(row, shape):
    """Return the cells of the page, as far as they can be measured on a mesh of ``shape``."""
    warnings.filterwarnings("ignore", "no optimizer has stepped")  # Muon takes matrices only
    plain = seeded(row.model())
    start = full_state(plain)
    expected = trained(row, plain, lambda m, params: row.cls(params, **row.options))
    cells = [outcome(row, way, shape, start, expected) for way in ways_on(shape)]
    return [row.name, *cells]


def ways_on(shape):
    return WAYS if len(shape) == 1 else WAYS[:-1]  # of four ranks' mean, the last bits differ


def rows_of_page():
    """Return the cells of each row of the first table."""
    page = (ROOT / "docs" / "reference" / "optimizers.md").read_text()
    table = page.partition("|---|---|---|---|---|---|\n")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    others = {}
    if torch.__version__ < "2.12":
        others = CELLS_OF_2_11
    elif torch.__version__ >= "2.15":
        others = CELLS_OF_2_15
    for cells in rows:
        told = others.get(cells[0], [])
        cells[1 : 1 + len(told)] = told
    return rows


@on_ranks(2)
def test_a_factory_that_leaves_out_its_param_groups_is_refused():
    """In backward the module holds unsharded parameters of the unit."""
    model = torch.nn.Sequential(*(torch.nn.Linear(7, 7) for _ in range(3)))
    for unit in (model[0], model[1], model):
        meshard.fully_shard(unit)
    meshard.overlap_optimizer(model, lambda groups: stand_ins.Lamb(model.parameters()))
    with pytest.raises(RuntimeError, match="make it from the param groups that are passed"):
        model(torch.ones(2, 7)).sum().backward()


def test_the_page_has_a_row_for_each_and_no_other():
    assert [cells[0] for cells in rows_of_page()] == [row.name for row in ROWS]
    classes = [getattr(torch.optim, name) for name in torch.optim.__all__]
    classes = {each for each in classes if inspect.isclass(each)} - {torch.optim.Optimizer}
    assert classes - {row.cls for row in ROWS} == set()


def rows(shape):
    for number, row in enumerate(ROWS):
        if shape == (2,) or row.cls not in POINTWISE:
            is_fast = shape == (2,) and row.cls in (torch.optim.Adafactor, stand_ins.Prodigy)
            marks = [] if is_fast else [pytest.mark.slow]
            yield pytest.param(number, shape, id=f"{row.name} on {shape}", marks=marks)


# The pointwise ones, which test_as_the_ordinary_one trains too, on one mesh; all others on both.
@pytest.mark.parametrize(("number", "shape"), [*rows((2,)), *rows((2, 2))])
def test_the_page_says_what_becomes_of_it(run_ranks, number, shape):
    page = rows_of_page()[number][: 1 + len(ways_on(shape))]
    for found in run_ranks(outcomes, torch.Size(shape).numel(), ROWS[number], shape):
        pairs = zip(found, page, strict=True)
        # Whether sums over ranks round as those of one process depends on the processor.
        assert [b if (a, b) == ("exact", "to rounding") else a for a, b in pairs] == page
