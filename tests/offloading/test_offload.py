"""Models whose shards live in host memory, against those on the device, bit for bit."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy as TorchCPUOffloadPolicy
from torch.distributed.tensor import Shard

import meshard
import meshard.offloading
from meshard import CPUOffloadPolicy, MixedPrecisionPolicy
from tests.support.cases import CASES
from tests.support.models import seeded
from tests.support.parity import assert_same, full_grads, full_state, own_grads, own_state
from tests.support.ranks import on_fake_ranks, on_ranks, on_threads
from tests.support.spread import spread
from tests.support.strategies import MODES
from tests.support.threads import run_threads

HOST, DEVICE = CPUOffloadPolicy(pin_memory=False), meshard.OffloadPolicy()


def make(case, policy=HOST, mesh=None, dtype=None, **kwargs):
    model = case.build().to(dtype)
    for unit in case.units(model):
        meshard.fully_shard(unit, mesh, offload_policy=policy, **kwargs)
    return model


def beside_the_ordinary(story, case_name="mlp_stack", mesh_shape=(2,), **kwargs):
    """Compare what ``story(case, model)`` has seen of an offloaded model and an ordinary one."""
    case, mesh = CASES[case_name], init_device_mesh("cpu", mesh_shape)
    models = [make(case, policy, mesh, **kwargs) for policy in (HOST, DEVICE)]
    seen = zip(*(list(story(case, model)) for model in models), strict=True)
    for place, (ours, theirs) in enumerate(seen):
        assert_same(ours, theirs, bitwise=True, what=f"rank {dist.get_rank()}, record {place}")


def backward(case, model, number, *args):
    loss = case.loss(model(case.batch(number, dist.get_rank()), *args))
    loss.backward()
    return loss.detach()


def windows(case, model, *, is_last=True, edit=None, set_to_none=True, clear_every=1):
    """Train windows of several schedules; yield this rank's gradients and parameters on the way."""
    optimizer, number = torch.optim.AdamW(model.parameters(), lr=0.05), 0
    for window, schedule in enumerate(("F", "NF", "RF", "FFF", "FRNF", "F"), 1):
        for place, mode in enumerate(schedule):
            model.set_gradient_sync(MODES[mode])
            model.set_is_last_backward(is_last or place == len(schedule) - 1)
            loss = backward(case, model, number)
            number += 1
            if is_last and edit is not None:
                edit(model)
            if is_last:
                yield own_grads(model)
        norm = meshard.clip_grad_norm_(model, 0.5)
        yield {**own_grads(model), "norm": norm, "loss": loss}
        optimizer.step()
        if window % clear_every == 0:
            optimizer.zero_grad(set_to_none=set_to_none)
        yield own_state(model)


@on_ranks(2)
def test_one_model_in_processes():
    beside_the_ordinary(windows, "uneven")


@spread(
    case_name=["mlp_stack", "transformer_tied", "uneven", "frozen_beside", "mixed_dtype"],
    mesh_shape=[(2,), (2, 2)],
)
def test_offloaded_training_equals_the_ordinary_one(case_name, mesh_shape):
    run_threads(beside_the_ordinary, math.prod(mesh_shape), windows, case_name, mesh_shape)


def halve(model):
    """What users do to gradients between two backwards of a window."""
    for param in model.parameters():
        if param.grad is not None:
            param.grad.mul_(0.5)


def replace_some(model):
    for param in list(model.parameters())[::2]:
        if param.grad is not None:
            param.grad = param.grad.clone()


def drop_some(model):
    for param in list(model.parameters())[::2]:
        param.grad = None


MIXED = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)}
NARROW = {"dtype": torch.bfloat16, **MIXED}


