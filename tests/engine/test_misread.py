"""The explanation of torch's error about shards beside ordinary tensors."""

import copy

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional

import meshard
from tests.support.against_plain import check_gradients, inputs_of, sharded_and_plain
from tests.support.models import Transformer, seeded
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


@on_ranks(2)
def test_the_peer_names_no_parameter():
    mesh = init_device_mesh("cpu", (2,))
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    for unit in (attention.out_proj, attention):
        torch_fsdp.fully_shard(unit, mesh=mesh)
    x = torch.ones(1, 3, 8)
    assert "out_proj" not in text_of(attention, x, x, x)


class Root(nn.Module):
    """Its forward does ``how`` with the weight of a layer that is a unit of its own."""

    def __init__(self, how):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4, bias=False)])
        self.how = how

    def forward(self, x):
        return self.how(self, x)


def by_index(model, x):
    return x @ model.layers[0].weight.t()


def by_local_name(model, x):
    last = model.layers[1].weight
    for _ in range(2):
        x = torch.tanh(x)
    return functional.linear(x, last)


def by_list(model, x):
    for param in model.layers[1].parameters():
        x = x * param.detach()
    return x


def in_another_line(model, x):
    return functional.linear(
        torch.tanh(x) + 1,
        model.layers[1].weight,
    )


def in_a_call(model, x):
    def inner(given):
        return torch.cat([x, given])

    return inner(model.layers[1].weight)


def by_module(model, x):
    layer = model.layers[1]
    return x @ layer.weight.t()


def text_of_read(how):
    model = Root(how)
    for layer in model.layers:
        meshard.fully_shard(layer)
    meshard.fully_shard(model)
    return text_of(model, torch.ones(4, 4))


@pytest.mark.parametrize("how", [by_local_name, by_list, in_a_call, by_module])
@on_fake_ranks(1)
def test_a_parameter_that_a_local_variable_holds_is_named(how):
    named = "parameter 'layers.1.weight' of unit 'layers.1' was read while that unit is not running"
    assert_explained(text_of_read(how), named)


@pytest.mark.parametrize("how", [by_index, in_another_line])
@on_fake_ranks(1)
def test_of_other_reads_the_sharded_units_inside_are_named(how):
    named = "a parameter of another unit was probably read"
    assert_explained(text_of_read(how), named, "sharded now: 'layers.0', 'layers.1'.")


class Decoder(nn.Module):
    """Reads the weight of a head that is no submodule of it, in a model of many units."""

    def __init__(self, head):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.tied = [head]

    def forward(self, x):
        return self.inner(x) @ self.tied[0].head.weight


@pytest.mark.parametrize("where", ["elsewhere", "inside"])
@on_fake_ranks(1)
def test_a_read_of_a_unit_that_the_line_names(where):
    model = nn.ModuleDict({f"layer{i}": nn.Linear(4, 4) for i in range(5)})
    model["head"] = nn.Linear(4, 4)
    if where == "elsewhere":
        model["decoder"] = Decoder(holder := nn.Module())
        holder.head = model["head"]
        meshard.fully_shard(model["decoder"].inner)
    for layer in model.values():
        meshard.fully_shard(layer)
    root = Root(lambda root, x: root.parts.head.weight @ x)
    root.parts = nn.Module()
    for name, layer in model.items():
        setattr(root.parts, name, layer)
    meshard.fully_shard(root)
    run = root.parts.decoder if where == "elsewhere" else root
    assert_explained(
        text_of(run, torch.ones(4, 4)),
        "Units named in the line that failed that are sharded now: 'parts.head'",
    )


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


class TakesWeight(nn.Module):
    """Its forward is given the weight of another module."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.empty(4))

    def forward(self, x, weight):
        return x @ weight + self.bias


class GivesWeight(nn.Module):
    """Gives the weight of a unit, which has run before, to another unit as an input."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), TakesWeight()

    def forward(self, x):
        return self.last(self.first(x), self.first.weight)


@on_fake_ranks(2)
def test_of_an_input_that_is_the_weight_of_another_unit_the_weight_is_named():
    model, _ = sharded_and_plain(GivesWeight(), ("first", "last"))
    text = text_of(model, torch.ones(2, 4))
    assert_explained(text, "parameter 'first.weight' of unit 'first' was read")
    assert "was given" not in text


@pytest.mark.parametrize("option", ["reshard_after_forward", "unshard_on_access"])
@on_threads(2)
def test_the_weight_of_another_unit_is_an_input_like_any_other_while_it_is_unsharded(option):
    model, plain = sharded_and_plain(
        GivesWeight(), ("first", "last"), **{option: option == "unshard_on_access"}
    )
    check_gradients(
        model, plain, lambda each, rank: each(inputs_of(rank, shape=(3, 4))).square().mean()
    )


