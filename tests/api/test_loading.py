"""Loading into a sharded module: unsharded tensors, and shards, as libraries do it."""

import copy
import gc
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import meshard
from meshard import CommLedger
from tests.support.models import Adapted, MlpStack, seeded
from tests.support.parity import assert_same, full_grads, full_state, whole
from tests.support.ranks import on_ranks
from tests.support.sharding import shard_blocks, sharded_case
from tests.support.spread import spread


def normed():
    """Units, one of them with buffers, and a parameter of the root that has two names."""
    model = MlpStack(6, 7, depth=2)
    model.blocks.append(nn.BatchNorm1d(6))
    model.shift = model.scale
    return model


def values(seed):
    """A plain model, with buffers that no other has."""
    model = seeded(normed(), seed)
    model.blocks[2].running_mean += seed
    model.blocks[2].num_batches_tracked += seed
    return model


def sharded(seed=1, mesh_shape=(2,)):
    return shard_blocks(values(seed), init_device_mesh("cpu", mesh_shape))


def same_models(model, plain, batch):
    """The two hold the same, compute the same, and train in the same way."""
    state = {name: whole(value) for name, value in model.state_dict().items()}
    assert_same(state, dict(plain.state_dict()), bitwise=True)
    for each in (model, plain):
        each.eval()
    assert_same(model(batch), plain(batch))
    for each in (model, plain):
        each.zero_grad()
        each(batch).square().mean().backward()
        each.train()
    assert_same(full_grads(model), full_grads(plain))


BATCH = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


ASSIGN = pytest.mark.parametrize("assign", [False, True])


@spread(assign=[False, True, False], mesh_shape=[(4,), (4,), (2, 2)])
@on_ranks(4)
def test_unsharded_tensors_are_loaded_without_communication(assign, mesh_shape):
    model, wanted = sharded(1, mesh_shape), values(2)
    model(BATCH)  # leaves a root, and a graph, with the old values
    given = {name: value.clone() for name, value in wanted.state_dict().items()}
    before = dict(given)
    with CommLedger(model) as ledger:
        result = model.load_state_dict(given, assign=assign)
    assert not ledger.counts
    assert result.missing_keys == result.unexpected_keys == []
    assert given.keys() == before.keys() and all(given[k] is v for k, v in before.items())
    assert all(isinstance(param, DTensor) for param in model.parameters())
    same_models(model, wanted, BATCH)
    # A submodule that is a unit, and one that is inside of one.
    other = values(3)
    for to in (model, wanted):
        for name in ("blocks.1", "blocks.0.up"):
            state = copy.deepcopy(other.get_submodule(name).state_dict())
            to.get_submodule(name).load_state_dict(state, assign=assign)
    same_models(model, wanted, BATCH)
    assert model.scale is model.shift


@ASSIGN
@on_ranks(3)
def test_unsharded_tensors_are_cut_on_any_dim(assign):
    case, model, wanted = sharded_case(
        "uneven", (3,), shard_placement_fn=lambda param: Shard(param.dim() - 1)
    )
    seeded(wanted, 4)
    model.load_state_dict(wanted.state_dict(), assign=assign)
    assert_same(full_state(model), full_state(wanted), bitwise=True)
    for param, theirs in zip(model.parameters(), wanted.parameters(), strict=True):
        # Not a view, which would keep the unsharded tensor, or see its edits.
        assert param.to_local().untyped_storage().data_ptr() != theirs.untyped_storage().data_ptr()
    batch = case.batch(0, 0)
    assert_same(model(batch), wanted(batch))


def reported(model, given, **kwargs):
    try:
        result = model.load_state_dict(given, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error).replace("FSDP", "")
    return sorted(result.missing_keys), sorted(result.unexpected_keys)


@on_ranks(2)
def test_what_does_not_fit_is_reported_as_torch_does():
    model, plain = sharded(), values(1)
    mesh = model.scale.device_mesh
    right = values(2).state_dict()
    partial = {name: value for name, value in right.items() if "blocks.0" in name}
    wrong_shape = {**right, "blocks.0.up.weight": torch.ones(3, 3), "scale": torch.ones(3)}
    extra = {**right, "blocks.0.up.more": torch.ones(2), "nothing": torch.ones(2)}
    no_tensor = {**right, "scale": [1.0]}
    for given in (partial, wrong_shape, extra, no_tensor):
        for strict in (True, False):
            for assign in (True, False):
                ours = reported(model, given, strict=strict, assign=assign)
                theirs = reported(plain, given, strict=strict, assign=assign)
                assert ours == theirs, (list(given), strict, assign)
    mixed = {
        name: distribute_tensor(value, mesh, [Shard(0)]) if "up" in name else value
        for name, value in values(5).state_dict().items()
    }
    model.load_state_dict(mixed)
    same_models(model, values(5), BATCH)


@ASSIGN
@on_ranks(4)
def test_shards_of_another_mesh_are_loaded(assign):
    line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    model = sharded(1, (2, 2))
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for seed, (mesh, placements) in enumerate(
        [
            (line, [Shard(0)]),
            (line, [Replicate()]),
            (grid, [Shard(0), Replicate()]),
            (grid, [Replicate(), Shard(0)]),  # as they are here
        ]
    ):
        wanted = values(seed + 2)
        given = copy.deepcopy(wanted.state_dict())
        for name in names:
            given[name] = distribute_tensor(given[name], mesh, placements)
        model(BATCH)  # leaves the root unsharded, with the old values
        model.load_state_dict(given, assign=assign)
        assert all(param.device_mesh == grid for param in model.parameters())
        same_models(model, wanted, BATCH)


