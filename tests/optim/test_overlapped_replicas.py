"""Optimizers in backward over replicated parameters."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import meshard
from tests.optim.test_flat_optimizer import MANY
from tests.optim.test_overlapped_steps import SCHEDULES, Net, train_both
from tests.optim.test_overlapped_use import SignDescent
from tests.support.models import seeded


def make():
    """A model in many buckets."""
    return meshard.replicate(seeded(Net()), init_device_mesh("cpu", (2,)), bucket_cap_mb=0.0002)


def compare(name):
    cls, options = MANY.get(name, (SignDescent, {"lr": 0.01}))
    for schedule in SCHEDULES:
        train_both(make, cls, options, schedule=schedule)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("name", ["momentum", "adamw", "another class"])
def test_as_the_ordinary_one(run_ranks, name):
    run_ranks(compare, 2, name)


def refused():
    with pytest.raises(ValueError, match="max_unit_norm"):
        meshard.overlap_optimizer(make(), torch.optim.SGD, clip="deferred", max_norm=1.0)


def test_deferred_steps_are_refused(run_ranks):
    run_ranks(refused, 2)
