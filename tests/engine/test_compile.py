"""Compiled blocks: they train like eager ones, and are compiled once."""

import copy
import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import meshard
from meshard import CommLedger, MixedPrecisionPolicy
from tests.support.against_plain import SGD, check_gradients, inputs_of, sharded_and_plain
from tests.support.models import Made, MlpStack, TransformerBlock, seeded
from tests.support.parity import assert_same, full_grads, full_state, train
from tests.support.ranks import on_fake_ranks, on_ranks
from tests.support.sharding import shard_blocks
from tests.support.spread import mostly_slow

STEPS = 4


@contextmanager
def compiling_at_most_once():
    """Start without compiled code, raise on a recompilation, and yield dynamo's counters."""
    import torch._dynamo  # late: it takes seconds, and only some tests need it
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True), warnings.catch_warnings():
        warnings.simplefilter("default")  # torch's own, about what it compiles with
        yield counters
    torch._dynamo.reset()


def compile_blocks(blocks, how="method", **options):
    """Compile each of a ModuleList in place, by the method or by the function."""
    options = {"backend": "aot_eager", "fullgraph": True} | options
    for number, block in enumerate(blocks):
        if how == "method":
            block.compile(**options)
        else:
            blocks[number] = torch.compile(block, **options)


def mean_square(output):
    return output.float().square().mean()


def plain_names(values):
    if not isinstance(values, dict):
        return values
    return {name.replace("_orig_mod.", ""): plain_names(each) for name, each in values.items()}


def check_compiled(before=None, after=None, *, depth=3, bitwise=True, prepare=None, **options):
    """Train eager and compiled, and compare.

    ``before`` and ``after`` it is sharded a model is compiled; ``after`` may return what is called.
    Return dynamo's counters.
    """

    def trained(before, after):
        model = seeded(MlpStack(depth=depth))
        for act in (prepare, before):
            if act is not None:
                act(model)
        shard_blocks(model, **options)
        run = None if after is None else after(model)
        batches = [inputs_of(dist.get_rank(), number) for number in range(STEPS)]
        with CommLedger() as ledger:
            steps = train(model if run is None else run, batches, SGD, loss_fn=mean_square)
        return plain_names(steps), ledger.counts

    expected, expected_counts = trained(None, None)
    with compiling_at_most_once() as counters:
        actual, counts = trained(before, after)
    assert_same(actual, expected, bitwise=bitwise)
    assert counts == expected_counts
    return counters


def by(how, **options):
    return lambda model: compile_blocks(model.blocks, how, **options)


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("how", "when", "options"),
    [
        ("method", "before", {"reshard_after_forward": True}),
        pytest.param("function", "after", {"reshard_after_forward": False}, marks=slow),
        pytest.param("method", "after", {"depth": 10}, marks=slow),  # dynamo would give up at 8
        pytest.param("function", "before", {"depth": 10}, marks=slow),
        ("method", "after", {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}),
    ],
)
@on_ranks(2)
def test_compiled_blocks_train_bit_for_bit_like_eager_ones(how, when, options):
    counters = check_compiled(**{when: by(how)}, **options)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@slow
@pytest.mark.parametrize(("how", "when"), [("method", "after"), ("function", "before")])
@on_ranks(2, timeout=280)
def test_inductor_agrees_to_rounding(how, when):
    check_compiled(**{when: by(how, backend="inductor")}, bitwise=False)


def recompute_inside(model):
    for block in model.blocks:
        block.up = Made(
            lambda m, x: checkpoint(lambda x: torch.sin(m.inner(x)), x, use_reentrant=False),
            inner=block.up,
        )


def compile_inside(model):
    for block in model.blocks:
        block.up = torch.compile(block.up, backend="aot_eager")


FORMS = {
    "model.compile": {"after": lambda model: model.compile(backend="aot_eager")},
    "torch.compile": {"after": lambda model: torch.compile(model, backend="aot_eager")},
    "inside": {"after": compile_inside},
    "checkpoints inside blocks": {
        "prepare": recompute_inside,
        "after": by("method", fullgraph=False),
    },
}


@pytest.mark.parametrize("form", mostly_slow(FORMS, "model.compile"))
@on_ranks(2)
def test_compiling_around_and_inside_units(form):
    assert check_compiled(**FORMS[form])["stats"]["unique_graphs"] >= 1


