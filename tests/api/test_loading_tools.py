"""Loading with torch's checkpoint functions and as other libraries do it."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import meshard
from tests.support.cases import CASES
from tests.support.models import MlpBlock, seeded
from tests.support.normed import BATCH, Normed, same_models, values
from tests.support.parity import assert_same, full_state
from tests.support.ranks import on_ranks
from tests.support.sharding import shard_blocks


@on_ranks(2)
def test_a_model_on_meta_is_filled_by_assigning():
    """As accelerate does: shard on meta, place each whole tensor like its parameter, assign."""
    mesh = init_device_mesh("cpu", (2,))
    wanted = values(2)
    with torch.device("meta"):
        model = Normed()
    shard_blocks(model, mesh)
    shards = {}
    for name, value in wanted.state_dict().items():
        target = model.state_dict()[name]
        if isinstance(target, DTensor):
            value = distribute_tensor(value, target.device_mesh, target.placements)
        shards[name] = value.clone()
    first = {name: value for name, value in shards.items() if "blocks" in name}
    model.load_state_dict({**first}, strict=False, assign=True)
    # Not everything is there yet; what is there must not get lost.
    model.train(True)
    for unit in (model.blocks[0], model):
        unit._apply(lambda tensor: tensor)
    rest = {name: value for name, value in shards.items() if name not in first}
    model.load_state_dict(rest, strict=False, assign=True)
    same_models(model, wanted, BATCH)
    # The optimizer of a model loaded in this way steps it.
    with torch.device("meta"):
        model = Normed()
    shard_blocks(model, mesh)
    model.load_state_dict(shards, assign=True)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, wanted)]
    for each, optimizer in zip((model, wanted), optimizers, strict=True):
        each.zero_grad()
        each(BATCH).square().mean().backward()
        optimizer.step()
    assert_same(full_state(model), full_state(wanted))


@on_ranks(2)
def test_a_unit_on_meta_may_be_filled_in_parts():
    mesh = init_device_mesh("cpu", (2,))
    wanted = seeded(MlpBlock(6, 7))
    with torch.device("meta"):
        model = MlpBlock(6, 7)
    meshard.fully_shard(model, mesh)
    model.load_state_dict({"up.weight": wanted.up.weight.detach()}, strict=False, assign=True)
    with pytest.raises(RuntimeError, match=r"'up.bias' of unit '\(root\)' is still on the meta"):
        model(BATCH)
    rest = {name: value for name, value in wanted.state_dict().items() if name != "up.weight"}
    for each in (copy.deepcopy(model), model):
        each.load_state_dict(rest, strict=False, assign=True)
        assert_same(each(BATCH), wanted(BATCH))


class Adapted(nn.Module):
    """A layer on the meta device, and an adapter with values; both of uneven sizes."""

    def __init__(self, device="meta"):
        super().__init__()
        self.base = nn.Linear(6, 7, device=device)
        self.down, self.up = nn.Linear(6, 3, bias=False), nn.Linear(3, 7, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def load_beside_values(fully_shard, assign):
    mesh = init_device_mesh("cpu", (2,))
    model, wanted = Adapted(), seeded(Adapted("cpu"))
    values = {name: value.clone() for name, value in wanted.state_dict().items()}
    base = {name: values.pop(name) for name in ("base.weight", "base.bias")}
    model.load_state_dict(values, strict=False)
    fully_shard(model, mesh=mesh)
    adapter = [param for param in model.parameters() if not param.is_meta]
    optimizer = torch.optim.SGD(adapter, lr=0.5)
    if fully_shard is meshard.fully_shard:
        with pytest.raises(RuntimeError, match="on the module that holds it"):
            model(BATCH)
    assert_same({name: model.get_parameter(name).full_tensor() for name in values}, values)
    if assign:
        sharded = {name: distribute_tensor(value, mesh) for name, value in base.items()}
        model.load_state_dict(sharded, strict=False, assign=True)
    else:
        model.base.to_empty(device="cpu")
        with torch.no_grad():
            for name, value in base.items():
                model.get_parameter(name).copy_(distribute_tensor(value, mesh))
    for each in (model, wanted):
        each(BATCH).square().mean().backward()
    optimizer.step()
    torch.optim.SGD([wanted.get_parameter(name) for name in values], lr=0.5).step()
    assert_same(full_state(model), full_state(wanted))


@pytest.mark.parametrize(
    ("lib", "assign"), [(meshard, False), (meshard, True), (torch_fsdp, False)]
)
def test_values_beside_a_layer_on_meta_are_kept(run_ranks, lib, assign):
    run_ranks(load_beside_values, 2, lib.fully_shard, assign)


def through_dcp(**options):
    """Whole state dicts by torch's own functions, of model and optimizer, there and back."""
    rank = dist.get_rank()
    case = CASES["transformer_tied"]
    mesh = init_device_mesh("cpu", (2,))

    def build():
        model = case.build()
        for unit in case.units(model):
            meshard.fully_shard(unit, mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(model, optimizer, number):
        case.loss(model(case.batch(number, rank))).backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = build()
    step(model, optimizer, 0)
    given = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=given)
    assert bool(model_state) is (rank == 0)
    assert not any(isinstance(value, DTensor) for value in model_state.values())
    other, its = build()
    other.load_state_dict(seeded(case.build(), 7).state_dict())
    taken = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, **options)
    # set_state_dict would let a rank with an empty dict out of the broadcast of the model.
    set_model_state_dict(other, model_state, options=taken)
    # On rank 0 the two optimizers would share the tensors that count steps.
    set_optimizer_state_dict(other, its, copy.deepcopy(optimizer_state), options=taken)
    for each in ((model, optimizer), (other, its)):
        step(*each, 1)
        step(*each, 2)
    assert_same(full_state(other), full_state(model), bitwise=True)
    # Every rank holds the whole, and no broadcast is needed.
    everywhere = full_state(model)
    everywhere["head.weight"] = everywhere["embedding.weight"]
    set_model_state_dict(other, everywhere, options=StateDictOptions(full_state_dict=True))
    assert_same(full_state(other), full_state(model), bitwise=True)
    sharded = get_model_state_dict(other)
    assert all(isinstance(value, DTensor) for value in sharded.values())


@pytest.mark.extras
@pytest.mark.filterwarnings("ignore")
def test_whole_state_dicts_go_through_torchs_checkpoint_functions(run_ranks):
    run_ranks(through_dcp, 2)