class ReadsCut(nn.Module):
    """Takes DTensors, as its parameters are, and reads an ordinary one of a unit inside."""

    def __init__(self):
        super().__init__()
        self.cut, self.inner = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return x.to_local() @ self.inner.weight


@on_threads(2)
def test_units_of_tensor_parallelism_may_take_dtensors():
    world = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = ReadsCut()
    parallelize_module(model, world["tp"], {"cut": ColwiseParallel()})
    meshard.fully_shard(model.inner, world["dp"])
    meshard.fully_shard(model, world["dp"])
    given = DTensor.from_local(torch.ones(2, 4), world["tp"], [Replicate()])
    assert_explained(text_of(model, given), "sharded now: 'inner'.")


class CutUp(nn.Module):
    """The output of ``up`` is a DTensor, which ``norm`` was not told of."""

    def __init__(self, between=None):
        super().__init__()
        self.up, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.between = between

    def forward(self, x):
        x = self.up(x)
        return self.norm(x if self.between is None else self.between(x))


def add_plain(x):
    return x + torch.ones(8)


@on_ranks(2)
@pytest.mark.parametrize("between", [None, add_plain])
def test_a_dtensor_between_modules_of_a_unit_is_not_blamed_on_its_parameters(between):
    world = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(CutUp(between), nn.Linear(8, 8))
    parallelize_module(model[0], world["tp"], {"up": ColwiseParallel(use_local_output=False)})
    for each in (model[0], model):
        meshard.fully_shard(each, world["dp"])
    text = text_of(model, torch.ones(2, 8))
    assert "parameter '" not in text and not any(each in text for each in REMEDIES)
    if between is None:
        assert text.count("module '0.norm' (LayerNorm) of unit '0' was given a DTensor of") == 1
        assert "shape (2, 8) and placements (Shard(dim=1),)" in text and "to_local()" in text


@on_fake_ranks(1)
def test_other_errors_are_left_alone():
    model = Root(lambda model, x: x @ torch.ones(3, 3))
    meshard.fully_shard(model)
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(1, 4))
    assert "meshard" not in str(caught.value)
    mesh = model.layers[0].weight.device_mesh
    stranger = distribute_tensor(torch.ones(4, 4), mesh, model.layers[0].weight.placements)
    model.how = lambda model, x: x @ stranger
    assert "meshard" not in text_of(model, torch.ones(1, 4))


@on_threads(2)
def test_a_loss_that_reads_the_head_trains_inside_unsharded_params():
    """The way out trains like the plain model."""
    tokens = torch.randint(0, 11, (2, 2, 5), generator=torch.Generator().manual_seed(0))

    def loss_of(model, rank):
        hidden = model.norm(model.embedding(tokens[rank]))
        logits = functional.linear(hidden, model.head.weight)
        return functional.cross_entropy(logits.flatten(0, 1), tokens[rank].flatten())

    def step(model, rank):
        if not isinstance(model, meshard.FSDPModule):
            return loss_of(model, rank)
        with meshard.unsharded_params(model.head):
            return loss_of(model, rank)

    model, plain = sharded_and_plain(Transformer(), ("embedding", "norm", "head"))
    assert "meshard" not in text_of(loss_of, model, 0)  # outside of any forward
    check_gradients(model, plain, step)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


class WithInner(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Inner()
        self.head = nn.Linear(4, 4)

    def forward(self, ids):
        return self.head(self.model(ids))

    def get_input_embeddings(self):
        return self.model.embed


def root_around_a_unit():
    model = seeded(WithInner())
    meshard.fully_shard(model.model.layers[0])
    return meshard.fully_shard(model)


IDS = torch.tensor([1, 2])
OUTSIDE = {
    "the embedding": (lambda model: model.get_input_embeddings()(IDS), "'model.embed.weight'"),
    "the inner model": (lambda model: model.model(IDS), "'model.embed.weight'"),
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
def test_other_errors_of_such_modules_keep_their_text():
    model = root_around_a_unit()
    with pytest.raises(TypeError) as caught:
        model.model("no tensor")
    assert "unit" not in str(caught.value)


@on_fake_ranks(1)
def test_modules_of_units_without_units_inside_have_no_hook():
    model = root_around_a_unit()
    assert len(model.model._forward_hooks) == len(model.head._forward_hooks) == 1
    alone = meshard.fully_shard(nn.Sequential(nn.Linear(4, 4)))
    assert not alone[0]._forward_hooks
