"""Gradients of gradients, and autograd calls on sharded parameters: hooks, penalties."""

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import meshard
from meshard import CommLedger, GradientSync, MixedPrecisionPolicy
from tests.support.against_plain import (
    check_gradients,
    check_training,
    inputs_of,
    sharded_and_plain,
)
from tests.support.insides import unsharded_units
from tests.support.models import Made, MlpBlock, MlpStack, Transformer, seeded
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import on_fake_ranks, on_ranks, on_threads
from tests.support.spread import mostly_slow


def points_of(rank, dtype=torch.float32):
    return inputs_of(rank).to(dtype).requires_grad_()


def penalty_of(critic, x):
    """Return how far the norm of the gradient by the input is from 1, as WGAN-GP does."""
    (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return (gradient.norm(dim=-1) - 1).square().mean()


def with_loss(critic, x):
    return critic(x).square().mean() + 10 * penalty_of(critic, x)


def forwards_between(critic, x):
    """Other forwards between the two backwards, as where real and fake samples follow."""
    penalty = penalty_of(critic, x)
    real, fake = critic(x.detach() + 1), critic(x.detach() - 1)
    return real.square().mean() - fake.square().mean() + 10 * penalty


def backward_between(critic, x):
    """A backward between the two that has nothing to do with the penalty."""
    penalty = penalty_of(critic, x)
    critic(x.detach() + 1).square().mean().backward()
    return penalty


def two_penalties(critic, x):
    first, second = penalty_of(critic, x), penalty_of(critic, x + 1)
    second.backward()
    return first


def kept_graph(critic, x):
    penalty = penalty_of(critic, x)
    penalty.backward(retain_graph=True)
    return 2 * penalty


def third_order(critic, x):
    (gradient,) = torch.autograd.grad(critic(x).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), x, create_graph=True)
    return second.square().mean()


def by_backward(critic, x):
    """``backward(create_graph=True)``: the parameters get a gradient each time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, about reference cycles
        critic(x).square().mean().backward(create_graph=True)
    gradient, x.grad = x.grad, None
    return gradient.square().mean()


def as_value_only(critic, x):
    """The gradient is used without a backward through it."""
    penalty = penalty_of(critic, x).detach()
    return critic(x.detach()).square().mean() * (1 + penalty)


WAYS = [
    penalty_of,
    with_loss,
    forwards_between,
    backward_between,
    two_penalties,
    kept_graph,
    third_order,
    by_backward,
    as_value_only,
]


RESHARDS = {"reshard_after_forward": True}
KEEPS = {"reshard_after_forward": False}
SINGLE = {"units": (), "reshard_after_forward": True}  # the gradient by its output is a constant


# On processes: a second backward that reads freed memory may end one by SIGSEGV.
@pytest.mark.parametrize(
    ("way", "options"),
    [
        *((way, {}) for way in WAYS),
        *mostly_slow([(way, SINGLE) for way in WAYS], (two_penalties, SINGLE)),
        *zip(WAYS, [RESHARDS, KEEPS] * 2, strict=False),
    ],
)
@on_ranks(2)
def test_gradients_of_gradients_agree_with_one_process(way, options):
    double = torch.float64  # penalties make large numbers, and rounding is not the question
    plain = MlpBlock(6, 8) if options == SINGLE else MlpStack()
    model, plain = sharded_and_plain(plain.to(double), **options)
    check_training(
        model, plain, lambda model, rank: way(model, points_of(rank, double)), dtype=double
    )
    with torch.no_grad():  # a forward gives back what was held for a graph that is gone
        model(points_of(0, double))
    assert unsharded_units(model) == [] or options == KEEPS


@on_ranks(4)
def test_gradients_of_gradients_where_neighbours_keep_parts():
    pair = sharded_and_plain(MlpStack().double(), reshard_after_forward=2)
    check_training(
        *pair,
        lambda model, rank: forwards_between(model, points_of(rank, torch.float64)),
        dtype=torch.float64,
    )


@on_fake_ranks(2)
def test_units_stay_unsharded_between_the_two_backwards_only():
    model, x = sharded_and_plain(MlpStack())[0], points_of(0)
    with CommLedger(model) as ledger:
        penalty = penalty_of(model, x)
    assert unsharded_units(model) == ["(root)", "blocks.0", "blocks.1", "blocks.2"]
    assert ledger.counts == {"all_gather": 7}  # forward 4 and the first backward 3
    with CommLedger(model) as ledger:
        (model(x.detach()).sum() + penalty).backward()
    assert unsharded_units(model) == []
    assert ledger.counts == {"reduce_scatter": 4}
    penalty = penalty_of(model, x)
    del penalty
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    with torch.no_grad():  # the first forward after a step gives back what a dropped graph held
        model(x)
    assert unsharded_units(model) == []


@on_fake_ranks(2)
def test_a_root_around_it_reshards_what_a_graph_has_kept():
    model, x = sharded_and_plain(MlpStack())[0], points_of(0)
    penalty = penalty_of(model, x)
    outer = meshard.fully_shard(nn.Sequential(model, nn.Linear(6, 2)))
    assert len(unsharded_units(model)) == 4
    del penalty
    for _ in range(2):
        outer(x.detach()).sum().backward()
    assert unsharded_units(model) == []


@on_ranks(2)
def test_penalties_under_mixed_precision():
    """Gradient by an embedding, through attention, in bfloat16 compute."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, plain = sharded_and_plain(Transformer(), mp_policy=policy)
    tokens, losses = torch.arange(10).view(2, 5), []
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        for each in (model, plain):
            noise = torch.zeros(2, 5, 8, requires_grad=True)
            handle = each.embedding.register_forward_hook(lambda m, i, o, noise=noise: o + noise)
            out = each(tokens).float().square().sum()
            handle.remove()
            (gradient,) = torch.autograd.grad(out, noise, create_graph=True)
            loss = gradient.square().mean()
            loss.backward()
            losses.append(loss.detach())
    assert_same(losses[0], losses[1], torch.bfloat16)
    ours = full_grads(model)
    for name, gradient in full_grads(plain).items():
        error = (ours[name] - gradient).norm() / gradient.norm().clamp(min=1e-3)
        assert error < 0.1, f"{name}: {error}"


