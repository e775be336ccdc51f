"""What ranks gather and reduce has rows of a multiple of 16 bytes: NCCL is slow at others."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard

import meshard
from tests.support import insides
from tests.support.ranks import fake_group

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


class Sum(nn.Module):
    """Uses each of its parameters once."""

    def __init__(self, params):
        super().__init__()
        self.params = nn.ParameterList(params)

    def forward(self):
        return sum(param.float().sum() for param in self.params)


shapes = st.lists(st.integers(1, 9), min_size=1, max_size=2)


@given(
    params=st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=5),
    mesh_shape=st.sampled_from([(2,), (3,), (7,), (64,), (2, 3)]),
    param_dtype=st.sampled_from([None, *DTYPES[1:]]),
    reduce_dtype=st.sampled_from([None, *DTYPES[1:]]),
    dim=st.sampled_from([0, -1]),
)
def test_rows_are_of_16_bytes(params, mesh_shape, param_dtype, reduce_dtype, dim):
    with fake_group(math.prod(mesh_shape)):
        model = Sum([torch.ones(shape, dtype=dtype) for shape, dtype in params])
        meshard.fully_shard(
            model,
            init_device_mesh("cpu", mesh_shape),
            mp_policy=meshard.MixedPrecisionPolicy(param_dtype, reduce_dtype),
            shard_placement_fn=lambda param: Shard(dim % param.dim()),
        )
        with meshard.CommLedger(model) as ledger:
            model().backward()
    sent = [event for event in ledger.events if event.op in ("all_gather", "reduce_scatter")]
    assert {event.op for event in sent} == {"all_gather", "reduce_scatter"}
    assert not any(event.payload_bytes % (16 * event.group_size) for event in sent)


def qwen3_8b_layer():
    shapes = {
        "q": (4096, 4096),
        "k": (1024, 4096),
        "v": (1024, 4096),
        "o": (4096, 4096),
        "gate": (12288, 4096),
        "up": (12288, 4096),
        "down": (4096, 12288),
        "q_norm": (128,),
        "k_norm": (128,),
        "before_attention": (4096,),
        "before_mlp": (4096,),
    }
    layer = nn.Module()
    for name, shape in shapes.items():
        values = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        layer.register_parameter(name, nn.Parameter(values))
    return layer


@pytest.mark.parametrize("ranks", [64, 128, 192, 256, 512, 1024])
def test_a_layer_whose_rows_fsdp2_sends_misaligned(ranks):
    with fake_group(ranks):
        mesh = init_device_mesh("cpu", (ranks,))
        ours = meshard.fully_shard(qwen3_8b_layer(), mesh)
        theirs = torch_fully_shard(qwen3_8b_layer(), mesh=mesh)
    # A rank of FSDP2 sends one padded shard after the other.
    group = theirs._get_fsdp_state()._fsdp_param_group
    sent = sum(2 * each.padded_sharded_param_size.numel() for each in group.fsdp_params)
    (row,) = [unit.group.unit_params.layout.shard_bytes for unit in insides.own_units(ours)]
    assert sent % 16
    assert row % 16 == 0
    assert 0 < row - sent < 16
