"""Setters of FSDP2, on every unit and at any time between steps."""

import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import meshard
from meshard import CommLedger, GradientSync
from tests.support.fake import fake_group
from tests.support.models import MlpStack, seeded
from tests.support.sharding import shard_blocks


def sharded(mesh_shape=(2, 2)):
    mesh = init_device_mesh("cpu", mesh_shape)
    model = MlpStack()
    return shard_blocks(model, mesh)


def counts_of_a_step(model):
    with CommLedger(model) as ledger:
        model(torch.ones(1, 6)).sum().backward()
    counts = ledger.counts
    return tuple(counts.get(op, 0) for op in ("all_gather", "reduce_scatter", "all_reduce"))


@pytest.fixture
def four_ranks():
    with fake_group(4):
        yield


pytestmark = pytest.mark.usefixtures("four_ranks")


def test_the_last_call_of_the_boolean_setters_counts():
    model = sharded()
    assert counts_of_a_step(model) == (7, 4, 4)
    model.set_requires_all_reduce(False)
    assert counts_of_a_step(model) == (7, 4, 0)
    model.set_requires_gradient_sync(True)
    assert counts_of_a_step(model) == (7, 4, 4)
    model.set_requires_gradient_sync(False)
    assert counts_of_a_step(model) == (7, 0, 0)
    model.set_requires_all_reduce(True)
    assert counts_of_a_step(model) == (7, 0, 0)  # there is nothing to all-reduce
    model.set_requires_gradient_sync(True)
    model.set_gradient_sync(GradientSync.REDUCE_SCATTER)
    assert counts_of_a_step(model) == (7, 4, 0)
    model.set_requires_all_reduce(True)
    assert counts_of_a_step(model) == (7, 4, 4)


@pytest.mark.parametrize("mode", GradientSync)
def test_a_mode_does_what_it_says(mode):
    model = sharded()
    model.set_gradient_sync(mode)
    _, num_scattered, num_all_reduced = counts_of_a_step(model)
    assert (num_scattered > 0) is mode.reduces
    assert (num_all_reduced > 0) is mode.over_replicas
    assert bool(meshard.pending_gradients(model)) is not mode.ends_window
    assert pickle.loads(pickle.dumps(mode)) is GradientSync(mode.value) is mode


@pytest.mark.parametrize("inside", GradientSync)
@pytest.mark.parametrize("before", GradientSync)
def test_gradient_sync_restores_the_mode_of_each_unit(before, inside):
    model = sharded()
    model.blocks[1].set_gradient_sync(before)
    expected = counts_of_a_step(model)
    with meshard.gradient_sync(model, inside):
        model.set_requires_all_reduce(False)
    assert counts_of_a_step(model) == expected


def test_setters_recurse_unless_told_not_to():
    model = sharded()
    model.set_gradient_sync(GradientSync.NONE, recurse=False)
    assert counts_of_a_step(model) == (7, 3, 3)
    model.blocks[0].set_gradient_sync(GradientSync.NONE)
    assert counts_of_a_step(model) == (7, 2, 2)


def test_resharding_is_set_at_any_time():
    model = sharded()
    model.set_reshard_after_forward(False)
    assert counts_of_a_step(model) == (4, 4, 4)
    model.set_reshard_after_forward(True)
    assert counts_of_a_step(model) == (8, 4, 4)
    model.set_reshard_after_backward(False)
    counts_of_a_step(model)
    model.set_reshard_after_forward(False)
    assert counts_of_a_step(model) == (0, 4, 4)


def test_unshard_and_reshard_by_hand():
    model = sharded()
    block = model.blocks[1]
    with CommLedger(model) as ledger:
        handle = block.unshard(async_op=True)
        assert isinstance(block.up.weight, DTensor)
        handle.wait()
        assert block.unshard() is None
    assert ledger.counts == {"all_gather": 1}
    assert type(block.up.weight) is nn.Parameter
    assert block.up.weight.shape == (10, 6)
    block.reshard()
    block.reshard()
    assert isinstance(block.up.weight, DTensor)
    assert counts_of_a_step(model) == (7, 4, 4)


def test_an_unshard_ahead_saves_the_gather_in_forward():
    model = sharded()
    model.blocks[0].unshard(async_op=True)
    with CommLedger(model) as ledger:
        model(torch.ones(1, 6))
    assert [event.unit for event in ledger.events] == ["(root)", "blocks.1", "blocks.2"]


