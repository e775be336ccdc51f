"""The models, batches and comparisons, which must tell a right run from a wrong one."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support.cases import CASES
from tests.support.integer_model import LEARNING_RATE, MAX_GRADIENT
from tests.support.parity import assert_same, assert_same_run, full_grads, train, train_plain
from tests.support.threads import run_threads

# torch's own fully_shard refuses units that mix parameter dtypes.
PEER_CASES = [name for name in CASES if name != "mixed_dtype"]


def _sgd(params):
    return torch.optim.SGD(params, lr=LEARNING_RATE)


def _train_with_peer(name, num_ranks, num_steps):
    case = CASES[name]

    def step():
        mesh = init_device_mesh("cpu", (num_ranks,))
        model, rank = case.build(), torch.distributed.get_rank()
        for unit in case.units(model):
            fully_shard(unit, mesh=mesh)
        if case.loss_is_sum:
            model.set_gradient_divide_factor(1.0)
            model.set_force_sum_reduction_for_comms(True)
            for unit in case.units(model):
                unit.set_gradient_divide_factor(1.0)
                unit.set_force_sum_reduction_for_comms(True)
        kind = "sum" if case.loss_is_sum else "mean"
        batches = case.batches(num_steps, rank)
        return train(model, batches, _sgd, loss_fn=case.loss, reduce_loss=kind)

    return run_threads(step, num_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("name", PEER_CASES)
def test_a_peer_trains_every_model_like_one_process_on_the_whole_batch(name):
    case = CASES[name]
    expected = train_plain(case.build(), case.whole_batches(3, 3), _sgd, loss_fn=case.loss)
    for actual in _train_with_peer(name, 3, 3):
        assert_same_run(actual, expected, case.dtype, bitwise=name == "integer")


@pytest.mark.parametrize("name", list(CASES))
def test_every_trainable_parameter_of_every_model_gets_a_gradient(name):
    case = CASES[name]
    model = case.build()
    case.loss(model(case.batch(0, 0))).backward()
    for fqn, param in model.named_parameters():
        assert (param.grad is not None) == param.requires_grad, fqn
        assert param.grad is None or param.grad.any(), fqn


def test_models_and_batches_are_the_same_each_time_and_differ_between_ranks():
    for case in CASES.values():
        first, again = case.build().state_dict(), case.build().state_dict()
        assert_same(first, again, bitwise=True)
        assert torch.equal(case.batch(1, 2), case.batch(1, 2))
        assert not torch.equal(case.batch(1, 2), case.batch(1, 1))
        assert not torch.equal(case.batch(1, 2), case.batch(0, 2))


def test_unused_parameters_get_no_gradient():
    case = CASES["sometimes_unused"]
    model = case.build()
    case.loss(model(case.batch(0, 0), used=(True, False, True))).backward()
    unused = {name for name, grad in full_grads(model).items() if grad is None}
    assert unused == {
        f"blocks.{block}.experts.1.{kind}" for block in (0, 1) for kind in ("weight", "bias")
    }


def test_the_integer_model_stays_exact_and_keeps_learning():
    case = CASES["integer"]
    batches = case.whole_batches(20, 4)
    single = train_plain(case.build(), batches, _sgd, loss_fn=case.loss)
    double = train_plain(
        case.build().double(), [b.double() for b in batches], _sgd, loss_fn=case.loss
    )
    for one, other in zip(single, double, strict=True):
        for name, grad in one.grads.items():
            assert torch.equal(grad, grad.round()), name
            assert torch.equal(grad.double(), other.grads[name]), name
            assert grad.abs().max() <= MAX_GRADIENT * len(batches[0]) * 2, name
            assert torch.equal(one.params[name].double(), other.params[name]), name
        assert all(grad.any() for grad in one.grads.values())


def test_the_integer_model_sums_over_ranks_exactly_in_any_order():
    case = CASES["integer"]
    per_rank = []
    for rank in range(5):
        model = case.build()
        case.loss(model(case.batch(0, rank))).backward()
        per_rank.append(full_grads(model))
    model = case.build()
    case.loss(model(case.whole_batch(0, 5))).backward()
    for name, expected in full_grads(model).items():
        assert torch.equal(sum(grads[name] for grads in per_rank), expected)
        assert torch.equal(sum(grads[name] for grads in reversed(per_rank)), expected)


def test_a_difference_names_the_step_the_kind_and_the_parameter():
    case = CASES["mlp_stack"]
    good = train_plain(case.build(), case.batches(2, 0), _sgd, loss_fn=case.loss)
    bad = train_plain(case.build(), case.batches(2, 0), _sgd, loss_fn=case.loss)
    bad[1].grads["blocks.2.up.bias"][0] += 1e-3
    with pytest.raises(AssertionError, match=r"step 1: grads 'blocks\.2\.up\.bias': "):
        assert_same_run(bad, good)


def test_bitwise_allows_no_rounding_and_none_is_not_zero():
    one = torch.ones(3)
    assert_same(one + 1e-6, one)
    with pytest.raises(AssertionError, match="not equal"):
        assert_same(one + 1e-6, one, bitwise=True)
    with pytest.raises(AssertionError, match="is not None"):
        assert_same(torch.zeros(3), None)
    with pytest.raises(AssertionError, match=r"names differ: \['b'\]"):
        assert_same({"a": one}, {"a": one, "b": one})
