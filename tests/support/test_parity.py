"""The exact model and the comparisons, which must tell a right run from a wrong one."""

import pytest
import torch

from tests.support.cases import CASES
from tests.support.integer_model import LEARNING_RATE, MAX_GRADIENT
from tests.support.parity import assert_same, train


def _sgd(params):
    return torch.optim.SGD(params, lr=LEARNING_RATE)


def test_the_integer_model_stays_exact_and_keeps_learning():
    case = CASES["integer"]
    batches = case.whole_batches(20, 4)
    single = train(case.build(), batches, _sgd, loss_fn=case.loss)
    double = train(case.build().double(), [b.double() for b in batches], _sgd, loss_fn=case.loss)
    for one, other in zip(single.values(), double.values(), strict=True):
        for name, grad in one["grads"].items():
            assert torch.equal(grad, grad.round()), name
            assert torch.equal(grad.double(), other["grads"][name]), name
            assert grad.abs().max() <= MAX_GRADIENT * len(batches[0]) * 2, name
            assert torch.equal(one["params"][name].double(), other["params"][name]), name
        assert all(grad.any() for grad in one["grads"].values())


def test_a_difference_names_the_step_the_kind_and_the_parameter():
    case = CASES["mlp_stack"]
    good = train(case.build(), case.batches(2, 0), _sgd, loss_fn=case.loss)
    bad = train(case.build(), case.batches(2, 0), _sgd, loss_fn=case.loss)
    bad["step 1"]["grads"]["blocks.2.up.bias"][0] += 1e-3
    with pytest.raises(AssertionError, match=r"'step 1' 'grads' 'blocks\.2\.up\.bias': "):
        assert_same(bad, good)


def test_bitwise_allows_no_rounding_and_none_is_not_zero():
    one = torch.ones(3)
    assert_same(one + 1e-6, one)
    with pytest.raises(AssertionError, match="not equal"):
        assert_same(one + 1e-6, one, bitwise=True)
    with pytest.raises(AssertionError, match="is not None"):
        assert_same(torch.zeros(3), None)
    with pytest.raises(AssertionError, match=r"names differ: \['b'\]"):
        assert_same({"a": one}, {"a": one, "b": one})
