"""The explanation of torch's error about shards beside ordinary tensors."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional

import meshard
from tests.support.against_plain import check_gradients, inputs_of, sharded_and_plain
from tests.support.models import Made
from tests.support.ranks import on_fake_ranks, on_ranks, on_threads

REMEDIES = [
    "apply fully_shard to the parent instead of this module",
    "meshard.register_fsdp_forward_method(module, name)",
    "with meshard.unsharded_params(module):",
    "unshard_on_access=True",
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
    text = text_of(attention, x, x, x)
    assert_explained(text, "of unit 'out_proj'", "this rank's shard, (4, 8) of (8, 8)")
    assert "parameter 'out_proj.weight' or 'out_proj.bias'" in text
    with torch.no_grad():  # torch's fast path is one operator: no local variable holds the weight
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


def by_list(model, x):
    for param in model.layers[1].parameters():
        x = x * param.detach()
    return x


def in_a_call(model, x):
    def inner(given):
        return torch.cat([x, given])

    return inner(model.layers[1].weight)


def by_module(model, x):
    layer = model.layers[1]
    return x @ layer.weight.t()


def in_another_line(model, x):
    return functional.linear(
        torch.tanh(x) + 1,
        model.layers[1].weight,
    )


HELD = "parameter 'layers.1.weight' of unit 'layers.1' was read while that unit is not running"
SHARDED = "sharded now: 'layers.0', 'layers.1'."


@pytest.mark.parametrize(
    ("how", "named"),
    [
        (by_local_name, HELD),
        (by_list, HELD),
        (in_a_call, HELD),
        (by_module, HELD),
        (in_another_line, SHARDED),
        (lambda model, x: x @ model.layers[0].weight.t(), SHARDED),
    ],
)
@on_fake_ranks(1)
def test_what_a_local_variable_holds_is_named_and_else_the_sharded_units_inside(how, named):
    text = text_of(root(how), torch.ones(4, 4))
    assert_explained(text, named)
    assert ("a parameter of another unit was probably read" in text) == (named == SHARDED)


@pytest.mark.parametrize("where", ["elsewhere", "inside"])
@on_fake_ranks(1)
def test_a_read_of_a_unit_that_the_line_names(where):
    parts = nn.ModuleDict({f"layer{i}": nn.Linear(4, 4) for i in range(5)})
    parts["head"] = nn.Linear(4, 4)
    tied = [parts]  # whose head is no submodule of the decoder
    parts["decoder"] = Made(lambda m, x: m.inner(x) @ tied[0].head.weight, inner=nn.Linear(4, 4))
    meshard.fully_shard(parts["decoder"].inner)
    for part in parts.values():
        meshard.fully_shard(part)
    model = meshard.fully_shard(Made(lambda m, x: m.parts.head.weight @ x, parts=parts))
    text = text_of(parts["decoder"] if where == "elsewhere" else model, torch.ones(4, 4))
    named = "Units named in the line that failed that are sharded now: 'parts.head'"
    assert_explained(text, named)


@on_ranks(2)
def test_an_input_that_is_a_dtensor_is_what_is_explained():
    world = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for each in (*model, model):
        meshard.fully_shard(each, world)
    given = DTensor.from_local(torch.ones(2, 4), world, [Replicate()])
    text = text_of(model, given)
    assert "unit '0' was given a DTensor of shape (2, 4)" in text
    assert "to_local()" in text and "parameter '" not in text
    assert text.count("was given a") == 1 and not any(each in text for each in REMEDIES)


def gives_weight():
    """Return a module that gives the weight of a unit, which has run before, to another unit."""
    takes = Made(lambda m, x, weight: x @ weight + m.bias, bias=nn.Parameter(torch.empty(4)))
    return Made(lambda m, x: m.last(m.first(x), m.first.weight), first=nn.Linear(4, 4), last=takes)


@on_fake_ranks(2)
def test_of_an_input_that_is_the_weight_of_another_unit_the_weight_is_named():
    model, _ = sharded_and_plain(gives_weight(), ("first", "last"))
    text = text_of(model, torch.ones(2, 4))
    assert_explained(text, "parameter 'first.weight' of unit 'first' was read")
    assert "was given" not in text


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


@pytest.mark.parametrize("between", [None, lambda x: x + torch.ones(8)])
@on_threads(2)
def test_a_dtensor_between_modules_of_a_unit_is_not_blamed_on_its_parameters(between):
    world = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    cut = Made(  # the output of ``up`` is a DTensor, which ``norm`` was not told of
        lambda m, x: m.norm((between or torch.nn.Identity())(m.up(x))),
        up=nn.Linear(8, 8),
        norm=nn.LayerNorm(8),
    )
    model = nn.Sequential(cut, nn.Linear(8, 8))
    parallelize_module(cut, world["tp"], {"up": ColwiseParallel(use_local_output=False)})
    for each in (cut, model):
        meshard.fully_shard(each, world["dp"])
    text = text_of(model, torch.ones(2, 8))
    assert "parameter '" not in text and not any(each in text for each in REMEDIES)
    if between is None:
        assert text.count("module '0.norm' (LayerNorm) of unit '0' was given a DTensor of") == 1
        assert "shape (2, 8) and placements (Shard(dim=1),)" in text and "to_local()" in text


@on_fake_ranks(1)
def test_other_errors_are_left_alone():
    layer = nn.Linear(4, 4)
    model = meshard.fully_shard(Made(lambda m, x: x @ torch.ones(3, 3), layer=layer))
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(1, 4))
    assert "meshard" not in str(caught.value)
    mesh, placements = layer.weight.device_mesh, layer.weight.placements
    stranger = distribute_tensor(torch.ones(4, 4), mesh, placements)
    model = meshard.fully_shard(Made(lambda m, x: x @ stranger, layer=nn.Linear(4, 4)))
    assert "meshard" not in text_of(model, torch.ones(1, 4))


def root_around_a_unit():
    inner = nn.Sequential(nn.Embedding(4, 4), meshard.fully_shard(nn.Linear(4, 4)))
    head = nn.Linear(4, 4)
    return meshard.fully_shard(Made(lambda m, ids: m.head(m.model(ids)), model=inner, head=head))


IDS = torch.tensor([1, 2])
OUTSIDE = {
    "the embedding": (lambda model: model.model[0](IDS), "'model.0.weight'"),
    "the inner model": (lambda model: model.model(IDS), "'model.0.weight'"),
    "the head": (lambda model: model.head(torch.ones(2, 4)), "'head.weight' or 'head.bias'"),
}


@pytest.mark.parametrize("what", OUTSIDE)
@on_fake_ranks(2)
def test_a_module_of_the_root_that_is_called_by_itself_is_explained(what):
    call, names = OUTSIDE[what]
    model = root_around_a_unit()
    for when in ("first", "after a step", "of a copy"):
        if when == "after a step":
            model(IDS).sum().backward()
        elif when == "of a copy":
            model = copy.deepcopy(model)
        text = text_of(call, model)
        assert f"parameter {names} of unit '(root)' was read outside" in text, when
        for remedy in ("unsharded_params", "register_fsdp_forward_method", "Call the module that"):
            assert text.count(remedy) == 1, when
        assert model(IDS).shape == (2, 4)  # nothing has changed
        model.reset_iter_state()
    outer = meshard.fully_shard(nn.Sequential(model, nn.Linear(4, 4)))
    assert outer(IDS).shape == (2, 4)
    with pytest.raises(RuntimeError, match="got mixed"):
        call(model)  # a unit inside another one has no such hooks


@on_fake_ranks(1)
def test_only_modules_of_a_root_around_units_have_a_hook_and_other_errors_keep_their_text():
    model = root_around_a_unit()
    with pytest.raises(TypeError) as caught:
        model.model("no tensor")
    assert "unit" not in str(caught.value)
    assert len(model.model._forward_hooks) == len(model.head._forward_hooks) == 1
    alone = meshard.fully_shard(nn.Sequential(nn.Linear(4, 4)))
    assert not alone[0]._forward_hooks
