"""Models whose shards live in host memory, against those on the device, bit for bit."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy as TorchCPUOffloadPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard

import meshard
import meshard.offloading
from meshard import CPUOffloadPolicy, GradientSync, MixedPrecisionPolicy
from tests.support.cases import CASES
from tests.support.parity import assert_same, full_grads, full_state, own_grads, own_state
from tests.support.ranks import on_threads
from tests.support.threads import run_threads

HOST = CPUOffloadPolicy(pin_memory=False)
MODES = {
    "N": GradientSync.NONE,
    "R": GradientSync.REDUCE_SCATTER,
    "F": GradientSync.FULL,
}


def make(case, mesh, dtype=None, **kwargs):
    model = case.build().to(dtype)
    for unit in case.units(model):
        meshard.fully_shard(unit, mesh, **kwargs)
    return model


def windows(case, model, schedules, *, is_last=True, edit=None, set_to_none=True, clear_every=1):
    """Train one window per schedule; return this rank's gradients and parameters on the way."""
    rank, seen, number = dist.get_rank(), [], 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for window, schedule in enumerate(schedules, 1):
        for place, mode in enumerate(schedule):
            model.set_gradient_sync(MODES[mode])
            model.set_is_last_backward(is_last or place == len(schedule) - 1)
            loss = case.loss(model(case.batch(number, rank)))
            loss.backward()
            number += 1
            if is_last and edit is not None:
                edit(model)
            if is_last:
                seen.append(own_grads(model))
        norm = meshard.clip_grad_norm_(model, 0.5)
        seen += [own_grads(model), {"norm": norm, "loss": loss.detach()}]
        optimizer.step()
        if window % clear_every == 0:
            optimizer.zero_grad(set_to_none=set_to_none)
        seen.append(own_state(model))
    return seen


SCHEDULES = ("F", "NF", "RF", "FFF", "FRNF", "F")


def compare(case_name, mesh_shape, how, **kwargs):
    case = CASES[case_name]
    mesh = init_device_mesh("cpu", mesh_shape)
    ordinary = windows(case, make(case, mesh, **kwargs), SCHEDULES, **how)
    offloaded = make(case, mesh, offload_policy=HOST, **kwargs)
    for ours, theirs in zip(windows(case, offloaded, SCHEDULES, **how), ordinary, strict=True):
        assert_same(ours, theirs, bitwise=True)


def test_one_model_in_processes(run_ranks):
    run_ranks(compare, 2, "uneven", (2,), {})


CASE_NAMES = ["mlp_stack", "transformer_tied", "uneven", "frozen_beside", "mixed_dtype"]


@pytest.mark.default_rows(2)
@pytest.mark.parametrize("case_name", CASE_NAMES)
@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
def test_offloaded_training_equals_the_ordinary_one(run_ranks, case_name, mesh_shape):
    num_ranks = torch.Size(mesh_shape).numel()
    run_ranks(compare, num_ranks, case_name, mesh_shape, {})


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


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


