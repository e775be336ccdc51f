"""fsdp_pre_all_gather and fsdp_post_all_gather set on a local tensor instance."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard

import meshard
from tests.support import parity
from tests.support.against_plain import inputs_of
from tests.support.models import seeded
from tests.support.ranks import on_fake_ranks, on_ranks, on_threads


def pre_all_gather(local, calls, mesh, outer_size, outer_stride, module, mp_policy):
    calls.append(
        ("pre", mesh.size(), tuple(outer_size), tuple(outer_stride), type(module).__name__)
    )
    return (local.to(torch.bfloat16),), None


def post_all_gather(calls, all_gather_outputs, metadata, param_dtype, *, out=None):
    (gathered,) = all_gather_outputs
    calls.append(("post", param_dtype, out is None))
    if out is not None:
        # torch's fully_shard leaves this to the method; meshard does it itself.
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(gathered[: out.shape[0]])
        return None
    unsharded = gathered.to(param_dtype)
    return unsharded, (unsharded,)


def set_methods(param):
    """Set both methods on the local tensor of ``param``; return the list of their calls."""
    local, calls = param._local_tensor, []
    local.fsdp_pre_all_gather = partial(pre_all_gather, local, calls)
    local.fsdp_post_all_gather = partial(post_all_gather, calls)
    return calls


def train(model, steps=3):
    """Return losses, gradients and parameters of each step."""
    batches = [inputs_of(0, step) for step in range(steps)]
    sgd = partial(torch.optim.SGD, lr=0.1)
    return parity.train(model, batches, sgd, loss_fn=lambda output: output.square().sum())


def sharded(fully_shard, rows=4, **kwargs):
    model = seeded(nn.Sequential(nn.Linear(6, rows), nn.Tanh(), nn.Linear(rows, 4)))
    mesh = init_device_mesh("cpu", (2,))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh, **kwargs)
    return model


@on_ranks(2)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_they_are_called_as_by_torch(reshard_after_forward):
    runs = []
    for fully_shard in (meshard.fully_shard, torch_fully_shard):
        model = sharded(fully_shard, reshard_after_forward=reshard_after_forward)
        calls = [set_methods(model[number].weight) for number in (0, 2)]
        runs.append((train(model), calls))
    (steps, calls), (peer_steps, peer_calls) = runs
    assert calls[0], "fsdp_pre_all_gather was not called"
    assert calls == peer_calls
    parity.assert_same(steps, peer_steps, bitwise=True)


@on_threads(2)
def test_they_may_be_set_after_a_step():
    model = sharded(meshard.fully_shard)
    train(model, 1)
    calls = set_methods(model[0].weight)
    train(model, 1)
    assert calls


def on_other_dim(param):
    return Shard(1) if param.shape == (4, 5) else None


@on_ranks(2)
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"mp_policy": meshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        {"shard_placement_fn": on_other_dim},
    ],
    ids=["float32", "bfloat16", "other dims"],
)
def test_the_other_parameters_of_the_unit_train_as_before(kwargs):
    runs = []
    for with_methods in (False, True):
        model = sharded(meshard.fully_shard, rows=5, **kwargs)
        if with_methods:
            set_methods(model[0].weight)
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(param.bfloat16())  # so that a gather in bfloat16 loses nothing
        runs.append(train(model, 1))
    parity.assert_same(*runs, bitwise=True)


def shard_layer(**options):
    return meshard.fully_shard(nn.Linear(6, 4), init_device_mesh("cpu", (2,)), **options)


@on_fake_ranks(2)
def test_parameters_on_other_dims_are_gathered_beside_them():
    layer = shard_layer(shard_placement_fn=lambda param: Shard(param.dim() - 1))
    set_methods(layer.bias)
    layer.unshard()
    assert layer.weight.shape == (4, 6)
    layer.reshard()
    set_methods(layer.weight)
    with pytest.raises(NotImplementedError, match="dim 0 only"):
        layer(torch.ones(2, 6))
    assert isinstance(layer.weight, DTensor)


@on_fake_ranks(2)
def test_what_cannot_be_done_is_refused():
    before = nn.Linear(6, 4)
    before.weight.fsdp_pre_all_gather = before.weight.fsdp_post_all_gather = print
    with pytest.raises(ValueError, match="after fully_shard"):
        meshard.fully_shard(before)

    one_only = shard_layer()
    one_only.weight._local_tensor.fsdp_pre_all_gather = print
    with pytest.raises(ValueError, match="fsdp_post_all_gather"):
        one_only(torch.ones(2, 6))

    offloaded = shard_layer(offload_policy=meshard.CPUOffloadPolicy(pin_memory=False))
    set_methods(offloaded.weight)
    for _ in range(2):  # and not gathered without them afterwards
        with pytest.raises(NotImplementedError, match="'weight'"):
            offloaded(torch.ones(2, 6))

    summoned = shard_layer()
    set_methods(summoned.weight)
    with (
        pytest.raises(NotImplementedError, match="unsharded_params"),
        meshard.unsharded_params(summoned),
    ):
        pass


@on_ranks(2)
def test_methods_may_go_again_but_not_in_silence():
    layer, x = shard_layer(), torch.ones(2, 6)
    calls = set_methods(layer.weight)
    layer(x)
    values = {name: torch.ones(value.shape) for name, value in layer.state_dict().items()}
    layer.load_state_dict(values)  # in place: the local tensor and its methods stay
    calls.clear()
    layer(x)
    assert calls
    with pytest.warns(UserWarning, match="set the methods again"):
        layer.to_empty(device="cpu")
    layer.load_state_dict(values)
    calls.clear()
    with torch.no_grad():
        outputs = layer(x)
    assert not calls and torch.equal(outputs, torch.full((2, 4), 7.0))

    calls = set_methods(layer.weight)
    layer(x).sum().backward()
    with pytest.warns(UserWarning, match="set the methods again"):
        copied = copy.deepcopy(layer)
    copied(x)
    del layer.weight._local_tensor.fsdp_pre_all_gather
    del layer.weight._local_tensor.fsdp_post_all_gather
    num_calls = len(calls)
    assert torch.equal(layer(x), outputs)
    assert num_calls == len(calls) > 0
