"""What of a unit is made anew for a graph on its whole parameters, and until when does it last?"""

import gc

import pytest
import torch

from meshard._engine.unit import unit_of
from tests.support.by_hand import (
    BATCHES,
    both,
    loss_of,
    penalty_of,
    reshard,
    units_of,
    unshard,
    with_methods,
)
from tests.support.fake import fake_group
from tests.support.parity import assert_same, full_grads


def wholes_of(model):
    return [param.unsharded for unit in units_of(model) for param in unit_of(unit).group.params]


def test_values_are_those_that_the_graph_has_seen():
    with fake_group(1):
        model, _ = both()
        unshard(model)
        seen = model.blocks[0].up.weight.detach().clone()
        penalty = model.blocks[0].up.weight.square().sum()
        reshard(model)
        with torch.no_grad():
            model.blocks[0].up.weight.zero_()
        loss_of(model, BATCHES[0])  # gathers anew
        penalty.backward()
        assert_same(model.blocks[0].up.weight.grad.full_tensor(), 2 * seen)


def sum_of(model):
    """Reads nothing in its backward."""
    return sum(param.sum() for param in model.parameters())


@pytest.mark.parametrize("inference", [False, True])
def test_without_a_graph_that_reads_nothing_is_made_anew(inference):
    with fake_group(1):
        model, plain = both()
        before = wholes_of(model)
        for _ in range(2):
            with torch.inference_mode(inference):
                unshard(model)
            first = sum_of(model)
            with torch.no_grad():
                penalty_of(model)
            loss_of(model, BATCHES[0]).backward()
            unshard(model)
            second = sum_of(model)
            reshard(model)
            (first + second).backward()
            (loss_of(plain, BATCHES[0]) + 2 * sum_of(plain)).backward()
        assert all(now is then for now, then in zip(wholes_of(model), before, strict=True))
        assert_same(full_grads(model), full_grads(plain))


def test_the_memory_goes_with_the_graph():
    with fake_group(1):
        model, _ = both()
        gc.disable()
        try:
            for use in (torch.Tensor.backward, lambda penalty: None):
                unshard(model)
                penalty = penalty_of(model)
                reshard(model)
                left = [ref for unit in units_of(model) for ref in left_of(unit)]
                assert len(left) == 14 and all(ref() is not None for ref in left)
                use(penalty)
                del penalty
                assert all(ref() is None for ref in left)
        finally:
            gc.enable()


def left_of(unit):
    return [param.left[-1] for param in unit_of(unit).group.params if param.left]


def run_backward(loss):
    loss.backward()


def drop_graph(loss):
    loss.detach_()


ENDS = {"in a backward": run_backward, "without one": drop_graph}
READERS = {
    "a weight": lambda model: model.blocks[0].up.weight.square().sum(),
    "of the root": lambda model: model.scale.square().sum(),
    "a view": lambda model: model.blocks[1].down.weight.t().cos().sum(),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("reader", READERS)
def test_a_graph_stays_when_that_of_forward_ends_before_it(end, reader):
    with fake_group(1):
        model, plain = both()
        for each in (model, with_methods(plain)):
            loss = loss_of(each, BATCHES[0])
            unshard(each)
            penalty = READERS[reader](each)
            ENDS[end](loss)
            reshard(each)
            penalty.backward()
        assert_same(full_grads(model), full_grads(plain))


@pytest.mark.parametrize("keeps", [False, True])
def test_nothing_is_left_to_the_graph_of_forward(keeps):
    with fake_group(1):
        model, _ = both()
        loss = loss_of(model, BATCHES[0])
        unshard(model)
        loss.backward(retain_graph=keeps)
        reshard(model)
        assert not any(left_of(unit) for unit in units_of(model))


def test_what_a_view_shows_stays():
    with fake_group(1):
        model, plain = both()
        model.unshard()
        kept = model.scale.detach()
        state = model.state_dict()
        model.reshard()
        assert_same(kept, plain.scale)
        assert_same(state["shift"], plain.shift)


def test_gradients_are_cleared_while_a_second_handle_is_not_waited_for():
    with fake_group(1):
        model, _ = both()
        loss_of(model, BATCHES[0]).backward()
        unshard(model)
        penalty = penalty_of(model)
        handles = [unit.unshard(async_op=True) for unit in units_of(model)]
        model.zero_grad()
        reshard(model)
        assert all(grad is None for grad in full_grads(model).values())
        penalty.backward()
        assert all(grad is not None for grad in full_grads(model).values())
        for handle in handles:
            handle.wait()  # of what was given back: nothing
