"""State dicts while a window of accumulation is open."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.support.models import MlpStack, seeded
from tests.support.ones import make, run
from tests.support.parity import assert_same, full_state
from tests.support.ranks import on_threads
from tests.support.sharding import shard_blocks


def fail(*_):
    raise ZeroDivisionError


@on_threads(4)
def test_a_checkpoint_in_the_middle_of_a_window_is_refused():
    model = make()
    run(model, "R", 1.0, 1.0)
    with pytest.raises(RuntimeError, match=r"unit '\(root\)' holds gradients .* zero_grad"):
        model.state_dict()
    model.zero_grad()
    assert list(model.state_dict()) == ["a", "b"]


@on_threads(4)
def test_a_checkpoint_after_a_backward_that_failed_before_any_unit_is_allowed():
    model = make()
    loss = model(1.0, 1.0)
    loss.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    assert list(model.state_dict()) == ["a", "b"]


@on_threads(2)
def test_a_checkpoint_after_a_failed_backward_is_allowed():
    model = shard_blocks(seeded(MlpStack()), init_device_mesh("cpu", (2,)))
    before = full_state(model)
    hook = model.blocks[0].register_full_backward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):  # reductions of the other blocks are in flight
        model(torch.ones(2, 6)).sum().backward()
    hook.remove()
    assert model.state_dict().keys() == before.keys()
    assert_same(full_state(model), before, bitwise=True)
    model(torch.ones(2, 6)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
