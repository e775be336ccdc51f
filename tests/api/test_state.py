"""Parameters that are made late, moved, cast, saved and loaded."""

import copy
import io
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import meshard
from tests.support.cases import CASES
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.ranks import on_ranks


def shard(case, model, mesh):
    for unit in case.units(model):
        meshard.fully_shard(unit, mesh)
    return model


def reseed(model, seed):
    """Give every parameter values that depend on its name only, shard by shard."""
    for number, param in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(seed + number)
        whole = torch.randn(param.shape, generator=generator) * 0.3
        if isinstance(param, DTensor):
            with torch.no_grad():
                param.copy_(
                    torch.distributed.tensor.distribute_tensor(
                        whole, param.device_mesh, param.placements
                    )
                )
        else:
            param.data.copy_(whole)


def views_of_one_buffer(model):
    for module in model.modules():
        unit = vars(module).get("_meshard_unit")
        if unit is not None:
            buffer = unit.group.unit_params.flat_shard.buffer
            first, last = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
            for param in unit.group.params:
                local = param.sharded._local_tensor
                assert not local.numel() or first <= local.data_ptr() < last


def make_on_meta(mesh_shape):
    case = CASES["transformer"]
    mesh = init_device_mesh("cpu", mesh_shape)
    with torch.device("meta"):
        model = case.build()
    shard(case, model, mesh)
    assert all(param.is_meta for param in model.parameters())
    model.to_empty(device="cpu")
    views_of_one_buffer(model)
    reseed(model, 5)
    plain = case.build()
    reseed(plain, 5)
    rank = dist.get_rank()
    case.loss(model(case.batch(0, rank))).backward()
    case.loss(plain(case.whole_batch(0, dist.get_world_size()))).backward()
    assert_same(full_state(model), full_state(plain), bitwise=True)
    assert_same(full_grads(model), full_grads(plain))


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (2, 2)])
def test_a_model_made_on_meta_trains_like_one_made_here(run_ranks, mesh_shape):
    num_ranks = mesh_shape[0] * (mesh_shape[1] if len(mesh_shape) == 2 else 1)
    run_ranks(make_on_meta, num_ranks, mesh_shape)


@on_ranks(2)
@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_of_shards_is_loaded(assign):
    case = CASES["transformer"]
    mesh = init_device_mesh("cpu", (2,))
    first, second = (shard(case, case.build(), mesh) for _ in range(2))
    reseed(first, 1)
    reseed(second, 2)
    batch = case.batch(0, dist.get_rank())
    second(batch)  # leaves the root whole, with the old values
    state = {name: value.clone() for name, value in first.state_dict().items()}
    assert all(isinstance(value, DTensor) for value in state.values())
    second.load_state_dict(state, assign=assign)
    assert torch.equal(first(batch), second(batch))
    for model in (first, second):
        case.loss(model(batch)).backward()
    assert_same(full_grads(second), full_grads(first), bitwise=True)
    views_of_one_buffer(second)


@on_ranks(2)
def test_a_model_is_cast_after_a_step():
    case = CASES["mlp_stack"]
    mesh = init_device_mesh("cpu", (2,))
    model = shard(case, case.build(), mesh)
    batch = case.batch(0, dist.get_rank())
    case.loss(model(batch)).backward()
    before = full_state(model)
    names = [name for name, _ in model.named_parameters()]
    model.double()
    assert [name for name, _ in model.named_parameters()] == names
    assert_same(full_state(model), {k: v.double() for k, v in before.items()}, bitwise=True)
    views_of_one_buffer(model)
    model.zero_grad()
    case.loss(model(batch.double())).backward()
    assert all(param.grad.dtype == torch.float64 for param in model.parameters())
    plain = case.build().double()
    case.loss(plain(case.whole_batch(0, 2).double())).backward()
    assert_same(full_grads(model), full_grads(plain), torch.float64)


@on_ranks(2)
def test_edits_of_shards_reach_a_forward_that_would_reuse_whole_parameters():
    """Evaluation leaves the root whole; edits of the shards must reach the next forward."""
    case = CASES["mlp_stack"]
    mesh = init_device_mesh("cpu", (2,))
    model = shard(case, case.build(), mesh)
    plain = case.build()
    batch = case.batch(0, 0)

    def edits(module):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5, foreach=True)
        yield lambda: [param.mul_(2) for param in module.parameters()]
        yield lambda: [getattr(p, "_local_tensor", p).add_(1) for p in module.parameters()]
        yield lambda: [setattr(p, "grad", p.detach().clone()) for p in module.parameters()]
        yield optimizer.step

    model.set_reshard_after_forward(False)
    with torch.no_grad():
        for ours, theirs in zip(edits(model), edits(plain), strict=True):
            assert_same(model(batch), plain(batch))
            ours()
            theirs()
        assert_same(model(batch), plain(batch))


