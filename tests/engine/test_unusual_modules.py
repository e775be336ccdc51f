"""Modules that use their weights, inputs and outputs in unusual ways."""

import copy
import dataclasses
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import meshard
from meshard import CPUOffloadPolicy, MixedPrecisionPolicy
from tests.support.against_plain import (
    check_gradients,
    check_training,
    inputs_of,
    sharded_and_plain,
)
from tests.support.models import Made, MlpStack, seeded
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import on_fake_ranks, on_ranks, on_threads
from tests.support.spread import spread


@dataclasses.dataclass
class Output:
    """A container that torch's pytree does not know."""

    hidden: torch.Tensor
    more: dict


def detached(m, x):
    """Read the weight where the gradient does not flow to it: a straight-through estimator."""
    weight = m.layer.weight
    rounded = weight + (weight.sign() - weight).detach()
    return torch.tanh(x @ weight.detach()) * (x @ rounded) * weight.detach().sum()


def wrapping(m, x):
    return Output(torch.tanh(m.layer(x)), {"twice": [2 * x]})


def recursive(m, x, depth=2):
    return torch.tanh(m.layer(m(x, depth - 1) if depth else x))


def force(m, x):
    """Differentiate a unit inside the forward of another."""
    inner = x.detach().requires_grad_()
    with torch.enable_grad():
        (force,) = torch.autograd.grad(torch.tanh(m.layer(inner)).sum(), inner)
    return m.layer(x * m.scale) + force.sum(-1, keepdim=True)


@on_threads(2)
def test_a_forward_without_grad_may_train_units_inside():
    """As test-time training does, with a loss of each step's own."""

    def forward(model, x):
        with torch.enable_grad():
            model.inner(x).square().mean().backward()
        return model.inner(x) * model.scale

    model, plain = sharded_and_plain(
        Made(forward, inner=MlpStack(), scale=nn.Parameter(torch.empty(6))),
        ("inner.blocks", "inner"),
    )

    def step(model, rank):
        with torch.no_grad():
            model(inputs_of(rank))

    check_gradients(model, plain, step)
    check_gradients(model, plain)  # a backward through the forward as well


@pytest.mark.parametrize("num_with_all", [0, 1, 2])
@on_threads(2)
def test_a_forward_without_grad_may_train_its_own_parameters(num_with_all):
    """Their gradients are in .grad after it, on ranks with all of them and with some."""

    def forward(model, x, uses_all):
        with torch.enable_grad():
            scale = model.scale + model.shift if uses_all else model.scale
            (model.inner(x) * scale).square().mean().backward()
        return model.inner(x) * model.scale

    vectors = {name: nn.Parameter(torch.empty(6)) for name in ("scale", "shift")}
    model, plain = sharded_and_plain(Made(forward, inner=nn.Linear(6, 6), **vectors), ("inner",))

    def step(model, rank):
        with torch.no_grad():
            model(inputs_of(rank), rank < num_with_all)

    check_gradients(model, plain, step)
    check_gradients(model, plain, step)  # nothing is left of the first steps


@pytest.mark.parametrize("kind", [detached, wrapping, recursive, force])
@on_threads(2)
def test_unusual_modules_train_like_plain_ones(kind):
    def forward(model, x):
        for unit in model.blocks:
            x = unit(x * model.own)
            x = x.hidden if isinstance(x, Output) else x
        return x + model.own

    blocks = [
        Made(kind, layer=nn.Linear(6, 6), scale=nn.Parameter(torch.empty(6))) for _ in range(2)
    ]
    inner = ("blocks.0.layer", "blocks.1.layer") if kind is force else ()
    plain = Made(forward, blocks=blocks, own=nn.Parameter(torch.empty(6)))
    check_training(*sharded_and_plain(plain, (*inner, "blocks")))


