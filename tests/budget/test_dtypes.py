"""The dtype in which each collective travels."""

import torch
from torch.distributed.device_mesh import init_device_mesh

from meshard import CommLedger, MixedPrecisionPolicy
from tests.api.test_mixed_precision import BF16, FP16
from tests.support.models import MlpStack
from tests.support.ranks import on_fake_ranks
from tests.support.sharding import shard_blocks


@on_fake_ranks(4)
def test_each_collective_travels_in_its_dtype():
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP16)
    model = shard_blocks(MlpStack(), init_device_mesh("cpu", (2, 2)), mp_policy=policy)
    with CommLedger(model) as ledger:
        model(torch.ones(1, 6)).sum().backward()
    dtypes = {event.op: event.dtype for event in ledger.events}
    assert dtypes == {"all_gather": BF16, "reduce_scatter": FP16, "all_reduce": FP16}
