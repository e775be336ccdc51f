"""Tensor subclasses with a custom all-gather: other features."""

import os
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import meshard
from tests.support.extensions import Bfloat16Whole, Int8OnWire, RoundingModel, with_matrices_as
from tests.support.integer_model import IntegerModel, integer_batch, integer_loss, ternary
from tests.support.parity import assert_same, full_grads, full_state

KINDS = [Int8OnWire, Bfloat16Whole]


def sharded(kind, *, wrap=lambda block: None, model=None):
    model = with_matrices_as(model or IntegerModel(), kind)
    for block in model.blocks:
        meshard.fully_shard(block)
        wrap(block)
    return meshard.fully_shard(model)


def one_backward(model):
    loss = integer_loss(model(integer_batch(0, dist.get_rank())))
    loss.backward()
    return loss.item()


def expected_grads(kind, num_ranks, divisor=1.0, model=None):
    model = RoundingModel(model or IntegerModel(), kind)
    integer_loss(model(torch.cat([integer_batch(0, rank) for rank in range(num_ranks)]))).backward()
    return {name.removeprefix("model."): grad / divisor for name, grad in full_grads(model).items()}


def count_collectives():
    model = sharded(Int8OnWire)
    one_backward(model)
    model.zero_grad()
    with meshard.CommLedger() as ledger:
        one_backward(model)
    # Gathered in forward and in backward, and reduced: the weight apart from the bias.
    return [
        (event.unit.endswith("(tensor subclasses)"), event.op, event.payload_bytes)
        for event in ledger.events
        if event.unit.startswith("blocks.1")
    ]


def test_a_unit_has_one_gather_and_one_reduction_more(run_ranks):
    rows, columns = 14, 5  # with one row of padding
    weight = rows * columns * 4
    for events in run_ranks(count_collectives, 2):
        assert sorted(events) == [
            (False, "all_gather", rows * 4),
            (False, "all_gather", rows * 4),
            (False, "reduce_scatter", rows * 4),
            (True, "all_gather", rows * (columns + 4)),  # a byte each, and a scale
            (True, "all_gather", rows * (columns + 4)),
            (True, "reduce_scatter", weight),
        ]


def norms_and_tables(kind):
    model = sharded(kind)
    one_backward(model)
    norm = meshard.clip_grad_norm_(model, 1e-3)
    clipped = nn.utils.get_total_norm([g for g in full_grads(model).values() if g is not None])
    return norm.item(), clipped.item(), meshard.describe(model)


@pytest.mark.parametrize("kind", KINDS)
def test_norms_and_the_table_of_units(run_ranks, kind):
    grads = expected_grads(kind, 2, divisor=2.0)
    expected = nn.utils.get_total_norm(list(grads.values()))
    for norm, clipped, table in run_ranks(norms_and_tables, 2, kind):
        assert_same(torch.tensor(norm), expected)
        assert clipped == pytest.approx(1e-3, rel=1e-4)
        assert "(tensor subclasses)" in table


class Recomputed(nn.Module):
    """A block whose forward runs again in backward."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


def recompute(kind):
    model = with_matrices_as(IntegerModel(), kind)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = Recomputed(meshard.fully_shard(block))
    meshard.fully_shard(model)
    one_backward(model)
    return {name.replace(".block.", "."): grad for name, grad in full_grads(model).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_recomputation(run_ranks, kind):
    for grads in run_ranks(recompute, 2, kind):
        assert_same(grads, expected_grads(kind, 2, divisor=2.0), bitwise=True)


def prefetch_by_hand(kind):
    model = sharded(kind)
    first, second, third = model.blocks
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])
    for _ in range(2):
        model.zero_grad()
        one_backward(model)
    return full_grads(model)


@pytest.mark.parametrize("kind", KINDS)
def test_lists_of_what_to_gather_ahead(run_ranks, kind):
    for grads in run_ranks(prefetch_by_hand, 2, kind):
        assert_same(grads, expected_grads(kind, 2, divisor=2.0), bitwise=True)


def under_debug(kind):
    with mock.patch.dict(os.environ, {"MESHARD_DEBUG": "1"}):
        model = sharded(kind)
        one_backward(model)
        grads = full_grads(model)
        if dist.get_rank():
            weight = IntegerModel()
            with torch.no_grad():
                weight.blocks[0].linear.weight[0, 0] += 1
        else:
            weight = IntegerModel()
        with pytest.raises(RuntimeError, match=r"differ, first 'linear\.weight'"):
            sharded(kind, model=weight)
    return grads


@pytest.mark.parametrize("kind", KINDS)
def test_debugging(run_ranks, kind):
    for grads in run_ranks(under_debug, 2, kind):
        assert_same(grads, expected_grads(kind, 2, divisor=2.0), bitwise=True)


def take_first_values(kind):
    model = with_matrices_as(IntegerModel(seed=dist.get_rank()), kind)
    units = meshard.fully_shard_units(model, sync_init=True)
    assert len(units) == 4
    return full_state(model)


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_the_first_rank(run_ranks, kind):
    for state in run_ranks(take_first_values, 2, kind):
        assert_same(state, full_state(IntegerModel()), bitwise=True)


def save_and_load(kind, path):
    model = sharded(kind)
    dcp.save(dict(model.state_dict()), checkpoint_id=path)
    other = sharded(kind, model=IntegerModel(seed=3))
    state = dict(other.state_dict())
    with torch.serialization.safe_globals([kind]):  # as for any class that is pickled
        dcp.load(state, checkpoint_id=path)
    other.load_state_dict(state)
    assert_same(full_state(other), full_state(IntegerModel()), bitwise=True)


@pytest.mark.extras
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints(run_ranks, kind, tmp_path):
    run_ranks(save_and_load, 2, kind, str(tmp_path))


class Reading(IntegerModel):
    """Reads the weight of a unit inside it, without calling that."""

    def forward(self, x):
        first = self.blocks[0].linear
        x = ternary(nn.functional.linear(x, first.weight, first.bias))
        return ternary(self.blocks[2](self.blocks[1](x)) + self.shift)


def read_inside(kind):
    model = with_matrices_as(Reading(), kind)
    for block in model.blocks:
        meshard.fully_shard(block, unshard_on_access=True)
    meshard.fully_shard(model)
    one_backward(model)
    return full_grads(model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_parent_reads_the_weight(run_ranks, kind):
    for grads in run_ranks(read_inside, 2, kind):
        assert_same(grads, expected_grads(kind, 2, divisor=2.0), bitwise=True)


class Tied(IntegerModel):
    """Uses the weight of one layer in another one of the same unit."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([self.blocks[0]])
        self.again = nn.Linear(7, 5)
        self.shift = nn.Parameter(torch.ones(5))
        with torch.no_grad():
            self.again.bias.fill_(0.5)
        self.again.weight = self.blocks[0].linear.weight

    def forward(self, x):
        return ternary(ternary(self.again(x)) + self.blocks[0](x) + self.shift)


