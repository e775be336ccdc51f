"""Tensor subclasses with a custom all-gather: the contract of their methods, and memory."""

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import meshard
from tests.peers.both import mesh_of
from tests.support.extensions import (
    Bfloat16Whole,
    Int8OnWire,
    WholeBfloat16,
    Wrapper,
    linear,
    quantised,
    with_matrices_as,
)
from tests.support.ranks import on_fake_ranks, on_ranks


class Listening(Wrapper):
    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        Listening.told = (mesh.shape, mesh.mesh_dim_names, outer_size, outer_stride)
        Listening.mesh, Listening.module, Listening.mp_policy = mesh, module, mp_policy
        return (self.inner, torch.tensor(7.0)), "metadata"

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        whole, sevens = all_gather_outputs
        Listening.given = (metadata, param_dtype, sevens.tolist(), whole.shape)
        if out is not None:
            return None
        return whole, (whole,)


class ListeningToMesh(Wrapper):
    """Of the short signature."""

    def fsdp_pre_all_gather(self, mesh):
        ListeningToMesh.told = (mesh.shape, mesh.mesh_dim_names)
        return (self.inner,), None

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        return None if out is not None else (all_gather_outputs[0], all_gather_outputs)


@on_ranks(4)
def test_both_signatures_are_told_of_the_shard_axis():
    policy = meshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    mesh = mesh_of(2, 2)  # one for both: torch's caches mix equal meshes up, and their groups
    layer = meshard.fully_shard(linear(Listening), mesh, mp_policy=policy)
    layer.unshard()
    assert Listening.module is layer and Listening.mp_policy is policy
    # The extension has left its parameter in float32.
    assert layer.weight.dtype == torch.float32 and layer.bias.dtype == torch.bfloat16
    layer.reshard()
    short = meshard.fully_shard(linear(ListeningToMesh, rows=4), mesh)
    short.unshard()
    assert short.weight.shape == (4, 3)
    assert Listening.told == ((2,), ("shard",), (5, 3), (3, 1))
    assert Listening.given == ("metadata", torch.bfloat16, [7.0, 7.0], (6, 3))
    assert ListeningToMesh.told == ((2,), ("shard",))


@on_ranks(4)
def test_a_mesh_without_names_has_a_shard_axis_too():
    layer = meshard.fully_shard(linear(Listening), init_device_mesh("cpu", (2, 2)))
    layer.unshard()
    first = dist.get_rank() // 2 * 2
    assert dist.get_process_group_ranks(Listening.mesh.get_group()) == [first, first + 1]


def _bytes_of(tensor):
    return tensor.untyped_storage().nbytes()


class Watched(Int8OnWire):
    def fsdp_post_all_gather(self, all_gather_outputs, *args, out=None):
        Watched.outputs = all_gather_outputs
        return super().fsdp_post_all_gather(all_gather_outputs, *args, out=out)


@pytest.mark.parametrize(
    ("kind", "whole_kind", "num_bytes"),
    [(Bfloat16Whole, WholeBfloat16, 6 * 3 * 2), (Watched, nn.Parameter, 6 * 3 * 4)],
)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@on_ranks(2)
def test_memory_is_given_back(reshard_after_forward, kind, whole_kind, num_bytes):
    def bytes_of(weight):
        return _bytes_of(weight.inner if kind is Bfloat16Whole else weight)

    def assert_no_outputs():
        """What nothing refers to any more is freed while the parameter is whole."""
        assert kind is not Watched or {_bytes_of(output) for output in Watched.outputs} == {0}

    layer, seen = linear(kind), []
    meshard.fully_shard(layer, mesh_of(2), reshard_after_forward=reshard_after_forward)
    handle = layer.register_forward_hook(lambda *_: seen.append(layer.weight), prepend=True)
    for _ in range(2):
        loss = layer(torch.ones(2, 3)).sum()
        whole = seen.pop()
        assert type(whole) is whole_kind
        assert bytes_of(whole) == (0 if reshard_after_forward else num_bytes)
        loss.backward()
        assert bytes_of(whole) == 0
    handle.remove()
    assert isinstance(layer.weight, DTensor)
    assert_no_outputs()
    layer.unshard()
    assert_no_outputs()
    assert bytes_of(layer.weight) == num_bytes
    layer.reshard()


class Releasing(Bfloat16Whole):
    """Stays a subclass when whole, over memory of its own, and says whether outputs may go."""

    answer: object = True

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self):
        return self.answer

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        Releasing.outputs = all_gather_outputs
        if out is not None:
            out.inner.copy_(all_gather_outputs[0][: out.shape[0]])
            return None
        own = all_gather_outputs[0].clone()
        return WholeBfloat16(own, param_dtype), (own,)


@pytest.mark.parametrize("answer", [True, False])
@on_fake_ranks(1)
def test_a_class_may_say_whether_outputs_are_freed_early(monkeypatch, answer):
    monkeypatch.setattr(Releasing, "answer", answer)
    layer = meshard.fully_shard(linear(Releasing), mesh_of(1))
    for _ in range(2):
        layer.unshard()
        assert (_bytes_of(Releasing.outputs[0]) == 0) is answer
        assert torch.equal(layer.weight.inner[:, 0], 3.0 * torch.arange(5) - 4)
        layer.reshard()
        assert _bytes_of(Releasing.outputs[0]) == 0


