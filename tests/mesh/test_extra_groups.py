"""Process groups that meshard adds to a mesh."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate

import meshard
from meshard._mesh.mesh_info import MeshInfo, post_forward_pg, separate_reduce_scatter_pg
from tests.support import insides
from tests.support.ranks import fake_group, on_ranks


@on_ranks(2)
def test_they_wait_as_long_as_the_groups_of_the_mesh():
    patience = timedelta(seconds=77)
    own = dist.new_group(backend="gloo", timeout=patience)
    mesh_info = MeshInfo.of(DeviceMesh.from_group(own, "cpu"))
    for group in (post_forward_pg(mesh_info, 1), separate_reduce_scatter_pg(mesh_info)):
        assert group._get_backend(torch.device("cpu")).options._timeout == patience


def test_they_have_the_backend_of_the_mesh():
    with fake_group(4):
        mesh = init_device_mesh(
            "cpu",
            (2, 2),
            mesh_dim_names=("a", "b"),
            backend_override={"a": "fake", "b": "cpu:fake,meta:fake"},
        )
        layer = nn.Linear(4, 4)
        meshard.fully_shard(layer, mesh, shard_placement_fn=lambda _: Replicate())
        group = insides.units(layer)[0].group.spec.mesh_info.replicate_group
        assert group.size() == 4
        assert dist.get_backend_config(group) == "cpu:fake,meta:fake"
