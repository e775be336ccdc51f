import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard.planning import fit, sweep


def job(replicas=1, reshard=True):
    world_size = torch.distributed.get_world_size()
    if world_size % replicas:
        raise ValueError("replicas must divide the ranks")
    mesh = init_device_mesh("cuda", (replicas, world_size // replicas))
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
    for layer in model:
        meshard.fully_shard(layer, mesh, reshard_after_forward=reshard)
    meshard.fully_shard(model, mesh)
    return lambda: model(torch.ones(1, 256)).sum().backward()


def test_what_sends_least_between_nodes_comes_first():
    rows = sweep(
        job, {"replicas": [1, 2], "reshard": [True, False]}, world_size=16, ranks_per_node=8
    )
    assert [(row.settings["replicas"], row.settings["reshard"]) for row in rows] == [
        (2, False),
        (2, True),
        (1, False),
        (1, True),
    ]


def test_what_does_not_fit_comes_after_what_fits_and_errors_come_last():
    peaks = [sweep(job, {"replicas": [n]}, world_size=16)[0].plan.peak_bytes for n in (1, 2)]
    limit = sum(peaks) // 2
    rows = sweep(job, {"replicas": [1, 3, 2]}, world_size=16, limit=limit)
    assert [row.settings["replicas"] for row in rows] == [1, 2, 3]
    assert [row.fits(limit) for row in rows] == [True, False, False]
    assert rows[-1].plan is None
    assert rows[-1].error == "ValueError: replicas must divide the ranks"


def test_the_smallest_world_and_the_cheapest_setting_that_fit():
    settings = {"reshard": [True, False]}
    limit = min(row.plan.peak_bytes for row in sweep(job, settings, world_size=4))
    smallest, cheapest = fit(job, settings, limit=limit, world_size=16)
    assert (smallest.world_size, smallest.settings) == (4, {"reshard": True})
    assert cheapest.world_size == 16
    assert fit(job, settings, limit=1000, world_size=16) == (None, None)


def test_a_setting_that_a_job_does_not_have_is_a_row_with_an_error():
    (row,) = sweep(job, {"other": [1]}, world_size=4)
    assert row.plan is None
    assert "Error" in row.error


def test_the_smallest_world_of_a_rank_is_not_larger_because_smaller_ones_lack_it():
    smallest, cheapest = fit(job, {}, limit="80GB", world_size=16, rank=5)
    assert (smallest.world_size, smallest.plan.rank) == (1, 0)
    assert (cheapest.world_size, cheapest.plan.rank) == (16, 5)


def test_nothing_fits_is_not_said_of_what_could_not_be_planned():
    with pytest.raises(RuntimeError, match=r"no setting could be planned: TypeError.*witdh"):
        fit(job, {"witdh": [64]}, limit="80GB", world_size=2)


def test_a_limit_that_is_no_size_is_refused_before_plans_are_made():
    with pytest.raises(ValueError, match="80GB"):
        sweep(lambda: pytest.fail("planned"), {}, world_size=2, limit="80 gigs")