def test_the_class_is_both_the_old_and_the_new():
    model = sharded()
    assert isinstance(model, MlpStack)
    assert isinstance(model, meshard.FSDPModule)
    assert isinstance(model, torch.distributed.fsdp.FSDPModule)
    assert type(model).__name__ == "FSDPMlpStack"
    stack = meshard.fully_shard(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    assert type(stack[:2]) is nn.Sequential


def test_names_and_placements_are_those_of_a_plain_model():
    plain = [name for name, _ in MlpStack().named_parameters()]
    model = sharded()
    assert [name for name, _ in model.named_parameters()] == plain
    for param in model.parameters():
        assert isinstance(param, DTensor) and isinstance(param, nn.Parameter)
        assert [str(placement) for placement in param.placements] == ["R", "S(0)"]
        assert param.device_mesh.shape == (2, 2)


def test_a_list_of_modules_is_one_unit():
    mesh = init_device_mesh("cpu", (4,))
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.Sequential(first, nn.ReLU(), second)
    assert meshard.fully_shard([first, second], mesh) == [first, second]
    meshard.fully_shard(model, mesh)
    with CommLedger(model) as ledger:
        model(torch.ones(1, 4)).sum().backward()
        first(torch.ones(1, 4))  # only one of the two
    assert ledger.counts == {"all_gather": 3, "reduce_scatter": 1}
    assert all(isinstance(param, DTensor) for param in model.parameters())


def test_a_root_without_parameters_still_orders_its_units():
    mesh = init_device_mesh("cpu", (4,))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        meshard.fully_shard(layer, mesh)
    meshard.fully_shard(model, mesh)
    for _ in range(2):
        with CommLedger(model) as ledger:
            model(torch.ones(1, 4)).sum().backward()
    order = [(event.op, event.unit) for event in ledger.events if event.op == "all_gather"]
    assert [unit for _, unit in order] == ["0", "1", "1", "0"]


def test_units_without_parameters_communicate_nothing():
    mesh = init_device_mesh("cpu", (2, 2))
    model = nn.Sequential(nn.ReLU(), nn.Tanh())
    for module in (*model, model):
        meshard.fully_shard(module, mesh)
    model[0].set_modules_to_forward_prefetch([model[1]])
    model.set_modules_to_backward_prefetch([model[0]])
    with CommLedger() as ledger:
        model.set_separate_reduce_scatter_group(True)
        model.unshard()
        for sync in (GradientSync.NONE, GradientSync.FULL):
            model.set_gradient_sync(sync)
            model(torch.ones(2, requires_grad=True)).sum().backward()
        meshard.finalize_gradients(model)
        with meshard.unsharded_params(model):
            model(torch.ones(2))
        meshard.offload(model)
        meshard.onload(model)
        model.reshard()
    assert ledger.events == []


def skip_waiting(num_microbatches):
    model = seeded(MlpStack())
    mesh = init_device_mesh("cpu", (2,))
    shard_blocks(model, mesh)
    x = torch.ones(1, 6) * (1 + dist.get_rank())
    for number in range(num_microbatches):
        model.set_is_last_backward(number == num_microbatches - 1)
        model(x).sum().backward()
    return {name: param.grad.full_tensor() for name, param in model.named_parameters()}


def test_reductions_may_outlast_a_backward_that_is_not_the_last(run_ranks):
    one, three = run_ranks(skip_waiting, 2, 1)[0], run_ranks(skip_waiting, 2, 3)[0]
    for name, grad in one.items():
        torch.testing.assert_close(three[name], 3 * grad)


@pytest.mark.parametrize("reshards", [False, True])
def test_unshard_lasts_until_a_forward_or_backward_reshards(reshards):
    model = sharded()
    block = model.blocks[0]
    model.set_reshard_after_forward(reshards)
    model.set_reshard_after_backward(False)
    block.unshard()
    unsharded = block.up.weight
    assert not isinstance(unsharded, DTensor)
    loss = model(torch.ones(1, 6)).sum()
    assert (block.up.weight is unsharded) is not reshards
    loss.backward()
    assert (block.up.weight is unsharded) is not reshards
    assert unsharded.grad is None  # it was reduced
    block.reshard()
    assert isinstance(block.up.weight, DTensor)
    assert block.up.weight.grad is not None
