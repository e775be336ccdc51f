"""Changes of dtype, device and memory format after sharding."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import meshard
from tests.support.cases import CASES
from tests.support.models import MlpStack, seeded
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.ranks import on_ranks
from tests.support.sharding import shard_blocks


def sharded(mesh_shape=(2,), **kwargs):
    mesh = init_device_mesh("cpu", mesh_shape)
    model = seeded(MlpStack())
    return shard_blocks(model, mesh, **kwargs)


CONVERSIONS = {
    "half": lambda module: module.half(),
    "bfloat16": lambda module: module.bfloat16(),
    "double": lambda module: module.double(),
    "to": lambda module: module.to(torch.float64),
    "to_device": lambda module: module.to("cpu", torch.bfloat16),
}
PARTS = {
    "root": lambda model: model,
    "unit": lambda model: model.blocks[1],
    "inside": lambda model: model.blocks[1].up,
}


def check_same_step(model, plain, batches, dtype):
    rank = dist.get_rank()
    for each in (model, plain):
        each.zero_grad()
    model(batches[rank]).square().mean().backward()
    plain(batches.flatten(0, 1)).square().mean().backward()
    assert_same(full_grads(model), full_grads(plain), dtype)
    for param, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert param.dtype == theirs.dtype == param.grad.dtype == theirs.grad.dtype
        assert isinstance(param, DTensor) and isinstance(param, nn.Parameter)


class BlocksInUnits(nn.Module):
    """The same, with a forward of its own for each block, which is a unit."""

    class Block(nn.Module):
        def __init__(self, dim, hidden):
            super().__init__()
            self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

        def forward(self, x):
            up = torch.tanh(self.up(x.to(self.up.weight.dtype)))
            return x + self.down(up.to(self.down.weight.dtype)).to(x.dtype)

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(6))
        self.blocks = nn.ModuleList(self.Block(6, 10) for _ in range(2))

    def forward(self, x):
        x = x.to(self.scale.dtype) * self.scale
        for block in self.blocks:
            x = block(x)
        return x.float()


def convert(how, part, when, reshard_after_forward):
    mesh = init_device_mesh("cpu", (2,))
    plain = seeded(BlocksInUnits())
    model = copy.deepcopy(plain)
    shard_blocks(model, mesh, reshard_after_forward=reshard_after_forward)
    batches = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))
    if when == "forward":
        with torch.no_grad():
            model(batches[0]), plain(batches[0])
    elif when == "step":
        check_same_step(model, plain, batches, torch.float32)
    objects = list(model.parameters())
    for each in (model, plain):
        CONVERSIONS[how](PARTS[part](each))
    # An optimizer that was built before goes on to hold the right objects.
    assert all(new is old for new, old in zip(model.parameters(), objects, strict=True))
    assert_same(full_state(model), full_state(plain), bitwise=True)
    if how == "half":
        dtype = torch.float16
    else:
        dtype = torch.bfloat16 if how in ("bfloat16", "to_device") else torch.float32
    check_same_step(model, plain, batches, dtype)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for optimizer in optimizers:
        optimizer.step()
    assert_same(full_state(model), full_state(plain), dtype)
    check_same_step(model, plain, batches, dtype)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("how", CONVERSIONS)
def test_a_cast_reaches_the_next_forward(run_ranks, how, part):
    when = {"root": "step", "unit": "forward", "inside": "step"}[part]
    keeps = {"root": None, "unit": False, "inside": False}[part]
    run_ranks(convert, 2, how, part, when, keeps)


@on_ranks(2)
def test_a_cast_of_the_shards_leaves_the_compute_dtype():
    """The whole parameters stay in param_dtype, whatever the shards are."""
    policy = meshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(mp_policy=policy)
    batch = torch.ones(2, 6)
    model(batch).float().sum().backward()
    before = full_grads(model)
    model.zero_grad()
    model.double()
    model(batch).float().sum().backward()
    assert all(param.grad.dtype == torch.float64 for param in model.parameters())
    assert_same(full_grads(model), {k: v.double() for k, v in before.items()}, torch.bfloat16)


@on_ranks(2)
def test_memory_is_taken_part_by_part():
    """to_empty on a submodule, on a unit, and on the root, each then filled."""
    case = CASES["mlp_stack"]
    mesh = init_device_mesh("cpu", (2,))
    with torch.device("meta"):
        model = case.build()
    for unit in case.units(model):
        meshard.fully_shard(unit, mesh)
    plain = case.build()
    model.blocks[0].up.to_empty(device="cpu")
    model.blocks[0].up.load_state_dict(plain.blocks[0].up.state_dict())
    model.blocks[1].to_empty(device="cpu")
    model.blocks[1].load_state_dict(plain.blocks[1].state_dict())
    with pytest.raises(RuntimeError, match=r"'scale' .* still on the meta device"):
        model(case.batch(0, 0))
    assert_same(full_state(model.blocks[1]), full_state(plain.blocks[1]), bitwise=True)
    model.blocks[0].down.to_empty(device="cpu")
    model.blocks[0].down.load_state_dict(plain.blocks[0].down.state_dict())
    assert_same(model.blocks[0](torch.ones(1, 6)), plain.blocks[0](torch.ones(1, 6)))
    model.to_empty(device="cpu")  # also what had memory
    model.load_state_dict(plain.state_dict())
    assert_same(model(case.batch(0, 0)), plain(case.batch(0, 0)))


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 5, 1)
        self.matrix = nn.Parameter(torch.empty(9, 5).t())  # not contiguous

    def forward(self, x):
        x = self.second(torch.tanh(self.first(x)))
        return torch.einsum("bchw,ck->bkhw", x, self.matrix)


@on_ranks(2)
@pytest.mark.parametrize(("shard_dim", "after"), [(0, False), (1, False), (0, True)])
def test_parameters_of_any_memory_format_are_sharded(shard_dim, after):
    mesh = init_device_mesh("cpu", (2,))
    plain = seeded(Conv()).to(memory_format=torch.channels_last)
    model = copy.deepcopy(plain)
    assert not model.first.weight.is_contiguous() and not model.matrix.is_contiguous()

    def placement(param):
        return Shard(shard_dim % param.dim())

    for unit in (model.first, model):
        meshard.fully_shard(unit, mesh, shard_placement_fn=placement)
    assert_same(full_state(model), full_state(plain), bitwise=True)
    xs = torch.randn(2, 2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    for step in range(2):
        if after and step:
            model.to(memory_format=torch.channels_last)
        check_same_step(model, plain, xs, torch.float32)
        for param in model.parameters():
            assert param.is_contiguous() and param.to_local().is_contiguous()
        for each in (model, plain):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
    assert_same(full_state(model), full_state(plain))
    copied = copy.deepcopy(model)
    copied.load_state_dict(plain.state_dict())
    assert_same(full_state(copied), full_state(plain), bitwise=True)


@on_ranks(2)
def test_every_way_of_converting_is_followed():
    """torch.__future__'s ways of Module.to."""
    batches = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))
    for switch in (
        torch.__future__.set_swap_module_params_on_conversion,
        torch.__future__.set_overwrite_module_params_on_conversion,
    ):
        model, plain = sharded(), seeded(MlpStack())
        check_same_step(model, plain, batches, torch.float32)
        switch(True)
        try:
            for each in (model, plain):
                each.double()
                each.load_state_dict({k: v.double() for k, v in MlpStack().state_dict().items()})
                each.load_state_dict(seeded(MlpStack(), 3).state_dict())
        finally:
            switch(False)
        assert_same(full_state(model), full_state(plain), bitwise=True)
        check_same_step(model, plain, batches.double(), torch.float64)
