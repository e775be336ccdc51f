"""Buffers without values, after a meta model got memory and was loaded, are NaN.

Rotary models have a non-persistent buffer of frequencies, which is in no checkpoint.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshard
from tests.support.models import Made, seeded
from tests.support.ranks import on_ranks


def frequencies():
    return 1 / 10 ** torch.arange(4.0)


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", frequencies(), persistent=False)
        self.register_buffer("turns", torch.polar(frequencies(), frequencies()), persistent=False)

    def reset_parameters(self):
        self.inv_freq.copy_(frequencies())
        self.turns.copy_(torch.polar(frequencies(), frequencies()))

    def forward(self, x):
        return x * self.inv_freq.cos() * self.turns.abs()


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
    for layer in (*model.layers, model.rotary):
        meshard.fully_shard(layer)
    return meshard.fully_shard(model)


def loss_of(model):
    return model(torch.arange(8.0).view(2, 4)).square().sum()


@on_ranks(1)
def test_what_no_checkpoint_has_makes_the_first_loss_nan():
    model, state = on_meta(), seeded(built()).state_dict()
    model.to_empty(device="cpu")
    assert not any(model.load_state_dict(state))
    rotary = model.rotary
    assert rotary.inv_freq.isnan().all() and rotary.turns.isnan().all()
    assert not model.norm.running_mean.isnan().any()
    assert loss_of(model).isnan()


@on_ranks(1)
def test_a_persistent_buffer_that_the_file_lacks_is_nan_too():
    model, state = on_meta(), seeded(built()).state_dict()
    del state["norm.running_var"]
    model.to_empty(device="cpu")
    model.load_state_dict(state, strict=False)
    model.rotary.reset_parameters()
    assert model.norm.running_var.isnan().all()
    assert loss_of(model.eval()).isnan()


def receive(rotary):
    if dist.get_rank() == 0:
        rotary.reset_parameters()
    for buffer in rotary.buffers():
        dist.broadcast(torch.view_as_real(buffer) if buffer.is_complex() else buffer, 0)


WRITES = {
    "reset": lambda rotary: rotary.reset_parameters(),
    "assigned": lambda rotary: vars(rotary)["_buffers"].update(Rotary()._buffers),
    "received": receive,
}


@on_ranks(2)
@pytest.mark.parametrize("write", [*WRITES, "materialized", "emptied and materialized"])
def test_what_was_written_stays(write):
    model, plain = on_meta(), seeded(built())
    if write != "materialized":
        model.to_empty(device="cpu")
    if write in WRITES:
        WRITES[write](model.rotary)
    else:
        meshard.materialize(model)
    model.load_state_dict(plain.state_dict())
    assert torch.equal(model.rotary.inv_freq, frequencies())
    assert torch.equal(loss_of(model), loss_of(plain))
    model.double().float()  # moved: values stay
    assert torch.equal(model.rotary.inv_freq, frequencies())


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
