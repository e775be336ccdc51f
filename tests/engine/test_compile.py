"""Compiled blocks: they train like eager ones, and are compiled once."""

import copy
import functools
import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as peer_fully_shard
from torch.utils.checkpoint import checkpoint

import meshard
from meshard import CommLedger, MixedPrecisionPolicy
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


def mesh_of_all():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def compile_blocks(blocks, how, **options):
    """Compile each of a ModuleList in place, by the method or by the function."""
    for number, block in enumerate(blocks):
        if how == "method":
            block.compile(**options)
        else:
            blocks[number] = torch.compile(block, **options)


def plain_names(values):
    return {name.replace("_orig_mod.", ""): value for name, value in values.items()}


def train(model, run, batches, counters=None):
    """Return loss, gradients, parameters and collectives of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    records, frames = [], []
    for batch in batches:
        with CommLedger() as ledger:
            loss = run(batch).float().square().mean()
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


def batches_of(rank, shape=(3, 6)):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator) for _ in range(STEPS)]


def both_ways(how, when, *, backend="aot_eager", num_graphs=1, depth=3, **kwargs):
    """Train eager and compiled, and compare."""
    mesh, batches = mesh_of_all(), batches_of(dist.get_rank())
    bitwise = backend == "aot_eager"

    def build(how):
        model = seeded(MlpStack(depth=depth))
        if how is not None and when == "before":
            compile_blocks(model.blocks, how, backend=backend, fullgraph=True)
        for block in model.blocks:
            meshard.fully_shard(block, mesh, **kwargs)
        if how is not None and when == "after":
            compile_blocks(model.blocks, how, backend=backend, fullgraph=True)
        return meshard.fully_shard(model, mesh, **kwargs)

    model = build(None)
    expected = train(model, model, batches)
    with compiling_at_most_once() as counters:
        model = build(how)
        actual = train(model, model, batches, counters)
        assert counters["stats"]["unique_graphs"] == num_graphs
        assert not counters["graph_break"]
    for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert_same(one, other, bitwise=bitwise, what=f"step {number}")


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", ["method", "function"])
def test_compiled_blocks_train_bit_for_bit_like_eager_ones(run_ranks, how, when, reshard):
    run_ranks(both_ways, 2, how, when, reshard_after_forward=reshard)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["method", "function"])
def test_one_graph_serves_more_blocks_than_dynamo_may_recompile(run_ranks, how):
    run_ranks(both_ways, 2, how, "after", depth=10)


def test_compiled_blocks_under_mixed_precision(run_ranks):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    run_ranks(both_ways, 2, "method", "after", mp_policy=policy)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "when"), [("method", "after"), ("function", "before")])
def test_inductor_agrees_to_rounding(run_ranks, how, when):
    run_ranks(both_ways, 2, how, when, backend="inductor", timeout=280)


class Checkpointing(MlpStack):
    """Compiled code that recomputes: the checkpoint is inside the unit."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.up = Recomputed(block.up)


class Recomputed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(lambda x: torch.sin(self.inner(x)), x, use_reentrant=False)


def whole_model(form, model_class=MlpStack):
    mesh, batches = mesh_of_all(), batches_of(dist.get_rank())
    models = [seeded(model_class()) for _ in range(2)]
    for model in models:
        shard_blocks(model, mesh)
    expected = train(models[0], models[0], batches)
    with compiling_at_most_once() as counters:
        run = models[1]
        if form == "model.compile":
            run.compile(backend="aot_eager")
        elif form == "torch.compile":
            run = torch.compile(run, backend="aot_eager")
        elif form == "inside":
            for block in run.blocks:
                block.up = torch.compile(block.up, backend="aot_eager")
        elif form == "blocks":
            compile_blocks(run.blocks, "method", backend="aot_eager")
        actual = train(models[1], run, batches, counters)
        assert counters["stats"]["unique_graphs"] >= 1
    for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert_same(one, other, bitwise=True, what=f"step {number}")


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("form", ["model.compile", "torch.compile", "inside"])
def test_compiling_around_and_inside_units(run_ranks, form):
    run_ranks(whole_model, 2, form)


def test_checkpoints_inside_compiled_blocks(run_ranks):
    run_ranks(whole_model, 2, "blocks", Checkpointing)


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


