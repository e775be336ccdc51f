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
from torch.distributed.tensor import DTensor

import meshard
from tests.support import insides
from tests.support.models import seeded
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.ranks import on_ranks, on_threads
from tests.support.sharding import sharded_case


def share_one_buffer(unit):
    """Tell whether the shards of a unit are views of the same memory, as its collectives need."""
    (group,) = (each.group for each in insides.own_units(unit))
    buffer = group.unit_params.flat_shard.buffer
    shards = [param.sharded.to_local() for param in group.params]
    starts = [shard.data_ptr() - buffer.data_ptr() for shard in shards if shard.numel()]
    return all(0 <= start < buffer.nbytes for start in starts)


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
@on_threads(4)
def test_a_model_made_on_meta_trains_like_one_made_here(mesh_shape):
    with torch.device("meta"):
        case, model, _ = sharded_case("transformer", mesh_shape)
    assert all(param.is_meta for param in model.parameters())
    model.to_empty(device="cpu")
    assert all(map(share_one_buffer, model.blocks))
    plain = case.build()
    model.load_state_dict(plain.state_dict())
    case.loss(model(case.batch(0, dist.get_rank()))).backward()
    case.loss(plain(case.whole_batch(0, 4))).backward()
    assert_same(full_state(model), full_state(plain), bitwise=True)
    assert_same(full_grads(model), full_grads(plain))


@on_ranks(2)
def test_a_model_is_cast_after_a_step():
    case, model, plain = sharded_case("mlp_stack")
    batch = case.batch(0, dist.get_rank())
    case.loss(model(batch)).backward()
    before = full_state(model)
    model.double()
    assert_same(full_state(model), {k: v.double() for k, v in before.items()}, bitwise=True)
    assert all(map(share_one_buffer, model.blocks))
    model.zero_grad()
    case.loss(model(batch.double())).backward()
    assert all(param.grad.dtype == torch.float64 for param in model.parameters())
    plain.double()
    case.loss(plain(case.whole_batch(0, 2).double())).backward()
    assert_same(full_grads(model), full_grads(plain), torch.float64)


@on_ranks(2)
def test_edits_of_shards_reach_a_forward_that_would_reuse_whole_parameters():
    """Evaluation leaves the root whole; edits of the shards must reach the next forward."""
    case, model, plain = sharded_case("mlp_stack")
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
        # each saves its own
        warnings.filterwarnings("ignore", "rank 0 pickles a sharded state_dict")
        torch.save(state, file)
    file.seek(0)


@on_ranks(2)
def test_a_state_dict_is_pickled_and_copied():
    _, model, _ = sharded_case("transformer")
    state = model.state_dict()
    file = io.BytesIO()
    save_on_every_rank(state, file)
    sharded_bytes = sum(value.to_local().nbytes for value in state.values())
    num_bytes = len(file.getvalue())
    assert num_bytes < 2 * sharded_bytes + 50_000  # not the whole buffer with every parameter
    for loaded in (torch.load(file), copy.deepcopy(state)):
        for name, value in state.items():
            assert torch.equal(loaded[name].to_local(), value.to_local())
            assert loaded[name].placements == value.placements


@pytest.mark.parametrize(
    ("what", "mesh_shape"),
    [("sharded", (2,)), ("sharded", (2, 1)), ("copied", (2,)), ("full", (2,)), ("made full", (2,))],
)
@on_ranks(2)
def test_rank_0_is_warned_that_it_saves_its_shards_only(what, mesh_shape):
    _, model, _ = sharded_case("mlp_stack", mesh_shape)
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
    is_part = "full" not in what and mesh_shape == (2,)  # replicas have all
    assert len(caught) == (is_part and dist.get_rank() == 0)
    for text in (str(each.message) for each in caught):
        assert "not those of the other 1 ranks" in text and "full_state_dict=True" in text


@on_ranks(4)
def test_a_state_dict_of_a_mesh_with_groups_beside_its_own_is_pickled_and_copied():
    """What a mesh has got for neighbours, or for reductions, is not part of what is saved."""
    case, model, plain = sharded_case("mlp_stack", (2, 2), reshard_after_forward=2)
    model.set_separate_reduce_scatter_group()
    case.loss(model(case.batch(0, 0))).backward()
    state = model.state_dict()
    file = io.BytesIO()
    save_on_every_rank(state, file)
    assert b"meshard" not in file.getvalue().replace(b"_meshard_tag", b"")
    for loaded in (torch.load(file), copy.deepcopy(state)):
        model.load_state_dict(loaded)
        assert_same(full_state(model), full_state(plain), bitwise=True)


@pytest.mark.extras
@pytest.mark.filterwarnings("ignore")
def test_distributed_checkpoints_move_to_another_mesh(run_ranks, tmp_path):
    run_ranks(save_sharded, 3, str(tmp_path / "checkpoint"))
    run_ranks(load_sharded, 4, str(tmp_path / "checkpoint"))


def save_sharded(path):
    _, model, plain = sharded_case("transformer", (3,))
    model.load_state_dict(seeded(plain, 9).state_dict())
    checkpoint.save(get_model_state_dict(model), checkpoint_id=path)


def load_sharded(path):
    case, model, plain = sharded_case("transformer", (2, 2))
    state = get_model_state_dict(model)
    checkpoint.load(state, checkpoint_id=path)
    set_model_state_dict(model, state)
    seeded(plain, 9)
    assert_same(full_state(model), full_state(plain), bitwise=True)
    batch = case.batch(0, dist.get_rank())
    assert_same(model(batch), plain(batch))


def test_one_rank_without_a_group_or_a_mesh_is_enough():
    try:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        for layer in (*model, model):
            meshard.fully_shard(layer)
        assert dist.get_world_size() == 1
        assert all(isinstance(param, DTensor) for param in model.parameters())
        model(torch.ones(2, 4)).sum().backward()
        assert model[0].weight.grad.full_tensor().shape == (4, 4)
    finally:
        dist.destroy_process_group()
