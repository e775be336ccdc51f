"""Mixed precision: each dtype is used where the policy says, and nowhere else."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import GradientSync, MixedPrecisionPolicy
from tests.support import ones
from tests.support.models import Made, MlpStack, Ones, seeded
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import on_ranks, on_threads
from tests.support.sharding import shard_blocks
from tests.support.threads import run_threads

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize("reduce_dtype", [None, FP32])
@on_ranks(2)
def test_bfloat16_compute_with_float32_masters_is_exact(reduce_dtype):
    """Two ranks against one process that computes each half in bfloat16 and adds in float32."""
    master = seeded(MlpStack())
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype)
    model = shard_blocks(copy.deepcopy(master), mp_policy=policy)
    xs = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    oracle = torch.optim.SGD(master.parameters(), lr=0.1)
    for _ in range(5):
        out = model(xs[dist.get_rank()])
        assert out.dtype == BF16
        out.float().square().mean().backward()
        halves = []
        for x in xs:
            half = copy.deepcopy(master).bfloat16()
            half(x.bfloat16()).float().square().mean().backward()
            halves.append(
                [param.grad.to(reduce_dtype or BF16).float() for param in half.parameters()]
            )
        for param, a, b in zip(master.parameters(), *halves, strict=True):
            param.grad = (a + b) / 2
        for param in model.parameters():
            assert param.dtype == param.grad.dtype == FP32
        assert_same(full_grads(model), full_grads(master), bitwise=True)
        for each in (optimizer, oracle):
            each.step()
            each.zero_grad()


def sum_of_ones(mesh_shape, mode, count, policy, param_dtype=FP32):
    """Return the gradient of ``count`` microbatches of ones."""
    model = ones.make(mesh_shape, param_dtype, mp_policy=policy)
    ones.run(model, mode * (count - 1) + "F", 1.0)
    grad = full_grads(model)["a"]
    assert grad.dtype == param_dtype
    return grad.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["N", "R", "F"])
@on_threads(4)
def test_512_microbatches_of_ones_add_up_to_512(mode):
    policy = MixedPrecisionPolicy(reduce_dtype=BF16)
    assert sum_of_ones((2, 2), mode, 512, policy) == [512.0] * 4
    # For parameters in bfloat16 a window adds up in float32 too; their .grad is in bfloat16.
    summed = sum_of_ones((2, 2), mode, 512, MixedPrecisionPolicy(), BF16)
    assert summed == [256.0 if mode == "F" else 512.0] * 4


@pytest.mark.slow
@on_threads(2)
def test_sums_stay_wide_when_parameters_are_frozen_and_thawed():
    model = Ones(6, BF16)
    model.b.requires_grad_(False)
    meshard.fully_shard(model, init_device_mesh("cpu", (2,)))
    for number in range(600):
        model.b.requires_grad_(number % 4 < 2)
        is_last = number == 599
        model.set_gradient_sync(GradientSync.FULL if is_last else GradientSync.NONE)
        model(1.0, 1.0).backward()
    grads = full_grads(model)
    # added up in bfloat16, ones stop at 256
    assert grads["a"].tolist() == [600.0] * 6
    assert grads["b"].tolist() == [300.0] * 6


@on_threads(2)
def test_the_accumulate_dtype_is_the_users_choice():
    policy = MixedPrecisionPolicy(accumulate_dtype=BF16)
    assert sum_of_ones((2,), "F", 300, policy, BF16) == [256.0] * 4  # where bfloat16 stops counting
    assert sum_of_ones((2,), "R", 3, MixedPrecisionPolicy(), FP64) == [3.0] * 4


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2), (4, 1), (8,)])
def test_float16_neither_overflows_nor_loses_what_it_could_keep(mesh_shape):
    """Four ranks of 20000 sum to 80000, which float16 has not; the mean is 20000 all the same."""

    def run():
        policy = MixedPrecisionPolicy(reduce_dtype=FP16)
        model = meshard.fully_shard(Ones(6), init_device_mesh("cpu", mesh_shape), mp_policy=policy)
        for value in (20000.0, 2.0**-14):
            model.zero_grad()
            model(value).backward()
            assert full_grads(model)["a"].tolist() == [value] * 6

    run_threads(run, math.prod(mesh_shape))


@on_ranks(1)
def test_inputs_and_outputs_are_cast_wherever_they_are():
    seen = []

    def look(module, x, *, scale, extra):
        seen.append((x.dtype, scale.dtype, extra["ids"].dtype, module.inner.weight.dtype))
        return {"out": module.inner(x) * scale, "ids": extra["ids"]}

    policy = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=FP64)
    layer = meshard.fully_shard(Made(look, inner=nn.Linear(3, 3)), mp_policy=policy)
    extra = {"ids": torch.arange(3)}
    out = layer(torch.ones(1, 3), scale=torch.ones(1), extra=extra)
    assert seen == [(BF16, BF16, torch.int64, BF16)]
    assert (out["out"].dtype, out["ids"].dtype) == (FP64, torch.int64)
    policy = MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False)
    layer = meshard.fully_shard(nn.Linear(3, 3), mp_policy=policy)
    with pytest.raises(RuntimeError, match="same dtype"):
        layer(torch.ones(1, 3))
    assert layer(torch.ones(1, 3, dtype=BF16)).dtype == BF16


@pytest.mark.parametrize("sync", [GradientSync.FULL, GradientSync.NONE])
@on_threads(4)
def test_the_smallest_float16_gradient_survives_the_division_in_float32(sync):
    """A unit this large divides while it packs, from float16 into float32."""
    model = seeded(nn.Linear(512, 512, bias=False))
    policy = MixedPrecisionPolicy(param_dtype=FP16, reduce_dtype=FP32)
    meshard.fully_shard(model, init_device_mesh("cpu", (4,)), mp_policy=policy)
    smallest = 2.0**-24
    with meshard.gradient_sync(model, sync):
        model(torch.full((1, 512), 2.0**-12)).backward(torch.full((1, 512), 2.0**-12, dtype=FP16))
    if sync is GradientSync.NONE:
        meshard.finalize_gradients(model)
    assert torch.equal(model.weight.grad.to_local(), torch.full((128, 512), smallest))


@pytest.mark.parametrize("sync", [GradientSync.FULL, GradientSync.NONE])
@on_threads(2)
def test_a_frozen_float8_weight_beside_trained_float32(sync):
    def forward(model, x):
        return x @ model.base.float() + x @ model.down @ model.up

    base = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    down, up = nn.Parameter(torch.empty(8, 2)), nn.Parameter(torch.empty(2, 8))
    plain = seeded(Made(forward, down=down, up=up))
    plain.base = nn.Parameter(base, requires_grad=False)
    model = meshard.fully_shard(copy.deepcopy(plain), init_device_mesh("cpu", (2,)))
    with meshard.gradient_sync(model, sync):
        model(torch.ones(4, 8)).square().mean().backward()
    if sync is GradientSync.NONE:
        meshard.finalize_gradients(model)
    plain(torch.ones(4, 8)).square().mean().backward()
    assert_same(full_grads(model), full_grads(plain))
