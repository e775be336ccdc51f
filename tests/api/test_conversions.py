"""Changes of dtype, device and memory format after sharding."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import meshard
from tests.support import insides
from tests.support.against_plain import check_gradients, inputs_of, mean_square, sharded_and_plain
from tests.support.models import Made, MlpStack, seeded
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.ranks import on_ranks, on_threads
from tests.support.sharding import sharded_case
from tests.support.spread import spread
from tests.support.threads import run_threads


def check_step(model, plain, dtype=torch.float32, step=mean_square):
    check_gradients(model, plain, step, times=1, dtype=dtype)
    for param, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert param.dtype == theirs.dtype == param.grad.dtype == theirs.grad.dtype
        assert isinstance(param, DTensor) and isinstance(param, nn.Parameter)


def share_one_buffer(unit):
    """Tell whether the shards of a unit are views of the same memory, as its collectives need."""
    (group,) = (each.group for each in insides.own_units(unit))
    buffer = group.unit_params.flat_shard.buffer
    shards = [param.sharded.to_local() for param in group.params]
    starts = [shard.data_ptr() - buffer.data_ptr() for shard in shards if shard.numel()]
    return all(0 <= start < buffer.nbytes for start in starts)


def any_dtype():
    """A model that computes in the dtypes of its layers."""

    def run(layer, x):
        return layer(x.to(layer.weight.dtype))

    def forward(block, x):
        return x + run(block.down, run(block.up, x).tanh()).to(x.dtype)

    return Made(
        lambda m, x: m.blocks[1](m.blocks[0](x.to(m.scale.dtype) * m.scale)).float(),
        scale=nn.Parameter(torch.empty(6)),
        blocks=[Made(forward, up=nn.Linear(6, 10), down=nn.Linear(10, 6)) for _ in range(2)],
    )


CONVERSIONS = {
    "half": (lambda module: module.half(), torch.float16),
    "bfloat16": (lambda module: module.bfloat16(), torch.bfloat16),
    "double": (lambda module: module.double(), torch.float32),
    "to": (lambda module: module.to(torch.float64), torch.float32),
    "to_device": (lambda module: module.to("cpu", torch.bfloat16), torch.bfloat16),
}


@spread(
    how=list(CONVERSIONS),
    part=["blocks.1.up", "blocks.1", ""],
    after_a_step=[True, False],
    reshards=[None, False],
)
@on_threads(2)
def test_a_cast_reaches_the_next_forward(how, part, after_a_step, reshards):
    convert, dtype = CONVERSIONS[how]
    model, plain = sharded_and_plain(any_dtype(), reshard_after_forward=reshards)
    if after_a_step:
        check_step(model, plain)
    else:
        with torch.no_grad():
            model(inputs_of(0))
    objects = list(model.parameters())
    for each in (model, plain):
        convert(each.get_submodule(part))
    # An optimizer that was built before goes on to hold the right objects.
    assert all(new is old for new, old in zip(model.parameters(), objects, strict=True))
    assert_same(full_state(model), full_state(plain), bitwise=True)
    assert part == "blocks.1.up" or share_one_buffer(model.blocks[1])
    for _ in range(2):
        check_step(model, plain, dtype)
        for each in (model, plain):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
        assert_same(full_state(model), full_state(plain), dtype)


@on_ranks(2)
def test_a_cast_of_the_shards_leaves_the_compute_dtype():
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


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
def test_memory_is_taken_part_by_part(mesh_shape):

    def run():
        with torch.device("meta"):
            case, model, _ = sharded_case("mlp_stack", mesh_shape)
        plain, x = case.build(), case.batch(0, 0)

        def fill(name):
            model.get_submodule(name).to_empty(device="cpu")
            model.get_submodule(name).load_state_dict(plain.get_submodule(name).state_dict())

        fill("blocks.0.up")
        fill("blocks.1")
        with pytest.raises(RuntimeError, match=r"'scale' .* still on the meta device"):
            model(x)
        assert_same(full_state(model.blocks[1]), full_state(plain.blocks[1]), bitwise=True)
        fill("blocks.0.down")
        assert_same(model.blocks[0](x), plain.blocks[0](x))
        fill("")  # also what had memory
        assert all(map(share_one_buffer, model.blocks))
        assert_same(full_state(model), full_state(plain), bitwise=True)
        check_gradients(model, plain)

    run_threads(run, math.prod(mesh_shape))


def convolutions():
    return Made(
        lambda m, x: torch.einsum("bchw,ck->bkhw", m.second(m.first(x).tanh()), m.matrix),
        first=nn.Conv2d(3, 8, 3, padding=1),
        second=nn.Conv2d(8, 5, 1),
        matrix=nn.Parameter(torch.empty(9, 5).t()),  # not contiguous
    )


@pytest.mark.parametrize(("shard_dim", "after"), [(0, False), (1, False), (0, True)])
@on_threads(2)
def test_parameters_of_any_memory_format_are_sharded(shard_dim, after):
    plain = convolutions().to(memory_format=torch.channels_last)
    assert not plain.first.weight.is_contiguous() and not plain.matrix.is_contiguous()
    model, plain = sharded_and_plain(
        plain, ["first"], shard_placement_fn=lambda param: Shard(shard_dim % param.dim())
    )
    assert_same(full_state(model), full_state(plain), bitwise=True)
    for number in range(2):
        if after and number:
            model.to(memory_format=torch.channels_last)
        check_step(
            model, plain, step=lambda m, rank: m(inputs_of(rank, 0, (2, 3, 4, 4))).square().mean()
        )
        for param in model.parameters():
            assert param.is_contiguous() and param.to_local().is_contiguous()
        for each in (model, plain):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
    assert_same(full_state(model), full_state(plain))
    copied = copy.deepcopy(model)
    copied.load_state_dict(plain.state_dict())
    assert_same(full_state(copied), full_state(plain), bitwise=True)


@pytest.mark.parametrize(
    "switch",
    [
        torch.__future__.set_swap_module_params_on_conversion,
        torch.__future__.set_overwrite_module_params_on_conversion,
    ],
)
@on_ranks(2)
def test_every_way_of_converting_is_followed(switch):
    _, model, plain = sharded_case("mlp_stack")
    check_step(model, plain)
    switch(True)
    try:
        for each in (model, plain):
            each.double()
            each.load_state_dict({k: v.double() for k, v in MlpStack().state_dict().items()})
            each.load_state_dict(seeded(MlpStack(), 3).state_dict())
    finally:
        switch(False)
    assert_same(full_state(model), full_state(plain), bitwise=True)
    check_step(
        model, plain, torch.float64, lambda m, rank: m(inputs_of(rank).double()).square().mean()
    )