@on_ranks(2)
def test_shards_of_a_mesh_without_this_rank_are_refused():
    model = sharded()
    alone = DeviceMesh("cpu", [0])
    given = values(2).state_dict()
    given["scale"] = DTensor.from_local(given["scale"], alone, [Replicate()], run_check=False)
    if dist.get_rank() == 0:
        model.load_state_dict(given)
        return
    with pytest.raises(RuntimeError, match=r"'scale' cannot be loaded .* not part of that mesh"):
        model.load_state_dict(given)


@ASSIGN
@on_ranks(2)
def test_what_is_loaded_while_a_unit_is_unsharded_is_not_lost(assign):
    model = sharded()
    wanted = values(2)
    for giver in (wanted, sharded(2)):
        given = copy.deepcopy(giver.state_dict())
        model.load_state_dict(values(1).state_dict())
        model.blocks[0].unshard()
        model.load_state_dict(given, assign=assign)
        model.blocks[0].reshard()
        same_models(model, wanted, BATCH)


@on_ranks(2)
def test_an_unsharded_parameter_that_is_assigned_becomes_a_shard():
    model = sharded()
    plain = values(1)
    model(BATCH), plain(BATCH)
    other = torch.randn(7, 6, generator=torch.Generator().manual_seed(3))
    for each in (model, plain):
        each.blocks[0].up.weight = nn.Parameter(other.clone())
        each.scale = each.shift = nn.Parameter(torch.ones(6), requires_grad=False)
        each.eval()
    assert_same(model(BATCH), plain(BATCH))
    assert isinstance(model.blocks[0].up.weight, DTensor)
    assert not model.scale.requires_grad
    same_models(model, plain, BATCH)


@on_ranks(2)
def test_loading_keeps_no_unsharded_tensor():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    meshard.fully_shard(model, init_device_mesh("cpu", (2,)))
    for assign in (False, True):
        given = {name: torch.ones(value.shape) for name, value in model.state_dict().items()}
        storages = [value.untyped_storage() for value in given.values()]
        model.load_state_dict(given, assign=assign)
        del given
        gc.collect()
        assert all(sys.getrefcount(storage) <= 3 for storage in storages)
        for param in model.parameters():
            local = param.to_local()
            assert local.untyped_storage().nbytes() == local.nbytes
            assert torch.equal(param.full_tensor(), torch.ones(param.shape))


@on_ranks(2)
def test_a_model_on_meta_is_filled_by_assigning():
    """As accelerate does: shard on meta, place each unsharded tensor like its parameter, assign."""
    wanted = values(2)
    with torch.device("meta"):
        model = normed()
    shard_blocks(model, init_device_mesh("cpu", (2,)))
    shards = {}
    for name, value in wanted.state_dict().items():
        target = model.state_dict()[name]
        if isinstance(target, DTensor):
            value = distribute_tensor(value, target.device_mesh, target.placements)
        shards[name] = value.clone()
    first = {n: shards.pop(n) for n in list(shards) if "blocks.0" in n or "blocks.1" in n}
    model.load_state_dict(first, strict=False, assign=True)
    # Not everything is there yet; what is there must not get lost.
    for unit in (model.blocks[0], model):
        unit._apply(lambda tensor: tensor)
    model.load_state_dict(shards, strict=False, assign=True)
    same_models(model, wanted, BATCH)
    # The optimizer of a model loaded in this way steps it.
    for each in (model, wanted):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    same_models(model, wanted, BATCH)


@ASSIGN
@on_ranks(2)
def test_values_beside_a_layer_on_meta_are_kept(assign):
    mesh = init_device_mesh("cpu", (2,))
    model, wanted = seeded(Adapted(6)), seeded(Adapted(6))
    model.base.to("meta")
    meshard.fully_shard(model, mesh)
    given = dict(wanted.named_parameters())
    base = {name: given.pop(name).detach() for name in ("base.weight", "base.bias")}
    optimizers = [
        torch.optim.SGD([each.get_parameter(name) for name in given], lr=0.5)
        for each in (model, wanted)
    ]
    with pytest.raises(RuntimeError, match="on the module that holds it"):
        model(BATCH)
    assert_same({name: whole(model.get_parameter(name)) for name in given}, given, bitwise=True)
    placed = {name: distribute_tensor(value, mesh) for name, value in base.items()}
    if not assign:
        model.base.to_empty(device="cpu")
    model.load_state_dict(placed, strict=False, assign=assign)
    for each, optimizer in zip((model, wanted), optimizers, strict=True):
        each(BATCH).square().mean().backward()
        optimizer.step()
    assert_same(full_state(model), full_state(wanted))


@pytest.mark.extras
@pytest.mark.filterwarnings("ignore")
@on_ranks(2)
def test_full_state_dicts_are_made_on_one_rank_and_broadcast_by_torch():
    rank = dist.get_rank()
    (case, model, _), (_, other, _) = (sharded_case("transformer_tied") for _ in range(2))
    optimizer, its = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, other))

    def step(model, optimizer, number):
        case.loss(model(case.batch(number, rank))).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(model, optimizer, 0)
    given = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=given)
    assert bool(model_state) is (rank == 0)
    assert not any(isinstance(value, DTensor) for value in model_state.values())
    other.load_state_dict(seeded(case.build(), 7).state_dict())
    taken = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    # set_state_dict would let a rank with an empty dict out of the broadcast of the model.
    set_model_state_dict(other, model_state, options=taken)
    # On rank 0 the two optimizers would share the tensors that count steps.
    set_optimizer_state_dict(other, its, copy.deepcopy(optimizer_state), options=taken)
    for each in ((model, optimizer), (other, its)):
        step(*each, 1)
        step(*each, 2)
    assert_same(full_state(other), full_state(model), bitwise=True)
