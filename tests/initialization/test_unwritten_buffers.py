"""Buffers without values after a meta model got memory and was loaded: named, never used silently.

Rotary models have a non-persistent buffer of frequencies, which is in no checkpoint.
"""

import sys
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import meshard
from meshard.checkpoint import meta_parameters
from tests.support.models import Made, seeded
from tests.support.ranks import on_ranks


def frequencies():
    return 1 / 10 ** torch.arange(4.0)


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", frequencies(), persistent=False)

    def reset_parameters(self):
        self.inv_freq.copy_(frequencies())

    def forward(self, x):
        return x * self.inv_freq.cos()


def built():
    def forward(m, x):
        x = m.norm(m.rotary(x))
        for layer in m.layers:
            x = layer(x)
        return x

    layers = [nn.Linear(4, 4) for _ in range(2)]
    return Made(forward, rotary=Rotary(), norm=nn.BatchNorm1d(4), layers=layers)


def on_meta():
    with torch.device("meta"):
        model = built()
    for layer in model.layers:
        meshard.fully_shard(layer)
    return meshard.fully_shard(model)


def warnings_of_two_forwards(model):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
    return caught


@on_ranks(1)
@pytest.mark.parametrize(
    "how",
    [
        "load_state_dict",
        pytest.param("dcp", marks=pytest.mark.extras),  # dcp.save needs numpy
        pytest.param("dcp in place", marks=pytest.mark.extras),
    ],
)
def test_the_first_forward_names_what_no_checkpoint_has(how, tmp_path):
    model, state = on_meta(), seeded(built()).state_dict()
    model.to_empty(device="cpu")
    if how != "load_state_dict":
        dcp.save(state, checkpoint_id=tmp_path / "checkpoint")
        state = model.state_dict()
        dcp.load(state, checkpoint_id=tmp_path / "checkpoint")
    if how != "dcp in place":
        assert not any(model.load_state_dict(state))
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
    whole = seeded(built()).state_dict()

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
        model = built()
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


def receive(rotary):
    if dist.get_rank() == 0:
        rotary.inv_freq.copy_(frequencies())
    dist.broadcast(rotary.inv_freq, 0)


WRITES = {
    "reset": lambda rotary: rotary.reset_parameters(),
    "assigned": lambda rotary: setattr(rotary, "inv_freq", frequencies()),
    "registered": lambda rotary: rotary.register_buffer("inv_freq", frequencies(), False),
    "written by data": lambda rotary: rotary.inv_freq.data.copy_(frequencies()),
    "replaced by data": lambda rotary: setattr(rotary.inv_freq, "data", frequencies()),
    "received": receive,
}


@on_ranks(2)
@pytest.mark.parametrize("write", [*WRITES, "materialized", "emptied and materialized"])
def test_what_was_written_is_not_named(write):
    model = on_meta()
    if write != "materialized":
        model.to_empty(device="cpu")
    if write in WRITES:
        WRITES[write](model.rotary)
    else:
        meshard.materialize(model)
    model.load_state_dict(seeded(built()).state_dict())
    assert not warnings_of_two_forwards(model)
    assert torch.equal(model.rotary.inv_freq, frequencies())
    model = meshard.fully_shard(built())  # never emptied
    model.rotary.inv_freq.fill_(float("nan"))
    assert not warnings_of_two_forwards(model)


@on_ranks(1)
def test_a_buffer_that_assign_left_on_meta_is_named_in_the_error_of_torch():
    model = on_meta()
    model.load_state_dict(seeded(built()).state_dict(), assign=True)
    with pytest.raises(RuntimeError, match="meta") as error:
        model(torch.ones(2, 4))
    assert "buffer 'rotary.inv_freq'. No checkpoint has" in str(error.value)
    assert "materialize" in str(error.value)


@on_ranks(1)
def test_modules_may_be_emptied_and_filled_one_by_one():
    """``apply`` visits modules inside first: ``recurse=False`` must leave their buffers alone."""

    def fill(module):
        module.to_empty(device="cpu", recurse=False)
        if isinstance(module, nn.BatchNorm1d):
            module.reset_running_stats()

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    meshard.fully_shard(model).apply(fill)
    assert model[1].running_mean.tolist() == [0.0] * 4
    assert model[1].num_batches_tracked.item() == 0
