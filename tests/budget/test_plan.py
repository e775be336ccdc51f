"""The traffic of a plan."""

from functools import partial

import pytest
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard.planning import plan
from tests.planning.test_plan import mlp_job, num_params

NUM_UNITS = 6


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ({"reshard_after_forward": True}, 3),
        ({"reshard_after_forward": False}, 2),
        ({"shard": meshard.replicate}, 2),
    ],
)
def test_traffic_is_that_of_the_known_formulas(options, passes):
    """Each pass sends (S - 1) / S of the parameters: 2.625 P, 1.750 P and 1.750 P on 8 ranks.

    With each gradient a number is sent, which tells whether the parameter was used: by a sharded
    unit of one or two weights 8 numbers to each rank, as rows are multiples of 16 bytes in
    bfloat16. In the second step replicate also sends the order of gradients, once.
    """
    planned = plan(partial(mlp_job, **options), world_size=8, steps=3)
    if "shard" in options:
        numel = passes * (num_params() + 6)  # a weight per layer
    else:
        numel = passes * num_params() + 8 * 8 * NUM_UNITS
    assert planned.wire_bytes == 7 / 8 * 4 * numel


def test_replicas_on_nodes_of_their_own_send_only_shards_between_nodes():
    def job():
        return mlp_job(mesh=init_device_mesh("cuda", (2, 8)))

    planned = plan(job, world_size=16, ranks_per_node=8)
    between = {op: each.wire_bytes_between_nodes for op, each in planned.collectives.items()}
    shard_bytes = 4 * (num_params() // 8 + 8 * NUM_UNITS)  # with counts: see above
    assert between == {"all_gather": 0, "reduce_scatter": 0, "all_reduce": shard_bytes}