@pytest.mark.default_rows(1)
@pytest.mark.parametrize(
    ("how", "kwargs"),
    [
        ({"is_last": False}, {}),
        ({"is_last": False}, {"mp_policy": MIXED}),
        ({"set_to_none": False}, {}),
        ({"set_to_none": False, "is_last": False}, {}),
        ({"is_last": False, "clear_every": 3}, {}),
        ({"is_last": False, "clear_every": 3}, {"dtype": torch.bfloat16, "mp_policy": MIXED}),
        ({"edit": halve}, {"dtype": torch.bfloat16, "mp_policy": MIXED}),
        ({"edit": halve}, {}),
        ({"edit": replace_some}, {}),
        ({"edit": drop_some}, {}),
        ({}, {"mp_policy": MIXED}),
        ({}, {"reshard_after_forward": False}),
        ({}, {"reshard_after_forward": 2}),
        ({}, {"shard_placement_fn": lambda p: Shard(p.dim() - 1)}),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "case_name", [pytest.param("uneven", marks=pytest.mark.slow), "mixed_dtype"]
)
def test_also_under_every_way_of_accumulating(case_name, how, kwargs):
    run_threads(compare, 4, case_name, (2, 2), how, **kwargs)


@on_threads(2)
def test_also_with_explicit_prefetch():
    case, mesh = CASES["mlp_stack"], init_device_mesh("cpu", (2,))
    models = [make(case, mesh), make(case, mesh, offload_policy=HOST)]
    for model in models:
        model.set_modules_to_forward_prefetch([model.blocks[0], model.blocks[1]])
        model.blocks[2].set_modules_to_backward_prefetch([model.blocks[1], model.blocks[0]])
    for ours, theirs in zip(*(windows(case, m, ("F", "RF")) for m in models), strict=True):
        assert_same(ours, theirs, bitwise=True)


@on_threads(2)
def test_units_with_and_without_the_policy_train_together():
    """Units on the host beside units that are not, and a policy object of torch's."""
    case, mesh = CASES["mlp_stack"], init_device_mesh("cpu", (2,))
    ordinary, mixed = make(case, mesh), case.build()
    meshard.fully_shard(mixed.blocks[0], mesh)
    meshard.fully_shard(mixed.blocks[1], mesh, offload_policy=TorchCPUOffloadPolicy(False))
    meshard.fully_shard(mixed, mesh)
    for ours, theirs in zip(
        windows(case, mixed, SCHEDULES), windows(case, ordinary, SCHEDULES), strict=True
    ):
        assert_same(ours, theirs, bitwise=True)


@on_threads(2)
def test_losses_are_scaled_as_ever():
    """An inf on one rank skips the step of all."""
    case, mesh = CASES["mlp_stack"], init_device_mesh("cpu", (2,))
    results = []
    for policy in (meshard.OffloadPolicy(), HOST):
        model = make(case, mesh, offload_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scaler = meshard.ShardedGradScaler("cpu", init_scale=2.0**8)
        for step in range(3):
            loss = case.loss(model(case.batch(step, dist.get_rank())))
            if step == 1 and dist.get_rank() == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append((full_state(model), scaler.get_scale()))
    assert results[0][1] == results[1][1] == 2.0**7
    assert_same(results[1][0], results[0][0], bitwise=True)


@on_threads(2)
def test_gradients_that_the_user_keeps_are_not_written_over():
    case, mesh = CASES["mlp_stack"], init_device_mesh("cpu", (2,))
    model = make(case, mesh, offload_policy=HOST)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept, values = [], []
    for step in range(4):
        for _ in range(2):
            case.loss(model(case.batch(step, dist.get_rank()))).backward()
        kept += [param.grad for param in model.parameters()]
        values += [param.grad.full_tensor() for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(g.full_tensor(), v) for g, v in zip(kept, values, strict=True))


@on_threads(2)
def test_hooks_on_sharded_parameters_see_what_has_arrived():
    case, mesh = CASES["mlp_stack"], init_device_mesh("cpu", (2,))
    model, heard = make(case, mesh, offload_policy=HOST), []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(
            lambda p: heard.append((p, p.grad._local_tensor.clone()))
        )
    for number in range(2):
        case.loss(model(case.batch(number, dist.get_rank()))).backward()
        assert len(heard) == len(list(model.parameters()))
        assert all(torch.equal(p.grad._local_tensor, value) for p, value in heard)
        heard.clear()


@on_threads(4)
def test_parameters_are_frozen_and_thawed_between_reductions():
    case, mesh = CASES["mlp_stack"], init_device_mesh("cpu", (2, 2))
    results = []
    for policy in (meshard.OffloadPolicy(), HOST):
        model = make(case, mesh, offload_policy=policy)
        seen = []
        for number in range(6):
            model.blocks[0].up.weight.requires_grad_(number % 2 == 0)
            model.set_is_last_backward(number % 3 == 2)
            case.loss(model(case.batch(number, dist.get_rank()))).backward()
            meshard.finalize_gradients(model)
            seen.append(full_grads(model))
        results.append(seen)
    for ours, theirs in zip(*results, strict=True):
        assert_same(theirs, ours, bitwise=True)


@on_threads(2)
def test_a_model_made_on_meta_is_filled_on_the_host():
    case, mesh = CASES["transformer"], init_device_mesh("cpu", (2,))
    with torch.device("meta"):
        model = case.build()
    for unit in case.units(model):
        meshard.fully_shard(unit, mesh, offload_policy=HOST)
    batch = case.batch(0, dist.get_rank())
    with pytest.raises(RuntimeError, match=r"on the meta device; call to_empty\(device='cpu'"):
        model(batch)
    model.to_empty(device="cpu")
    other = make(case, mesh)
    model.load_state_dict({k: v.clone() for k, v in other.state_dict().items()})
    for each in (model, other):
        case.loss(each(batch)).backward()
    assert_same(full_grads(model), full_grads(other), bitwise=True)
    model.double()
    model.zero_grad()
    model(batch).sum().backward()
    assert {param.grad.dtype for param in model.parameters()} == {torch.float64}


def test_pinning_on_a_cpu_mesh_warns_once(monkeypatch):
    monkeypatch.setattr(meshard.api, "_has_warned_of_pinning", False)
    meshard.fully_shard(nn.Linear(2, 2))  # makes the default group
    # What torch's own does: it has no device, or no driver for the one that it is built for.
    with pytest.raises(RuntimeError, match=r"accelerator|NVIDIA driver"):
        torch_fully_shard(nn.Linear(2, 2), offload_policy=TorchCPUOffloadPolicy())(torch.ones(1, 2))
    with pytest.warns(UserWarning, match="host memory is not pinned; pass pin_memory=False"):
        first = meshard.fully_shard(nn.Linear(2, 2), offload_policy=CPUOffloadPolicy())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            meshard.fully_shard(nn.Linear(2, 2), offload_policy=TorchCPUOffloadPolicy())
        first(torch.ones(1, 2)).sum().backward()
        assert first.weight.grad is not None
    finally:
        dist.destroy_process_group()


def test_a_policy_is_checked_where_it_is_made():
    with pytest.raises(TypeError, match="pin_memory must be a bool, got 'yes'"):
        CPUOffloadPolicy(pin_memory="yes")


def evaluate_inside(mesh_shape, dtype):
    case, seen = CASES["mlp_stack"], []
    for evaluates in (False, True):
        model = make(case, init_device_mesh("cpu", mesh_shape), dtype, offload_policy=HOST)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_evaluation_in_inference_mode_between_microbatches_changes_no_gradient(dtype):
    run_threads(evaluate_inside, 2, (2,), dtype)
