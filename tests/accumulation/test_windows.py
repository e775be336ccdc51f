"""Windows that are interrupted or changed on the way."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import GradientSync, MixedPrecisionPolicy
from tests.support.models import Made, Ones
from tests.support.ones import make, run, values
from tests.support.parity import full_grads
from tests.support.ranks import on_threads
from tests.support.strategies import MODES
from tests.support.threads import run_threads


class Boom(Exception):
    """What fails."""


@on_threads(4)
def test_finalizing_reduces_what_is_on_its_way_to_the_replicas():
    """By hand, with every rank's number: 1 + 2 + 3 + 4 and 4 * 5, divided by 4."""
    model = make((2, 2))
    model.set_is_last_backward(False)
    run(model, "R", float(dist.get_rank() + 1), 5.0)
    meshard.finalize_gradients(model)
    assert values(model) == {"a": 2.5, "b": 5.0}


# --- an exception at the end of backward -------------------------------------------------------


class FailingHook:
    """Raises the first time."""

    def __init__(self):
        self.calls = 0

    def after(self, shard):
        self.calls += 1
        if self.calls == 1:
            raise Boom


def failing_factor():
    calls = []

    def factor():
        calls.append(None)
        if len(calls) == 1:
            raise Boom
        return 4.0

    return factor


def fail_at_the_end(kind, mesh_shape):
    model, found = make(mesh_shape), []
    if kind == "hook":
        meshard.register_reduce_hook(model, FailingHook())
    elif kind == "factor":
        model.set_gradient_divide_factor(failing_factor())
    else:
        hook = FailingHook()
        model.a.register_post_accumulate_grad_hook(hook.after)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        try:
            run(model, "F", 1.0, None)  # b is not used: the unit is swept up at the end
        except Boom:
            with pytest.raises(RuntimeError, match="the last backward through unit"):
                optimizer.step()
            found.append("Boom")
            continue
        found.append(values(model)["a"])
        optimizer.step()
    return found


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
@pytest.mark.parametrize("kind", ["hook", "factor", "gradient hook"])
def test_an_exception_at_the_end_of_backward_does_not_spoil_what_follows(kind, mesh_shape):
    assert run_threads(fail_at_the_end, 4, kind, mesh_shape) == [["Boom", 1.0, 1.0]] * 4


def chain():
    """Units one after the other; a backward can be made to fail before the first."""

    def forward(module, fails=False):
        total = module.units[0](1.0, 1.0)
        if fails:
            total.register_hook(raise_boom)
        for unit in module.units[1:]:
            total = total + unit(1.0, 1.0)
        return total

    return Made(forward, units=[Ones() for _ in range(4)])


def raise_boom(_):
    raise Boom


