"""The private names of torch's fully_shard that public programs read: answered, or refused."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

import meshard
from tests.support import insides
from tests.support.extensions import Int8OnWire, linear
from tests.support.models import MlpStack, seeded
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import on_fake_ranks, on_threads
from tests.support.sharding import shard_blocks


def state_of(module):
    return module._get_fsdp_state()


def restored(module):
    """As DINOv3 does for its teachers."""
    state = state_of(module)
    assert state._fsdp_param_group
    info = state._fsdp_param_group.post_forward_mesh_info
    state._lazy_init()
    state._fsdp_param_group.post_forward_mesh_info = info
    return info


@pytest.mark.parametrize("chosen", [True, False, None, 2])
@on_fake_ranks(4)
def test_a_mesh_that_is_put_back_changes_nothing_but_the_default_of_a_root(chosen):
    model = nn.Sequential(meshard.fully_shard(nn.Linear(4, 4), reshard_after_forward=chosen))
    meshard.fully_shard(model, reshard_after_forward=chosen)
    for each in (model[0], copy.deepcopy(model)[0]):  # the state of a copy is its own
        info = restored(each)
        assert info is None if chosen is False else info.mesh == each.weight.device_mesh
    restored(model)
    model(torch.ones(1, 4))
    assert insides.unsharded_units(model) == (["0"] if chosen is False else [])


@on_threads(2)
def test_none_keeps_a_unit_unsharded_and_gradients_are_right():
    model, plain = shard_blocks(seeded(MlpStack())), seeded(MlpStack())
    state = state_of(model.blocks[0])
    info, state._fsdp_param_group.post_forward_mesh_info = state.post_forward_mesh_info, None
    assert state.post_forward_mesh_info is None and not state._reshard_after_forward
    loss = model(torch.ones(2, 6)).sum()
    assert "blocks.0" in insides.unsharded_units(model)
    loss.backward()
    plain(torch.ones(2, 6)).sum().backward()
    assert_same(full_grads(model), full_grads(plain))
    state._fsdp_param_group.post_forward_mesh_info = info
    assert state._fsdp_param_group._reshard_after_forward
    model(torch.ones(2, 6))
    assert "blocks.0" not in insides.unsharded_units(model)


class Listening(Int8OnWire):
    """Reads what the subclasses of TransformerEngine read."""

    seen = []  # noqa: RUF012  # of all instances, which are made anew

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        group = module._get_fsdp_state()._fsdp_param_group
        self.seen.append((group._reshard_after_forward, group._training_state))
        return super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)


@pytest.mark.parametrize("is_root", [True, False])
@on_fake_ranks(2)
def test_a_subclass_reads_the_state_of_the_step_before_it_is_gathered(is_root):
    Listening.seen.clear()
    layer = meshard.fully_shard(linear(Listening))
    model = layer if is_root else meshard.fully_shard(nn.Sequential(layer))
    model(torch.ones(1, layer.in_features)).sum().backward()
    states = [TrainingState.FORWARD] + [TrainingState.PRE_BACKWARD] * (not is_root)
    assert Listening.seen == [(not is_root, state) for state in states]
    layer.unshard()
    assert Listening.seen[-1] == (not is_root, TrainingState.IDLE)


@on_fake_ranks(2)
def test_the_stream_of_gathers_may_be_entered():
    layer = meshard.fully_shard(nn.Linear(4, 4))
    with torch.cpu.stream(state_of(layer)._comm_ctx.all_gather_stream):
        pass


@on_fake_ranks(2)
def test_all_other_names_say_what_to_call_instead():
    state = state_of(meshard.fully_shard(nn.Linear(4, 4)))
    for read in ("fsdp_params", "mesh_info", "_device"):
        assert not hasattr(state, read)
        with pytest.raises(AttributeError, match=rf"no {read!r}, .* public methods .* reshard\(\)"):
            getattr(state._fsdp_param_group, read)
        with pytest.raises(AttributeError, match=rf"no {read!r}, .* public methods"):
            setattr(state._fsdp_param_group, read, None)
