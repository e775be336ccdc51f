"""Private names of torch's fully_shard that public programs read and set."""

import copy
from typing import ClassVar

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor

import meshard
from tests.support.extensions import Int8OnWire, linear
from tests.support.models import MlpStack, seeded
from tests.support.parity import assert_same
from tests.support.ranks import on_fake_ranks, on_threads
from tests.support.sharding import shard_blocks


def states_of(model):
    units = [each for each in model.modules() if isinstance(each, meshard.FSDPModule)]
    return [unit._get_fsdp_state() for unit in units]


@on_threads(2)
def test_teachers_of_dinov3_are_resharded_after_every_forward():
    """As it prepares models that never run a backward."""
    plain = seeded(MlpStack())
    model = shard_blocks(copy.deepcopy(plain), reshard_after_forward=True)
    for state in states_of(model):
        if not state._fsdp_param_group:
            continue
        mesh_info = state._fsdp_param_group.post_forward_mesh_info
        state._lazy_init()
        state._fsdp_param_group.post_forward_mesh_info = mesh_info
    with torch.no_grad():
        assert_same(model(torch.ones(2, 6)), plain(torch.ones(2, 6)), bitwise=True)
    assert all(isinstance(param, DTensor) for param in model.parameters())


@on_fake_ranks(1)
def test_post_forward_mesh_info_is_what_a_unit_is_resharded_to():
    model = shard_blocks(MlpStack(), reshard_after_forward=True)
    group = model.blocks[0]._get_fsdp_state()._fsdp_param_group
    assert group.post_forward_mesh_info is not None
    for mesh_info, is_sharded in ((None, False), (group.post_forward_mesh_info, True)):
        group.post_forward_mesh_info = mesh_info
        out = model(torch.ones(2, 6))
        assert isinstance(model.blocks[0].up.weight, DTensor) is is_sharded
        out.sum().backward()


class AsksWhy(Int8OnWire):
    """Reads what TransformerEngine does to send columns in backward, and rows in forward."""

    seen: ClassVar = []

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        group = module._get_fsdp_state()._fsdp_param_group
        self.seen.append((group._reshard_after_forward, group._training_state))
        return super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)


@pytest.mark.parametrize("reshard", [True, False])
@on_fake_ranks(1)
def test_a_custom_gather_sees_whether_it_is_of_a_forward_or_of_a_backward(reshard):
    model = torch.nn.Sequential(linear(AsksWhy), torch.nn.Linear(5, 1))
    meshard.fully_shard(model[0], reshard_after_forward=reshard)
    meshard.fully_shard(model)
    AsksWhy.seen.clear()
    model(torch.ones(1, 3)).sum().backward()
    moments = [TrainingState.FORWARD, *([TrainingState.PRE_BACKWARD] if reshard else [])]
    assert AsksWhy.seen == [(reshard, moment) for moment in moments]


@on_fake_ranks(1)
def test_xtuner_offloads_activations_on_the_stream_of_gathers():
    model = shard_blocks(MlpStack())
    model(torch.ones(2, 6)).sum().backward()
    streams = {state._comm_ctx.all_gather_stream for state in states_of(model)}
    assert len(streams) == 1


@pytest.mark.parametrize("name", ["_sharded_state", "fsdp_params", "_to_unsharded"])
@on_fake_ranks(1)
def test_other_private_names_raise_an_error_that_gives_a_public_call(name):
    group = shard_blocks(MlpStack())._get_fsdp_state()._fsdp_param_group
    assert not hasattr(group, name)
    with pytest.raises(AttributeError, match=rf"{name}(.|\n)*\w\(.*\)"):
        getattr(group, name)
