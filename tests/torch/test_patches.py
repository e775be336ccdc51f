"""The two methods of torch that meshard replaces."""

import functools
import sys

import pytest
import torch
from torch import nn

import meshard
import meshard.compat
from meshard._gradients import zero_grad
from meshard._optimizer_hooks import watch_optimizers
from tests.support.ranks import fake_group


@pytest.fixture
def model():
    with fake_group(1):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        for layer in model:
            meshard.fully_shard(layer)
        yield meshard.fully_shard(model)


def accumulate(model, mode=meshard.GradientSync.NONE):
    with meshard.gradient_sync(model, mode):
        model(torch.ones(1, 2)).sum().backward()


def pending(model):
    return sorted(meshard.pending_gradients(model))


def test_a_module_and_an_optimizer_drop_what_is_pending_of_their_parameters(model):
    accumulate(model)
    model[0].zero_grad()
    assert pending(model) == ["1.bias", "1.weight"]
    assert len(zero_grad.pending_holders) == 1
    model.zero_grad()
    assert pending(model) == [] and not meshard.pending_gradients(model)
    assert len(zero_grad.pending_holders) == 0
    accumulate(model)
    torch.optim.SGD([model[0].weight, model[1].bias], lr=0.1).zero_grad()
    assert pending(model) == ["0.bias", "1.weight"]


def test_what_is_reduced_later_is_dropped_and_nothing_is_held_between_ordinary_steps(model):
    for _ in range(2):
        accumulate(model, meshard.GradientSync.FULL)
        assert len(zero_grad.pending_holders) == 0
        assert all(param.grad is not None for param in model.parameters())
        model.zero_grad()
    model.set_is_last_backward(False)
    model(torch.ones(1, 2)).sum().backward()
    model.zero_grad()
    meshard.finalize_gradients(model)
    assert all(param.grad is None for param in model.parameters())
    assert len(zero_grad.pending_holders) == 0


@pytest.mark.parametrize("clear", ["module", "optimizer"])
def test_unsharded_parameters_stand_for_their_shards(model, clear):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shards = list(model.parameters())
    accumulate(model, meshard.GradientSync.FULL)
    model.unshard()
    for layer in model:
        layer.unshard()
    (model if clear == "module" else optimizer).zero_grad()
    assert all(param.grad is None for param in shards)
    for unit in (model, *model):
        unit.reshard()
    assert len(zero_grad.pending_holders) == 0


class Own(torch.optim.SGD):
    """An optimizer with a ``zero_grad`` of its own that calls nothing of torch's."""

    def zero_grad(self, set_to_none=True):
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None


def test_a_class_with_a_method_of_its_own_clears_before_its_first_step(model):
    optimizer = Own(model.parameters(), lr=0.1)
    accumulate(model)
    optimizer.zero_grad()
    assert pending(model) == []

    class Later(torch.optim.Adam):
        zero_grad = functools.partialmethod(Own.zero_grad)

    later = Later(model.parameters())
    accumulate(model)
    later.zero_grad()
    assert pending(model) == []


class InPlace(torch.optim.SGD):
    """An optimizer with a ``zero_grad`` of its own that fills gradients with zeros."""

    def zero_grad(self, set_to_none=False):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.zero_()


class Wrapper(torch.optim.Optimizer):
    """An optimizer that clears by another one, and only at the end of a window, as accelerate's."""

    def __init__(self, inner):
        self.inner, self.ends_window = inner, False

    @property
    def param_groups(self):
        return self.inner.param_groups

    def zero_grad(self, set_to_none=True):
        if self.ends_window:
            self.inner.zero_grad(set_to_none=set_to_none)


@pytest.mark.parametrize("has_grads", [False, True])
def test_a_method_that_fills_with_zeros_clears(model, has_grads):
    optimizer = InPlace(model.parameters(), lr=0.1)
    if has_grads:
        accumulate(model, meshard.GradientSync.FULL)
    accumulate(model)
    optimizer.zero_grad()
    assert pending(model) == []
    for param in model.parameters():
        assert (param.grad is not None) is has_grads
        assert param.grad is None or not param.grad.full_tensor().any()


@pytest.mark.parametrize("has_grads", [False, True])
def test_a_method_that_does_nothing_within_a_window_leaves_what_is_pending(model, has_grads):
    optimizer = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    if has_grads:
        accumulate(model, meshard.GradientSync.FULL)
    before = [param.grad for param in model.parameters()]
    accumulate(model)
    optimizer.zero_grad()
    assert len(pending(model)) == 4
    assert all(param.grad is grad for param, grad in zip(model.parameters(), before, strict=True))
    optimizer.ends_window = True
    optimizer.zero_grad()
    assert pending(model) == []


def test_the_methods_are_put_back(model, monkeypatch):
    replaced = torch.optim.Optimizer.zero_grad, nn.Module.zero_grad, Own.zero_grad
    accumulate(model)
    meshard.compat.unpatch_torch()
    assert all(each.__wrapped__ is not None for each in replaced)
    assert torch.optim.Optimizer.zero_grad is replaced[0].__wrapped__
    assert nn.Module.zero_grad is replaced[1].__wrapped__
    assert Own.zero_grad is replaced[2].__wrapped__
    model.zero_grad()
    assert len(pending(model)) == 4
    model.reset_iter_state()
    assert pending(model) == []
    meshard.fully_shard(nn.Linear(2, 2))
    accumulate(model)
    model.zero_grad()
    assert pending(model) == []
    # Somebody else has replaced one since: that one stays.
    monkeypatch.setattr(nn.Module, "zero_grad", lambda self: None)
    mine = nn.Module.zero_grad
    meshard.compat.unpatch_torch()
    assert nn.Module.zero_grad is mine
    monkeypatch.undo()
    nn.Module.zero_grad = replaced[1].__wrapped__
    meshard.fully_shard(nn.Linear(2, 2))


def instructions_of(function):
    """Count the bytecode instructions that ``function`` runs."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    # In Python 3.12, settrace looks whether a frame has ever wanted opcodes: the first count was 0.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("of", ["an optimizer", "a module"])
def test_an_unrelated_model_is_cleared_at_a_cost_that_does_not_grow(of):
    extra = []
    for number in (4, 400):
        module = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(number))
        owner = torch.optim.AdamW(module.parameters()) if of == "an optimizer" else module
        meshard.compat.unpatch_torch()
        own = instructions_of(owner.zero_grad)
        watch_optimizers()
        extra.append(instructions_of(owner.zero_grad) - own)
        assert own > number
    assert 0 < extra[0] == extra[1] < 100
