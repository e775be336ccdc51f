"""The traffic of a plan."""

from functools import partial

import pytest
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard.planning import plan
from tests.planning.test_plan import mlp_job, num_params


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

    With each gradient, replicate sends whether the parameter was used. In the second step it also
    sends the order of gradients, once.
    """
    planned = plan(partial(mlp_job, **options), world_size=8, steps=3)
    numel = num_params() + (6 if "shard" in options else 0)  # a weight per layer
    assert planned.wire_bytes == passes * 7 / 8 * 4 * numel


def test_replicas_on_nodes_of_their_own_send_only_shards_between_nodes():
    def job():
        return mlp_job(mesh=init_device_mesh("cuda", (2, 8)))

    planned = plan(job, world_size=16, ranks_per_node=8)
    between = {op: each.wire_bytes_between_nodes for op, each in planned.collectives.items()}
    shard_bytes = 4 * num_params() // 8
    assert between == {"all_gather": 0, "reduce_scatter": 0, "all_reduce": shard_bytes}