def save_on_every_rank(state, file):
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "rank 0 pickles a sharded state_dict"
        )  # each saves its own
        torch.save(state, file)


@on_ranks(2)
def test_a_state_dict_is_pickled_and_copied():
    case = CASES["transformer"]
    model = shard(case, case.build(), init_device_mesh("cpu", (2,)))
    state = model.state_dict()
    file = io.BytesIO()
    save_on_every_rank(state, file)
    sharded_bytes = sum(value.to_local().nbytes for value in state.values())
    assert file.tell() < 2 * sharded_bytes + 50_000  # not the whole buffer with every parameter
    file.seek(0)
    for loaded in (torch.load(file), copy.deepcopy(state)):
        for name, value in state.items():
            assert torch.equal(loaded[name].to_local(), value.to_local())
            assert loaded[name].placements == value.placements


def saved_by(what, mesh_shape=(2,)):
    """Return what this rank is warned about when it saves, and what another process loads."""
    model = CASES["mlp_stack"].build()
    for unit in CASES["mlp_stack"].units(model):
        meshard.fully_shard(unit, init_device_mesh("cpu", mesh_shape))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options) if what == "full" else model.state_dict()
    if what == "copied":
        state = copy.deepcopy(state)
    if what == "made full":
        for name, value in state.items():
            state[name] = value.full_tensor()
    file = io.BytesIO()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        copy.deepcopy(state)
        pickle.dumps(model.state_dict()["blocks.0.up.weight"])
        torch.save({"model": state}, file)
    file.seek(0)
    if "full" not in what:
        model.load_state_dict(torch.load(file)["model"])
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("what", ["sharded", "copied", "full", "made full"])
def test_rank_0_is_warned_that_it_saves_its_shards_only(run_ranks, what):
    first, second = run_ranks(saved_by, 2, what)
    assert second == [] and len(first) == ("full" not in what)
    for text in first:
        assert "not those of the other 1 ranks" in text and "full_state_dict=True" in text


def test_replicas_of_whole_parameters_are_saved_without_a_warning(run_ranks):
    assert run_ranks(saved_by, 2, "sharded", (2, 1)) == [[], []]


@on_ranks(4)
def test_a_state_dict_of_a_mesh_with_groups_beside_its_own_is_pickled_and_copied():
    """What a mesh has got for neighbours, or for reductions, is not part of what is saved."""
    case = CASES["mlp_stack"]
    mesh = init_device_mesh("cpu", (2, 2))
    model = case.build()
    for unit in case.units(model):
        meshard.fully_shard(unit, mesh, reshard_after_forward=2)
    model.set_separate_reduce_scatter_group()
    case.loss(model(case.batch(0, 0))).backward()
    state = model.state_dict()
    file = io.BytesIO()
    save_on_every_rank(state, file)
    assert b"meshard" not in file.getvalue().replace(b"_meshard_tag", b"")
    file.seek(0)
    for loaded in (torch.load(file), copy.deepcopy(state)):
        model.load_state_dict(loaded)
        assert_same(full_state(model), full_state(case.build()), bitwise=True)


def save_sharded(path):
    case = CASES["transformer"]
    model = shard(case, case.build(), init_device_mesh("cpu", (3,)))
    reseed(model, 9)
    checkpoint.save(get_model_state_dict(model), checkpoint_id=path)


def load_sharded(path):
    case = CASES["transformer"]
    model = shard(case, case.build(), init_device_mesh("cpu", (2, 2)))
    state = get_model_state_dict(model)
    checkpoint.load(state, checkpoint_id=path)
    set_model_state_dict(model, state)
    plain = case.build()
    reseed(plain, 9)
    assert_same(full_state(model), full_state(plain), bitwise=True)
    batch = case.batch(0, dist.get_rank())
    assert_same(model(batch), plain(batch))


@pytest.mark.extras
@pytest.mark.filterwarnings("ignore")
def test_distributed_checkpoints_move_to_another_mesh(run_ranks, tmp_path):
    run_ranks(save_sharded, 3, str(tmp_path / "checkpoint"))
    run_ranks(load_sharded, 4, str(tmp_path / "checkpoint"))


def test_one_rank_without_a_group_or_a_mesh_is_enough():
    try:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        for layer in model:
            meshard.fully_shard(layer)
        meshard.fully_shard(model)
        assert dist.get_world_size() == 1
        policies = {param.placements for param in model.parameters()}
        assert len(policies) == 1
        model(torch.ones(2, 4)).sum().backward()
        assert model[0].weight.grad.full_tensor().shape == (4, 4)
    finally:
        dist.destroy_process_group()
