"""Steps inside a backward that meshard does not know of: refused where they would train wrongly."""

import contextlib
import copy
import importlib
import os
import tempfile
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc

import meshard
from meshard import GradientSync
from tests.support.against_plain import inputs_of
from tests.support.models import seeded
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.ranks import on_ranks

either = pytest.mark.parametrize("shard", [meshard.fully_shard, meshard.replicate])


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def batch(rank=None):
    return inputs_of(dist.get_rank() if rank is None else rank, shape=(6, 3))


def step_in_backward(params):
    """Step ``params`` by torch's own optimizers in backward."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        optim = importlib.import_module("torch.distributed.optim")
    optim._apply_optimizer_in_backward(torch.optim.SGD, params, {"lr": 0.1})


def apply(shard, model):
    if shard is meshard.fully_shard:
        shard(model[0])
    return shard(model)


def parameters_are_equal(model):
    """Whether all ranks hold the same values."""
    own = torch.cat([value.flatten() for value in full_state(model).values()])
    values = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(values, own)
    return all(torch.equal(value, own) for value in values)


REFUSED = r"'2\.weight'.* has _in_backward_optimizers.* meshard\.overlap_optimizer"


@on_ranks(2)
@pytest.mark.parametrize("when", ["after", "later"])
@either
def test_torch_optimizers_in_backward_are_refused(shard, when):
    model = apply(shard, net())
    if when == "later":
        model(batch()).sum().backward()
        model.zero_grad()
    step_in_backward([model[2].weight])
    for _ in range(2):  # the first refusal is not the last
        with pytest.raises(RuntimeError, match=REFUSED):
            model(batch())
    assert parameters_are_equal(model)


@on_ranks(2)
@either
def test_a_refused_forward_leaves_the_open_window_alone(shard):
    model, untouched = apply(shard, seeded(net())), apply(shard, seeded(net()))
    for each in (model, untouched):
        with meshard.gradient_sync(each, GradientSync.NONE):
            each(batch()).sum().backward()
    step_in_backward([model[2].weight])
    with pytest.raises(RuntimeError, match=REFUSED):
        model(batch())
    for each in (model, untouched):
        meshard.finalize_gradients(each)
    assert_same(full_grads(model), full_grads(untouched), bitwise=True)


@on_ranks(1)
def test_optimizers_in_backward_of_ignored_parameters_and_of_other_models_are_allowed():
    model = net()
    step_in_backward(net().parameters())
    step_in_backward([model[2].weight])
    meshard.replicate(model, ignored_params={model[2].weight})
    before = copy.deepcopy(model[2].weight)
    model(batch()).sum().backward()
    assert not torch.equal(model[2].weight, before)


def step_and_clear(optimizers):
    """Return the hook of torch's tutorial."""

    def hook(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    return hook


def step_only(optimizers):
    return lambda param: optimizers[param].step()


def take(_):
    def hook(param):
        param.data.sub_(0.1 * param.grad)
        param.grad = None

    return hook


NOT_REDUCED = r"before (it was|gradients were) reduced, so ranks would drift apart.*overlap_optim"


@on_ranks(2)
@pytest.mark.parametrize("bucket_cap_mb", [25, 4e-5])
@pytest.mark.parametrize("make", [step_and_clear, step_only, take])
def test_hooks_that_step_before_the_reduction_are_refused(make, bucket_cap_mb):
    model = meshard.replicate(seeded(net()), bucket_cap_mb=bucket_cap_mb)
    optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}
    handles = [
        param.register_post_accumulate_grad_hook(make(optimizers)) for param in model.parameters()
    ]
    with pytest.raises(RuntimeError, match=NOT_REDUCED):
        model(batch()).sum().backward()
    for handle in handles:
        handle.remove()
    # Only what was stepped by hand before the error has drifted, which nothing can undo.
    assert make is take or parameters_are_equal(model)
    model(batch()).sum().backward()
    for param in model.parameters():
        optimizers[param].step()
    assert make is take or parameters_are_equal(model)


@on_ranks(2)
def test_hooks_that_would_not_be_called_are_refused():
    """The module computes with copies, whose gradients hooks of parameters do not see."""
    policy = meshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = meshard.replicate(net(), mp_policy=policy)
    model(batch()).sum().backward()
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        handle = getattr(model[2].weight, register)(print)
        with pytest.raises(RuntimeError, match=r"'2\.weight' .* would not be called.*reduce_hook"):
            model(batch())
        handle.remove()
    model(batch()).sum().backward()


@on_ranks(2)
def test_hooks_on_shards_see_reduced_gradients_and_may_step():
    plain, model = seeded(net()), seeded(net())
    apply(meshard.fully_shard, model)
    optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step_and_clear(optimizers))
    model(batch()).sum().backward()
    for rank in range(dist.get_world_size()):
        (plain(batch(rank)).sum() / dist.get_world_size()).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_same(full_state(model), full_state(plain))


class Unused(torch.autograd.Function):
    """A backward that has no gradient for its second input."""

    @staticmethod
    def forward(ctx, x, weight):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def double(param):
    param.grad.mul_(2)


@on_ranks(2)
def test_hooks_that_look_are_allowed():
    """Hooks that look at gradients or change them, and parameters without one, are no concern."""
    model = meshard.replicate(seeded(net()))
    seen = []
    model[0].weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.sum()))
    model[2].weight.register_post_accumulate_grad_hook(double)
    for _ in range(2):
        model(batch()).sum().backward()
        model.zero_grad()
    model.register_forward_hook(lambda _, args, out: Unused.apply(out, model[0].bias))
    model[2].register_forward_hook(lambda _, args, out: out.detach().requires_grad_())
    model(batch()).sum().backward()
    assert len(seen) == 2
    assert model[0].bias.grad is None


@on_ranks(2)
def test_a_parameter_may_be_frozen_between_forward_and_backward():
    """Autograd has a gradient for it, and nowhere to put it: no hook took that."""
    model = meshard.replicate(seeded(net()))
    loss = model(batch()).sum()
    model[0].weight.requires_grad_(False)
    loss.backward()
    assert model[0].weight.grad is None
    assert model[2].bias.grad.tolist() == [6.0, 6.0]


@contextlib.contextmanager
def rpc_agent():
    """An agent of its own for each rank: autograd asks for one, and they need not talk."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, TP_SOCKET_IFNAME="lo"),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "You are using a Backend")  # torch's, of its own use
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/store")
        rpc.init_rpc("only", rank=0, world_size=1, rpc_backend_options=options)
        try:
            yield
        finally:
            rpc.shutdown()


@pytest.mark.extras  # torch's rpc needs numpy
@on_ranks(2)
@either
def test_distributed_autograd_is_refused(shard):
    model = apply(shard, seeded(net()))
    with rpc_agent():
        with dist_autograd.context(), torch.no_grad():
            model(batch())
        loss = model(batch()).sum()
        with (
            dist_autograd.context() as context,
            pytest.warns(UserWarning, match=r"inside torch\.distributed\.autograd\.context"),
            pytest.raises(RuntimeError),
        ):
            dist_autograd.backward(context, [loss])
        model.reset_iter_state()
        assert all(param.grad is None for param in model.parameters())
        model(batch()).sum().backward()  # outside of a context, as ever
        assert all(param.grad is not None for param in model.parameters())
