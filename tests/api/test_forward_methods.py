"""Calls of registered methods, against calls of the module."""

import inspect
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import meshard
from meshard import CommLedger
from tests.support import against_plain
from tests.support.against_plain import check_gradients, check_training, inputs_of
from tests.support.insides import unsharded_bytes
from tests.support.models import MlpBlock, seeded
from tests.support.parity import assert_same
from tests.support.ranks import on_ranks, on_threads
from tests.support.spread import spread


class TwoWays(nn.Module):
    """Its other methods call forward, are called by it, or neither."""

    def __init__(self, dim=6):
        super().__init__()
        self.block = MlpBlock(dim, 9)
        self.head = nn.Linear(dim, dim, bias=False)

    def forward(self, x, scored=False):
        x = self.block(x)
        return self.score(x) if scored else x

    def score(self, x):
        return torch.tanh(x @ self.head.weight.t())

    def all_at_once(self, x):
        return self.score(self(x, scored=True)) + self(x)

    def fails(self, x):
        raise ValueError(f"a weight of shape {tuple(self.head.weight.shape)} and then")


class InATree(nn.Module):
    """Calls its unit in every way there is."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(6))
        self.unit = TwoWays()

    def forward(self, x):
        x = self.unit(x * self.scale, scored=True)
        return self.unit.score(x) + self.unit.all_at_once(x)


def sharded_and_plain(units=("unit",), **kwargs):
    model, plain = against_plain.sharded_and_plain(InATree(), units, **kwargs)
    for name in ("score", "all_at_once", "fails"):
        meshard.register_fsdp_forward_method(model.unit, name)
    return model, plain


CALLS = {
    "module": lambda m, x: m(x),
    "method": lambda m, x: m.unit.score(x),
    "calls itself": lambda m, x: m.unit.all_at_once(x),
}


@spread(how=list(CALLS), mesh_shape=[(2, 2), (4,)])
@on_threads(4)
def test_whatever_is_called_trains_like_the_plain_model(how, mesh_shape):
    model, plain = sharded_and_plain(mesh_shape=mesh_shape)
    check_training(model, plain, lambda m, rank: CALLS[how](m, inputs_of(rank)).square().mean())
    assert all(isinstance(param, DTensor) for param in model.parameters())


@on_ranks(2)
def test_a_registered_method_communicates_and_casts_like_a_call_of_the_module():
    x = torch.ones(1, 6)
    policy = meshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    unit = meshard.fully_shard(seeded(TwoWays()), mp_policy=policy)
    meshard.register_fsdp_forward_method(unit, "score")
    for call in (unit, unit.score):
        with CommLedger(unit) as ledger:
            out = call(x)
            out.sum().backward()
        assert out.dtype == torch.float64
        assert ledger.counts == {"all_gather": 1, "reduce_scatter": 1}


@on_threads(2)
def test_a_method_that_raises_leaves_everything_sharded():
    model, plain = sharded_and_plain()
    text = r"of shape|cannot be multiplied|must match"
    for method in (model.unit.fails, lambda x: model(x[:, :5])):
        with pytest.raises((ValueError, RuntimeError), match=text):
            method(torch.ones(1, 6))
        assert all(isinstance(param, DTensor) for param in model.parameters())
        assert unsharded_bytes(model) == 0
    check_gradients(model, plain, lambda m, rank: m.unit.score(inputs_of(rank)).sum())


@pytest.fixture
def unit():
    yield meshard.fully_shard(seeded(TwoWays()))
    dist.destroy_process_group()


def test_registering_is_harmless_where_there_is_nothing_to_do(unit):
    other = meshard.fully_shard(TwoWays())
    plain = TwoWays()
    meshard.register_fsdp_forward_method(plain, "score")
    assert "score" not in vars(plain) and "score" not in vars(other)
    for _ in range(2):
        meshard.register_fsdp_forward_method(unit, "score")
    x = torch.ones(1, 6)
    assert unit.score(x).shape == plain.score(x).shape == (1, 6)
    with pytest.raises(RuntimeError, match="got mixed"):
        other.score(x)  # asked for on another instance
    with pytest.raises(ValueError, match="TwoWays has no method"):
        meshard.register_fsdp_forward_method(plain, "head")  # a submodule
    with pytest.raises(ValueError, match="TwoWays has no method"):
        meshard.register_fsdp_forward_method(plain, "generate")


class Twice:
    """An object that can be called."""

    def __call__(self, x):
        return 2 * x


class Wrapper(nn.Module):
    """Looks for other names in what it wraps, as PEFT's models do."""

    twice = Twice()

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)


@on_threads(2)
def test_methods_that_are_no_functions_of_the_class_are_registered():
    wrapper = meshard.fully_shard(Wrapper(seeded(TwoWays())))
    for name in ("score", "twice"):
        meshard.register_fsdp_forward_method(wrapper, name)
    x = torch.ones(1, 6)
    with meshard.unsharded_params(wrapper):
        expected = wrapper.inner.score(x)
    assert torch.equal(wrapper.score(x), expected)
    assert torch.equal(wrapper.twice(x), 2 * x)


def test_a_method_that_was_put_on_the_instance_is_registered(unit):
    unit.twice = lambda x: 2 * unit.score(x)
    unit.score = lambda x: x @ unit.head.weight
    meshard.register_fsdp_forward_method(unit, "twice")
    x = torch.ones(1, 6)
    weight = unit.head.weight.full_tensor()
    assert torch.equal(unit.twice(x), 2 * (x @ weight))
    with pytest.raises(AttributeError, match="no attribute 'twice'"):
        meshard.fully_shard(TwoWays()).twice(x)


def test_what_is_wrapped_keeps_its_signature_and_its_module_is_not_kept_alive(unit):
    meshard.register_fsdp_forward_method(unit, "score")
    assert list(inspect.signature(unit.score).parameters) == ["x"]
    module = meshard.fully_shard(TwoWays())
    meshard.register_fsdp_forward_method(module, "score")
    module.score(torch.ones(1, 6)).sum().backward()
    ref = weakref.ref(module)
    del module
    assert ref() is None


def test_a_forward_that_was_replaced_on_the_class_is_the_one_that_runs(unit, monkeypatch):
    monkeypatch.setattr(TwoWays, "forward", lambda self, x: x + self.head.weight.sum())
    x = torch.zeros(1, 6)
    expected = unit.head.weight.full_tensor().sum().expand(1, 6)
    assert_same(unit(x), expected)
