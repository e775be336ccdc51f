"""Compiled blocks: they train like eager ones, and are compiled once."""

import copy
import functools
import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as peer_fully_shard
from torch.utils.checkpoint import checkpoint

import meshard
from meshard import CommLedger, MixedPrecisionPolicy
from tests.support.against_plain import SGD, check_gradients, inputs_of, sharded_and_plain
from tests.support.models import MlpStack, TransformerBlock, seeded
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.ranks import on_fake_ranks, on_ranks
from tests.support.sharding import shard_blocks

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


def compile_blocks(blocks, how, **options):
    """Compile each of a ModuleList in place, by the method or by the function."""
    for number, block in enumerate(blocks):
        if how == "method":
            block.compile(**options)
        else:
            blocks[number] = torch.compile(block, **options)


def plain_names(values):
    return {name.replace("_orig_mod.", ""): value for name, value in values.items()}


def train(model, run=None, counters=None):
    """Return loss, gradients, parameters and collectives of each step."""
    run = model if run is None else run
    optimizer, records, frames = SGD(model.parameters()), [], []
    for number in range(STEPS):
        with CommLedger() as ledger:
            loss = run(inputs_of(dist.get_rank(), number)).float().square().mean()
            loss.backward()
        grads = plain_names(full_grads(model))
        optimizer.step()
        optimizer.zero_grad()
        records.append(
            {"loss": loss.detach(), "grads": grads, "params": plain_names(full_state(model))}
            | {op: torch.tensor(count) for op, count in ledger.counts.items()}
        )
        if counters is not None:
            frames.append((counters["frames"]["total"], counters["stats"]["unique_graphs"]))
    assert len(set(frames[1:])) <= 1, f"still compiling: {frames}"
    return records


def check_both_ways(how, when="after", *, backend="aot_eager", depth=3, **options):
    """Train eager and compiled, and compare."""

    def build(is_compiled):
        model = seeded(MlpStack(depth=depth))
        if is_compiled and when == "before":
            compile_blocks(model.blocks, how, backend=backend, fullgraph=True)
        for block in model.blocks:
            meshard.fully_shard(block, **options)
        if is_compiled and when == "after":
            compile_blocks(model.blocks, how, backend=backend, fullgraph=True)
        return meshard.fully_shard(model, **options)

    expected = train(build(False))
    with compiling_at_most_once() as counters:
        actual = train(build(True), counters=counters)
        assert counters["stats"]["unique_graphs"] == 1
        assert not counters["graph_break"]
    for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert_same(one, other, bitwise=backend == "aot_eager", what=f"step {number}")


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("how", "when", "reshard"),
    [
        ("method", "before", True),
        pytest.param("method", "after", False, marks=slow),
        pytest.param("function", "before", False, marks=slow),
        pytest.param("function", "after", True, marks=slow),
    ],
)
@on_ranks(2)
def test_compiled_blocks_train_bit_for_bit_like_eager_ones(how, when, reshard):
    check_both_ways(how, when, reshard_after_forward=reshard)


@slow
@pytest.mark.parametrize("how", ["method", "function"])
@on_ranks(2)
def test_one_graph_serves_more_blocks_than_dynamo_may_recompile(how):
    check_both_ways(how, depth=10)


@on_ranks(2)
def test_compiled_blocks_under_mixed_precision():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    check_both_ways("method", mp_policy=policy)


@slow
@pytest.mark.parametrize(("how", "when"), [("method", "after"), ("function", "before")])
@on_ranks(2, timeout=280)
def test_inductor_agrees_to_rounding(how, when):
    check_both_ways(how, when, backend="inductor")


class Recomputed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(lambda x: torch.sin(self.inner(x)), x, use_reentrant=False)


