"""The fake group: one process acts as a rank of a large mesh."""

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support.fake import fake_group


@pytest.mark.parametrize(("shape", "rank"), [((1,), 0), ((7,), 6), ((32, 8), 100)])
def test_a_rank_of_a_large_mesh_holds_its_rows(shape, rank):
    size = shape[0] * (shape[1] if len(shape) > 1 else 1)
    with fake_group(size, rank=rank):
        assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        model = fully_shard(nn.Linear(4, 16), mesh=mesh)
        rows = -(-16 // shape[-1])
        first = min(16, rows * (rank % shape[-1]))
        assert model.weight.to_local().shape[0] == min(16, first + rows) - first
    assert not dist.is_initialized()


def test_the_group_is_gone_after_an_error():
    with pytest.raises(KeyError), fake_group(4):
        raise KeyError
    assert not dist.is_initialized()
