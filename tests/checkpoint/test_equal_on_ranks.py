"""Ordinary tensors that ranks should hold alike: compared before a save, or kept for each rank."""

import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import meshard
from meshard.checkpoint import Checkpointer, CheckpointError
from tests.checkpoint.runs import assert_same_values, net, train, values_of
from tests.support.ranks import on_ranks


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class LocalMomentum(torch.optim.Optimizer):
    """Knows only the shards of this rank: its states are ordinary tensors."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.change(local(param), local(param.grad), self.state[param], group["lr"])

    def change(self, shard, grad, state, lr):
        momentum = state.setdefault("momentum", torch.zeros_like(shard))
        shard.sub_(momentum.mul_(0.9).add_(grad), alpha=lr)


class Blocks(LocalMomentum):
    """Its momentum is stored in eight bits, with the scale of each block of the shard."""

    def change(self, shard, grad, state, lr):
        old = state["codes"].float() * state["scales"] if state else torch.zeros(shard.numel(), 1)
        new = old * 0.9 + grad.reshape(-1, 1)
        state["scales"] = new.abs().clamp(min=1e-12) / 127
        state["codes"] = (new / state["scales"]).round().to(torch.int8)
        shard.sub_((state["codes"].float() * state["scales"]).view(shard.shape), alpha=lr)


class Scaled(torch.Tensor):
    """A tensor that is made of two others, as the states of torchao's optimizers are."""

    @staticmethod
    def __new__(cls, codes, scale, label):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale, label):
        self.codes, self.scale, self.label = codes, scale, label

    def __tensor_flatten__(self):
        return ["codes", "scale"], [self.label]

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["codes"], inner["scale"], *context)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        assert func in (torch.ops.aten.detach.default, torch.ops.aten.view.default), func
        return cls(args[0].codes, args[0].scale, args[0].label)


