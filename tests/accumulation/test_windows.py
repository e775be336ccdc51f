"""Windows that are interrupted or changed on the way."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import GradientSync, MixedPrecisionPolicy
from tests.support.models import Made, MlpStack, Ones, seeded
from tests.support.ones import make, run, values
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.ranks import on_threads
from tests.support.sharding import shard_blocks
from tests.support.spread import spread
from tests.support.strategies import MODES

on_flat_and_hybrid = pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])


def fail(*_):
    raise ZeroDivisionError


@on_threads(4)
def test_finalizing_reduces_what_is_in_flight_to_the_replicas():
    """By hand, with every rank's number: 1 + 2 + 3 + 4 and 4 * 5, divided by 4."""
    model = make((2, 2))
    model.set_is_last_backward(False)
    run(model, "R", float(dist.get_rank() + 1), 5.0)
    meshard.finalize_gradients(model)
    assert values(model) == {"a": 2.5, "b": 5.0}


@on_threads(4)
def test_finalizing_ends_a_window_in_which_all_is_reduced():
    model = make()
    model.set_is_last_backward(False)
    run(model, "F", 1.0, 1.0)
    meshard.finalize_gradients(model)
    model.set_gradient_divide_factor(2.0)  # refused in the middle of a window
    run(model, "F", 1.0, 1.0)
    assert values(model) == {"a": 1.0 + 4 / 2, "b": 1.0 + 4 / 2}


# --- units without a backward in the last microbatch ----------------------------------------------


@on_threads(4)
@spread(mode=["N", "R"], mesh_shape=[(4,), (2, 2)])
def test_a_last_backward_in_which_no_unit_runs_reduces_all_the_same(mode, mesh_shape):
    mesh = init_device_mesh("cpu", mesh_shape)
    child = nn.Linear(4, 1, bias=False)  # the only unit with parameters, which need not run
    model = seeded(Made(lambda m, x, use: m.child(x) if use else x, child=child))
    meshard.fully_shard(model.child, mesh)
    meshard.fully_shard(model, mesh)
    model.set_gradient_sync(MODES[mode])
    model(torch.full((1, 4), float(dist.get_rank())), True).sum().backward()
    model.set_gradient_sync(MODES["F"])
    model(torch.ones(1, 4, requires_grad=True), False).sum().backward()
    assert not meshard.pending_gradients(model)
    assert model.child.weight.grad.full_tensor().tolist() == [[1.5] * 4]


# --- an exception in a window ------------------------------------------------------------------


def fails_once():
    calls = []

    def call(*args):
        calls.append(args)
        if len(calls) == 1:
            fail()
        return None if args else 4.0  # without arguments it is a divide factor

    return call


FAILS = {
    "hook": lambda model, call: meshard.register_reduce_hook(model, SimpleNamespace(after=call)),
    "factor": lambda model, call: model.set_gradient_divide_factor(call),
    "gradient hook": lambda model, call: model.a.register_post_accumulate_grad_hook(call),
}


@on_threads(4)
@on_flat_and_hybrid
@pytest.mark.parametrize("kind", FAILS)
def test_an_exception_at_the_end_of_backward_does_not_spoil_what_follows(kind, mesh_shape):
    model = make(mesh_shape)
    FAILS[kind](model, fails_once())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ZeroDivisionError):
        run(model, "F", 1.0, None)  # b is not used: the unit is swept up at the end
    with pytest.raises(RuntimeError, match="the last backward through unit"):
        optimizer.step()
    for _ in range(2):
        optimizer.zero_grad()
        run(model, "F", 1.0, None)
        assert values(model)["a"] == 1.0
        optimizer.step()


def chain(*mesh_shape):
    """Return units one after the other; a backward can be made to fail before the first."""

    def forward(module, fails=False):
        total = module.blocks[0](1.0, 1.0)
        if fails:
            total.register_hook(fail)
        for unit in module.blocks[1:]:
            total = total + unit(1.0, 1.0)
        return total

    model = Made(forward, blocks=[Ones() for _ in range(4)])
    return shard_blocks(model, init_device_mesh("cpu", mesh_shape))


