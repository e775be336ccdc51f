"""Replicated modules: dtypes of compute, wire and sums."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call

import meshard
from meshard import CommLedger, GradientSync, MixedPrecisionPolicy
from tests.support.integer_model import IntegerModel, integer_batch, integer_loss, ternary
from tests.support.models import Made
from tests.support.ranks import on_threads
from tests.support.replicated import SMALL, Pair, run
from tests.support.spread import spread

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def computing_in(dtype):
    """Return how a plain model computes in ``dtype`` with parameters that it keeps in another."""

    def way(model, x):
        params = {name: param.to(dtype) for name, param in model.named_parameters()}
        integer_loss(functional_call(model, params, (x.to(dtype),)).float()).backward()

    return way


def run_wide(model, x):
    integer_loss(model(x).float()).backward()


@on_threads(4)
@spread(
    dtype=[BF16, FP64, BF16, FP64],
    reduce_dtype=[None, FP32, FP16, None],
    as_views=[True, False, False, True],
    mesh_shape=[(2, 2), (4,), (4,), (2, 2)],
)
def test_copies_of_parameters_compute_in_another_dtype(dtype, reduce_dtype, as_views, mesh_shape):
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype)
    mesh = init_device_mesh("cpu", mesh_shape)
    pair = Pair(mesh=mesh, mp_policy=policy, gradient_as_bucket_view=as_views)
    ways = run_wide, computing_in(dtype)
    pair.steps(range(4), *ways)
    assert pair.ours(integer_batch(0, 0)).dtype == dtype
    for number in (5, 6):
        pair.backward(number, *ways)
        pair.compare()
    if as_views:
        pair.assert_views()
    with CommLedger(pair.ours) as ledger:
        pair.backward(7, *ways)
    assert {event.dtype for event in ledger.events} == {reduce_dtype or dtype}
    for param in pair.ours.parameters():
        assert param.dtype == param.grad.dtype == FP32


@on_threads(2)
def test_inputs_and_outputs_are_cast_as_the_policy_says():
    policy = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=FP32, cast_forward_inputs=False)
    model = meshard.replicate(IntegerModel(), mp_policy=policy)
    with pytest.raises(RuntimeError, match="dtype"):
        model(integer_batch(0, 0))
    assert model(integer_batch(0, 0).bfloat16()).dtype == FP32
    assert all(param.dtype == FP32 for param in model.parameters())


@on_threads(2)
def test_copies_for_compute_follow_what_is_done_to_parameters():
    pair = Pair(mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32))
    ways = run_wide, computing_in(BF16)
    pair.steps(range(2), *ways)
    for model in pair.both:
        model.blocks[0].requires_grad_(False)
    pair.step(2, *ways)
    for model in pair.both:
        with torch.no_grad():
            model.shift.add_(1)
            model.blocks[1].linear.bias.data.mul_(2)
        model.blocks[0].requires_grad_(True)
        model.blocks[2].linear.weight = nn.Parameter(-model.blocks[2].linear.weight.detach())
    pair.renew_optimizers()
    pair.steps(range(3, 6), *ways)


@on_threads(2)
@pytest.mark.parametrize(
    ("dtype", "reduce_dtype", "accumulate_dtype", "as_views"),
    [(BF16, FP32, None, True), (FP16, None, FP32, True), (BF16, None, FP32, False)],
)
def test_gradients_of_narrow_parameters_are_added_up_in_more_bits(
    dtype, reduce_dtype, accumulate_dtype, as_views
):
    model = nn.Linear(3, 2, bias=False, dtype=dtype)
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, accumulate_dtype=accumulate_dtype)
    meshard.replicate(model, mp_policy=policy, gradient_as_bucket_view=as_views)
    ones = torch.ones(1, 3, dtype=dtype)
    for mode in (*[GradientSync.NONE] * 12, GradientSync.FULL) * 20:
        with meshard.gradient_sync(model, mode):
            model(ones).sum().backward()
    assert model.weight.grad.dtype == dtype
    assert (model.weight.grad == 260).all()


@on_threads(2)
def test_changes_of_narrow_gradients_reach_the_sum_that_they_are_copies_of():
    model = nn.Linear(3, 2, bias=False, dtype=BF16)
    meshard.replicate(model)
    ones = torch.ones(1, 3, dtype=BF16)
    for _ in range(2):
        model(ones).sum().backward()
        model.weight.grad.mul_(4)
        model(ones).sum().backward()
        assert (model.weight.grad == 5).all()
        model.zero_grad(set_to_none=False)
        model(ones).sum().backward()
        assert (model.weight.grad == 1).all()
        model.zero_grad()


@on_threads(2)
@spread(as_views=[True, False], cap=[SMALL, 25])
def test_parameters_may_have_several_dtypes(as_views, cap):
    def forward(model, x):
        """Compute in the dtype of each weight, with float32 in between."""
        params = iter(model.params)
        for weight, bias in zip(params, params, strict=True):
            x = x.to(weight.dtype) @ weight.t()
            x = ternary(x.float() + bias.float())
        return ternary(x + model.shift)

    inner = IntegerModel()
    for block, dtype in zip(inner.blocks, (FP64, FP32, BF16), strict=True):
        block.to(dtype)
    inner.blocks[1].linear.bias.data = inner.blocks[1].linear.bias.data.double()
    params = nn.ParameterList(inner.blocks.parameters())
    model = Made(forward, params=params, shift=inner.shift)
    pair = Pair(model, gradient_as_bucket_view=as_views, bucket_cap_mb=cap)
    assert " + " not in meshard.describe(pair.ours)  # each bucket has one dtype
    pair.steps(range(4))
    for number in (5, 6):
        pair.backward(number)
        pair.compare()


@on_threads(2)
def test_under_autocast_parameters_and_gradients_stay_wide():
    pair = Pair()

    def way(model, x):
        with torch.autocast("cpu", dtype=BF16):
            output = model(x)
        integer_loss(output.float()).backward()

    pair.steps(range(3), way, way)
    pair.backward(3, way, way)
    pair.assert_views()
    run(pair.ours, integer_batch(0, 0))


@on_threads(1)
def test_a_backward_inside_the_forward_adds_to_what_the_user_has_set():
    def forward(model, x):
        loss = (x * model.one).sum() + model.other.sum()
        loss.backward()
        return loss.detach()

    params = {name: nn.Parameter(torch.ones(4)) for name in ("one", "other")}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = meshard.replicate(Made(forward, **params), mp_policy=policy)
    for param in model.parameters():
        param.grad = torch.full((4,), 10.0)
    for expected in (11.0, 12.0, 13.0):
        model(torch.ones(4))
        assert [param.grad[0].item() for param in model.parameters()] == [expected] * 2


@on_threads(1)
def test_a_cast_between_forward_and_backward_is_refused_if_modules_compute_in_copies():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = meshard.replicate(nn.Embedding(4, 4), mp_policy=policy)
    out = model(torch.tensor([1])).sum()
    model.to("cpu")
    with pytest.raises(RuntimeError, match="cast, moved or replaced between its forward"):
        out.backward()