@pytest.mark.slow
@on_ranks(2)
def test_transforms_of_torch_func_need_open_parameters():
    model, plain = sharded_and_plain(MlpStack())
    x = points_of(dist.get_rank())
    wanted = torch.func.jacrev(lambda x: plain(x).sum(0))(x)
    with pytest.raises(RuntimeError, match=r"torch\.func .* unit '\(root\)'.*unsharded_params"):
        torch.func.jacrev(lambda x: model(x).sum(0))(x)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script`")  # torch's own, at its first use
        assert_same(torch.func.jacfwd(lambda x: model(x).sum(0))(x).detach(), wanted.detach())
    with meshard.unsharded_params(model):
        assert_same(torch.func.jacrev(lambda x: model(x).sum(0))(x), wanted)


@on_threads(2)
def test_units_inside_vmap():
    batches = torch.stack([points_of(number) for number in range(3)])
    check_gradients(
        *sharded_and_plain(MlpStack()),
        lambda model, rank: torch.vmap(torch.vmap(model))(batches).square().mean(),
    )


# --- autograd on sharded parameters --------------------------------------------------------------


@on_threads(2)
def test_hooks_on_shards_run_on_reduced_gradients():
    model, plain = sharded_and_plain(MlpStack())
    heard, removable = {model: [], plain: []}, []
    for each in (model, plain):
        weight = each.blocks[0].up.weight
        each.scale.register_hook(lambda grad: 2 * grad)
        weight.register_hook(lambda grad, own=heard[each]: own.append(("tensor", grad)))
        removable.append(each.blocks[1].up.bias.register_hook(lambda grad: 0 * grad))
        each.blocks[1].down.bias.register_hook(lambda grad: grad + 1)
        each.blocks[1].down.bias.register_hook(lambda grad: 3 * grad)
        each.blocks[2].down.bias.register_hook(lambda grad: (grad.mul_(5), None)[1])
        weight.register_post_accumulate_grad_hook(
            lambda param, own=heard[each]: own.append(("post", param.grad.clone()))
        )

    def check():
        model(inputs_of(dist.get_rank())).square().mean().backward()
        plain(torch.cat([inputs_of(0), inputs_of(1)])).square().mean().backward()
        assert_same(full_grads(model), full_grads(plain))

    check()
    check()  # added to what is there; the hook sees what is added
    assert [kind for kind, _ in heard[model]] == ["tensor", "post"] * 2
    for (kind, ours), (other_kind, theirs) in zip(heard[model], heard[plain], strict=True):
        assert kind == other_kind and isinstance(ours, DTensor)
        assert_same(ours.full_tensor(), theirs, what=kind)
    for handle in removable:
        handle.remove()
    for each in (model, plain):
        each.zero_grad()
    check()


@on_fake_ranks(2)
def test_hooks_that_sharding_loses_are_named():
    model = MlpBlock(2, 2)
    model.up.weight.register_hook(lambda grad: 2 * grad)
    model.down.bias.register_post_accumulate_grad_hook(lambda param: None)
    model.up.bias.register_hook(lambda grad: grad).remove()
    text = "of 'up.weight', 'down.bias' will not run any more"
    with pytest.warns(UserWarning, match=text) as warned:
        meshard.fully_shard(model)
    assert len(warned) == 1 and warned[0].filename == __file__


@on_threads(2)
def test_a_hook_runs_once_in_a_window():
    policy = meshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = sharded_and_plain(MlpStack(), mp_policy=policy)[0].bfloat16()
    seen, grads = [], []
    model.scale.register_hook(lambda grad: seen.append(grad.dtype) or 2 * grad)
    for _ in range(2):
        for sync in (GradientSync.NONE, GradientSync.FULL):
            model.set_gradient_sync(sync)
            model(torch.ones(1, 6)).float().sum().backward()
        grads.append(model.scale.grad.full_tensor())
        model.zero_grad()
        model.scale._backward_hooks.clear()
    assert seen == [torch.bfloat16]
    assert_same(grads[0], 2 * grads[1], torch.bfloat16)


# Each backward gathers and reduces; a root that forward kept is gathered again by the second.
@pytest.mark.parametrize("reshard", [None, False])
@on_threads(2)
def test_several_backwards_over_one_graph(reshard):
    def step(model, rank):
        out = model(inputs_of(rank))
        out.square().mean().backward(retain_graph=True)
        (out * 0.25).sum().div(out.numel()).backward(retain_graph=True)
        return out.square().mean()

    pair = sharded_and_plain(MlpStack(), reshard_after_forward=reshard)
    check_gradients(*pair, step)


@pytest.mark.parametrize("place", ["on shards", "on whole parameters"])
@on_threads(2)
def test_a_penalty_on_weights(place):
    def step(model, rank):
        is_unsharded = place != "on shards" and isinstance(model, meshard.FSDPModule)
        with meshard.unsharded_params(model) if is_unsharded else contextlib.nullcontext():
            penalty = model[1].weight.square().sum()
            penalty = penalty.full_tensor() if isinstance(penalty, DTensor) else penalty
            (model(inputs_of(rank)).square().mean() + 0.1 * penalty).backward()

    plain = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    check_training(*sharded_and_plain(plain, ("0", "1")), step)


@on_fake_ranks(2)
def test_a_penalty_that_is_a_dtensor_is_explained():
    plain = Made(lambda m, x: m.layer(x).square().mean(), layer=nn.Linear(6, 3))
    model, _ = sharded_and_plain(plain, ("layer",))
    penalty = sum(param.square().sum() for param in model.parameters())
    with pytest.raises(RuntimeError, match=r"output of unit '\(root\)', an .*full_tensor\(\)"):
        (model(torch.ones(4, 6)) + 0.1 * penalty).backward()


@pytest.mark.parametrize("reshard", [None, False])
@on_ranks(2)
def test_a_second_backward_after_a_step_and_a_forward_is_refused(reshard):
    """As in torch: the graph has saved weights that the step has changed."""
    model = seeded(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    for layer in (model[0], model[2], model):
        meshard.fully_shard(layer, reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.ones(2, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    with torch.no_grad():
        model(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("reshard", [None, False])
@on_threads(2)
def test_a_graph_of_before_outlives_a_dropped_second_order_graph(reshard):
    def step(model, rank):
        x = inputs_of(rank).requires_grad_()
        first = model(x).square().mean()
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return first + model(x).square().mean()

    layers = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 4))
    check_gradients(*sharded_and_plain(layers, ("0", "2"), reshard_after_forward=reshard), step)


@on_threads(2)
@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")  # with create_graph=True, a cycle
def test_a_penalty_of_before_the_forward_with_replicas_whose_graph_was_dropped():
    model = meshard.replicate(seeded(nn.Linear(4, 4)))
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 4)
    model(x).sum().backward(create_graph=True)
    optimizer.step()
    model.zero_grad()
    penalty = sum(param.square().sum() for param in model.parameters())
    (model(x).sum() + penalty).backward()
    assert torch.equal(model.bias.grad, 2 + 2 * model.bias)


@pytest.mark.parametrize("is_second", [False, True])
@on_ranks(2)
def test_ranks_may_penalise_different_derivatives_of_a_graph(is_second):
    """Also of a graph that a backward has kept: its units await gradients once more."""

    def step(model, rank):
        inputs = [inputs_of(rank, number).requires_grad_() for number in range(2)]
        total = sum(out.sum() for out in model(*inputs))
        if is_second:
            total.backward(retain_graph=True)
        of_first, of_second = torch.autograd.grad(total, inputs, create_graph=True)
        (of_second.square().sum() + (of_first.square().sum() if rank else 0)).backward()

    layers = {name: nn.Linear(6, 6, bias=False) for name in ("first", "second")}
    plain = Made(lambda model, x, y: (model.first(x), model.second(y)), **layers)
    check_gradients(*sharded_and_plain(plain, ("first", "second")), step)
