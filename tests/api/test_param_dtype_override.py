"""``MixedPrecisionPolicy(param_dtype_override_fn=...)``: parameters that keep their dtype."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import CommLedger, MixedPrecisionPolicy
from tests.support.extensions import Wrapper, linear
from tests.support.models import Made, Ones
from tests.support.parity import full_grads
from tests.support.ranks import on_ranks, on_threads
from tests.support.spread import spread

BF16, FP32 = torch.bfloat16, torch.float32
POLICIES = [MixedPrecisionPolicy]
if hasattr(torch_fsdp.MixedPrecisionPolicy(), "param_dtype_override_fn"):  # since torch 2.15
    POLICIES.append(torch_fsdp.MixedPrecisionPolicy)


def net():
    """A matrix in the dtype of the policy, and a norm that keeps its own."""

    def forward(module, x):
        module.dtypes = [param.dtype for param in module.parameters()]
        hidden = module.linear(x)
        return hidden.sum() + module.norm(hidden.float()).sum()

    model = Made(forward, linear=nn.Linear(4, 4, bias=False), norm=nn.LayerNorm(4))
    nn.init.ones_(model.linear.weight)
    return model


def keep_vectors(param):
    return param.dtype if param.dim() == 1 else None


def policy(fn=keep_vectors, **kwargs):
    return MixedPrecisionPolicy(param_dtype=BF16, param_dtype_override_fn=fn, **kwargs)


@pytest.mark.parametrize(
    ("apply", "mesh_shape"),
    [(meshard.fully_shard, (2,)), (meshard.fully_shard, (2, 1)), (meshard.replicate, (2,))],
)
@on_threads(2)
def test_each_computes_in_its_dtype_and_gradients_are_sent_in_the_widest(apply, mesh_shape):
    model = apply(net(), init_device_mesh("cpu", mesh_shape), mp_policy=policy())
    with CommLedger(model) as ledger:
        model(torch.full((2, 4), 1.0 + dist.get_rank())).backward()
    assert model.dtypes == [BF16, FP32, FP32]
    assert all(param.dtype == param.grad.dtype == FP32 for param in model.parameters())
    assert {each.dtype for each in ledger.events if each.op != "all_gather"} == {FP32}
    grads = full_grads(model)
    assert grads["norm.bias"].tolist() == [2.0] * 4  # of two rows, on each rank
    assert grads["linear.weight"].tolist() == [[3.0] * 4] * 4  # the mean of 2 * 1 and 2 * 2


@on_ranks(1)
def test_it_is_called_once_per_parameter_and_not_in_copies():
    called = []

    def fn(param):
        called.append(param)
        return param.dtype

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    params = list(model.parameters())
    meshard.fully_shard(model, mp_policy=policy(fn, cast_forward_inputs=False))
    copied = copy.deepcopy(model)
    for each in (model, copied):
        assert each(torch.ones(1, 2)).dtype == FP32
        each.double()
        assert each(torch.ones(1, 2).double()).dtype == torch.float64  # in its own dtype still
    assert [id(param) for param in called] == [id(param) for param in params]


@spread(
    apply=[meshard.fully_shard, meshard.replicate],
    returned=[torch.float16, 3, "bfloat16", torch.ones(2)],
)
@on_ranks(1)
def test_anything_else_is_refused_and_changes_nothing(apply, returned):
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"param_dtype_override_fn returned .* 'weight'"):
        apply(layer, mp_policy=policy(lambda _: returned))
    assert type(layer) is nn.Linear and type(layer.weight) is nn.Parameter
    # param_dtype itself, and integers
    layer.steps = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
    apply(layer, mp_policy=policy(lambda _: BF16))
    assert layer(torch.ones(1, 2)).dtype == BF16


class Asked(Wrapper):
    """Keeps the policy that it was given."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        Asked.policy = mp_policy
        return (self.inner,), None

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        Asked.param_dtype = param_dtype
        if out is not None:
            return None
        whole = all_gather_outputs[0].to(param_dtype)
        return whole, (whole,)


@pytest.mark.parametrize(("chosen", "expected"), [(None, BF16), (FP32, FP32)])
@on_ranks(1)
def test_tensor_subclasses_are_told_their_own_dtype(chosen, expected):
    layer = linear(Asked)
    meshard.fully_shard(layer, mp_policy=policy(lambda _: chosen))
    layer.unshard()
    assert layer.weight.dtype == Asked.param_dtype == Asked.policy.param_dtype == expected
    assert Asked.policy.param_dtype_override_fn is None


@pytest.mark.parametrize("cls", POLICIES)
@on_ranks(1)
def test_the_table_says_how_many_keep_theirs(cls):
    theirs = cls(param_dtype=BF16, param_dtype_override_fn=keep_vectors)
    model = meshard.fully_shard(net(), mp_policy=theirs)
    assert "param_dtype=bfloat16 (2 keep their own)" in meshard.describe(model)
    model(torch.ones(1, 4))
    assert model.dtypes == [BF16, FP32, FP32]
    alone = meshard.fully_shard(Ones(), mp_policy=theirs)
    assert "param_dtype" not in meshard.describe(alone)