@pytest.mark.parametrize(
    "form",
    [
        "model.compile",
        pytest.param("torch.compile", marks=slow),
        pytest.param("inside", marks=slow),
        "checkpoints inside blocks",
    ],
)
@on_ranks(2)
def test_compiling_around_and_inside_units(form):
    models = [seeded(MlpStack()) for _ in range(2)]
    for model in models:
        for block in model.blocks if form == "checkpoints inside blocks" else ():
            block.up = Recomputed(block.up)
        shard_blocks(model)
    expected, (_, model) = train(models[0]), models
    with compiling_at_most_once() as counters:
        run = model
        if form == "model.compile":
            model.compile(backend="aot_eager")
        elif form == "torch.compile":
            run = torch.compile(model, backend="aot_eager")
        elif form == "inside":
            for block in model.blocks:
                block.up = torch.compile(block.up, backend="aot_eager")
        else:
            compile_blocks(model.blocks, "method", backend="aot_eager")
        actual = train(model, run, counters)
        assert counters["stats"]["unique_graphs"] >= 1
    for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert_same(one, other, bitwise=True, what=f"step {number}")


class TwoBlocks(nn.Module):
    """A root with compute of its own around two units, called one by one."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(TransformerBlock(8, 2) for _ in range(2))
        self.shift = nn.Parameter(torch.empty(8))

    def forward(self, x):
        x = self.blocks[0](torch.sin(x + self.shift))
        x = self.blocks[1](torch.cos(x))
        return torch.tanh(x)


@slow
@on_ranks(2)
def test_units_are_borders_of_graphs_in_a_compiled_root():
    mesh, found = torch.distributed.init_device_mesh("cpu", (2,)), []
    for shard in (meshard.fully_shard, peer_fully_shard):
        model = seeded(TwoBlocks())
        for unit in (*model.blocks, model):
            shard(unit, mesh=mesh)
        with compiling_at_most_once() as counters:
            model.compile(backend="aot_eager")
            for number in range(STEPS):
                model(inputs_of(dist.get_rank(), number, (2, 3, 8))).sum().backward()
            found.append((counters["stats"]["unique_graphs"], counters["frames"]["total"]))
    ours, peers = found
    assert ours[0] == 4  # one before, between and after the units, and one that both units share
    assert ours[0] <= peers[0] and ours[1] <= peers[1]


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


@pytest.mark.parametrize(
    "form", ["method", *(pytest.param(f, marks=slow) for f in ("function", "registered", "direct"))]
)
@on_ranks(2)
def test_torch_modules_and_methods_are_compiled(form):
    """Modules of torch, registered methods, forward called directly: all are compiled."""
    torch_layer = functools.partial(
        nn.TransformerEncoderLayer, 8, 2, dim_feedforward=8, dropout=0.0, batch_first=True
    )
    plain = seeded(Scoring() if form in ("registered", "direct") else torch_layer())
    module = meshard.fully_shard(copy.deepcopy(plain))
    expected = plain.scores if form == "registered" else plain
    with compiling_at_most_once() as counters:
        if form == "method":
            module.compile(backend="aot_eager", fullgraph=True)
            run = module
        elif form == "function":
            run = torch.compile(module, backend="aot_eager", fullgraph=True)
        elif form == "registered":
            meshard.register_fsdp_forward_method(module, "scores")
            run = torch.compile(module.scores, backend="aot_eager")
        else:
            run = torch.compile(module.forward, backend="aot_eager")
        for _ in range(3):
            for each in (run, expected):
                each(inputs_of(0, shape=(2, 3, 8))).square().mean().backward()
            assert_same(full_grads(module), full_grads(plain))
        assert counters["stats"]["unique_graphs"] == 1


@on_ranks(2)
def test_frozen_weights_and_evaluation_between_compiled_steps():
    """Freeze, evaluate and train again: each may compile once more, and no value is stale."""
    model, plain = sharded_and_plain(MlpStack())
    compile_blocks(model.blocks, "method", backend="aot_eager", fullgraph=True)
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


@pytest.mark.parametrize("wrap", [meshard.fully_shard, meshard.replicate])
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