def tie(kind):
    model = Tied()
    model.blocks[0].linear.weight = nn.Parameter(kind(model.again.weight.detach()))
    model.again.weight = model.blocks[0].linear.weight
    meshard.fully_shard(model)
    one_backward(model)
    assert model.again.weight is model.blocks[0].linear.weight
    return full_grads(model)


@pytest.mark.parametrize("kind", KINDS)
def test_tied_weights(run_ranks, kind):
    for grads in run_ranks(tie, 2, kind):
        assert_same(grads, expected_grads(kind, 2, divisor=2.0, model=Tied()), bitwise=True)


def step_flat(kind, foreach):
    results = []
    for make in (torch.optim.AdamW, None):
        model = sharded(kind)
        if make is None:
            optimizer = meshard.flat_optimizer(model, torch.optim.AdamW, foreach=foreach)
        else:
            optimizer = make(model.parameters(), foreach=foreach)
        for _ in range(3):
            one_backward(model)
            optimizer.step()
            optimizer.zero_grad()
        results.append(full_state(model))
    return results


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_of_flat_shards(run_ranks, kind, foreach):
    for ordinary, flat in run_ranks(step_flat, 2, kind, foreach):
        assert_same(flat, ordinary, bitwise=True)
        assert not torch.equal(
            flat["blocks.0.linear.weight"], IntegerModel().blocks[0].linear.weight
        )


def tensor_parallel(kind):
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp = world["tp"]
    whole = (torch.arange(18).view(6, 3) - 8) / 2
    layer = nn.Linear(3, 6, bias=False)
    part = whole.chunk(2)[tp.get_local_rank()]
    layer.weight = nn.Parameter(DTensor.from_local(kind(part), tp, [Shard(0)]))
    meshard.fully_shard(layer, world["dp"])
    assert type(layer.weight.to_local()) is kind
    for step in (1, 2):
        x = torch.full((2, 3), float(step + dist.get_rank() // 2))
        y = layer(DTensor.from_local(x, tp, [Replicate()])).full_tensor()
        assert torch.equal(y, x @ kind.rounded(whole).T)
        y.sum().backward()
    return layer.weight.grad.redistribute(placements=[Replicate()] * 2).to_local()


@pytest.mark.parametrize("kind", KINDS)
def test_tensor_parallelism(run_ranks, kind):
    for gradient in run_ranks(tensor_parallel, 4, kind):
        assert torch.equal(gradient, torch.full((6, 3), 2.0 * (1 + 2 + 2 + 3) / 2))


def compiled(kind):
    model = sharded(kind, wrap=lambda block: block.compile(backend="eager"))
    with warnings.catch_warnings():
        # Dynamo itself does what torch advises against.
        warnings.simplefilter("ignore")
        for _ in range(2):
            model.zero_grad()
            one_backward(model)
    return full_grads(model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_blocks(run_ranks, kind):
    for grads in run_ranks(compiled, 2, kind):
        assert_same(grads, expected_grads(kind, 2, divisor=2.0), bitwise=True)
