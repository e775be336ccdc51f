"""``fully_shard_units``: which modules become units, what each of them takes, and training."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from meshard import (
    FSDPModule,
    MixedPrecisionPolicy,
    describe,
    fully_shard,
    fully_shard_units,
)
from tests.support import insides
from tests.support.against_plain import check_gradients, check_training
from tests.support.cases import CASES
from tests.support.models import (
    ChosenBlocks,
    Made,
    MlpBlock,
    MlpStack,
    Transformer,
    TransformerBlock,
    seeded,
)
from tests.support.parity import assert_same, full_state
from tests.support.ranks import on_fake_ranks, on_threads

BLOCK = 40  # parameters of MlpBlock(4, 4)


def linear():
    return nn.Linear(4, 4)


def members(model):
    """Return the names of the modules of each unit, by that of its first."""
    found = {}
    for fqn, module in model.named_modules():
        for unit in insides.own_units(module):
            found.setdefault(unit, []).append(fqn)
    return {names[0]: names for names in found.values()}


def taken_by(model):
    """Return the full names of each parameter that a unit owns, by the name of its module."""
    holders = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        for name in module._parameters:
            holders.setdefault((module, name), f"{fqn}.{name}" if fqn else name)
    return {
        fqn: [[holders[owner] for owner in param.owners] for param in unit.params]
        for fqn, module in model.named_modules()
        for unit in insides.own_units(module)
    }


def squares(*dims):
    return nn.Sequential(*[nn.Linear(dim, dim, bias=False) for dim in dims])


def blocks(count):
    return nn.Sequential(*[MlpBlock(4, 4) for _ in range(count)])


def tied_stack():
    model = MlpStack(4, 4, depth=2)
    model.blocks[1].up.weight = model.blocks[0].up.weight
    return model


def tied_stack_with_a_unit():
    model = tied_stack()
    fully_shard(model.blocks[0], ignored_params={model.blocks[0].up.weight})
    return model


def row(names, build, taken=None, **kwargs):
    return names.split(), build, taken or {}, kwargs


def all_of(block):
    return " ".join(f"{block}.{name}" for name, _ in MlpBlock(4, 4).named_parameters())


# The names of the modules of each unit besides the root, the model, all that some units take, and
# arguments.
CHOICES = {
    "outermost blocks": row("0 1", lambda: nn.Sequential(squares(4, 4), squares(4, 4))),
    # Also the only block of its list: a deeper model would have more there.
    "lists of lists": row(
        "stages.0.0 stages.0.1 stages.1.0",
        lambda: Made(None, stages=[nn.ModuleList(blocks(2)), nn.ModuleList(blocks(1))]),
    ),
    "the only block": row("blocks.0", lambda: MlpStack(depth=1)),
    "siblings of one class that hold parameters": row(
        "0 3", lambda: nn.Sequential(linear(), nn.ReLU(), nn.ReLU(), linear(), nn.LayerNorm(4))
    ),
    "blocks that are compiled": row(
        "0._orig_mod 1._orig_mod 2",
        lambda: nn.Sequential(*[torch.compile(linear(), backend="eager") for _ in "01"], linear()),
    ),
    "a dict of like blocks": row(
        "layers.one layers.two",
        lambda: Made(None, layers=nn.ModuleDict({"one": linear(), "two": linear()})),
    ),
    "a dict of different parts": row(
        "parts.list.0 parts.list.1",
        lambda: Made(
            None,
            parts=nn.ModuleDict({"a": linear(), "b": linear(), "list": nn.ModuleList(blocks(2))}),
        ),
    ),
    "the root takes the rest": row(
        "blocks.0 blocks.1", Transformer, {"": "embedding.weight norm.weight norm.bias head.weight"}
    ),
    "subclasses": row(
        "0 1",
        lambda: nn.Sequential(linear(), type("Wide", (nn.Linear,), {})(4, 4), nn.LayerNorm(4)),
        units=nn.Linear,
    ),
    "nested": row(
        "embedding blocks.0 blocks.0.attention_norm blocks.0.mlp_norm norm",
        lambda: Transformer(depth=1),
        units=(TransformerBlock, nn.Embedding, nn.LayerNorm),
    ),
    "a predicate of names and modules": row(
        "blocks.0 blocks.1.up",
        MlpStack,
        units=lambda fqn, m: fqn == "blocks.0" or ("1.up" in fqn and isinstance(m, nn.Linear)),
    ),
    "nothing without parameters": row(
        "0", lambda: nn.Sequential(linear(), nn.ReLU()), units=lambda fqn, module: True
    ),
    "no container without a forward": row(
        "blocks.0.up blocks.0.down", lambda: MlpStack(depth=1), units=(nn.ModuleList, nn.Linear)
    ),
    "nothing inside attention, which reads it": row(
        "1",
        lambda: nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8)),
        units=nn.Linear,
    ),
    "attention with what is inside": row(
        "0.self_attn 0.linear1 0.linear2",
        lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16)),
        units=(nn.Linear, nn.MultiheadAttention),
    ),
    # The block itself would own nothing but two norms.
    "small ones left to the unit around": row(
        "blocks.0.attention.qkv blocks.0.attention.out blocks.0.mlp.0 blocks.0.mlp.2 head",
        lambda: Transformer(depth=1),
        units=(TransformerBlock, nn.Linear, nn.LayerNorm),
        min_params=72,
    ),
    "what small ones leave counts around": row(
        "0",
        lambda: nn.Sequential(nn.Sequential(linear(), linear()), linear()),
        units=(nn.Linear, nn.Sequential),
        min_params=40,
    ),
    "just enough": row("0 1 2 3 4", lambda: blocks(5), min_params=BLOCK),
    "too few by one": row("", lambda: blocks(5), min_params=BLOCK + 1),
    "small ones stay in the root": row(
        "2 6",
        lambda: squares(4, 4, 9, 4, 4, 4, 9, 4),
        {"": "0.weight 1.weight 3.weight 4.weight 5.weight 7.weight"},
        min_params=32,
    ),
    "blocks of which inner units have taken the most": row(
        "0.1 1.1 2.1 3.1",
        lambda: nn.Sequential(*[nn.Sequential(nn.LayerNorm(8), *squares(8)) for _ in range(4)]),
        units=(nn.Sequential, nn.Linear),
        min_params=32,
    ),
    "units by hand are blocks enough": row(
        "0", lambda: nn.Sequential(fully_shard(linear()), nn.LayerNorm(4))
    ),
    "a tied embedding is the root's": row(
        "blocks.0 blocks.0.attention.qkv blocks.0.attention.out blocks.0.mlp.0 blocks.0.mlp.2",
        lambda: Transformer(depth=1, tied=True),
        {"": "embedding.weight=head.weight norm.weight norm.bias"},
        units=(nn.Embedding, nn.Linear, TransformerBlock),
    ),
    "a tie goes to the lowest unit around all uses, past containers": row(
        "0 0.blocks.0 0.blocks.1 1 1.blocks.0 1.blocks.1",
        lambda: nn.Sequential(tied_stack(), tied_stack(), linear()),
        {"0": "0.scale 0.shift 0.blocks.0.up.weight=0.blocks.1.up.weight"},
        units=(MlpStack, MlpBlock),
    ),
    "a tie goes past modules that are no units": row(
        "0.blocks.0 0.blocks.1",
        lambda: nn.Sequential(tied_stack(), nn.Identity()),
        {"": "0.scale 0.shift 0.blocks.0.up.weight=0.blocks.1.up.weight"},
        units=MlpBlock,
    ),
    "a tie that a unit by hand has ignored": row(
        "blocks.0 blocks.1",
        tied_stack_with_a_unit,
        {"": "scale shift blocks.0.up.weight=blocks.1.up.weight"},
    ),
    "a shared module is one unit that keeps its parameters": row(
        "0 0.0",
        lambda: nn.Sequential(nn.Sequential(one := MlpBlock(4, 4), linear()), nn.Sequential(one)),
        {"0.0": all_of("0.0")},
        units=(MlpBlock, nn.Sequential),
    ),
    "a shared module that is no unit goes around both uses": row(
        "0 1",
        lambda: nn.Sequential(squares(5).append(one := linear()), squares(5).append(one)),
        {"": "0.1.weight 0.1.bias"},
    ),
}


@pytest.mark.parametrize("case", CHOICES)
@on_fake_ranks(4)
def test_these_modules_become_units_and_a_second_call_changes_nothing(case):
    units, build, taken, kwargs = CHOICES[case]
    model = build()
    total = sum(param.numel() for param in model.parameters())
    names = fully_shard_units(model, **kwargs)
    assert ["+".join(each) for each in members(model).values()] == ["", *units]
    assert names == [*members(model)]
    found = taken_by(model)
    for unit, params in taken.items():
        assert {"=".join(names) for names in found[unit]} == set(params.split())
    taken_once = [names[0] for name in members(model) for names in found[name]]
    assert sum(model.get_parameter(name).numel() for name in taken_once) == total
    before = {fqn: (type(m), list(m._parameters.values())) for fqn, m in model.named_modules()}
    hooks = {fqn: len(m._forward_hooks) for fqn, m in model.named_modules()}
    assert fully_shard_units(model, **kwargs) == names
    for fqn, module in model.named_modules():
        kind, params = before[fqn]
        assert type(module) is kind and len(module._forward_hooks) == hooks[fqn], fqn
        assert all(a is b for a, b in zip(module._parameters.values(), params, strict=True)), fqn


@on_fake_ranks(4)
def test_auto_without_repeated_blocks_is_one_unit_and_a_warning():
    model = nn.Sequential(linear(), nn.LayerNorm(4))
    with pytest.warns(UserWarning, match=r"no repeated blocks in this Sequential.*units=") as seen:
        assert fully_shard_units(model) == [""]
    assert len(seen) == 1 and seen[0].filename == __file__
    assert len(taken_by(model)[""]) == 4 and fully_shard_units(model) == [""]


@pytest.mark.parametrize("by_hand", [(0,), (1, 2), (0, 1, 2)])
@on_fake_ranks(4)
def test_units_made_by_hand_stay_and_the_others_come(by_hand):
    model = MlpStack()
    for number in by_hand:
        fully_shard(model.blocks[number], reshard_after_forward=False)
    inner = []
    if by_hand == (0,):
        fully_shard(model.blocks[1].up)
        inner = ["blocks.1.up"]
    kept = {block: insides.own_units(block) for block in model.blocks}
    names = ["", "blocks.0", "blocks.1", *inner, "blocks.2"]
    assert fully_shard_units(model) == names
    assert all(not units or insides.own_units(block) == units for block, units in kept.items())


@on_fake_ranks(4)
def test_arguments_of_fully_shard_reach_every_unit_and_overrides_one():
    model, hybrid = MlpStack(), init_device_mesh("cpu", (2, 2))
    seen = []

    def overrides(fqn, module):
        seen.append((fqn, type(module).__name__))
        return {"reshard_after_forward": False, "mesh": hybrid} if fqn == "blocks.1" else None

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard_units(model, reshard_after_forward=True, overrides=overrides, mp_policy=policy)
    rows = describe(model).splitlines()[1:5]
    assert ["reshard_after_forward=False" in row for row in rows] == [False, False, True, False]
    assert all("param_dtype=bfloat16" in row for row in rows)
    assert [block.up.weight.device_mesh.ndim for block in model.blocks] == [1, 2, 1]
    assert sorted(seen) == [("", "MlpStack"), *((f"blocks.{n}", "MlpBlock") for n in range(3))]


@pytest.mark.parametrize("name", ["mesh", "mp_policy", "offload_policy", "reshard_after_forward"])
@on_fake_ranks(4)
def test_none_in_overrides_is_the_default(name):
    model, mesh = MlpStack(), init_device_mesh("cpu", (2, 2))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    chosen = {"mp_policy": policy, "reshard_after_forward": False}
    fully_shard_units(model, mesh, overrides=lambda fqn, _: {name: None}, **chosen)
    row = describe(model).splitlines()[2]
    assert model.blocks[0].up.weight.device_mesh == mesh  # that of the call
    assert ("param_dtype" not in row) is (name == "mp_policy")
    assert ("reshard_after_forward" not in row) is (name == "reshard_after_forward")


@on_fake_ranks(4)
def test_ignored_params_stay_and_do_not_count():
    model = MlpStack()
    ignored = {model.scale, *model.blocks[1].parameters()}
    assert fully_shard_units(model, ignored_params=iter(ignored)) == ["", "blocks.0", "blocks.2"]
    assert type(model.scale) is nn.Parameter and model.scale in ignored


@on_fake_ranks(4)
def test_a_module_with_an_ignored_parameter_keeps_only_that_unsharded():
    layer = linear()
    fully_shard(layer, ignored_params={layer.weight})
    assert type(layer.weight) is nn.Parameter and isinstance(layer.bias, DTensor)


def blocks_with_a_scalar():
    return Made(None, temperature=nn.Parameter(torch.tensor(1.0)), blocks=[linear(), linear()])


@pytest.mark.parametrize(
    ("build", "kwargs", "error", "match"),
    [
        (MlpStack, {"units": nn.Conv2d}, ValueError, "a forward inside MlpStack.*Linear, MlpBlock"),
        (MlpStack, {"units": lambda fqn, module: False}, ValueError, "matches no module"),
        (MlpStack, {"units": nn.ModuleList}, ValueError, "no module with a forward.*MlpBlock"),
        (MlpStack, {"units": "MlpBlock"}, TypeError, "not callable"),
        (MlpStack, {"units": ("MlpBlock",)}, TypeError, "not callable"),
        (MlpStack, {"units": ()}, TypeError, "not callable"),
        (MlpStack, {"reshard": True}, TypeError, "unexpected keyword argument .reshard"),
        (MlpStack, {"unit": []}, TypeError, "unexpected keyword argument .unit"),
        (MlpStack, {"module": 1}, TypeError, "multiple values for .*'module'"),
        (MlpStack, {"reshard_after_forward": 3}, ValueError, "must divide the 4 ranks"),
        (MlpStack, {"overrides": lambda *_: 1}, TypeError, "'int' object is not a mapping"),
        (MlpStack, {"overrides": lambda *_: {"x": 1}}, TypeError, "unexpected keyword argument 'x"),
        (MlpStack, {"overrides": lambda *_: {"mesh": 4}}, AttributeError, "device_type"),
        (blocks_with_a_scalar, {}, ValueError, "'temperature' is a scalar"),
        (
            lambda: blocks(2).to("meta"),
            {"sync_init": True},
            ValueError,
            "'1.up.weight' is on the meta",
        ),
    ],
)
@on_fake_ranks(4)
def test_what_is_refused_leaves_the_model_as_it_was(build, kwargs, error, match):
    model = build()
    with pytest.raises(error, match=match):
        fully_shard_units(model, **kwargs)
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
    assert all(type(param) is nn.Parameter for param in model.parameters())


@on_fake_ranks(2)
def test_a_root_without_a_forward_is_refused():
    with pytest.raises(ValueError, match="a ModuleList, because it has no forward"):
        fully_shard_units(nn.ModuleList([linear(), linear()]))


@on_fake_ranks(2)
def test_a_second_call_changes_nothing():
    model = MlpStack()
    names = fully_shard_units(model)
    assert fully_shard_units(model, sync_init=True) == names


LAYERS = (nn.Linear, nn.Embedding, nn.LayerNorm)


@pytest.mark.parametrize(
    ("case_name", "units", "min_params"),
    [
        ("transformer", "auto", 0),
        ("transformer_tied", LAYERS, 0),
        ("transformer_tied", LAYERS, 90),
        ("tied_inside", lambda fqn, module: True, 70),
        ("mlp_stack", nn.Linear, 70),
    ],
)
@on_threads(2)
def test_any_choice_of_units_trains_like_one_process(case_name, units, min_params):
    case = CASES[case_name]
    model, plain = case.build(), case.build()
    if dist.get_rank():
        seeded(model, 1)  # the values of rank 0 are sent
    mesh = init_device_mesh("cpu", (2,))
    fully_shard_units(model, mesh, units=units, min_params=min_params, sync_init=True)
    check_training(model, plain, lambda each, rank: case.loss(each(case.batch(0, rank))))
    model.load_state_dict(case.build().state_dict())
    assert_same(full_state(model), full_state(case.build()), bitwise=True)


@pytest.mark.parametrize("units", [nn.MultiheadAttention, (nn.Linear, nn.LayerNorm), "auto"])
@on_threads(2)
def test_attention_may_be_inside_units_or_be_one(units):
    """torch's own encoder, whose attention reads a weight of a module inside it."""

    def build():
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        return seeded(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))

    model, plain = build(), build()
    fully_shard_units(model, units=units)
    x = torch.ones(2, 3, 8).cumsum(1)
    for mode in (True, False):
        model.train(mode), plain.train(mode)
        with torch.set_grad_enabled(mode):
            torch.testing.assert_close(model(x), plain(x))


@on_threads(2)
def test_ranks_may_run_different_modules_of_a_unit_of_several():
    plain, model = seeded(ChosenBlocks()), seeded(ChosenBlocks())
    fully_shard([*model.blocks])
    fully_shard(model)
    for chosen in [((0, 1), (1, 2)), ((2,), (0,)), ((0, 1, 2), (2, 0))]:
        check_gradients(
            model, plain, lambda m, rank, at=chosen: m(torch.ones(2, 6), at[rank]).sum(), times=1
        )
