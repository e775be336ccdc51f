"""Modules with units are neither pickled nor copied by ``copy.copy``; their state dicts are."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import meshard
from tests.support.models import seeded
from tests.support.ranks import on_ranks


def net():
    return seeded(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)))


def sharded(model):
    meshard.fully_shard(model[0])
    return meshard.fully_shard(model)


def mixed(model):
    """A sharded unit inside a replicated module."""
    meshard.fully_shard(model[0])
    return meshard.replicate(model)


@pytest.mark.parametrize("apply", [meshard.replicate, sharded, mixed])
@on_ranks(2)
def test_a_module_with_units_is_refused_and_its_state_dict_is_not(apply):
    model = apply(net())
    for each in (model, nn.Sequential(model)):
        with pytest.raises(
            TypeError, match=r"Sequential cannot be pickled; save its state_dict\(\)"
        ):
            pickle.dumps(each)
    with pytest.raises(TypeError, match=r"Sequential needs copy\.deepcopy, not copy\.copy"):
        copy.copy(model)
    with meshard.unsharded_params(model):
        with pytest.raises(TypeError, match="cannot be pickled"):
            torch.save(model, io.BytesIO())
        file = io.BytesIO()
        torch.save({name: each.detach().clone() for name, each in model.state_dict().items()}, file)
    file.seek(0)
    plain = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    plain.load_state_dict(torch.load(file))
    x = torch.randn(6, 3)
    assert torch.equal(plain(x), net()(x))