def count_graphs():
    """Return how many graphs and frames the whole model needs with ours and with torch's."""
    mesh = mesh_of_all()
    found = []
    for shard in (meshard.fully_shard, peer_fully_shard):
        model = seeded(TwoBlocks())
        for block in model.blocks:
            shard(block, mesh=mesh)
        shard(model, mesh=mesh)
        with compiling_at_most_once() as counters:
            model.compile(backend="aot_eager")
            for batch in batches_of(dist.get_rank(), (2, 3, 8)):
                model(batch).sum().backward()
            found.append((counters["stats"]["unique_graphs"], counters["frames"]["total"]))
    return found


@pytest.mark.slow
def test_units_are_borders_of_graphs_in_a_compiled_root(run_ranks):
    for ours, peers in run_ranks(count_graphs, 2):
        # One before, between and after the units, and one that both units share.
        assert ours[0] == 4
        assert ours[0] <= peers[0] and ours[1] <= peers[1]


@on_ranks(2)
def test_forward_and_backward_may_be_compiled_together():
    """Compile forward and backward in one function."""
    mesh, batches = mesh_of_all(), batches_of(dist.get_rank())
    models = [seeded(MlpStack()) for _ in range(2)]
    for model in models:
        shard_blocks(model, mesh)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]

    def step(model, batch):
        loss = model(batch).square().mean()
        loss.backward()
        return loss.detach()

    with compiling_at_most_once():
        compiled = torch.compile(step, backend="aot_eager")
        for batch in batches:
            losses = []
            for run, model, optimizer in zip((step, compiled), models, optimizers, strict=True):
                losses.append(run(model, batch))
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
@pytest.mark.default_rows(1)
@pytest.mark.parametrize("form", ["method", "function", "registered", "direct"])
def test_torch_modules_and_methods_are_compiled(form):
    """Modules of torch, registered methods, forward called directly: all are compiled."""
    torch_layer = functools.partial(
        nn.TransformerEncoderLayer, 8, 2, dim_feedforward=8, dropout=0.0, batch_first=True
    )
    module = seeded(Scoring() if form in ("registered", "direct") else torch_layer())
    plain = copy.deepcopy(module)
    meshard.fully_shard(module, mesh_of_all())
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
        x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
        for _ in range(3):
            for each in (run, expected):
                each(x).square().mean().backward()
            assert_same(full_grads(module), full_grads(plain))
        assert counters["stats"]["unique_graphs"] == 1


@on_ranks(2)
def test_frozen_weights_and_evaluation_between_compiled_steps():
    """Freeze, evaluate and train again: each may compile once more, and no value is stale."""
    mesh, batches = mesh_of_all(), batches_of(dist.get_rank())
    model = seeded(MlpStack())
    plain = copy.deepcopy(model)
    for block in model.blocks:
        meshard.fully_shard(block, mesh)
        block.compile(backend="aot_eager", fullgraph=True)
    meshard.fully_shard(model, mesh)
    with compiling_at_most_once() as counters:
        torch._dynamo.config.error_on_recompile = False
        for _ in range(2):
            for frozen in (False, True):
                for each in (model, plain):
                    each.blocks[0].up.weight.requires_grad_(not frozen)
                    each.zero_grad()
                with torch.no_grad():
                    assert_same(model(batches[0]).clone(), plain(batches[0]))
                model(batches[0]).square().mean().backward()
                for rank in range(dist.get_world_size()):
                    loss = plain(batches_of(rank)[0]).square().mean()
                    (loss / dist.get_world_size()).backward()
                assert_same(full_grads(model), full_grads(plain))
        assert counters["stats"]["unique_graphs"] <= 4
    torch._dynamo.reset()


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
    grad = layer.weight.grad
    assert torch.equal(
        grad.full_tensor() if wrap is meshard.fully_shard else grad, torch.ones(4, 4)
    )


class _Scale(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return x * self.weight


class _Shift(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

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
        for cls, size in ((_Scale, 4), (_Shift, 6)):
            block = meshard.fully_shard(cls(size), mesh_of_all())
            torch.compile(block, backend=record)(torch.ones(2, size))
    assert len(placeholders) == 2
    for values in placeholders:
        assert all(isinstance(value, torch.Tensor) for value in values), values
        assert all(type(size) is int for value in values for size in value.shape), values
