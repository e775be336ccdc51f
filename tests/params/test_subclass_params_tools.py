"""Tensor subclasses with a custom all-gather: other features."""

import os
import warnings
from functools import partial
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
from tests.support.ranks import on_ranks, on_threads
from tests.support.spread import spread

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


each_kind = pytest.mark.parametrize("kind", KINDS)


def expected_grads(kind, plain=None):
    """Return the gradients of one process on the batches of two ranks, divided by their number."""
    plain = plain or IntegerModel()
    x = torch.cat([integer_batch(0, rank) for rank in range(2)])
    integer_loss(RoundingModel(plain, kind)(x)).backward()
    return {name: grad / 2 for name, grad in full_grads(plain).items()}


def check_grads(model, kind, plain=None):
    one_backward(model)
    assert_same(full_grads(model), expected_grads(kind, plain), bitwise=True)


@each_kind
@on_threads(2)
def test_norms_and_the_table_of_units(kind):
    model = sharded(kind)
    check_grads(model, kind)
    expected = nn.utils.get_total_norm(list(expected_grads(kind).values()))
    assert_same(meshard.clip_grad_norm_(model, 1e-3), expected)
    clipped = nn.utils.get_total_norm(list(full_grads(model).values()))
    assert clipped.item() == pytest.approx(1e-3, rel=1e-4)
    assert "custom all-gather" in meshard.describe(model)


@each_kind
@on_threads(2)
def test_recomputation(kind):
    model = with_matrices_as(IntegerModel(), kind)
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        meshard.fully_shard(block)
    check_grads(meshard.fully_shard(model), kind)


@each_kind
@on_threads(2)
def test_lists_of_what_to_gather_ahead(kind):
    model = sharded(kind)
    first, second, third = model.blocks
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])
    one_backward(model)
    model.zero_grad()
    check_grads(model, kind)


@each_kind
@on_ranks(2)
def test_debugging(kind):
    with mock.patch.dict(os.environ, {"MESHARD_DEBUG": "1"}):
        check_grads(sharded(kind), kind)


@each_kind
@on_threads(2)
def test_values_of_the_first_rank(kind):
    model = with_matrices_as(IntegerModel(seed=dist.get_rank()), kind)
    assert len(meshard.fully_shard_units(model, sync_init=True)) == 4
    assert_same(full_state(model), full_state(IntegerModel()), bitwise=True)


@pytest.mark.extras
@each_kind
@on_ranks(2)
def test_checkpoints(kind, tmp_path):
    model = sharded(kind)
    dcp.save(dict(model.state_dict()), checkpoint_id=str(tmp_path))
    other = sharded(kind, model=IntegerModel(seed=3))
    state = dict(other.state_dict())
    with torch.serialization.safe_globals([kind]):  # as for any class that is pickled
        dcp.load(state, checkpoint_id=str(tmp_path))
    other.load_state_dict(state)
    assert_same(full_state(other), full_state(IntegerModel()), bitwise=True)


class Reading(IntegerModel):
    """Reads the weight of a unit inside it, without calling that."""

    def forward(self, x):
        first = self.blocks[0].linear
        x = ternary(nn.functional.linear(x, first.weight, first.bias))
        return ternary(self.blocks[2](self.blocks[1](x)) + self.shift)


@each_kind
@on_threads(2)
def test_a_parent_reads_the_weight(kind):
    model = with_matrices_as(Reading(), kind)
    for block in model.blocks:
        meshard.fully_shard(block, unshard_on_access=True)
    check_grads(meshard.fully_shard(model), kind)


class Tied(IntegerModel):
    """Uses the weight of one layer in another one of the same unit."""

    def __init__(self):
        super().__init__(dims=(7, 5))
        self.again = nn.Linear(7, 5)
        nn.init.constant_(self.again.bias, 0.5)
        self.again.weight = self.blocks[0].linear.weight

    def forward(self, x):
        return ternary(ternary(self.again(x)) + self.blocks[0](x) + self.shift)


@each_kind
@on_threads(2)
def test_tied_weights(kind):
    model = Tied()
    model.blocks[0].linear.weight = nn.Parameter(kind(model.again.weight.detach()))
    model.again.weight = model.blocks[0].linear.weight
    check_grads(meshard.fully_shard(model), kind, Tied())
    assert model.again.weight is model.blocks[0].linear.weight


@spread(kind=KINDS, foreach=[None, False, True])
@on_threads(2)
def test_local_optimizers(kind, foreach):
    local, usual = sharded(kind), sharded(kind)
    before = full_state(local)
    optimizers = {
        local: meshard.local_optimizer(local, torch.optim.AdamW, foreach=foreach),
        usual: torch.optim.AdamW(usual.parameters(), foreach=foreach),
    }
    for model, optimizer in optimizers.items():
        for _ in range(3):
            one_backward(model)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(full_state(local), full_state(usual), bitwise=True)
    name = "blocks.0.linear.weight"
    assert not torch.equal(full_state(local)[name], before[name])


@each_kind
@on_threads(4)
def test_tensor_parallelism(kind):
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
    gradient = layer.weight.grad.redistribute(placements=[Replicate()] * 2).to_local()
    assert torch.equal(gradient, torch.full((6, 3), 2.0 * (1 + 2 + 2 + 3) / 2))


@pytest.mark.slow
@each_kind
@on_ranks(2)
def test_compiled_blocks(kind):
    model = sharded(kind, wrap=lambda block: block.compile(backend="eager"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo itself does what torch advises against
        one_backward(model)
        model.zero_grad()
        check_grads(model, kind)
