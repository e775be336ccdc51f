"""Communication that runs beside compute."""

import pytest
import torch

from tests.comm.delays import (
    BLOCKS,
    COMPUTE,
    DelayedCommunicator,
    DelayedReductions,
    step_times,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("delayed", "mesh_shape"), [(DelayedCommunicator, (2,)), (DelayedReductions, (2, 2))]
)
def test_collectives_that_take_20_ms_hide_behind_20_ms_of_compute(run_ranks, delayed, mesh_shape):
    num_ranks = torch.Size(mesh_shape).numel()
    for plain, late in run_ranks(step_times, num_ranks, delayed, mesh_shape):
        assert plain >= 2 * BLOCKS * COMPUTE
        assert late <= 1.3 * plain