@on_threads(4)
@pytest.mark.parametrize("mode", ["N", "R", "F"])
@pytest.mark.parametrize("use", [meshard.finalize_gradients, meshard.pending_gradients])
def test_half_a_microbatch_is_never_handed_out(mode, use):
    model = chain(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.set_gradient_sync(MODES[mode])
    model().backward()
    with pytest.raises(ZeroDivisionError):
        model(fails=True).backward()
    with pytest.raises(RuntimeError, match="the last backward through unit"):
        optimizer.step()
    use(model)
    assert all(param.grad is None for param in model.parameters())
    assert not meshard.pending_gradients(model)
    model.set_gradient_sync(GradientSync.FULL)
    model().backward()
    optimizer.step()
    assert {grad[0].item() for grad in full_grads(model).values()} == {1.0}


@on_threads(4)
@on_flat_and_hybrid
@pytest.mark.parametrize("mode", ["N", "R", "F"])
def test_a_window_begins_again_after_a_forward_that_failed(mesh_shape, mode):
    model = make(mesh_shape)
    model.set_is_last_backward(False)
    run(model, mode, 1.0, 1.0)
    meshard.pending_gradients(model)  # leaves nothing in flight
    handle = model.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        run(model, mode, 1.0, 1.0)
    handle.remove()
    run(model, mode, 1.0, 1.0)
    model.set_is_last_backward(True)
    run(model, "F", 1.0, 1.0)
    assert values(model)["a"] == 2.0


# --- state dicts in a window ----------------------------------------------------------------------


@on_threads(2)
@pytest.mark.parametrize("where", ["before any unit", "while reductions are in flight"])
def test_a_checkpoint_after_a_failed_backward_is_allowed(where):
    model, outputs = shard_blocks(seeded(MlpStack())), []
    before = full_state(model)
    model.blocks[0].register_forward_hook(lambda *args: outputs.append(args[2]))
    loss = model(torch.ones(2, 6)).sum()
    (loss if where == "before any unit" else outputs[0]).register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    assert model.state_dict().keys() == before.keys()
    assert_same(full_state(model), before, bitwise=True)
    model(torch.ones(2, 6)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


# --- the divide factor -------------------------------------------------------------------------


@on_threads(4)
@on_flat_and_hybrid
@pytest.mark.parametrize(("is_last", "expected"), [(True, 2.0), (False, 3.0)])
def test_the_factor_cannot_change_while_anything_is_in_flight(mesh_shape, is_last, expected):
    model = make(mesh_shape)
    model.set_gradient_divide_factor(4.0)
    model.set_is_last_backward(is_last)
    for mode in "R" if is_last else "RF":
        run(model, mode, 1.0, 1.0)
        with pytest.raises(RuntimeError, match="in the middle of a window"):
            model.set_gradient_divide_factor(1.0)
    model.set_is_last_backward(True)
    run(model, "F", 1.0, 1.0)
    model.set_gradient_divide_factor(1.0)
    assert values(model)["a"] == expected
    model.zero_grad()
    run(model, "F", 1.0, 1.0)
    assert values(model)["a"] == 4.0


@on_threads(4)
@on_flat_and_hybrid
@pytest.mark.parametrize("mode", ["R", "F"])
def test_a_count_that_changes_in_a_window_is_refused(mesh_shape, mode):
    model, tokens = make(mesh_shape), [4.0]
    model.set_gradient_divide_factor(lambda: torch.tensor(tokens[0]))
    model.set_is_last_backward(False)
    run(model, mode, 1.0, 1.0)
    model.set_is_last_backward(True)
    tokens[0] = 1.0
    with pytest.raises(RuntimeError, match=r"part of this window by 4.0, .* the rest by 1.0"):
        run(model, "F", 1.0, 1.0)
    run(model, "F", 1.0, 1.0)
    assert values(model)["a"] == 4.0
    model.zero_grad()
    model.set_gradient_divide_factor(None)
    run(model, "F", 1.0, 1.0)
    assert values(model)["a"] == 1.0


@on_threads(4)
@pytest.mark.parametrize("mode", "NRF")
def test_a_window_cleared_in_flight_may_begin_again_with_another_count(mode):
    model, tokens = make((2, 2)), [4.0]
    model.set_gradient_divide_factor(lambda: tokens[0])
    model.set_is_last_backward(False)
    run(model, "R", 1.0, 1.0)
    model.zero_grad()
    tokens[0] = 2.0
    run(model, mode, 1.0, 1.0)
    model.set_is_last_backward(True)
    run(model, "F", 1.0, 1.0)
    assert values(model) == {"a": 4.0, "b": 4.0}


@on_threads(2)
def test_a_factor_is_asked_for_once_per_backward():
    model, calls = chain(2), []
    model.set_gradient_divide_factor(lambda: calls.append(None) or 2.0)
    for _ in range(3):
        model().backward()
    assert len(calls) == 3


# --- clearing and guards -----------------------------------------------------------------------


@on_threads(4)
@pytest.mark.parametrize("mode", ["N", "R"])
def test_two_optimizers_clear_a_window_together(mode):
    model = make()
    first, second = torch.optim.SGD([model.a], lr=1.0), torch.optim.SGD([model.b], lr=1.0)
    run(model, mode, 100.0, 100.0 if dist.get_rank() else None)
    first.zero_grad()
    assert meshard.pending_gradients(model)
    second.zero_grad()
    assert not meshard.pending_gradients(model)
    first.step()
    run(model, mode, 1.0, None)
    run(model, "F", 1.0, 1.0)
    assert values(model) == {"a": 2.0, "b": 1.0}


@on_threads(4)
def test_a_window_goes_on_for_the_parameters_that_one_of_two_optimizers_left():
    model, factor = make(), torch.tensor(2.0)
    model.set_gradient_divide_factor(factor)
    first = torch.optim.SGD([model.a], lr=1.0)
    model.set_is_last_backward(False)
    run(model, "F", 1.0, 1.0)
    first.zero_grad()
    factor.fill_(8.0)
    with pytest.raises(RuntimeError, match=r"has divided part of this window by 2\.0"):
        run(model, "F", 1.0, 1.0)


@on_threads(4)
def test_a_parameter_without_gradient_and_optimizer_does_not_keep_a_window_open():
    model = make()
    model.set_gradient_divide_factor(2.0)
    model.set_is_last_backward(False)
    run(model, "F", 1.0, None)
    meshard.pending_gradients(model)  # leaves nothing in flight
    torch.optim.SGD([model.a], lr=1.0).zero_grad()
    model.set_gradient_divide_factor(4.0)


@on_threads(4)
@pytest.mark.parametrize("as_keyword", [True, False])
def test_a_closure_that_leaves_a_window_open_is_noticed(as_keyword):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step(mode):
        def closure():
            optimizer.zero_grad()
            run(model, mode, 1.0, 1.0)
            return 3.0

        return optimizer.step(closure=closure) if as_keyword else optimizer.step(closure)

    assert step("F") == 3.0
    assert model.a.full_tensor()[0] == -1.0
    with pytest.raises(RuntimeError, match="holds gradients"):
        step("R")
    assert model.a.full_tensor()[0] == -1.0


@on_threads(4)
@pytest.mark.parametrize("mode", ["N", "R"])
def test_a_parameter_that_is_unfrozen_in_a_window_is_added_in_its_own_dtype(mode):
    model = Ones()
    model.b = nn.Parameter(torch.zeros(4, dtype=torch.float64), requires_grad=False)
    meshard.fully_shard(model, init_device_mesh("cpu", (2, 2)))
    run(model, mode, 1.0, 1.0)
    model.b.requires_grad_(True)
    run(model, mode + "F", 1.0, 1 + 2**-40)
    assert values(model) == {"a": 3.0, "b": 2 + 2**-39}


CHANGES = {
    "assign": lambda model: setattr(model, "a", nn.Parameter(torch.ones(4))),
    "load": lambda model: model.load_state_dict({"a": torch.ones(4)}, strict=False, assign=True),
    "cast": lambda model: model.double(),
}


@on_threads(4)
@spread(
    mode=["N", "R"],
    mesh_shape=[(2, 2), (2, 2), None, (2, 2)],
    **{"change, a": [("assign", 2.0), ("load", 2.0), ("assign", 2.0), ("cast", 3.0)]},
)
def test_a_parameter_that_is_replaced_in_a_window_loses_what_is_pending(
    mode, mesh_shape, change, a
):
    """As in one process, where the new parameter has no gradient; a cast keeps it."""
    model = make(mesh_shape) if mesh_shape else meshard.replicate(Ones())
    run(model, mode, 1.0, 10.0)
    CHANGES[change](model)
    run(model, "F", 2.0, 20.0)
    assert values(model) == {"a": a, "b": 30.0}


@on_threads(4)
def test_pending_gradients_of_one_of_a_list_names_the_others_as_the_unit_does():
    first, second = Ones(), Ones()
    meshard.fully_shard([first, second], init_device_mesh("cpu", (2, 2)))
    first.set_gradient_sync(GradientSync.REDUCE_SCATTER)
    (first(1.0, 1.0) + second(1.0, 1.0)).backward()
    assert sorted(meshard.pending_gradients(first)) == ["1.a", "1.b", "a", "b"]


@on_threads(4)
def test_ranks_are_added_in_the_wider_dtype():
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, accumulate_dtype=torch.bfloat16)
    model = make((4,), mp_policy=policy)
    model.set_gradient_divide_factor(1.0)
    run(model, "F", 65.625, None)  # 262.5; each sum of two rounds to 131, in bfloat16
    assert values(model)["a"] == torch.tensor(262.5).bfloat16().item()
