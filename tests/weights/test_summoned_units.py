"""Summoned units: when, by whom, and what happens to gradients meanwhile."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.func import functional_call

import meshard
from meshard import CommLedger, unsharded_params
from tests.support.against_plain import check_gradients, inputs_of, mean_square, sharded_and_plain
from tests.support.models import Made, MlpStack, seeded
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.ranks import on_fake_ranks, on_ranks, on_threads
from tests.support.sharding import edit, sharded_case
from tests.support.spread import spread


@on_ranks(4)
def test_of_edits_that_differ_the_owner_in_the_first_replica_wins():
    mesh = init_device_mesh("cpu", (2, 2))
    rank = dist.get_rank()
    model = meshard.fully_shard(nn.Linear(2, 4, bias=False), mesh)
    with unsharded_params(model), torch.no_grad():
        model.weight.fill_(rank)
    # Rows are owned by shard rank 0 and 1; the first replica's ranks are 0 and 1.
    rows = torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 1.0], [1.0, 1.0]])
    assert_same(full_state(model), {"weight": rows}, what="parameter")
    with unsharded_params(model, writeback=False), torch.no_grad():
        model.weight.fill_(7)
    assert_same(full_state(model), {"weight": rows}, what="parameter")


@on_ranks(2)
def test_contexts_nest():
    case, model, plain = sharded_case("mlp_stack")
    x = case.batch(0, 0)
    with unsharded_params(model.blocks[1]):
        assert isinstance(model.scale, DTensor) and isinstance(model.blocks[0].up.weight, DTensor)
        with unsharded_params(model, writeback=False), CommLedger(model) as ledger:
            edit(model)  # of these, only those of the outer context are written
            model(x)
        assert not ledger.counts
        assert not isinstance(model.blocks[1].up.weight, DTensor)
        text = r"'blocks\.1' is unsharded already by unsharded_params"
        with pytest.raises(RuntimeError, match=text):
            unsharded_params(model, rank0_only=True).__enter__()
        assert isinstance(model.scale, DTensor)
    numbers = {id(p): number for number, p in enumerate(plain.parameters())}
    with torch.no_grad():
        for param in plain.blocks[1].parameters():
            param.mul_(0.5).add_(numbers[id(param)] / 64)
    assert_same(full_state(model), full_state(plain), bitwise=True)
    with (
        unsharded_params(model.blocks[0], writeback=False),
        pytest.raises(RuntimeError, match="edits inside are dropped"),
        unsharded_params(model),
    ):
        pass
    with unsharded_params(model, recurse=False):
        assert not isinstance(model.scale, DTensor)
        assert isinstance(model.blocks[0].up.weight, DTensor)
        assert_same(model(x), plain(x))  # the root as it is, the blocks gathered


@spread(
    mode=list(meshard.GradientSync), inside=[True, False], mesh_shape=[(4,), (2, 2), (2, 2), (4,)]
)
@on_threads(4)
def test_gradients_of_unsharded_parameters_are_reduced(mode, inside, mesh_shape):
    """They train: with and without what an ordinary forward gives, and from two blocks at once."""
    case, model, plain = sharded_case("integer", mesh_shape)
    model.set_gradient_divide_factor(1.0)
    times = 1 if inside else 2

    def loss_of(model, k, rank):
        loss = case.loss(model(case.batch(k, rank)))
        return loss + (rank + 1) * model.blocks[1].linear.bias.sum()

    for k in meshard.microbatches(model, range(2), until_last=mode):
        total = 0
        for _ in range(times):
            with unsharded_params(model.blocks[1]):
                loss = loss_of(model, k, dist.get_rank())
                if inside:
                    loss.backward()
                else:
                    total += loss
        (total + case.loss(model(case.batch(5, dist.get_rank())))).backward()
    for k in range(2):
        for rank in range(4):
            for _ in range(times):  # not a multiple: gradients are clamped
                loss_of(plain, k, rank).backward()
            case.loss(plain(case.batch(5, rank))).backward()
    assert_same(full_grads(model), full_grads(plain), bitwise=True, what="gradient")
    assert not meshard.pending_gradients(model)


@on_threads(2)
def test_gradients_are_clipped_and_cleared_inside():
    model = meshard.fully_shard(seeded(nn.Linear(4, 4)))
    with unsharded_params(model):
        model(torch.ones(2, 4)).sum().backward()
        assert meshard.clip_grad_norm_(model.parameters(), 1.0) > 1
    assert_same(meshard.clip_grad_norm_(model, 1.0), torch.tensor(1.0))
    with unsharded_params(model):
        model.zero_grad()
    assert model.weight.grad is None


@on_threads(2)
def test_a_unit_that_only_a_penalty_reads_is_reduced_in_that_backward():
    """Its forward and the backward of that are over."""

    def step(model, rank):
        mean_square(model, rank).backward()
        first, second = model.blocks[:2]
        loss = second(inputs_of(rank)).square().mean()
        with contextlib.nullcontext() if model is plain else unsharded_params(first):
            penalty = first.down.weight.square().sum()
        return loss + (rank + 1) * penalty

    model, plain = sharded_and_plain(MlpStack())
    check_gradients(model, plain, step)


@on_ranks(2)
def test_wrong_moments_are_refused():
    case, model, _ = sharded_case("mlp_stack")
    x = case.batch(0, 0)
    refused = []

    def open_now(*args):
        with pytest.raises(RuntimeError, match="inside the forward or backward of unit"):
            unsharded_params(model.blocks[0]).__enter__()
        refused.append(True)

    handle = model.blocks[1].register_forward_hook(lambda m, a, out: open_now())
    loss = case.loss(model(x))
    handle.remove()
    model.blocks[1].down.weight.register_post_accumulate_grad_hook(open_now)
    loss.backward()
    assert refused == [True] * 2
    model.zero_grad()
    loss = case.loss(model(x))
    text = "a backward reached unit '.*' inside unsharded_params"
    with pytest.raises(RuntimeError, match=text), unsharded_params(model):
        loss.backward()
    case.loss(model(x)).backward()
    for call, text in [
        (model.unshard, r"is inside unsharded_params, so it cannot be gathered by unshard"),
        (model.double, r"is inside unsharded_params, so it cannot be moved or cast"),
        (lambda: copy.deepcopy(model), r"is inside unsharded_params, so it cannot be copied"),
    ]:
        with unsharded_params(model), pytest.raises(RuntimeError, match=text):
            call()
    with unsharded_params(model, rank0_only=True):
        if dist.get_rank():
            with pytest.raises(RuntimeError, match="unsharded on rank 0 only"):
                model(x)
        else:
            model(x)
    model(x)


@on_ranks(2)
def test_a_summoned_unit_runs_like_an_ordinary_module():
    """A unit of a running root that is summoned is neither cast, gathered nor retained."""
    policy = meshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    results = []
    silent = Made(lambda m, x: results.append(m.linear(x)), linear=nn.Linear(4, 4))
    layer = meshard.fully_shard(silent, mp_policy=policy)
    with unsharded_params(layer):
        layer(torch.ones(1, 4))  # outside of the block: a warning, which is an error
        assert results[0].dtype == torch.float32
        results[0].sum().backward()
    weight = layer.linear.weight
    assert weight.grad is not None and isinstance(weight, DTensor)


@on_ranks(1)
def test_what_cannot_be_unsharded_is_refused():
    root = nn.Sequential(nn.Linear(2, 2))
    meshard.fully_shard(root[0])
    with pytest.raises(ValueError, match="with recurse=True"):
        unsharded_params(root, recurse=False).__enter__()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2))
    meshard.fully_shard(model)
    with pytest.raises(RuntimeError, match=r"'0\.weight' .* still on the meta device"):
        unsharded_params(model).__enter__()
    ignored = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    meshard.fully_shard(ignored, ignored_params=set(ignored[0].parameters()))
    held = ignored[0].weight
    with unsharded_params(ignored):
        assert ignored[0].weight is held and not isinstance(ignored[1].weight, DTensor)


@on_ranks(1)
def test_functional_call_is_for_the_inside():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    plain = copy.deepcopy(model)
    for unit in (model[0], model):
        meshard.fully_shard(unit)
    x = torch.ones(1, 3)
    with unsharded_params(model):
        scaled = {name: param * 2 for name, param in model.named_parameters()}
        out = functional_call(model, scaled, (x,))
        out.sum().backward()
    expected = {name: param * 2 for name, param in plain.named_parameters()}
    functional_call(plain, expected, (x,)).sum().backward()
    assert_same(full_grads(model), full_grads(plain))
    before = full_state(model)
    assert_same(functional_call(model, dict(model.named_parameters()), (x,)), plain(x))
    for given in (expected, {name: param * 2 for name, param in model.named_parameters()}):
        with pytest.raises(RuntimeError, match=r"functional_call.*unsharded_params"):
            functional_call(model, given, (x,))
        assert_same(full_state(model), before, bitwise=True)
        with torch.no_grad():
            assert_same(model(x), plain(x))


class Interrupted(nn.Linear):
    """Raises a KeyboardInterrupt where an unsharded weight is put in, once."""

    is_armed = False

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if self.is_armed and name == "weight" and not isinstance(value, DTensor):
            self.is_armed = False
            raise KeyboardInterrupt


@on_fake_ranks(1)
def test_an_interrupt_at_the_entry_leaves_a_unit_as_it_was():
    layer = meshard.fully_shard(Interrupted(2, 2))
    shard = layer.weight
    layer.is_armed = True
    with pytest.raises(KeyboardInterrupt), unsharded_params(layer):
        pass
    assert layer.weight is shard
    layer(torch.ones(1, 2)).sum().backward()
    assert shard.grad is not None