@pytest.mark.slow
@on_threads(4)
@spread(
    row=[
        ({"is_last": False}, MIXED),
        ({"set_to_none": False}, {}),
        ({"set_to_none": False, "is_last": False}, {}),
        ({"is_last": False, "clear_every": 3}, NARROW),
        ({"edit": halve}, NARROW),
        ({"edit": replace_some}, {}),
        ({"edit": drop_some}, {}),
        ({}, {"reshard_after_forward": False}),
        ({}, {"reshard_after_forward": 2}),
        ({}, {"shard_placement_fn": lambda p: Shard(p.dim() - 1)}),
    ],
    case_name=["uneven", "mixed_dtype", "mixed_dtype"],
)
def test_also_under_every_way_of_accumulating(row, case_name):
    how, kwargs = row
    beside_the_ordinary(lambda *args: windows(*args, **how), case_name, (2, 2), **kwargs)


@on_threads(2)
def test_also_with_explicit_prefetch():
    def story(case, model):
        model.set_modules_to_forward_prefetch([model.blocks[0], model.blocks[1]])
        model.blocks[2].set_modules_to_backward_prefetch([model.blocks[1], model.blocks[0]])
        yield from windows(case, model)

    beside_the_ordinary(story)


@on_threads(2)
def test_units_with_a_policy_of_torch_and_units_without_one_train_together():
    case, mesh = CASES["mlp_stack"], init_device_mesh("cpu", (2,))
    ordinary, mixed = make(case, DEVICE), case.build()
    meshard.fully_shard(mixed.blocks[0], mesh)
    meshard.fully_shard(mixed.blocks[1], mesh, offload_policy=TorchCPUOffloadPolicy(False))
    meshard.fully_shard(mixed, mesh)
    for ours, theirs in zip(windows(case, mixed), windows(case, ordinary), strict=True):
        assert_same(ours, theirs, bitwise=True)


# --- gradients on their way to the host ----------------------------------------------------


