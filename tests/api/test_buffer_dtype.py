"""Buffers of modules that compute in less than float32: ``buffer_dtype``, and errors without it."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy

import meshard
from meshard import MixedPrecisionPolicy, fully_shard, replicate
from tests.support.models import seeded
from tests.support.parity import assert_same
from tests.support.ranks import on_fake_ranks, on_ranks
from tests.support.spread import spread

BF16, FP32 = torch.bfloat16, torch.float32
POLICY = MixedPrecisionPolicy(param_dtype=BF16)
WITH_BUFFERS = MixedPrecisionPolicy(param_dtype=BF16, buffer_dtype=BF16)


def convolutions():
    return nn.Sequential(nn.Conv1d(2, 4, 1), nn.BatchNorm1d(4), nn.Conv1d(4, 2, 1))


class Positions(nn.Module):
    """Adds a float32 buffer, or does something else."""

    def __init__(self, forward=lambda m, x: x + m.angles):
        super().__init__()
        self.function = forward
        self.register_buffer("angles", torch.linspace(0, 1, 6))
        self.register_buffer("index", torch.arange(6))
        self.register_buffer("nothing", None)

    def forward(self, x):
        return self.function(self, x)


def positional(*args):
    """The buffer of a module that has returned when a layer after it fails."""
    return nn.Sequential(Positions(*args), nn.Linear(6, 6))


class Products(dict):
    """A caller in the traceback that has no hash."""

    def add(self, name, one, other):
        self[name] = one @ other.T
        return self[name] @ one


def uses_a_dict():
    return positional(lambda m, x: Products().add("of both", x + m.angles, x))


IMAGES = torch.ones(3, 2, 5)
CASES = {
    "norm": (convolutions, IMAGES, ["1.running_mean", "1.running_var"]),
    "positions": (positional, torch.ones(2, 6), ["0.angles"]),
    "inside a dict": (uses_a_dict, torch.ones(2, 6), ["0.angles"]),
}
EACH = spread(apply=[fully_shard, replicate], case=list(CASES))


@EACH
@on_fake_ranks(1)
def test_without_it_buffers_keep_their_dtype_and_torch_raises(apply, case):
    build, x, _ = CASES[case]
    model = apply(build(), mp_policy=POLICY)
    with pytest.raises(RuntimeError, match="type"):
        model(x)


@EACH
@on_fake_ranks(1)
def test_it_computes_as_the_module_does_in_that_dtype(apply, case):
    build, x, _ = CASES[case]
    plain, model = seeded(build()).to(BF16), apply(seeded(build()), mp_policy=WITH_BUFFERS)
    for step in range(4):
        batch = x * (step + 1) + torch.linspace(0, 1, x.shape[-1])
        out, expected = model(batch), plain(batch.to(BF16))
        out.sum().backward()
        assert_same(out.detach(), expected.detach(), bitwise=True)
    assert_same(dict(model.named_buffers()), dict(plain.named_buffers()), bitwise=True)
    assert {buffer.dtype for buffer in model.buffers()} == {BF16, torch.int64}
    assert {param.dtype for param in model.parameters()} == {FP32}


@on_ranks(2)
def test_they_are_broadcast_in_it():
    """Each forward begins with the buffers of the first rank, whatever the second has seen."""
    model, plain = seeded(convolutions()), seeded(convolutions()).to(BF16)
    mesh = init_device_mesh("cpu", (2,))
    replicate(model, mesh, mp_policy=WITH_BUFFERS, broadcast_buffers=True)
    for step in range(3):
        of_first = torch.linspace(0, step + 1, 30).view(3, 2, 5)
        own = of_first + dist.get_rank()
        model(own).sum().backward()
        plain((own if step == 2 else of_first).to(BF16))
    assert_same(dict(model.named_buffers()), dict(plain.named_buffers()), bitwise=True)


@pytest.mark.parametrize("apply", [fully_shard, replicate])
@on_fake_ranks(1)
def test_a_norm_in_a_unit_of_its_own_stays_in_float32(apply):
    model = convolutions()
    fully_shard(model[1])
    apply(model, mp_policy=WITH_BUFFERS)  # of what is in no unit inside
    assert "param_dtype=bfloat16, buffer_dtype=bfloat16" in meshard.describe(model)
    model(IMAGES).sum().backward()
    assert model[1].running_mean.dtype == FP32 and model[1].running_mean.any()
    assert model[1].weight.grad is not None


@on_fake_ranks(1)
def test_the_first_remedy_is_enough_for_what_is_cast_in_forward():
    model = positional(lambda m, x: x + m.angles.to(x.dtype))
    assert fully_shard(model, mp_policy=POLICY)(torch.ones(2, 6)).dtype == BF16


@pytest.mark.parametrize("policy", [POLICY, TorchPolicy(param_dtype=BF16)])
@on_fake_ranks(1)
def test_without_it_buffers_stay_the_tensors_that_they_were(policy):
    model = convolutions()
    before = list(model.buffers())
    fully_shard(model, mp_policy=policy)
    assert all(a is b for a, b in zip(model.buffers(), before, strict=True))


@on_fake_ranks(1)
def test_what_is_no_float_and_what_is_shared_stays_so():
    model = nn.Sequential(Positions(), Positions(), nn.Linear(6, 6))
    model[1].angles = model[0].angles
    model.register_buffer("rotation", torch.ones(2, dtype=torch.complex64))
    index = model[0].index
    fully_shard(model, mp_policy=WITH_BUFFERS)
    assert model[0].angles.dtype == BF16 and model[1].angles is model[0].angles
    assert model[0].index is index and model.rotation.dtype == torch.complex64
    assert "angles" in dict(model[0].named_buffers()) and model[0].nothing is None
    norms = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    norms[1].running_mean = norms[0].running_mean
    for unit in norms:
        fully_shard(unit, mp_policy=WITH_BUFFERS)
    assert norms[0].running_mean is norms[1].running_mean
    assert norms[0].running_mean.dtype == BF16


@pytest.mark.parametrize("is_copy", [False, True])
@spread(apply=[fully_shard, replicate], assign=[False, True])
@on_fake_ranks(1)
def test_state_dicts_hold_that_dtype_and_load_from_any_also_of_copies(apply, assign, is_copy):
    plain = seeded(convolutions())
    plain[1].running_mean.fill_(1 / 3)
    original = apply(seeded(convolutions()), mp_policy=WITH_BUFFERS)
    model = copy.deepcopy(original) if is_copy else original
    saved = model.state_dict()
    assert saved["1.running_mean"].dtype == BF16
    assert saved["1.num_batches_tracked"].dtype == torch.int64
    model.load_state_dict(copy.deepcopy(plain.state_dict()), assign=assign)
    assert_same(model[1].running_mean, plain[1].running_mean.to(BF16), bitwise=True)
    model(IMAGES).sum().backward()
    assert model[1].running_mean.dtype == BF16
    assert original[1].running_mean.any() != is_copy
    for _ in range(2):  # values, rounded once, into float32
        plain.load_state_dict({"1.running_mean": model[1].running_mean}, strict=False)
    assert_same(plain[1].running_mean, model[1].running_mean.float(), bitwise=True)


@on_fake_ranks(1)
def test_buffers_on_meta_are_materialised_in_it():
    with torch.device("meta"):
        model = convolutions()
    fully_shard(model, mp_policy=WITH_BUFFERS)
    assert model[1].running_var.is_meta and model[1].running_var.dtype == BF16
    meshard.materialize(model)
    assert model[1].running_var.tolist() == [1.0] * 4 and model[1].running_var.dtype == BF16