class ScaledMomentum(LocalMomentum):
    """Its states are DTensors over tensors that are made of others."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                shard, state, old = local(param), self.state[param], 0
                if state:
                    assert isinstance(state["momentum"], DTensor)
                    held = state["momentum"].to_local()
                    old = held.codes.float() * held.scale
                new = old * 0.9 + local(param.grad)
                scale = new.abs().max(dim=0, keepdim=True).values.clamp(min=1e-12) / 127
                made = Scaled((new / scale).round().to(torch.int8), scale, "eight bits")
                state["momentum"] = DTensor.from_local(
                    made, param.device_mesh, param.placements, run_check=False
                )
                shard.sub_(made.codes.float() * made.scale, alpha=group["lr"])


class Even(nn.Module):
    """All ranks hold as many rows."""

    def __init__(self, rows):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, rows * 4).view(rows, 4))

    def forward(self, x):
        return x @ self.weight.t()


def stepped(model, optimizer):
    model(torch.randn(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def sharded(rows=8):
    torch.manual_seed(dist.get_rank())
    return meshard.fully_shard(Even(rows))


def states_of(optimizer):
    return {
        f"{number}.{key}": local(each).clone()
        for number, state in enumerate(optimizer.state.values())
        for key, each in state.items()
    }


def assert_not_saved(checkpointer, text, *args, **kwargs):
    before = checkpointer.steps()
    for save in (checkpointer.save, lambda *a, **k: checkpointer.async_save(*a, **k).wait()):
        with pytest.raises(CheckpointError, match=text):
            save(*args, **kwargs)
    assert checkpointer.steps() == before


# --- states of optimizers --------------------------------------------------------------------


@pytest.mark.parametrize("kind", [LocalMomentum, Blocks])
@pytest.mark.parametrize("rows", [8, 512])
@on_ranks(2)
def test_a_state_of_an_optimizer_that_differs_between_ranks_is_refused_by_name(
    tmp_path, kind, rows
):
    model = sharded(rows)
    optimizer, checkpointer = kind(model.parameters()), Checkpointer(tmp_path)
    stepped(model, optimizer)
    key = "momentum" if kind is LocalMomentum else "(codes|scales)"
    text = rf"(?s)weight\.{key}\b.*per_rank="
    assert_not_saved(checkpointer, text, 1, model, optimizer)
    assert_not_saved(
        checkpointer, text.replace("weight", "second.*weight"), 1, model, second=optimizer
    )
    checkpointer.save(2, model)
    assert checkpointer.steps() == [2]


@on_ranks(2)
def test_what_async_save_refuses_in_the_background_is_raised_by_wait(tmp_path):
    model = sharded()
    optimizer, checkpointer = LocalMomentum(model.parameters()), Checkpointer(tmp_path)
    stepped(model, optimizer)
    handle = checkpointer.async_save(1, model, optimizer)
    with pytest.raises(CheckpointError, match=r"(?s)weight\.momentum.*per_rank="):
        handle.wait()
    handle = checkpointer.async_save(2, model, optimizer, per_rank=True)
    handle.wait()
    assert checkpointer.steps() == [2]


@on_ranks(2)
def test_states_of_other_shapes_on_each_rank_are_refused_by_name(tmp_path):
    model = sharded(9)
    optimizer = LocalMomentum(model.parameters())
    stepped(model, optimizer)
    assert_not_saved(
        Checkpointer(tmp_path), r"(?s)weight\.momentum.*per_rank=", 1, model, optimizer
    )


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("kind", [LocalMomentum, Blocks])
@on_ranks(2)
def test_with_per_rank_each_rank_gets_its_own_states_back_and_resumes_bit_for_bit(
    tmp_path, kind, background
):
    """Shards are uneven, and rank 1 has none of a parameter of one row."""

    def built(seed):
        torch.manual_seed(10 * seed + dist.get_rank())
        model, short = net("fully_shard", seed), meshard.fully_shard(Even(1))
        short(torch.ones(1, 4)).sum().backward()
        return model, short, kind([*model.parameters(), *short.parameters()])

    model, short, optimizer = built(0)
    train(model, optimizer, 2)
    checkpointer = Checkpointer(tmp_path)
    if background:
        checkpointer.async_save(2, model, optimizer, per_rank=True, short=short).wait()
    else:
        checkpointer.save(2, model, optimizer, per_rank=True, short=short)
    states, values = states_of(optimizer), values_of(model)
    losses = train(model, optimizer, 3)
    again, short, optimizer_again = built(1)
    loaded = checkpointer.load(again, optimizer_again, short=short)
    assert (loaded.missing, loaded.unexpected, loaded.random) == ([], [], "restored")
    assert_same_values(values_of(again), values)
    assert_same_values(states_of(optimizer_again), states)
    assert torch.equal(train(again, optimizer_again, 3), losses)
    assert_same_values(values_of(again), values_of(model))


@pytest.mark.parametrize("is_new", [True, False])
@on_ranks(2)
def test_states_that_are_made_of_other_tensors_come_back_with_per_rank(tmp_path, is_new):
    model = sharded()
    optimizer, checkpointer = ScaledMomentum(model.parameters()), Checkpointer(tmp_path)
    stepped(model, optimizer)
    text = r"(?s)weight\.momentum\.(codes|scale).*per_rank="
    assert_not_saved(checkpointer, text, 1, model, optimizer)
    checkpointer.save(1, model, optimizer, per_rank=True)
    stepped(model, optimizer)
    expected = values_of(model)
    again = sharded()
    resumed = ScaledMomentum(again.parameters())
    if not is_new:
        stepped(again, resumed)  # it has states, which are filled
    assert checkpointer.load(again, resumed).missing == []
    assert resumed.state[again.weight]["momentum"].to_local().label == "eight bits"
    stepped(again, resumed)
    assert_same_values(values_of(again), expected)


def save_scaled(folder):
    model = sharded()
    optimizer = ScaledMomentum(model.parameters())
    stepped(model, optimizer)
    Checkpointer(folder).save(1, model, optimizer, per_rank=True)


def load_scaled(folder):
    """The other placements have shards of the same shape."""
    model = meshard.fully_shard(Even(8), shard_placement_fn=lambda _: Shard(1))
    with pytest.raises(CheckpointError, match="'weight', of another part of it"):
        Checkpointer(folder).load(model, ScaledMomentum(model.parameters()))


def test_states_that_are_made_of_other_tensors_do_not_load_with_other_placements(
    run_ranks, tmp_path
):
    run_ranks(save_scaled, 2, tmp_path)
    run_ranks(load_scaled, 2, tmp_path)
    model = Even(8)
    with pytest.raises(CheckpointError, match="each of 2 ranks"):
        Checkpointer(tmp_path).load(model, LocalMomentum(model.parameters()))


def save_for_each_rank(folder):
    model = sharded()
    optimizer = LocalMomentum(model.parameters())
    stepped(model, optimizer)
    Checkpointer(folder).save(1, model, optimizer, per_rank=True)
    return values_of(model)


def test_states_of_each_rank_do_not_load_on_other_numbers_of_ranks(run_ranks, tmp_path):
    expected = run_ranks(save_for_each_rank, 2, tmp_path)[0]
    model = Even(8)
    before = values_of(model)
    with pytest.raises(CheckpointError, match=r"each of 2 ranks"):
        Checkpointer(tmp_path).load(model, LocalMomentum(model.parameters()))
    assert_same_values(values_of(model), before)
    Checkpointer(tmp_path).load(model)
    assert_same_values(values_of(model), expected)


@on_ranks(2)
def test_the_states_of_one_optimizer_may_be_refused_beside_those_of_another(tmp_path):
    model, head = sharded(), meshard.replicate(Even(8))
    first = torch.optim.AdamW(head.parameters())
    second = LocalMomentum(model.parameters())
    stepped(model, second)
    stepped(head, first)
    checkpointer, parts = Checkpointer(tmp_path), {"local": second, "trunk": model}
    assert_not_saved(checkpointer, r"(?s)local\..*momentum.*per_rank=", 1, head, first, **parts)
    checkpointer.save(1, head, first, per_rank=True, **parts)
    expected, states = values_of(head, first), states_of(second)
    stepped(head, first)
    stepped(model, second)
    checkpointer.load(head, first, **parts)
    assert_same_values(values_of(head, first), expected)
    assert_same_values(states_of(second), states)


@pytest.mark.parametrize("layout", ["replicate", "plain"])
@on_ranks(2)
def test_equal_states_of_adamw_are_saved_and_one_that_has_drifted_is_refused(tmp_path, layout):
    model = Even(300)  # its states are larger than a page
    model = meshard.replicate(model) if layout == "replicate" else model
    optimizer, checkpointer = torch.optim.AdamW(model.parameters()), Checkpointer(tmp_path)
    torch.manual_seed(7)  # the same on both ranks
    stepped(model, optimizer)
    checkpointer.save(1, model, optimizer)  # here warnings are errors
    state = optimizer.state[model.weight]
    expected = {key: local(each).clone() for key, each in state.items()}
    if dist.get_rank():
        local(state["exp_avg_sq"])[299, 3] += 1
    if not isinstance(state["exp_avg_sq"], DTensor):
        text = r"(?s)weight\.exp_avg_sq.*per_rank="
        assert_not_saved(checkpointer, text, 2, model, optimizer)
    checkpointer.load(model, optimizer)
    state = optimizer.state[model.weight]
    assert_same_values({key: local(each) for key, each in state.items()}, expected)


# --- buffers of the model --------------------------------------------------------------------


def warned(call):
    """Return what is warned on all ranks about ``per_rank``."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, [str(each.message) for each in seen])
    return [text for own in told for text in own if "per_rank" in text]


