"""``fully_shard_units``: which modules become units, what each of them takes, and training."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from meshard import (
    CommLedger,
    FSDPModule,
    MixedPrecisionPolicy,
    describe,
    fully_shard,
    fully_shard_units,
)
from tests.support import insides
from tests.support.cases import CASES
from tests.support.insides import members, sharded_modules, taken_by
from tests.support.models import (
    ChosenBlocks,
    MlpBlock,
    MlpStack,
    Transformer,
    TransformerBlock,
    seeded,
)
from tests.support.parity import (
    assert_same,
    assert_same_run,
    full_grads,
    full_state,
    train,
    train_plain,
)
from tests.support.ranks import on_fake_ranks, on_threads
from tests.support.spread import spread

BLOCK = 40  # parameters of MlpBlock(4, 4)
TINY = 40  # blocks


def linear():
    return nn.Linear(4, 4)


def blocks(count):
    return nn.Sequential(*[MlpBlock(4, 4) for _ in range(count)])


def module_of(**children):
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


def lists_of_lists():
    return module_of(stages=nn.ModuleList(nn.ModuleList(blocks(n)) for n in (2, 1)))


def dict_of_parts():
    parts = nn.ModuleDict({name: nn.Embedding(4, 4) for name in ("tokens", "positions")})
    parts["blocks"] = nn.ModuleList(blocks(2))
    return module_of(parts=parts)


class Wide(nn.Linear):
    pass


NESTED = (TransformerBlock, nn.Embedding, nn.LayerNorm)
NESTED_NAMES = ["embedding", "blocks.0", "blocks.0.attention_norm", "blocks.0.mlp_norm", "norm"]
SMALL_LEFT = (TransformerBlock, nn.Linear, nn.LayerNorm)
SMALL_LEFT_NAMES = ["attention.qkv", "attention.out", "mlp.0", "mlp.2"]
CHOICES = {
    "outermost blocks": (
        lambda: nn.Sequential(*[nn.Sequential(linear(), linear()) for _ in range(2)]),
        {},
        ["0", "1"],
    ),
    # Also the only block of its list: a deeper model would have more there.
    "lists of lists": (lists_of_lists, {}, ["stages.0.0", "stages.0.1", "stages.1.0"]),
    "the only block": (lambda: MlpStack(depth=1), {}, ["blocks.0"]),
    "siblings of one class that hold parameters": (
        lambda: nn.Sequential(linear(), nn.ReLU(), nn.ReLU(), linear(), nn.LayerNorm(4)),
        {},
        ["0", "3"],
    ),
    "a dict of like blocks": (
        lambda: module_of(layers=nn.ModuleDict({str(n): MlpBlock(4, 4) for n in range(2)})),
        {},
        ["layers.0", "layers.1"],
    ),
    "a dict of different parts": (dict_of_parts, {}, ["parts.blocks.0", "parts.blocks.1"]),
    "subclasses": (
        lambda: nn.Sequential(linear(), Wide(4, 4), nn.LayerNorm(4)),
        {"units": nn.Linear},
        ["0", "1"],
    ),
    "nested, bottom-up": (lambda: Transformer(depth=1), {"units": NESTED}, NESTED_NAMES),
    "nothing without parameters": (
        lambda: nn.Sequential(linear(), nn.ReLU()),
        {"units": lambda fqn, module: True},
        ["0"],
    ),
    # The block itself would own nothing but two norms.
    "small ones left to the unit around": (
        lambda: Transformer(depth=1),
        {"units": SMALL_LEFT, "min_params": 72},
        [*[f"blocks.0.{name}" for name in SMALL_LEFT_NAMES], "head"],
    ),
    "what small ones leave counts around": (
        lambda: nn.Sequential(nn.Sequential(linear(), linear()), linear()),
        {"units": (nn.Linear, nn.Sequential), "min_params": 40},
        ["0"],
    ),
}


@pytest.mark.parametrize("case", CHOICES)
@on_fake_ranks(4)
def test_these_modules_become_units_and_a_second_call_changes_nothing(case):
    build, kwargs, names = CHOICES[case]
    model = build()
    total = sum(param.numel() for param in model.parameters())
    assert fully_shard_units(model, **kwargs) == ["", *names]
    assert all(isinstance(model.get_submodule(name), FSDPModule) for name in names)
    taken = [names for rows in taken_by(model).values() for names in rows]
    assert sum(model.get_parameter(names[0]).numel() for names in taken) == total
    before = {fqn: (type(m), list(m._parameters.values())) for fqn, m in model.named_modules()}
    hooks = {fqn: len(m._forward_hooks) for fqn, m in model.named_modules()}
    assert fully_shard_units(model, **kwargs) == ["", *names]
    for fqn, module in model.named_modules():
        kind, params = before[fqn]
        assert type(module) is kind and len(module._forward_hooks) == hooks[fqn], fqn
        assert all(a is b for a, b in zip(module._parameters.values(), params, strict=True)), fqn


@on_fake_ranks(4)
def test_the_root_takes_the_rest():
    model = Transformer(depth=2)
    fully_shard_units(model)
    root = [names[0] for names in taken_by(model)[""]]
    assert root == ["embedding.weight", "norm.weight", "norm.bias", "head.weight"]


@on_fake_ranks(4)
def test_auto_without_repeated_blocks_is_one_unit_and_a_warning():
    model = nn.Sequential(linear(), nn.LayerNorm(4))
    with pytest.warns(UserWarning, match=r"no repeated blocks in this Sequential.*units=") as seen:
        assert fully_shard_units(model) == [""]
    assert len(seen) == 1 and seen[0].filename == __file__
    assert len(taken_by(model)[""]) == 4 and fully_shard_units(model) == [""]


@on_fake_ranks(4)
def test_a_predicate_sees_names_and_modules():
    seen = []

    def even_blocks(fqn, module):
        seen.append((fqn, type(module)))
        return fqn in ("blocks.0", "blocks.2")

    assert fully_shard_units(MlpStack(), units=even_blocks) == ["", "blocks.0", "blocks.2"]
    assert ("blocks.1.up", nn.Linear) in seen


@on_fake_ranks(4)
def test_containers_without_a_forward_are_never_units():
    model = MlpStack()
    with pytest.raises(ValueError, match=r"ModuleList has no forward.*MlpBlock"):
        fully_shard_units(model, units=nn.ModuleList)
    assert fully_shard_units(model, units=(nn.ModuleList, nn.Linear))[1] == "blocks.0.up"
    assert "blocks" not in sharded_modules(model)


@on_fake_ranks(4)
def test_what_is_inside_attention_that_reads_it_is_never_a_unit():
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8))
    assert fully_shard_units(model, units=nn.Linear) == ["", "1"]
    assert ["0.out_proj.weight"] in taken_by(model)[""]
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16))
    names = fully_shard_units(model, units=(nn.Linear, nn.MultiheadAttention))
    assert names == ["", "0.self_attn", "0.linear1", "0.linear2"]
    assert ["0.self_attn.out_proj.weight"] in taken_by(model)["0.self_attn"]


@pytest.mark.parametrize("by_hand", [(0,), (1, 2), (0, 1, 2)])
@on_fake_ranks(4)
def test_units_made_by_hand_stay_and_the_others_come(by_hand):
    model = MlpStack()
    for number in by_hand:
        fully_shard(model.blocks[number], reshard_after_forward=False)
    fully_shard(model.blocks[1].up) if by_hand == (0,) else None  # of another grain: named too
    kept = [insides.own_units(block) for block in model.blocks]
    names = fully_shard_units(model)
    assert [name for name in names if "up" not in name] == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert ("blocks.1.up" in names) is (by_hand == (0,))
    for block, units in zip(model.blocks, kept, strict=True):
        assert not units or insides.own_units(block) == units


@on_fake_ranks(4)
def test_units_made_by_hand_are_blocks_enough():
    model = nn.Sequential(linear(), nn.LayerNorm(4))
    fully_shard(model[0])
    assert fully_shard_units(model) == ["", "0"]


def sizes(model):
    """Return the number of parameters of each unit, by the name of its first module."""
    units = {name: insides.own_units(model.get_submodule(name))[0] for name in members(model)}
    return {name: sum(p.sharded.numel() for p in unit.params) for name, unit in units.items()}


@spread(
    min_params=[0, BLOCK, BLOCK + 1, 5 * BLOCK, 6 * BLOCK, TINY * BLOCK], units=["auto", nn.Linear]
)
@on_fake_ranks(4)
def test_forty_tiny_units_become_some_of_a_middle_size(units, min_params):
    model = blocks(TINY)
    names = fully_shard_units(model, units=units, min_params=min_params)
    root, *own = sizes(model).values()
    assert root + sum(own) == TINY * BLOCK and len(own) == len(names) - 1 > 0
    if min_params:
        assert root < min_params
        assert all(min_params <= numel < 2 * min_params for numel in own)
        with CommLedger(model) as ledger:
            model(torch.ones(1, 4)).sum().backward()
        assert 0 < ledger.counts["all_gather"] <= 2 + 2 * (TINY * BLOCK / min_params)


@on_fake_ranks(4)
def test_what_is_left_of_a_row_goes_to_the_root():
    model = blocks(5)
    assert fully_shard_units(model, min_params=2 * BLOCK) == ["", "0", "2"]
    joined = {"": [""], "0": ["0", "1"], "2": ["2", "3"]}
    assert members(model) == joined and ["4.up.weight"] in taken_by(model)[""]
    rows = describe(model).splitlines()[2:4]
    assert [row.split()[-2:] for row in rows] == [["2", "modules"]] * 2
    assert fully_shard_units(model, min_params=2 * BLOCK) == ["", "0", "2"]
    assert members(model) == joined
    too_few = blocks(5)
    assert fully_shard_units(too_few, min_params=5 * BLOCK + 1) == [""]
    assert sizes(too_few) == {"": 5 * BLOCK}


@on_fake_ranks(4)
def test_a_large_unit_ends_a_row():
    model = nn.Sequential(*[nn.Linear(n, n, bias=False) for n in (4, 4, 9, 4, 4, 4, 9, 4)])
    assert fully_shard_units(model, min_params=32) == ["", "0", "2", "3", "6"]
    assert members(model)["3"] == ["3", "4"]
    assert taken_by(model)[""] == [["5.weight"], ["7.weight"]]


@on_fake_ranks(4)
def test_blocks_of_which_inner_units_have_taken_the_most_are_joined_too():
    model = nn.Sequential(
        *[nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8, bias=False)) for _ in range(4)]
    )
    names = fully_shard_units(model, units=(nn.Sequential, nn.Linear), min_params=32)
    assert names == ["", "0", "0.1", "1.1", "2", "2.1", "3.1"]
    assert taken_by(model)["0"] == [
        [f"{n}.0.{name}"] for n in (0, 1) for name in ("weight", "bias")
    ]


@on_fake_ranks(4)
def test_only_units_with_the_same_arguments_are_joined():
    model = blocks(6)
    kept = {"reshard_after_forward": False}
    fully_shard_units(
        model, min_params=2 * BLOCK, overrides=lambda fqn, _: kept if fqn in ("3", "4") else None
    )
    assert members(model) == {"": [""], "0": ["0", "1"], "3": ["3", "4"]}
    assert ["2.up.weight"] in taken_by(model)[""] and ["5.up.weight"] in taken_by(model)[""]
    assert "reshard_after_forward=False" in describe(model[4])


@on_fake_ranks(4)
def test_what_several_modules_share_is_in_the_root():
    shared = MlpBlock(4, 4)
    pairs = list(blocks(4))
    pairs[1].up.weight = pairs[0].up.weight
    model = nn.Sequential(*[nn.Sequential(each, shared) for each in pairs])
    assert fully_shard_units(model, units=MlpBlock, min_params=48) == ["", "0.0", "2.0"]
    assert members(model)["0.0"] == ["0.0", "1.0"]
    assert ["0.0.up.weight", "1.0.up.weight"] in taken_by(model)[""]
    assert ["0.1.up.weight"] in taken_by(model)[""]


@on_fake_ranks(4)
def test_arguments_of_fully_shard_reach_every_unit_and_overrides_one():
    model = MlpStack()
    seen = []

    def overrides(fqn, module):
        seen.append((fqn, type(module).__name__))
        return {"reshard_after_forward": False} if fqn == "blocks.1" else None

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard_units(model, reshard_after_forward=True, overrides=overrides, mp_policy=policy)
    rows = describe(model).splitlines()[1:5]
    assert ["reshard_after_forward=False" in row for row in rows] == [False, False, True, False]
    assert all("param_dtype=bfloat16" in row for row in rows)
    assert sorted(seen) == [("", "MlpStack"), *((f"blocks.{n}", "MlpBlock") for n in range(3))]


@on_fake_ranks(4)
def test_a_unit_may_have_a_mesh_of_its_own():
    model = MlpStack()
    mesh, hybrid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    fully_shard_units(model, mesh, overrides=lambda fqn, _: {"mesh": hybrid} if fqn else {})
    assert model.scale.device_mesh.ndim == 1
    assert model.blocks[0].up.weight.device_mesh.ndim == 2


@pytest.mark.parametrize("name", ["mesh", "mp_policy", "offload_policy", "reshard_after_forward"])
@on_fake_ranks(4)
def test_none_in_overrides_is_the_default(name):
    model = MlpStack()
    mesh = init_device_mesh("cpu", (2, 2))
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


def unchanged_after(error, match, model, **kwargs):
    with pytest.raises(error, match=match):
        fully_shard_units(model, **kwargs)
    assert not sharded_modules(model)
    assert all(type(param) is nn.Parameter for param in model.parameters())


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"units": "MlpBlock"}, ValueError, "units must be .auto., .*got .MlpBlock."),
        ({"units": nn.Conv2d}, ValueError, "matches no module inside MlpStack.*Linear, MlpBlock"),
        ({"units": lambda fqn, module: False}, ValueError, "matches no module"),
        ({"units": ("MlpBlock",)}, TypeError, "units must be 'auto'"),
        ({"units": ()}, TypeError, "units must be 'auto'"),
        ({"min_params": 1.5}, TypeError, "min_params must be an int"),
        ({"reshard": True}, TypeError, "unexpected keyword argument .reshard"),
        ({"unit": []}, TypeError, "argument 'unit'; did you mean 'units'"),
        ({"module": None}, TypeError, "unexpected keyword argument .module"),
        ({"reshard_after_forward": 3}, ValueError, "must divide the 4 ranks"),
        ({"overrides": lambda fqn, m: 1}, TypeError, "overrides returned 1 for unit"),
        ({"overrides": lambda fqn, m: {"x": 1}}, TypeError, "overrides for unit .* argument 'x'"),
        ({"overrides": lambda fqn, m: {"mesh": 4}}, TypeError, "mesh must be a DeviceMesh"),
        ({"overrides": lambda fqn, m: {"ignored_params": set()}}, TypeError, "whole model"),
    ],
)
@on_fake_ranks(4)
def test_wrong_arguments_leave_the_model_as_it_was(kwargs, error, match):
    unchanged_after(error, match, MlpStack(), **kwargs)


@on_fake_ranks(4)
def test_a_parameter_that_cannot_be_sharded_leaves_the_model_as_it_was():
    model = MlpStack()
    model.temperature = nn.Parameter(torch.tensor(1.0))
    unchanged_after(ValueError, "'temperature' is a scalar", model)
    unchanged_after(ValueError, "the root is a ModuleList", nn.ModuleList([nn.Linear(2, 2)] * 2))
    with torch.device("meta"):
        model = MlpStack()
    unchanged_after(ValueError, r"no values.*'blocks.2.up.weight'", model, sync_init=True)


@on_fake_ranks(4)
def test_trainable_parameters_in_less_than_float32_warn_once():
    with pytest.warns(UserWarning, match=r"14 trainable parameters.*bfloat16.*param_dtype") as seen:
        fully_shard_units(MlpStack().bfloat16())
    assert len(seen) == 1 and seen[0].filename == __file__
    fully_shard_units(MlpStack().bfloat16().requires_grad_(False))
    fully_shard_units(MlpStack().double())


LAYERS = (nn.Linear, nn.Embedding, nn.LayerNorm)


@pytest.mark.parametrize(
    ("case_name", "units", "min_params"),
    [
        ("transformer", "auto", 0),
        ("transformer_tied", LAYERS, 0),
        ("transformer_tied", LAYERS, 90),
        ("tied_inside", lambda fqn, module: True, 70),
        ("mlp_stack", "auto", 2 * 136),  # blocks 0 and 1 are one unit
    ],
)
@on_threads(2)
def test_any_choice_of_units_trains_like_one_process(case_name, units, min_params):
    case = CASES[case_name]
    adam = functools.partial(torch.optim.AdamW, lr=1e-2)
    model, mesh = case.build(), init_device_mesh("cpu", (2,))
    if dist.get_rank():
        seeded(model, 1)  # the values of rank 0 are sent
    fully_shard_units(model, mesh, units=units, min_params=min_params, sync_init=True)
    run = train(
        model, case.batches(3, dist.get_rank()), adam, loss_fn=case.loss, reduce_loss="mean"
    )
    plain = case.build()
    expected = train_plain(plain, case.whole_batches(3, 2), adam, loss_fn=case.loss)
    assert_same_run(run, expected, case.dtype)
    model.load_state_dict(plain.state_dict())
    assert_same(full_state(model), full_state(plain), bitwise=True)


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
def test_ranks_may_run_different_modules_of_a_joined_unit():
    plain, model = seeded(ChosenBlocks()), seeded(ChosenBlocks())
    assert len(fully_shard_units(model, init_device_mesh("cpu", (2,)), min_params=300)) == 2
    x = torch.ones(2, 6)
    for chosen in [((0, 1), (1, 2)), ((2,), (0,)), ((0, 1, 2), (2, 0))]:
        model(x, chosen[dist.get_rank()]).sum().backward()
        for each in chosen:
            (plain(x, each).sum() / 2).backward()
        assert_same(full_grads(model), full_grads(plain))
        model.zero_grad(), plain.zero_grad()


@on_fake_ranks(2)
def test_a_misspelled_option_is_refused_also_if_all_units_exist():
    model = MlpStack()
    fully_shard_units(model)
    with pytest.raises(TypeError, match="did you mean 'reshard_after_forward'"):
        fully_shard_units(model, reshard_after_foward=True)


@on_fake_ranks(2)
def test_options_that_reach_no_unit_warn():
    model = MlpStack()
    fully_shard_units(model)
    ignored = "ignored sync_init, overrides, reshard_after_forward: this model is sharded"
    with pytest.warns(UserWarning, match=ignored):
        fully_shard_units(
            model, sync_init=True, overrides=lambda fqn, m: None, reshard_after_forward=False
        )