def half_a_microbatch(mode, use):
    mesh = init_device_mesh("cpu", (2, 2))
    model = chain()
    for unit in model.units:
        meshard.fully_shard(unit, mesh)
    meshard.fully_shard(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.set_gradient_sync(MODES[mode])
    model().backward()
    with pytest.raises(Boom):
        model(fails=True).backward()
    with pytest.raises(RuntimeError, match="the last backward through unit"):
        optimizer.step()
    use(model)
    left = [param.grad for param in model.parameters()]
    assert not meshard.pending_gradients(model)
    model.set_gradient_sync(GradientSync.FULL)
    model().backward()
    optimizer.step()
    return left, {grad[0].item() for grad in full_grads(model).values()}


@pytest.mark.parametrize("mode", ["N", "R", "F"])
@pytest.mark.parametrize("use", [meshard.finalize_gradients, meshard.pending_gradients])
def test_half_a_microbatch_is_never_handed_out(mode, use):
    assert run_threads(half_a_microbatch, 4, mode, use) == [([None] * 8, {1.0})] * 4


def retry(mesh_shape, mode):
    model = make(mesh_shape)
    model.set_is_last_backward(False)
    run(model, mode, 1.0, 1.0)
    meshard.pending_gradients(model)  # leaves nothing in flight
    handle = model.register_forward_pre_hook(lambda *_: raise_boom(None))
    with pytest.raises(Boom):
        run(model, mode, 1.0, 1.0)
    handle.remove()
    run(model, mode, 1.0, 1.0)
    model.set_is_last_backward(True)
    run(model, "F", 1.0, 1.0)
    return values(model)["a"]


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
@pytest.mark.parametrize("mode", ["N", "R", "F"])
def test_a_window_that_is_retried_counts_once_on_any_mesh(mesh_shape, mode):
    assert run_threads(retry, 4, mesh_shape, mode) == [2.0] * 4


# --- the divide factor -------------------------------------------------------------------------


def change_on_the_way(mesh_shape, is_last):
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
    found = values(model)["a"]
    model.zero_grad()
    run(model, "F", 1.0, 1.0)
    return found, values(model)["a"]


def change_after_a_failure(mesh_shape):
    """A factor that changed in a window has failed it; what is set next counts for another one."""
    model = make(mesh_shape)
    factors = iter((4.0, 2.0))
    model.set_gradient_divide_factor(lambda: next(factors))
    run(model, "R", 1.0, 1.0)
    with pytest.raises(RuntimeError, match=r"would divide the rest by 2\.0"):
        run(model, "R", 1.0, 1.0)
    model.zero_grad()
    model.set_gradient_divide_factor(1.0)
    run(model, "F", 1.0, 1.0)
    return values(model)["a"]


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
def test_the_factor_may_change_after_a_window_that_failed(mesh_shape):
    assert run_threads(change_after_a_failure, 4, mesh_shape) == [4.0] * 4


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
@pytest.mark.parametrize("is_last", [True, False])
def test_the_factor_cannot_change_while_anything_is_on_its_way(mesh_shape, is_last):
    expected = 2.0 if is_last else 3.0, 4.0
    assert run_threads(change_on_the_way, 4, mesh_shape, is_last) == [expected] * 4


def change_by_itself(mesh_shape, mode):
    model, tokens = make(mesh_shape), [4.0]
    model.set_gradient_divide_factor(lambda: torch.tensor(tokens[0]))
    model.set_is_last_backward(False)
    run(model, mode, 1.0, 1.0)
    model.set_is_last_backward(True)
    tokens[0] = 1.0
    with pytest.raises(RuntimeError, match=r"part of this window by 4.0, .* the rest by 1.0"):
        run(model, "F", 1.0, 1.0)
    run(model, "F", 1.0, 1.0)
    found = values(model)["a"]
    model.zero_grad()
    model.set_gradient_divide_factor(None)
    run(model, "F", 1.0, 1.0)
    return found, values(model)["a"]


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
@pytest.mark.parametrize("mode", ["R", "F"])
def test_a_count_that_changes_in_a_window_is_refused(mesh_shape, mode):
    assert run_threads(change_by_itself, 4, mesh_shape, mode) == [(4.0, 1.0)] * 4


def clear_after_full():
    """A window whose gradients are all in .grad is open; zero_grad closes it."""
    model = make()
    model.set_is_last_backward(False)
    run(model, "F", 1.0, 1.0)
    meshard.pending_gradients(model)
    model.zero_grad()
    model.set_gradient_divide_factor(1.0)
    model.set_is_last_backward(True)
    run(model, "F", 1.0, 1.0)
    return values(model)["a"]


def test_the_factor_may_change_once_a_window_is_cleared():
    assert run_threads(clear_after_full, 4) == [4.0] * 4


def count_calls():
    model, calls = chain(), []
    mesh = init_device_mesh("cpu", (2,))
    for unit in model.units:
        meshard.fully_shard(unit, mesh)
    meshard.fully_shard(model, mesh)
    model.set_gradient_divide_factor(lambda: calls.append(None) or 2.0)
    for _ in range(3):
        model().backward()
    return len(calls)


def test_a_factor_is_asked_for_once_per_backward():
    assert run_threads(count_calls, 2) == [3] * 2


# --- clearing and guards -----------------------------------------------------------------------


def clear_by_halves(mode):
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
    return values(model)


@pytest.mark.parametrize("mode", ["N", "R"])
def test_two_optimizers_clear_a_window_together(mode):
    assert run_threads(clear_by_halves, 4, mode) == [{"a": 2.0, "b": 1.0}] * 4


class OwnZeroGrad(torch.optim.SGD):
    """An optimizer that does not call torch's ``zero_grad``."""

    def zero_grad(self, set_to_none=True):
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None


def clear_in_an_own_way():
    model = make()
    optimizer = OwnZeroGrad(model.parameters(), lr=1.0)
    run(model, "F", 1.0, 1.0)
    optimizer.step()
    run(model, "R", 100.0, 1.0)
    optimizer.zero_grad()
    run(model, "F", 1.0, 1.0)
    return values(model)["a"]


def test_an_optimizer_with_a_zero_grad_of_its_own_clears_too():
    assert run_threads(clear_in_an_own_way, 4) == [1.0] * 4


def closure_in_a_window(as_keyword):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def closure(mode):
        optimizer.zero_grad()
        run(model, mode, 1.0, 1.0)
        return 3.0

    def call(closure):
        return optimizer.step(closure=closure) if as_keyword else optimizer.step(closure)

    assert call(lambda: closure("F")) == 3.0
    assert model.a.full_tensor()[0] == -1.0
    with pytest.raises(RuntimeError, match="holds gradients"):
        call(lambda: closure("R"))
    return model.a.full_tensor()[0].item()


@pytest.mark.parametrize("as_keyword", [True, False])
def test_a_closure_that_leaves_a_window_open_is_noticed(as_keyword):
    assert run_threads(closure_in_a_window, 4, as_keyword) == [-1.0] * 4


def skip_a_step():
    model = make((4,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = meshard.ShardedGradScaler("cpu", init_scale=2.0)
    bad = float("inf") if dist.get_rank() == 3 else 1.0
    model.set_gradient_sync(GradientSync.FULL)
    scaler.scale(model(bad, 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    cleared = values(model)
    scaler.scale(model(1.0, 1.0)).backward()  # without a zero_grad
    scaler.step(optimizer)
    return cleared, values(model), model.a.full_tensor()[0].item()


def test_a_step_that_the_scaler_skips_clears_the_gradients():
    expected = ({"a": None, "b": None}, {"a": 1.0, "b": 1.0}, -1.0)
    assert run_threads(skip_a_step, 4) == [expected] * 4


def touch_one_gradient(touch):
    model = make((2,), dtype=torch.bfloat16)
    for number in range(600):
        if number == 300:
            touch(model.a)
        model(1.0, 1.0).backward()
    return values(model)


def drop(param):
    param.grad = None


def replace(param):
    param.grad = param.grad.clone()


@pytest.mark.slow
def test_sums_stay_wide_beside_a_gradient_that_the_user_touched():
    # added up in bfloat16, ones stop at 256
    assert run_threads(touch_one_gradient, 2, drop) == [{"a": 300.0, "b": 600.0}] * 2
    # 300 is rounded to 300 in bfloat16, and goes on in float32
    assert run_threads(touch_one_gradient, 2, replace) == [{"a": 600.0, "b": 600.0}] * 2


def list_of_two():
    first, second = Ones(), Ones()
    meshard.fully_shard([first, second], init_device_mesh("cpu", (2, 2)))
    first.set_gradient_sync(GradientSync.REDUCE_SCATTER)
    (first(1.0, 1.0) + second(1.0, 1.0)).backward()
    return sorted(meshard.pending_gradients(first))


def test_pending_gradients_of_one_of_a_list_names_the_others_as_the_unit_does():
    assert run_threads(list_of_two, 4) == [["1.a", "1.b", "a", "b"]] * 4


def narrow_sums():
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, accumulate_dtype=torch.bfloat16)
    model = make((4,), mp_policy=policy)
    model.set_gradient_divide_factor(1.0)
    run(model, "F", 65.625, None)  # 262.5; each sum of two rounds to 131, in bfloat16
    return values(model)["a"]


def test_ranks_are_added_in_the_wider_dtype():
    rounded_once = torch.tensor(262.5).bfloat16().item()
    assert run_threads(narrow_sums, 4) == [rounded_once] * 4