def with_statistics():
    model = meshard.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    torch.manual_seed(dist.get_rank())
    model(torch.randn(8, 4))
    return model


def buffers_of(model):
    return {name: each.clone() for name, each in model.named_buffers()}


@pytest.mark.parametrize("background", [False, True])
@on_ranks(2)
def test_statistics_that_differ_are_those_of_the_first_rank_after_one_warning(tmp_path, background):
    model, checkpointer = with_statistics(), Checkpointer(tmp_path)
    own = buffers_of(model)
    first = [own]
    dist.broadcast_object_list(first)

    def save():
        for step in (1, 2):
            if background:
                checkpointer.async_save(step, model).wait()
            else:
                checkpointer.save(step, model)

    (text,) = warned(save)
    assert re.search(r"1\.running_mean", text) and "per_rank=" in text
    assert checkpointer.steps() == [1, 2]
    for step in (1, 2):
        checkpointer.load(model, step=step)
        assert_same_values(buffers_of(model), first[0])


@on_ranks(2)
def test_a_warning_that_is_an_error_does_not_fail_a_save_of_statistics_that_differ(tmp_path):
    model, checkpointer = with_statistics(), Checkpointer(tmp_path)
    raised = ""
    try:
        checkpointer.save(1, model)  # here warnings are errors
    except UserWarning as warning:
        raised = str(warning)
    told = [None, None]
    dist.all_gather_object(told, raised)
    assert sum("per_rank" in each for each in told) == 1
    assert checkpointer.steps() == [1]
    checkpointer.load(model)


