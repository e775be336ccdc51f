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


@on_ranks(1)
@pytest.mark.parametrize("load", [load_state_dict, load_by_dcp, load_in_place_by_dcp])
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
def test_every_buffer_that_was_not_loaded_is_named_whatever_happens_in_between():
    whole = seeded(Model()).state_dict()

    def check_named(model, names, state=whole):
        if state is not None:
            model.load_state_dict(state, strict=False)
        (warning,) = warnings_of_two_forwards(model)
        assert f"{names} got" in str(warning.message)

    model = on_meta()
    model.to_empty(device="cpu")
    persistent = {name: value for name, value in whole.items() if name != "norm.running_var"}
    check_named(model, "'rotary.inv_freq', 'norm.running_var'", persistent)

    model = on_meta()
    model.to_empty(device="cpu")
    model.load_state_dict(whole)
    model.double().float()  # moved
    check_named(model, "'rotary.inv_freq'", None)

    with meta_parameters():
        model = Model()
    meshard.fully_shard(model)
    model.to_empty(device="cpu")  # throws values away
    check_named(model, "'rotary.inv_freq'")

    with torch.device("meta"):
        model = nn.Sequential(Rotary(), nn.Linear(4, 4))
        around = nn.Sequential(model, nn.Linear(4, 4))
    meshard.fully_shard(model)
    model.to_empty(device="cpu")
    around[1].to_empty(device="cpu")
    meshard.fully_shard(around)  # only now is there a root
    check_named(around, "'0.0.inv_freq'", None)


WRITES = {
    "reset": lambda rotary: rotary.reset_parameters(),
    "assigned": lambda rotary: setattr(rotary, "inv_freq", frequencies()),
    "registered": lambda rotary: rotary.register_buffer("inv_freq", frequencies(), False),
    "written by data": lambda rotary: rotary.inv_freq.data.copy_(frequencies()),
    "replaced by data": lambda rotary: setattr(rotary.inv_freq, "data", frequencies()),
}


@on_ranks(1)
@pytest.mark.parametrize("write", [*WRITES, "materialized", "emptied and materialized"])
def test_what_was_written_is_not_named(write):
    model = on_meta(ResetRotary)
    if write != "materialized":
        model.to_empty(device="cpu")
    if write in WRITES:
        WRITES[write](model.rotary)
    else:
        meshard.materialize(model)
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