@slow
@on_ranks(2)
def test_units_are_borders_of_graphs_in_a_compiled_root():
    """One is before, between and after the units each, and one is shared by both units."""

    def forward(model, x):
        x = model.blocks[0](torch.sin(x + model.shift))
        return torch.tanh(model.blocks[1](torch.cos(x)))

    blocks = [TransformerBlock(8, 2) for _ in range(2)]
    model = shard_blocks(seeded(Made(forward, blocks=blocks, shift=nn.Parameter(torch.empty(8)))))
    with compiling_at_most_once() as counters:
        model.compile(backend="aot_eager")
        for number in range(STEPS):
            model(inputs_of(dist.get_rank(), number, (2, 3, 8))).sum().backward()
        assert counters["stats"]["unique_graphs"] == 4


@slow
@on_ranks(2)
def test_forward_and_backward_may_be_compiled_together():
    models = [shard_blocks(seeded(MlpStack())) for _ in range(2)]
    optimizers = [SGD(model.parameters()) for model in models]

    def step(model, batch):
        loss = model(batch).square().mean()
        loss.backward()
        return loss.detach()

    with compiling_at_most_once():
        compiled = torch.compile(step, backend="aot_eager")
        for number in range(STEPS):
            losses = []
            for run, model, optimizer in zip((step, compiled), models, optimizers, strict=True):
                losses.append(run(model, inputs_of(dist.get_rank(), number)))
                optimizer.step()
                optimizer.zero_grad()
            assert_same(losses[1], losses[0], bitwise=True)
    assert_same(full_state(models[1]), full_state(models[0]), bitwise=True)


class Scoring(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.up(x))

    def scores(self, x):
        return torch.sin(self.down(x))


@on_ranks(2)
def test_a_registered_method_is_compiled():
    plain = seeded(Scoring())
    module = meshard.fully_shard(copy.deepcopy(plain))
    meshard.register_fsdp_forward_method(module, "scores")
    with compiling_at_most_once() as counters:
        run = torch.compile(module.scores, backend="aot_eager")
        for _ in range(3):
            for each in (run, plain.scores):
                each(inputs_of(0, shape=(2, 3, 8))).square().mean().backward()
            assert_same(full_grads(module), full_grads(plain))
        assert counters["stats"]["unique_graphs"] == 1


@on_ranks(2)
def test_frozen_weights_and_evaluation_between_compiled_steps():
    """Freeze, evaluate and train again: each may compile once more, and no value is stale."""
    model, plain = sharded_and_plain(MlpStack())
    compile_blocks(model.blocks)
    with compiling_at_most_once() as counters:
        torch._dynamo.config.error_on_recompile = False
        for frozen in (False, True) * 2:
            for each in (model, plain):
                each.blocks[0].up.weight.requires_grad_(not frozen)
                each.zero_grad()
            with torch.no_grad():
                assert_same(model(inputs_of(0)).clone(), plain(inputs_of(0)))
            check_gradients(model, plain, times=1)
        assert counters["stats"]["unique_graphs"] <= 4


@pytest.mark.parametrize(
    "wrap", mostly_slow([meshard.fully_shard, meshard.replicate], meshard.fully_shard)
)
@on_ranks(2)
def test_compiled_autograd_is_refused_and_named(wrap):
    layer = nn.Linear(4, 4)
    nn.init.ones_(layer.weight)
    wrap(layer)

    def backward():
        layer(torch.ones(1, 4)).sum().backward()

    import torch._dynamo  # late: see compiling_at_most_once

    with torch._dynamo.config.patch(compiled_autograd=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about what it compiles
        with pytest.raises(RuntimeError, match="do not work under compiled autograd"):
            torch.compile(backward, backend="eager")()
    assert layer.weight.grad is None
    backward()
    assert torch.equal(full_grads(layer)["weight"], torch.ones(4, 4))


class Scale(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return x * self.weight


class Shift(Scale):
    def forward(self, x):
        return x + self.weight


@on_fake_ranks(2)
def test_two_classes_with_constant_shapes_are_compiled_without_symbolic_sizes():
    placeholders = []

    def record(graph, _):
        nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
        placeholders.append([node.meta["example_value"] for node in nodes])
        return graph

    with compiling_at_most_once():
        for cls, size in ((Scale, 4), (Shift, 6)):
            block = meshard.fully_shard(cls(size))
            torch.compile(block, backend=record)(torch.ones(2, size))
    assert len(placeholders) == 2
    for values in placeholders:
        assert all(isinstance(value, torch.Tensor) for value in values), values
        assert all(type(size) is int for value in values for size in value.shape), values