@pytest.mark.parametrize("background", [False, True])
@on_ranks(2)
def test_with_per_rank_each_rank_gets_its_own_statistics_back(tmp_path, background):
    model, checkpointer = with_statistics(), Checkpointer(tmp_path)
    own = buffers_of(model)
    if background:
        checkpointer.async_save(1, model, per_rank=True).wait()  # here warnings are errors
    else:
        checkpointer.save(1, model, per_rank=True)
    model(torch.randn(8, 4))
    loaded = checkpointer.load(model)
    assert (loaded.missing, loaded.unexpected) == ([], [])
    assert_same_values(buffers_of(model), own)


def save_equal_values(folder):
    model = sharded(9)
    model.register_buffer("table", torch.arange(6.0))
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer)
    Checkpointer(folder).save(1, model, optimizer, per_rank=True, tokens=3)
    return values_of(model, optimizer)


def test_with_per_rank_what_is_equal_or_sharded_loads_on_any_number_of_ranks(run_ranks, tmp_path):
    expected = run_ranks(save_equal_values, 2, tmp_path)[0]
    model = Even(9)
    model.register_buffer("table", torch.zeros(6))
    optimizer = torch.optim.AdamW(model.parameters())
    assert Checkpointer(tmp_path).load(model, optimizer).extra == {"tokens": 3}
    assert_same_values(values_of(model, optimizer), expected)


MiB = 2**20


@pytest.mark.parametrize("per_rank", [False, True])
@on_ranks(2)
def test_of_large_buffers_that_differ_none_is_mixed_of_several_ranks(tmp_path, per_rank):
    model, rank, checkpointer = nn.Module(), dist.get_rank(), Checkpointer(tmp_path)
    for name, size in {"a": 2 * MiB, "b": 2 * MiB, "long": 73 * MiB}.items():
        table = torch.full((73, size // 73), rank + 1, dtype=torch.uint8)
        model.register_buffer(name, table)
    warnings_of = warned(lambda: checkpointer.save(1, model, per_rank=per_rank))
    checkpointer.load(model)
    found = {name: each.unique().tolist() for name, each in model.named_buffers()}
    assert found == dict.fromkeys(found, [rank + 1] if per_rank else [1])
    assert len(warnings_of) == (0 if per_rank else 1)