@on_threads(2)
def test_gradients_that_the_user_keeps_are_not_written_over():
    case = CASES["mlp_stack"]
    model = make(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept, values = [], []
    for step in range(4):
        for _ in range(2):
            backward(case, model, step)
        kept += [param.grad for param in model.parameters()]
        values += [param.grad.full_tensor() for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(g.full_tensor(), v) for g, v in zip(kept, values, strict=True))


@on_threads(2)
def test_hooks_on_sharded_parameters_see_what_has_arrived():
    case, heard = CASES["mlp_stack"], []
    model = make(case)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(
            lambda p: heard.append((p, p.grad.to_local().clone()))
        )
    for number in range(2):
        backward(case, model, number)
        assert len(heard) == len(list(model.parameters()))
        assert all(torch.equal(p.grad.to_local(), value) for p, value in heard)
        heard.clear()


@on_threads(2)
@pytest.mark.parametrize("clears_some", [False, True])
def test_hooks_see_every_gradient_before_it_is_added_or_cleared(clears_some):
    def story(case, model):
        for number, param in enumerate(model.parameters()):
            param.register_hook(lambda grad, number=number: grad * (number + 1))
        some = torch.optim.SGD(list(model.parameters())[::2], lr=0.1)
        for number in range(4):
            model.set_is_last_backward(number % 2 == 1)
            backward(case, model, number)
            if clears_some and number % 2 == 0:
                some.zero_grad()
        yield full_grads(model)

    beside_the_ordinary(story)


@on_threads(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_evaluation_in_inference_mode_between_microbatches_changes_no_gradient(dtype):
    case, seen = CASES["mlp_stack"], []
    for evaluates in (False, True):
        model = make(case, dtype=dtype)
        for number in range(3):
            model.set_is_last_backward(number == 2)
            batch = case.batch(number, dist.get_rank()).to(dtype)
            model(batch).square().mean().backward()
            if evaluates:
                with torch.inference_mode():
                    model(batch)
        for param in model.parameters():
            assert not param.grad.is_inference() and not param.grad.to_local().is_inference()
        meshard.clip_grad_norm_(model, 0.5)
        seen.append(own_grads(model))
    assert_same(*seen, bitwise=True)


@on_threads(4)
def test_parameters_are_frozen_and_thawed_between_reductions():
    def story(case, model):
        for number in range(6):
            model.blocks[0].up.weight.requires_grad_(number % 2 == 0)
            model.set_is_last_backward(number % 3 == 2)
            backward(case, model, number)
            meshard.finalize_gradients(model)
            yield full_grads(model)

    beside_the_ordinary(story, mesh_shape=(2, 2))


@on_threads(2)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_first_gradients_on_their_way_are_cleared(set_to_none):
    """A parameter gets its first gradient beside one that has some, and both are cleared."""

    def story(case, model):
        for number, used in enumerate([(True, False, False), (True,) * 3, (True,) * 3]):
            model.set_is_last_backward(number != 1)
            backward(case, model, number, used)
            if number == 1:
                model.zero_grad(set_to_none=set_to_none)
            else:
                yield full_grads(model)

    beside_the_ordinary(story, "sometimes_unused")


@on_threads(2)
@spread(num_before=[0, 1, 2, 1], set_to_none=[True, False])
def test_gradients_on_their_way_are_cleared(num_before, set_to_none):
    """Clear some gradients while they are on their way; what comes after must not be touched."""

    def story(case, model):
        some = torch.optim.SGD(list(model.parameters())[::2], lr=0.1)
        for number in range(4):
            model.set_is_last_backward(number < num_before or number == 3)
            backward(case, model, number)
            if number == 2:
                some.zero_grad(set_to_none=set_to_none)
                model.blocks[0].zero_grad(set_to_none=set_to_none)
            if number < num_before or number == 3:
                yield full_grads(model)

    beside_the_ordinary(story)


# --- shards on the host --------------------------------------------------------------------


@on_threads(2)
def test_shards_are_edited_loaded_and_copied():
    def story(case, model):
        with meshard.unsharded_params(model), torch.no_grad():
            for param in model.parameters():
                param.mul_(2)
        yield full_state(model)
        whole = {name: 1.5 * value.full_tensor() for name, value in model.state_dict().items()}
        model.load_state_dict(whole)
        backward(case, model, 0)
        assert_same(full_state(model), whole, bitwise=True)
        for each in (model, copy.deepcopy(model)):
            each.zero_grad()
            backward(case, each, 0)
            backward(case, each, 1)
            yield full_grads(each)

    beside_the_ordinary(story)


@on_threads(2)
def test_a_model_made_on_meta_is_filled_on_the_host():
    case = CASES["transformer"]
    with torch.device("meta"):
        models = [make(case), make(case)]
    with pytest.raises(RuntimeError, match=r"on the meta device; call to_empty\(device='cpu'"):
        backward(case, models[0], 0)
    meshard.materialize(models[0])
    models[1].to_empty(device="cpu")
    models[1].load_state_dict({k: v.clone() for k, v in models[0].state_dict().items()})
    ordinary = make(case, DEVICE)
    ordinary.load_state_dict(models[0].state_dict())
    for each in (*models, ordinary):
        backward(case, each, 0)
        assert_same(full_grads(each), full_grads(models[0]), bitwise=True)
    models[0].double().zero_grad()
    models[0](case.batch(0, dist.get_rank())).sum().backward()
    assert {param.grad.dtype for param in models[0].parameters()} == {torch.float64}


@on_fake_ranks(1)
def test_on_a_cpu_mesh_nothing_is_pinned():
    first = meshard.fully_shard(nn.Linear(2, 2), offload_policy=TorchCPUOffloadPolicy())
    first(torch.ones(1, 2)).sum().backward()
    assert first.weight.grad is not None


@on_threads(2)
def test_no_step_follows_a_hook_that_raised_while_gradients_came_to_the_host():
    """The step waits for the copies, and then calls the hook."""

    def fail(_):
        raise ValueError("by a hook")

    model = seeded(nn.Linear(2, 2))
    meshard.fully_shard(model, offload_policy=HOST)
    model.bias.register_hook(fail)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.set_is_last_backward(False)
    model(torch.ones(1, 2)).sum().backward()
    before = full_state(model)
    with pytest.raises(ValueError, match="by a hook"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="some gradients are missing"):
        optimizer.step()
    assert_same(full_state(model), before, bitwise=True)
