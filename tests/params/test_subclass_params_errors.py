"""Tensor subclasses with a custom all-gather: what is refused, and how."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import meshard
from tests.support.extensions import Int8OnWire, Wrapper, linear, quantised
from tests.support.ranks import on_fake_ranks, on_ranks


class OnlyBefore(Wrapper):
    def fsdp_pre_all_gather(self, mesh):
        return (self.inner,), None


class OnlyAfter(Wrapper):
    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        return None


class TwoArguments(OnlyAfter):
    def fsdp_pre_all_gather(self, mesh, outer_size):
        return (self.inner,), None


@on_fake_ranks(1)
@pytest.mark.parametrize(
    ("kind", "kwargs", "error", "text"),
    [
        (OnlyBefore, {}, ValueError, "'weight' is a OnlyBefore, .* but not fsdp_post_all_gather"),
        (OnlyAfter, {}, ValueError, "'weight' is a OnlyAfter, .* but not fsdp_pre_all_gather"),
        (TwoArguments, {}, ValueError, r"'weight' .* takes \(mesh, outer_size\); it must take"),
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
    with pytest.raises(error, match=text):
        meshard.fully_shard(layer, **kwargs)
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


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        (WrongAtFirst, RuntimeError, r"'weight' of unit '0.*returned.*\(18,\).*\(5, 3\)"),
        (WrongLater, RuntimeError, r"'weight' of unit '0.*left out of shape \(2, 2\)"),
        (NoTuple, TypeError, r"'weight' of unit '0.*got Tensor"),
        (NothingToSend, TypeError, r"'weight' of unit '0.*got \(Tensor, NoneType\)"),
        (Nothing, TypeError, r"'weight' of unit '0.*got \(\(\), NoneType\)"),
        (OtherDtypes, RuntimeError, r"unit '0.*other dtypes"),
        (Changing, RuntimeError, r"unit '0.*the same dtypes and shapes each time"),
    ],
)
def test_errors_name_the_parameter_or_unit_on_all_ranks(kind, error, text):
    model = nn.Sequential(linear(kind))
    for module in (model[0], model):
        meshard.fully_shard(module)
    if kind in (WrongLater, Changing):
        model(torch.ones(1, 3))
    with pytest.raises(error, match=text):
        model(torch.ones(1, 3))
    assert isinstance(model[0].weight, DTensor)  # left sharded


@on_ranks(2)
def test_a_plain_tensor_in_the_place_of_one_that_says_what_is_gathered():
    layer = meshard.fully_shard(linear(Int8OnWire))
    with pytest.raises(RuntimeError, match=r"'weight' .* plain tensor, without the fsdp_pre_all"):
        layer.load_state_dict(linear(torch.Tensor).state_dict(), assign=True)


@on_ranks(2)
def test_what_is_not_built_says_so():
    layer = meshard.fully_shard(linear(Int8OnWire))
    for call in (meshard.offload, lambda layer: meshard.unsharded_params(layer).__enter__()):
        with pytest.raises(NotImplementedError, match="not built yet") as caught:
            call(layer)
        assert "'weight'" in str(caught.value)
    layer(torch.ones(1, 3)).sum().backward()  # nothing was changed
