"""Changes of dtype, device and memory format after sharding."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import meshard
from tests.support.models import MlpStack, seeded
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.ranks import on_ranks, on_threads
from tests.support.sharding import shard_blocks, sharded_case
from tests.support.spread import spread

BATCHES = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))


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


class AnyDtypeBlock(nn.Module):
    """A block that computes in the dtypes of its layers."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x):
        up = torch.tanh(self.up(x.to(self.up.weight.dtype)))
        return x + self.down(up.to(self.down.weight.dtype)).to(x.dtype)


class AnyDtype(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(6))
        self.blocks = nn.ModuleList(AnyDtypeBlock() for _ in range(2))

    def forward(self, x):
        x = x.to(self.scale.dtype) * self.scale
        for block in self.blocks:
            x = block(x)
        return x.float()


CONVERSIONS = {
    "half": (lambda module: module.half(), torch.float16),
    "bfloat16": (lambda module: module.bfloat16(), torch.bfloat16),
    "double": (lambda module: module.double(), torch.float32),
    "to": (lambda module: module.to(torch.float64), torch.float32),
    "to_device": (lambda module: module.to("cpu", torch.bfloat16), torch.bfloat16),
}
PARTS = {
    "root": lambda model: model,
    "unit": lambda model: model.blocks[1],
    "inside": lambda model: model.blocks[1].up,
}


@spread(
    how=list(CONVERSIONS),
    part=["inside", "unit", "root"],
    after_a_step=[True, False],
    reshards=[None, False],
)
@on_threads(2)
def test_a_cast_reaches_the_next_forward(how, part, after_a_step, reshards):
    convert, dtype = CONVERSIONS[how]
    plain = seeded(AnyDtype())
    model = copy.deepcopy(plain)
    shard_blocks(model, init_device_mesh("cpu", (2,)), reshard_after_forward=reshards)
    if after_a_step:
        check_same_step(model, plain, BATCHES, torch.float32)
    else:
        with torch.no_grad():
            model(BATCHES[0])
    objects = list(model.parameters())
    for each in (model, plain):
        convert(PARTS[part](each))
    # An optimizer that was built before goes on to hold the right objects.
    assert all(new is old for new, old in zip(model.parameters(), objects, strict=True))
    assert_same(full_state(model), full_state(plain), bitwise=True)
    for _ in range(2):
        check_same_step(model, plain, BATCHES, dtype)
        for each in (model, plain):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
        assert_same(full_state(model), full_state(plain), dtype)


@on_ranks(2)
def test_a_cast_of_the_shards_leaves_the_compute_dtype():
    """The whole parameters stay in param_dtype, whatever the shards are."""
    policy = meshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    _, model, _ = sharded_case("mlp_stack", mp_policy=policy)
    batch = torch.ones(2, 6)
    model(batch).float().sum().backward()
    before = full_grads(model)
    model.zero_grad()
    model.double()
    model(batch).float().sum().backward()
    assert all(param.grad.dtype == torch.float64 for param in model.parameters())
    assert_same(full_grads(model), {k: v.double() for k, v in before.items()}, torch.bfloat16)


@on_threads(2)
def test_memory_is_taken_part_by_part():
    """to_empty on a submodule, on a unit, and on the root, each then filled."""
    with torch.device("meta"):
        case, model, _ = sharded_case("mlp_stack")
    plain = case.build()

    def fill(name):
        model.get_submodule(name).to_empty(device="cpu")
        model.get_submodule(name).load_state_dict(plain.get_submodule(name).state_dict())

    fill("blocks.0.up")
    fill("blocks.1")
    with pytest.raises(RuntimeError, match=r"'scale' .* still on the meta device"):
        model(case.batch(0, 0))
    assert_same(full_state(model.blocks[1]), full_state(plain.blocks[1]), bitwise=True)
    fill("blocks.0.down")
    assert_same(model.blocks[0](torch.ones(1, 6)), plain.blocks[0](torch.ones(1, 6)))
    fill("")  # also what had memory
    assert_same(model(case.batch(0, 0)), plain(case.batch(0, 0)))


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 5, 1)
        self.matrix = nn.Parameter(torch.empty(9, 5).t())  # not contiguous

    def forward(self, x):
        x = self.second(torch.tanh(self.first(x)))
        return torch.einsum("bchw,ck->bkhw", x, self.matrix)


@pytest.mark.parametrize(("shard_dim", "after"), [(0, False), (1, False), (0, True)])
@on_threads(2)
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
    for switch in (
        torch.__future__.set_swap_module_params_on_conversion,
        torch.__future__.set_overwrite_module_params_on_conversion,
    ):
        _, model, plain = sharded_case("mlp_stack")
        check_same_step(model, plain, BATCHES, torch.float32)
        switch(True)
        try:
            for each in (model, plain):
                each.double()
                each.load_state_dict({k: v.double() for k, v in MlpStack().state_dict().items()})
                each.load_state_dict(seeded(MlpStack(), 3).state_dict())
        finally:
            switch(False)
        assert_same(full_state(model), full_state(plain), bitwise=True)
        check_same_step(model, plain, BATCHES.double(), torch.float64)