@on_fake_ranks(1)
def test_an_answer_must_be_a_bool(monkeypatch):
    monkeypatch.setattr(Releasing, "answer", None)
    layer = meshard.fully_shard(linear(Releasing), mesh_of(1))
    with pytest.raises(TypeError, match=r"fsdp_should_release_all_gather_outputs.* 'weight'"):
        layer.unshard()


class Telling(Int8OnWire):
    def fsdp_pre_all_gather(self, *args):
        metadata = {torch.ones(8)}
        Telling.told = weakref.ref(next(iter(metadata)))
        return quantised(self.inner), metadata

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, *args, out=None):
        assert any(each is Telling.told() for each in metadata)
        return super().fsdp_post_all_gather(all_gather_outputs, None, *args, out=out)


# Rows that are gathered again among neighbours are filled in with what was told of them.
@pytest.mark.parametrize("reshard_after_forward", [True, 2])
@on_ranks(4)
def test_metadata_is_that_of_the_last_gather(reshard_after_forward):
    layer = linear(Telling)
    meshard.fully_shard(layer, mesh_of(4), reshard_after_forward=reshard_after_forward)
    seen = []
    for _ in range(2):
        layer(torch.ones(2, 3)).sum().backward()
        seen.append(Telling.told)
    assert [ref() is not None for ref in seen] == [False, True]


@on_ranks(2)
def test_a_deleted_model_goes_without_the_garbage_collector():
    layer = meshard.fully_shard(linear(Bfloat16Whole), mesh_of(2))
    layer(torch.ones(2, 3)).sum().backward()
    refs = [weakref.ref(layer), weakref.ref(layer.weight)]
    gc.disable()
    try:
        del layer
        assert [ref() is None for ref in refs] == [True, True]
    finally:
        gc.enable()


each_kind = pytest.mark.parametrize("kind", [Int8OnWire, Bfloat16Whole])


@each_kind
@on_ranks(2)
def test_frozen_weights_and_a_first_run_under_inference_mode(kind):
    layer = linear(kind)
    layer.weight.requires_grad_(False)
    meshard.fully_shard(layer, mesh_of(2), reshard_after_forward=True)
    with torch.inference_mode():
        first = layer(torch.ones(2, 3)).clone()
    x = torch.ones(2, 3, requires_grad=True)
    second = layer(x)
    second.sum().backward()
    assert torch.equal(first, second)
    assert layer.weight.grad is None
    assert torch.equal(layer.bias.grad.full_tensor(), torch.full((5,), 2.0))
    layer.weight.requires_grad_(True)
    layer(x).sum().backward()
    assert torch.equal(layer.weight.grad.full_tensor(), torch.full((5, 3), 2.0))
    weight = kind.rounded(nn.Parameter(torch.arange(15).view(5, 3) - 4.0))
    assert torch.equal(x.grad, 2 * weight.sum(0).expand(2, 3))


@each_kind
@on_ranks(2)
@torch.no_grad()  # a forward with a graph leaves modules unsharded
def test_copies_and_state_dicts(kind):
    layer, x = meshard.fully_shard(linear(kind), mesh_of(2)), torch.ones(2, 3)
    with torch.enable_grad():
        layer(x).sum().backward()
    copied = copy.deepcopy(layer)
    assert type(copied.weight.to_local()) is kind
    inside = {}
    hook = layer.register_forward_pre_hook(lambda *_: inside.update(layer.state_dict()))
    layer(x)
    hook.remove()
    assert all(map(torch.equal, inside.values(), layer.state_dict().values()))
    assert torch.equal(copied(x), layer(x))
    state = copy.deepcopy(layer.state_dict())
    assert list(state) == ["weight", "bias"] and type(state["weight"].to_local()) is kind
    for param in layer.parameters():
        param.detach().to_local().add_(1.0)
    layer.reshard()
    assert not torch.equal(layer(x), copied(x))
    layer.load_state_dict(state)
    layer.reshard()
    assert torch.equal(layer(x), copied(x))
    plain = linear(torch.Tensor).state_dict()
    for given in (linear(kind).state_dict(), {name: v.float() for name, v in plain.items()}):
        for param in layer.parameters():
            param.detach().to_local().zero_()
        layer.load_state_dict(given)
        layer.reshard()
        assert torch.equal(layer(x), copied(x))
    for given in (state, linear(kind).state_dict()):
        layer.load_state_dict(given, assign=True)
        assert torch.equal(layer(x), copied(x))
    layer.weight = nn.Parameter(linear(kind).weight.detach())
    assert torch.equal(layer(x), copied(x))
    assert type(layer.weight.to_local()) is kind
    layer.double()
    assert layer(x.double()).dtype == torch.float64


@each_kind
@pytest.mark.parametrize("how", ["to_empty", "materialize"])
@on_ranks(2)
def test_a_model_may_begin_on_the_meta_device(how, kind):
    with torch.device("meta"):
        layer = with_matrices_as(nn.Linear(3, 5, bias=False), kind)
    meshard.fully_shard(layer, mesh_of(2))
    if how == "to_empty":
        with pytest.raises(RuntimeError, match=r"'weight' of unit .* is still on the meta device"):
            layer(torch.ones(2, 3))
        layer.to_empty(device="cpu")
    else:
        meshard.materialize(layer)
    assert type(layer.weight.to_local()) is kind
    layer.load_state_dict({"weight": linear(kind).weight.detach()})
    layer.reshard()
    loss = layer(torch.ones(2, 3)).sum()
    loss.backward()
    assert loss.item() == 2 * (torch.arange(15).sum() - 60)
    assert torch.equal(layer.weight.grad.full_tensor(), torch.full((5, 3), 2.0))
