"""The explanation of torch's error about shards beside ordinary tensors."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional

import meshard
from tests.support.against_plain import check_gradients, inputs_of, sharded_and_plain
from tests.support.models import Made
from tests.support.ranks import on_fake_ranks, on_ranks, on_threads

REMEDIES = [
    "Call the module that fully_shard was applied to",
    "apply fully_shard to the parent instead",
    "unshard_on_access=True",
    "meshard.register_fsdp_forward_method(module, name)",
    "with meshard.unsharded_params(module):",
    "to_local() or full_tensor()",
]
TORCH_SAYS = r"got mixed torch\.Tensor and DTensor"


def text_of(call, *args):
    with pytest.raises(RuntimeError, match=TORCH_SAYS) as caught:
        call(*args)
    return str(caught.value)


def assert_explained(text, *parts):
    assert "got mixed torch.Tensor and DTensor" in text.splitlines()[0]
    for part in parts:
        assert part in text, f"{part!r} is not in {text!r}"
    for remedy in REMEDIES:
        assert text.count(remedy) == 1


@on_fake_ranks(2)
def test_an_attention_whose_out_proj_is_a_unit_says_what_helps():
    attention, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.ones(1, 3, 8)
    meshard.fully_shard(attention.out_proj)
    meshard.fully_shard(attention)
    assert_explained(text_of(attention, x, x, x), "Units that are sharded now: 'out_proj'.")
    with torch.no_grad():  # torch's fast path is one operator
        assert_explained(text_of(attention.eval(), x, x, x), "sharded now: 'out_proj'.")


def root(how):
    """Return a module that does ``how`` with the weight of a layer that is a unit of its own."""
    layers = [nn.Linear(4, 4), nn.Linear(4, 4, bias=False)]
    for layer in layers:
        meshard.fully_shard(layer)
    return meshard.fully_shard(Made(how, layers=layers))


def by_local_name(model, x):
    last = model.layers[1].weight
    for _ in range(2):
        x = torch.tanh(x)
    return functional.linear(x, last)


def by_module(model, x):
    layer = model.layers[1]
    return x @ layer.weight.t()


@pytest.mark.parametrize("how", [by_local_name, by_module])
@on_fake_ranks(1)
def test_the_units_that_are_sharded_are_named_and_what_helps(how):
    assert_explained(text_of(root(how), torch.ones(4, 4)), "now: 'layers.0', 'layers.1'.")


@on_fake_ranks(1)
def test_units_around_add_nothing_to_the_text():
    model = meshard.fully_shard(nn.Sequential(root(by_module)))
    assert_explained(text_of(model, torch.ones(4, 4)), "now: '0.layers.0', '0.layers.1'.")


@on_ranks(2)
def test_an_input_that_is_a_dtensor_is_explained():
    world = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for each in (*model, model):
        meshard.fully_shard(each, world)
    given = DTensor.from_local(torch.ones(2, 4), world, [Replicate()])
    assert_explained(text_of(model, given))


def gives_weight():
    """Return a module that gives the weight of a unit, which has run before, to another unit."""
    takes = Made(lambda m, x, weight: x @ weight + m.bias, bias=nn.Parameter(torch.empty(4)))
    return Made(lambda m, x: m.last(m.first(x), m.first.weight), first=nn.Linear(4, 4), last=takes)


@pytest.mark.parametrize("option", ["reshard_after_forward", "unshard_on_access"])
@on_threads(2)
def test_the_weight_of_another_unit_is_an_input_like_any_other_while_it_is_unsharded(option):
    model, plain = sharded_and_plain(
        gives_weight(), ("first", "last"), **{option: option == "unshard_on_access"}
    )
    check_gradients(
        model, plain, lambda each, rank: each(inputs_of(rank, shape=(3, 4))).square().mean()
    )


@on_threads(2)
def test_units_of_tensor_parallelism_may_take_dtensors():
    world = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = Made(  # takes DTensors, as its parameters are, and reads an ordinary one
        lambda m, x: x.to_local() @ m.inner.weight, cut=nn.Linear(4, 4), inner=nn.Linear(4, 4)
    )
    parallelize_module(model, world["tp"], {"cut": ColwiseParallel()})
    meshard.fully_shard(model.inner, world["dp"])
    meshard.fully_shard(model, world["dp"])
    given = DTensor.from_local(torch.ones(2, 4), world["tp"], [Replicate()])
    assert_explained(text_of(model, given), "sharded now: 'inner'.")


@on_fake_ranks(1)
def test_other_errors_are_left_alone():
    layer = nn.Linear(4, 4)
    model = meshard.fully_shard(Made(lambda m, x: x @ torch.ones(3, 3), layer=layer))
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(1, 4))
    assert "meshard" not in str(caught.value)


OUTSIDE = """
import sys, torch, meshard
from torch import nn
from torch.nn import functional

model = nn.Sequential(meshard.fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4))
meshard.fully_shard(model)
hidden = model(torch.ones(2, 4)).detach()
model.reshard()
{call}
"""


@pytest.mark.parametrize(
    "call",
    ["functional.linear(hidden, model[1].weight)", "model[1](hidden)", "model[0].forward(hidden)"],
)
def test_an_error_outside_of_the_model_that_ends_the_program_is_explained(call):
    program = [sys.executable, "-c", OUTSIDE.format(call=call)]
    text = subprocess.run(program, capture_output=True, text=True, timeout=60).stderr
    assert_explained(text[text.index("RuntimeError") :])


def test_other_errors_that_end_the_program_keep_their_text():
    program = [sys.executable, "-c", OUTSIDE.format(call="raise RuntimeError('of the user')")]
    text = subprocess.run(program, capture_output=True, text=True, timeout=60).stderr
    assert text.endswith("RuntimeError: of the user\n")
