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
APPLIED = pytest.mark.parametrize("apply", [fully_shard, replicate])


class Convolutions(nn.Module):
    """A batch norm between two layers, in the root."""

    def __init__(self):
        super().__init__()
        self.inlet = nn.Conv1d(2, 4, 1)
        self.norm = nn.BatchNorm1d(4)
        self.outlet = nn.Conv1d(4, 2, 1)

    def forward(self, x):
        return self.outlet(self.norm(self.inlet(x)))


class Positions(nn.Module):
    """Adds a float32 buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("angles", torch.linspace(0, 1, 6))
        self.register_buffer("index", torch.arange(6))
        self.register_buffer("nothing", None)

    def forward(self, x):
        return x + self.angles


class Positional(nn.Module):
    """The buffer of a module that has returned when a layer after it fails."""

    def __init__(self):
        super().__init__()
        self.positions = Positions()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(self.positions(x))


CASES = {
    "norm": (Convolutions, torch.ones(3, 2, 5), ["norm.running_mean", "norm.running_var"]),
    "positions": (Positional, torch.ones(2, 6), ["positions.angles"]),
}
BOTH = pytest.mark.parametrize("case", list(CASES))
EACH = spread(apply=[fully_shard, replicate], case=list(CASES))


@EACH
@on_fake_ranks(1)
def test_without_it_an_error_names_the_buffers_and_what_helps(apply, case):
    build, x, names = CASES[case]
    model = apply(build(), mp_policy=POLICY)
    with pytest.raises(RuntimeError, match=r"(?s)type.*computes in torch\.bfloat16") as caught:
        model(x)
    text = str(caught.value)
    named = ", ".join(repr(f"{name} (torch.float32)") for name in names)
    assert f"but buffers of it have another dtype: {named}. " in text
    assert "MixedPrecisionPolicy(..., buffer_dtype=torch.bfloat16)" in text
    assert "fully_shard without param_dtype" in text and "cast them in forward" in text
    assert text.count("that is the cause") == 1


@BOTH
@on_fake_ranks(1)
def test_units_around_and_inside_add_nothing_to_the_error(case):
    build, x, names = CASES[case]
    inner = fully_shard(build(), mp_policy=POLICY)
    outer = nn.Sequential(nn.Identity(), inner)
    outer.register_buffer("of_outer", torch.ones(1))
    fully_shard(outer, mp_policy=POLICY)
    with pytest.raises(RuntimeError, match=rf"1\.{names[0]} \(torch.float32\)") as caught:
        outer(x)
    assert str(caught.value).count("that is the cause") == 1
    assert "of_outer" not in str(caught.value)


@on_fake_ranks(1)
def test_other_errors_and_other_dtypes_stay_as_they_are():
    class Fails(Positions):
        def forward(self, x):
            raise RuntimeError(x)

    for policy, text in [(POLICY, "no such type of task"), (MixedPrecisionPolicy(), "wrong dtype")]:
        model = Fails()
        model.weight = nn.Parameter(torch.ones(2))
        with pytest.raises(RuntimeError) as caught:
            fully_shard(model, mp_policy=policy)(text)
        assert str(caught.value) == text
    model = Fails().to(BF16)
    model.weight = nn.Parameter(torch.ones(2))
    with pytest.raises(RuntimeError) as caught:
        fully_shard(model, mp_policy=POLICY)("wrong dtype")
    assert str(caught.value) == "wrong dtype"


@EACH
@on_fake_ranks(1)
def test_it_computes_as_the_module_does_in_that_dtype(apply, case):
    build, x, _ = CASES[case]
    plain, model = seeded(build()), seeded(build())
    apply(model, mp_policy=WITH_BUFFERS)
    plain.to(BF16)
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
    model, plain = seeded(Convolutions()), seeded(Convolutions()).to(BF16)
    mesh = init_device_mesh("cpu", (2,))
    replicate(model, mesh, mp_policy=WITH_BUFFERS, broadcast_buffers=True)
    for step in range(3):
        of_first = torch.linspace(0, step + 1, 30).view(3, 2, 5)
        own = of_first + dist.get_rank()
        model(own).sum().backward()
        plain((own if step == 2 else of_first).to(BF16))
    assert_same(dict(model.named_buffers()), dict(plain.named_buffers()), bitwise=True)


@APPLIED
@on_fake_ranks(1)
def test_a_norm_in_a_unit_of_its_own_stays_in_float32(apply):
    model = Convolutions()
    fully_shard(model.norm)
    apply(model, mp_policy=WITH_BUFFERS)  # of what is in no unit inside
    assert "param_dtype=bfloat16, buffer_dtype=bfloat16" in meshard.describe(model)
    model(torch.ones(3, 2, 5)).sum().backward()
    assert model.norm.running_mean.dtype == FP32 and model.norm.running_mean.any()
    assert model.norm.weight.grad is not None


@on_fake_ranks(1)
def test_the_first_remedy_is_enough_for_what_is_cast_in_forward():
    class Casts(Positions):
        def forward(self, x):
            return x + self.angles.to(x.dtype)

    model = Positional()
    model.positions = Casts()
    assert fully_shard(model, mp_policy=POLICY)(torch.ones(2, 6)).dtype == BF16


@pytest.mark.parametrize("policy", [POLICY, TorchPolicy(param_dtype=BF16)])
@on_fake_ranks(1)
def test_without_it_buffers_stay_the_tensors_that_they_were(policy):
    model = Convolutions()
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


@spread(apply=[fully_shard, replicate], assign=[False, True])
@on_fake_ranks(1)
def test_state_dicts_hold_that_dtype_and_load_from_any(apply, assign):
    plain = seeded(Convolutions())
    plain.norm.running_mean.fill_(1 / 3)
    model = apply(seeded(Convolutions()), mp_policy=WITH_BUFFERS)
    saved = model.state_dict()
    assert saved["norm.running_mean"].dtype == BF16
    assert saved["norm.num_batches_tracked"].dtype == torch.int64
    model.load_state_dict(copy.deepcopy(plain.state_dict()), assign=assign)
    assert model.norm.running_mean.dtype == BF16
    assert_same(model.norm.running_mean, plain.norm.running_mean.to(BF16), bitwise=True)
    model(torch.ones(3, 2, 5)).sum().backward()
    for _ in range(2):  # values, rounded once, into float32
        plain.load_state_dict({"norm.running_mean": model.norm.running_mean}, strict=False)
    assert plain.norm.running_mean.dtype == FP32
    assert_same(plain.norm.running_mean, model.norm.running_mean.float(), bitwise=True)


@APPLIED
@on_fake_ranks(1)
def test_copies_keep_it(apply):
    model = apply(seeded(Convolutions()), mp_policy=WITH_BUFFERS)
    copied = copy.deepcopy(model)
    state = {name: value.clone() for name, value in seeded(Convolutions(), 1).state_dict().items()}
    copied.load_state_dict(state, assign=True)
    copied(torch.ones(3, 2, 5)).sum().backward()
    assert copied.norm.running_mean.dtype == BF16 and copied.norm.running_mean.any()
    assert not model.norm.running_mean.any()


@on_fake_ranks(1)
def test_buffers_on_meta_are_materialised_in_it():
    with torch.device("meta"):
        model = Convolutions()
    fully_shard(model, mp_policy=WITH_BUFFERS)
    assert model.norm.running_var.is_meta and model.norm.running_var.dtype == BF16
    meshard.materialize(model)
    assert model.norm.running_var.tolist() == [1.0] * 4 and model.norm.running_var.dtype == BF16
