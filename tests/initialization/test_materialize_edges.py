"""``materialize`` with nothing to call, or with initializations that leave something out."""

import gc
import weakref

import pytest
import torch
from torch import nn

import meshard
from meshard import fully_shard, fully_shard_units, materialize, unsharded_params
from tests.support.fake import fake_group
from tests.support.parity import assert_same, full_state
from tests.support.ranks import on_ranks

SEED = 7


def meta(build):
    with torch.device("meta"):
        return build()


class Partly(nn.Module):
    def __init__(self):
        super().__init__()
        self.drawn = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.full((4,), 2.0))  # nothing resets it

    def forward(self, x):
        return self.gain * self.drawn(x)


def keeps(device):
    model = Partly()
    model.drawn.to(device)
    fully_shard(model)
    torch.manual_seed(SEED)
    materialize(model)
    return full_state(model)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_nothing_resets_keeps_its_values(run_ranks, device):
    torch.manual_seed(SEED)
    drawn = nn.Linear(4, 4)
    for state in run_ranks(keeps, 2, device):
        assert_same(state["gain"], torch.full((4,), 2.0), bitwise=True)
        assert_same(state["drawn.weight"], drawn.weight.detach(), bitwise=True)


@on_ranks(2)
def test_init_that_writes_to_shards_is_an_error():
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(2)])
    fully_shard_units(model)
    with pytest.raises(RuntimeError, match=r"init\(\(root\)\) wrote to parameters of a unit"):
        materialize(model, init=lambda m: nn.init.ones_(m[0].weight) if m is model else None)


class RunsItself(nn.Linear):
    """Looks at what it computes while it is initialised, as data-dependent schemes do."""

    def reset_parameters(self):
        super().reset_parameters()
        self.of_ones = self(torch.ones(1, 4)).detach()


def runs_while_it_is_initialised():
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    model.__class__ = RunsItself
    fully_shard(model)
    torch.manual_seed(SEED)
    materialize(model)
    return model.of_ones, model(torch.ones(1, 4)).detach()


def test_a_module_may_run_while_it_is_initialised(run_ranks):
    for before, after in run_ranks(runs_while_it_is_initialised, 2):
        assert_same(before, after, bitwise=True)


def replicated():
    torch.manual_seed(0)
    model = meshard.replicate(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    torch.manual_seed(SEED)
    materialize(model)
    with unsharded_params(model), torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.raises(ValueError, match="is replicated: every rank has ordinary parameters"):
        unsharded_params(model, rank0_only=True).__enter__()
    return full_state(model)


def test_replicated_parameters_are_drawn_and_edited_as_they_are(run_ranks):
    torch.manual_seed(SEED)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        plain[0].weight.mul_(2)
    for state in run_ranks(replicated, 2):
        assert_same(state, full_state(plain), bitwise=True)


# --- errors -----------------------------------------------------------------------------------


def refused(model, error, match, **kwargs):
    with pytest.raises(error, match=match):
        materialize(model, **kwargs)


class Forgetful(nn.Linear):
    def reset_parameters(self):
        nn.init.zeros_(self.weight)


@on_ranks(2)
def test_what_would_not_be_initialised_is_named():
    model = meta(lambda: nn.Sequential(Partly(), Partly()))
    fully_shard_units(model)
    refused(model, ValueError, r"no reset_parameters: 0 \(Partly: gain\); 1 \(Partly: gain\)\.")
    assert all(param.is_meta for param in model.parameters())
    model = meta(lambda: nn.Sequential(nn.Linear(2, 2), Forgetful(4, 4)))
    fully_shard(model[1])
    fully_shard(model)
    refused(model, RuntimeError, r"1 parameters or buffers were .* first is '1\.bias'")
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    fully_shard(model)
    refused(model[0], ValueError, r"'0\.weight' is a DTensor of no unit inside")
    model = meta(lambda: nn.Sequential(nn.Linear(2, 2)))
    model[0].register_buffer("mask", torch.empty(2, dtype=torch.int32, device="meta"))
    fully_shard(model)
    refused(model, RuntimeError, r"first is '0\.mask'")
    materialize(meta(lambda: nn.Linear(2, 2)))  # not sharded at all
    model = fully_shard(nn.Linear(2, 2))
    with unsharded_params(model):
        refused(model, RuntimeError, "inside unsharded_params, so it cannot be materialized")
    model.reset_parameters = lambda: setattr(model, "weight", nn.Parameter(torch.ones(3)))
    refused(model, RuntimeError, r"'weight' .* was replaced inside materialize .* shape \(2, 2\)")
    assert model.weight.shape == (2, 2)


def test_a_materialized_model_is_freed_without_the_garbage_collector():
    with fake_group(1):
        model = materialize(fully_shard(meta(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()))))
        gc.collect()
        gc.disable()
        try:
            materialize(model)
            ref = weakref.ref(model)
            del model
            assert ref() is None
        finally:
            gc.enable()
