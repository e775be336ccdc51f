"""Buffers without values after a meta model got memory and was loaded: named, never used silently.

Rotary models have a non-persistent buffer of frequencies, which is in no checkpoint.
"""

import copy
import sys
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import meshard
from meshard.checkpoint import meta_parameters
from tests.support.models import seeded
from tests.support.ranks import on_ranks


def frequencies():
    return 1 / 10 ** torch.arange(4.0)


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", frequencies(), persistent=False)

    def forward(self, x):
        return x * self.inv_freq.cos()


class ResetRotary(Rotary):
    def reset_parameters(self):
        self.inv_freq.copy_(frequencies())


class Model(nn.Module):
    def __init__(self, rotary=Rotary):
        super().__init__()
        self.rotary = rotary()
        self.norm = nn.BatchNorm1d(4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        x = self.norm(self.rotary(x))
        for layer in self.layers:
            x = layer(x)
        return x


def on_meta(rotary=Rotary):
    with torch.device("meta"):
        model = Model(rotary)
    for layer in model.layers:
        meshard.fully_shard(layer)
    return meshard.fully_shard(model)


def warnings_of_two_forwards(model):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
    return caught


def load_state_dict(model, whole, folder):
    result = model.load_state_dict(whole)
    assert not result.missing_keys and not result.unexpected_keys


def load_by_dcp(model, whole, folder):
    dcp.save(whole, checkpoint_id=folder)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state)


def load_in_place_by_dcp(model, whole, folder):
    dcp.save(whole, checkpoint_id=folder)
    dcp.load(model.state_dict(), checkpoint_id=folder)


LOADS = [load_state_dict, load_by_dcp, load_in_place_by_dcp]


@on_ranks(1)
@pytest.mark.parametrize("load", LOADS)
def test_the_first_forward_names_what_no_checkpoint_has(load, tmp_path):
    model = on_meta()
    model.to_empty(device="cpu")
    load(model, seeded(Model()).state_dict(), tmp_path / "checkpoint")
    line = sys._getframe().f_lineno + 4
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.ones(2, 4))
    (warning,) = caught
    happens, remedy = str(warning.message).split("\n")
    assert "'rotary.inv_freq'" in happens and "to_empty" in happens and "norm" not in happens
    assert "materialize" in remedy and "load_pretrained" in remedy
    assert (warning.filename, warning.lineno) == (__file__, line)
    assert model.rotary.inv_freq.isnan().all()  # loud where the warning is overlooked


@on_ranks(1)
def test_persistent_buffers_that_were_not_loaded_are_named_too():
    model = on_meta()
    model.to_empty(device="cpu")
    whole = seeded(Model()).state_dict()
    del whole["norm.running_var"]
    model.load_state_dict(whole, strict=False)
    (warning,) = warnings_of_two_forwards(model)
    assert "'rotary.inv_freq', 'norm.running_var' got" in str(warning.message)


@on_ranks(1)
def test_buffers_stay_named_when_the_model_is_moved_in_between():
    model = on_meta()
    model.to_empty(device="cpu")
    model.load_state_dict(seeded(Model()).state_dict())
    model.double().float()
    (warning,) = warnings_of_two_forwards(model)
    assert "'rotary.inv_freq' got" in str(warning.message)


@on_ranks(1)
def test_values_that_to_empty_threw_away_are_missed_too():
    with meta_parameters():
        model = Model()
    meshard.fully_shard(model)
    model.to_empty(device="cpu")
    model.load_state_dict(seeded(Model()).state_dict())
    (warning,) = warnings_of_two_forwards(model)
    assert "'rotary.inv_freq' got" in str(warning.message)


@on_ranks(1)
def test_a_root_that_is_sharded_after_to_empty_knows_of_the_buffers_inside():
    with torch.device("meta"):
        model = nn.Sequential(Rotary(), nn.Linear(4, 4))
        whole = nn.Sequential(model, nn.Linear(4, 4))
    meshard.fully_shard(model)
    model.to_empty(device="cpu")
    whole[1].to_empty(device="cpu")
    meshard.fully_shard(whole)
    (warning,) = warnings_of_two_forwards(whole)
    assert "'0.0.inv_freq' got" in str(warning.message)


def by_reset(model):
    model.to_empty(device="cpu")
    model.rotary.reset_parameters()


def by_materialize(model):
    meshard.materialize(model)


def by_materialize_after_to_empty(model):
    model.to_empty(device="cpu")
    meshard.materialize(model)


def by_assignment(model):
    model.to_empty(device="cpu")
    model.rotary.inv_freq = frequencies()


def by_registration(model):
    model.to_empty(device="cpu")
    model.rotary.register_buffer("inv_freq", frequencies(), persistent=False)


def by_data(model):
    model.to_empty(device="cpu")
    model.rotary.inv_freq.data.copy_(frequencies())


def by_replaced_data(model):
    model.to_empty(device="cpu")
    model.rotary.inv_freq.data = frequencies()


WRITES = [by_reset, by_materialize, by_materialize_after_to_empty, by_assignment]
WRITES += [by_registration, by_data, by_replaced_data]


@on_ranks(1)
@pytest.mark.parametrize("write", WRITES)
def test_what_was_written_is_not_named(write):
    model = on_meta(ResetRotary)
    write(model)
    model.load_state_dict(seeded(Model()).state_dict())
    assert not warnings_of_two_forwards(model)
    assert torch.equal(model.rotary.inv_freq, frequencies())


@on_ranks(2)
def test_buffers_that_a_collective_has_filled_are_not_named():
    model = on_meta()
    model.to_empty(device="cpu")
    model.load_state_dict(seeded(Model()).state_dict())
    if torch.distributed.get_rank() == 0:
        model.rotary.inv_freq.copy_(frequencies())
    torch.distributed.broadcast(model.rotary.inv_freq, 0)
    assert not warnings_of_two_forwards(model)


@on_ranks(1)
def test_a_model_that_was_never_emptied_is_not_looked_at():
    model = meshard.fully_shard(copy.deepcopy(seeded(Model())))
    model.rotary.inv_freq.fill_(float("nan"))
    assert not warnings_of_two_forwards(model)


@on_ranks(1)
def test_a_buffer_that_assign_left_on_meta_is_named_in_the_error_of_torch():
    model = on_meta()
    model.load_state_dict(seeded(Model()).state_dict(), assign=True)
    with pytest.raises(RuntimeError, match="meta") as error:
        model(torch.ones(2, 4))
    assert "buffer 'rotary.inv_freq'. No checkpoint has" in str(error.value)
    assert "materialize" in str(error.value)
