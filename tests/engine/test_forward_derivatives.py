"""``torch.func.jvp`` through units of every kind; ``tests.peers`` has it beside the peer."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import CPUOffloadPolicy, MixedPrecisionPolicy
from tests.support.models import MlpStack, seeded
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import on_ranks

KINDS = {
    "replicated": (2,),
    "hsdp": (2, 1),
    "bfloat16": (2,),
    "offloaded": (2,),
}


def shard(kind):
    model, mesh, kwargs = seeded(MlpStack()), init_device_mesh("cpu", KINDS[kind]), {}
    if kind == "replicated":
        return meshard.replicate(model, mesh, bucket_cap_mb=1e-3)
    if kind == "bfloat16":
        kwargs["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
    if kind == "offloaded":
        kwargs["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for unit in (*model.blocks, model):
        meshard.fully_shard(unit, mesh, **kwargs)
    return model


def loss_of(model, x, tangent):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script`")  # torch's own, at its first use
        out, derivative = torch.func.jvp(model, (x,), (tangent,))
    return out.square().mean() + derivative.square().mean()


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_of_forward_derivatives(kind):
    model, plain = shard(kind), seeded(MlpStack())
    generator = torch.Generator().manual_seed(0)
    xs, tangents = torch.randn(2, 2, 3, 6, generator=generator)
    for _ in range(3):  # replicated parameters get their last buckets in the third
        loss_of(model, xs[dist.get_rank()], tangents[dist.get_rank()]).backward()
        losses = [loss_of(plain, *each) for each in zip(xs, tangents, strict=True)]
        (sum(losses) / 2).backward()
        dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
        assert_same(full_grads(model), full_grads(plain), dtype)
