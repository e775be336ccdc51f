"""Tensor subclasses with a custom all-gather: what is refused, and how."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import meshard
from tests.support.extensions import Int8OnWire, Wrapper, linear, quantised
from tests.support.ranks import on_ranks


def mesh_of(*shape):
    return init_device_mesh("cpu", shape)


class OnlyBefore(Wrapper):
    def fsdp_pre_all_gather(self, mesh):
        return (self.inner,), None


class OnlyAfter(Wrapper):
    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        return None


class TwoArguments(OnlyAfter):
    def fsdp_pre_all_gather(self, mesh, outer_size):
        return (self.inner,), None


@pytest.mark.parametrize(
    ("kind", "kwargs", "error", "text"),
    [
        (OnlyBefore, {}, ValueError, "'weight' is a OnlyBefore, .* but not fsdp_post_all_gather"),
        (OnlyAfter, {}, ValueError, "'weight' is a OnlyAfter, .* but not fsdp_pre_all_gather"),
        (TwoArguments, {}, ValueError, r"'weight' .* takes \(mesh, outer_size\); it must take"),
        (
            Int8OnWire,
            {"offload_policy": meshard.CPUOffloadPolicy(pin_memory=False)},
            NotImplementedError,
            "CPUOffloadPolicy for parameter 'weight'",
        ),
        (
            Int8OnWire,
            {"shard_placement_fn": lambda param: Shard(param.dim() - 1)},
            NotImplementedError,
            "'weight' is a Int8OnWire .* chose dim 1",
        ),
        (
            Int8OnWire,
            {"shard_placement_fn": lambda param: Replicate() if param.dim() == 2 else None},
            NotImplementedError,
            "'weight' is a Int8OnWire .* no axis to shard it over",
        ),
    ],
)
def test_what_fully_shard_refuses(kind, kwargs, error, text):
    layer = linear(kind)
    before = dict(layer.named_parameters())
    try:
        with pytest.raises(error, match=text):
            meshard.fully_shard(layer, **kwargs)
    finally:
        dist.destroy_process_group()
    assert type(layer) is nn.Linear and dict(layer.named_parameters()) == before


class WrongAtFirst(Int8OnWire):
    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        return all_gather_outputs[0].flatten(), all_gather_outputs


class WrongLater(Int8OnWire):
    def fsdp_post_all_gather(self, *args, out=None):
        if out is None:
            return super().fsdp_post_all_gather(*args)
        out.data = torch.zeros(2, 2)
        return None


class NoTuple(Int8OnWire):
    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        return all_gather_outputs[0]


class NothingToSend(Int8OnWire):
    def fsdp_pre_all_gather(self, mesh):
        return self.inner, None


class Nothing(Int8OnWire):
    def fsdp_pre_all_gather(self, mesh):
        return (), None


class OtherDtypes(Int8OnWire):
    def fsdp_pre_all_gather(self, mesh):
        dtype = torch.float32 if self.shape[0] == 3 else torch.float64
        return (self.inner.to(dtype),), None


class Changing(Int8OnWire):
    count = 0

    def fsdp_pre_all_gather(self, mesh):
        Changing.count += 1
        values, scale = quantised(self.inner)
        return (values, scale.double() if Changing.count > 1 else scale), None


def run_twice(kind):
    model = nn.Sequential(linear(kind))
    meshard.fully_shard(model[0], mesh_of(2))
    meshard.fully_shard(model, mesh_of(2))
    try:
        for _ in range(2):
            model(torch.ones(1, 3))
    except (RuntimeError, TypeError) as error:
        assert isinstance(model[0].weight, DTensor)  # left sharded
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        (WrongAtFirst, ["RuntimeError: ", "'weight' of unit '0", "returned", "(18,)", "(5, 3)"]),
        (WrongLater, ["RuntimeError: ", "'weight' of unit '0", "left out of shape (2, 2)"]),
        (NoTuple, ["TypeError: ", "'weight' of unit '0", "got Tensor"]),
        (NothingToSend, ["TypeError: ", "'weight' of unit '0", "got (Tensor, NoneType)"]),
        (Nothing, ["TypeError: ", "'weight' of unit '0", "got ((), NoneType)"]),
        (OtherDtypes, ["RuntimeError: ", "unit '0", "other dtypes"]),
        (Changing, ["RuntimeError: ", "unit '0", "the same dtypes and shapes each time"]),
    ],
)
def test_errors_name_the_parameter_or_unit_on_all_ranks(run_ranks, kind, texts):
    for message in run_ranks(run_twice, 2, kind):
        assert all(text in message for text in texts), message


@on_ranks(2)
def test_a_plain_tensor_in_the_place_of_one_that_says_what_is_gathered():
    layer = meshard.fully_shard(linear(Int8OnWire), mesh_of(2))
    with pytest.raises(RuntimeError, match=r"'weight' .* plain tensor, without the fsdp_pre_all"):
        layer.load_state_dict(linear(torch.Tensor).state_dict(), assign=True)


@on_ranks(2)
def test_what_is_not_built_says_so():
    layer = meshard.fully_shard(linear(Int8OnWire), mesh_of(2))
    for call in (meshard.offload, lambda layer: meshard.unsharded_params(layer).__enter__()):
        with pytest.raises(NotImplementedError, match="not built yet") as caught:
            call(layer)
        assert "'weight'" in str(caught.value)
    layer(torch.ones(1, 3)).sum().backward()  # nothing was changed