@on_threads(2)
def test_a_module_that_returns_its_parameter_gets_no_hooks_on_it():
    """As an embedding of positions does."""

    def step(model, rank):
        weight, x = model(torch.ones(6, 6))
        assert not weight._backward_hooks or weight.grad_fn is not None
        return (weight * x).square().sum()

    plain = Made(lambda m, x: (m.weight, x), weight=nn.Parameter(torch.empty(6, 6)))
    check_gradients(*sharded_and_plain(plain, (), reshard_after_forward=False), step)


class Cached(nn.Linear):
    """Computes with a list of its weights, which ``__setattr__`` keeps up to date."""

    def __init__(self):
        self.__dict__["flat"] = {}
        super().__init__(6, 6)

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if isinstance(value, nn.Parameter):
            self.flat[name] = value

    def forward(self, x):
        weight, bias = (self.flat[name].to(x.dtype) for name in ("weight", "bias"))
        return nn.functional.linear(x, weight, bias)


@on_threads(2)
@pytest.mark.parametrize("api", ["fully_shard", "replicate"])
def test_a_module_may_notice_by_setattr_which_parameters_it_holds(api):
    policy = MixedPrecisionPolicy(param_dtype=torch.float64, cast_forward_inputs=False)
    plain = seeded(nn.Sequential(Cached(), Cached()))
    model = copy.deepcopy(plain)
    for each in (*model, model):
        getattr(meshard, api)(each, mp_policy=policy)
    for each in (model, copy.deepcopy(model)):
        check_training(each, copy.deepcopy(plain))
        assert all(layer.flat["weight"] is layer.weight for layer in each)
        each.load_state_dict(plain.state_dict())


@on_threads(2)
@pytest.mark.parametrize(("reshard", "recompute"), [(True, False), (True, True), (False, False)])
def test_a_parametrization_may_come_and_go_in_a_forward(reshard, recompute):
    """PEFT adds one for each forward of an adapter for experts."""

    def forward(module, x):
        doubled = Made(lambda m, weight: 2 * weight)
        parametrize.register_parametrization(module.layer, "weight", doubled)
        try:
            return module.layer(x)
        finally:
            parametrize.remove_parametrizations(module.layer, "weight", leave_parametrized=False)

    def run(module, x):
        return checkpoint(module.block, x, use_reentrant=False) if recompute else module.block(x)

    plain = Made(run, block=Made(forward, layer=nn.Linear(6, 6)))
    model, plain = sharded_and_plain(plain, ("block",), reshard_after_forward=reshard)
    check_gradients(model, plain)
    assert all(isinstance(param, DTensor) for param in model.parameters())


LAYERS = {  # a linear layer returns a view of 3D inputs
    "view": lambda: nn.Linear(4, 4),
    "plain": lambda: nn.LayerNorm(4),
    "nested": lambda: Made(lambda m, x: m.inner(x), inner=nn.Linear(4, 4)),
}


@spread(kind=[*LAYERS, *LAYERS], reshard=[True, False, None, None, True, False])
@on_threads(2)
def test_outputs_may_be_changed_in_place(kind, reshard):
    def forward(model, x):
        for layer in model.layers:
            y = layer(x)
            y += x
            x = y * 2
        return model.layers[0](x)

    def step(model, rank):
        out = model(inputs_of(rank, shape=(1, 3, 4)))
        out += 1
        return out.square().sum()

    inner = [f"layers.{number}.inner" for number in range(3)] if kind == "nested" else []
    plain = Made(forward, layers=[LAYERS[kind]() for _ in range(3)])
    pair = sharded_and_plain(plain, (*inner, "layers"), reshard_after_forward=reshard)
    check_gradients(*pair, step)


@on_threads(2)
def test_a_penalty_on_the_gradient_goes_through_outputs_that_were_changed_in_place():
    """The gradient of a sum is a constant; the backward of its gradient reads weights."""

    def forward(model, x):
        y = model.inner(x)
        y += x
        return y

    def step(model, rank):
        x = inputs_of(rank, shape=(2, 3, 6)).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return gradient.square().sum()

    inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    check_gradients(*sharded_and_plain(Made(forward, inner=inner), ("inner",)), step)


FORWARD_MODE = {
    "replicated": None,
    "hsdp": {"mesh_shape": (2, 1)},
    "bfloat16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


@pytest.mark.parametrize("kind", FORWARD_MODE)
@on_ranks(2)
def test_losses_of_forward_derivatives(kind):
    def step(model, rank):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`torch.jit.script`")  # torch's own, at its first use
            x, tangent = inputs_of(rank), inputs_of(rank, 1)
            out, derivative = torch.func.jvp(model, (x,), (tangent,))
        return out.square().mean() + derivative.square().mean()

    if kind == "replicated":
        model, plain = seeded(MlpStack()), seeded(MlpStack())
        meshard.replicate(model, bucket_cap_mb=1e-3)
    else:
        model, plain = sharded_and_plain(MlpStack(), **FORWARD_MODE[kind])
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    for _ in range(3):  # replicated parameters get their last buckets in the third
        check_gradients(model, plain, step, times=1, dtype=dtype)


@on_threads(2)
@pytest.mark.parametrize(
    ("wrap", "is_made_inside"),
    [(meshard.fully_shard, False), (meshard.fully_shard, True), (meshard.replicate, False)],
)
def test_a_model_may_be_made_and_sharded_for_inference(wrap, is_made_inside):
    plain = seeded(MlpStack())
    with torch.inference_mode(is_made_inside):
        model = copy.deepcopy(plain)
    with torch.inference_mode():
        wrap(model)
        for _ in range(2):
            assert torch.equal(model(inputs_of(0)), plain(inputs_of(0)))
    check_training(model, plain)


def assign_before(model):
    model.scale = nn.Parameter(torch.full_like(model.scale, 2.0))
    return lambda: model(inputs_of(0))


INSIDE = {
    "a forward after an assignment": assign_before,
    "casts": lambda model: lambda: model.double().float(),
    "a deep copy": lambda model: lambda: copy.deepcopy(model),
    "off and on": lambda model: lambda: (meshard.offload(model), meshard.onload(model)),
}


@on_threads(2)
@pytest.mark.parametrize("what", INSIDE)
def test_what_is_done_under_inference_mode_leaves_a_model_that_trains(what):
    plain = seeded(MlpStack())
    model = meshard.fully_shard(copy.deepcopy(plain))
    run = INSIDE[what](model)
    with torch.no_grad():
        plain.scale.copy_(model.scale.full_tensor())
    with torch.inference_mode():
        result = run()
    check_training(result if what == "a deep copy" else model, plain)


@on_fake_ranks(2)
def test_a_model_that_is_initialised_under_inference_mode_trains():
    with torch.device("meta"):
        layer = nn.Linear(4, 4)
    meshard.fully_shard(layer, init_device_mesh("cpu", (2,)))
    with torch.inference_mode():
        meshard.materialize(layer)
    layer(torch.ones(1, 4)).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("reshard", [False, True])
@on_threads(2)
def test_a_module_of_a_list_may_call_another_one_that_is_not_inside_it(reshard):
    second = nn.Linear(6, 6)
    first = Made(lambda m, x: m.hidden[0](m.layer(x)), layer=nn.Linear(6, 6), hidden=(second,))
    plain = seeded(nn.ModuleList([first, second]))
    model = copy.deepcopy(plain)
    meshard.fully_shard([*model], reshard_after_forward=reshard)
    for is_last in (False, True):
        model[0].set_requires_gradient_sync(is_last)
        output = model[0](inputs_of(dist.get_rank(), is_last))
        assert isinstance(model[1].weight, DTensor) is reshard
        output.sum().backward()
        for rank in range(2):
            (plain[0](inputs_of(rank, is_last)).sum() / 2).backward()
    assert_same(full_grads(model), full_grads(plain))
