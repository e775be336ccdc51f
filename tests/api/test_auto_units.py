"""``fully_shard_units``: which modules become units, and which unit takes each parameter."""

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from meshard import FSDPModule, MixedPrecisionPolicy, fully_shard, fully_shard_units
from tests.support.fake import fake_group
from tests.support.models import MlpBlock, MlpStack, Transformer, TransformerBlock
from tests.support.units_made import sharded_modules, taken_by


@pytest.fixture(autouse=True)
def four_ranks():
    with fake_group(4):
        yield


# --- auto -------------------------------------------------------------------------------------


def test_auto_takes_the_repeated_blocks_and_the_root_takes_the_rest():
    model = Transformer(depth=3)
    assert fully_shard_units(model) == ["", "blocks.0", "blocks.1", "blocks.2"]
    root = [names[0] for names in taken_by(model)[""]]
    assert root == ["embedding.weight", "norm.weight", "norm.bias", "head.weight"]


def test_auto_takes_the_outermost_blocks_only():
    inner = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
    assert fully_shard_units(nn.Sequential(*inner)) == ["", "0", "1"]


def test_auto_looks_through_lists_of_lists():
    model = nn.Module()
    model.stages = nn.ModuleList(nn.ModuleList(MlpBlock(4, 4) for _ in range(n)) for n in (2, 1))
    # Also the only block of its list: a deeper model would have more there.
    assert fully_shard_units(model) == ["", "stages.0.0", "stages.0.1", "stages.1.0"]


def test_auto_wants_siblings_of_the_same_class_that_hold_parameters():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.ReLU(), nn.Linear(4, 4), nn.LayerNorm(4))
    assert fully_shard_units(model) == ["", "0", "3"]


def test_auto_finds_like_blocks_in_a_dict():
    model = nn.Module()
    model.layers = nn.ModuleDict({str(n): MlpBlock(4, 4) for n in range(3)})
    assert fully_shard_units(model) == ["", "layers.0", "layers.1", "layers.2"]


def test_auto_looks_through_a_dict_of_different_parts():
    model = nn.Module()
    model.parts = nn.ModuleDict({name: nn.Embedding(4, 4) for name in ("tokens", "positions")})
    model.parts["blocks"] = nn.ModuleList(MlpBlock(4, 4) for _ in range(2))
    assert fully_shard_units(model) == ["", "parts.blocks.0", "parts.blocks.1"]


def test_auto_without_repeated_blocks_is_one_unit_and_a_warning():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    with pytest.warns(UserWarning, match=r"no repeated blocks in this Sequential.*units=") as seen:
        assert fully_shard_units(model) == [""]
    assert len(seen) == 1 and seen[0].filename == __file__
    assert len(taken_by(model)[""]) == 4 and fully_shard_units(model) == [""]


def test_units_made_by_hand_are_blocks_enough():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    fully_shard(model[0])
    assert fully_shard_units(model) == ["", "0"]


# --- class and predicate ----------------------------------------------------------------------


def test_a_class_matches_its_subclasses():
    class Wide(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4), Wide(4, 4), nn.LayerNorm(4))
    assert fully_shard_units(model, units=nn.Linear) == ["", "0", "1"]


def test_a_tuple_of_classes_makes_nested_units_bottom_up():
    model = Transformer(depth=1)
    names = fully_shard_units(model, units=(TransformerBlock, nn.Embedding, nn.LayerNorm))
    assert names == [
        "",
        "embedding",
        "blocks.0",
        "blocks.0.attention_norm",
        "blocks.0.mlp_norm",
        "norm",
    ]
    assert "blocks.0.attention_norm.weight" not in str(taken_by(model)["blocks.0"])


def test_a_predicate_sees_names_and_modules():
    model = MlpStack(depth=3)
    seen = []

    def even_blocks(fqn, module):
        seen.append((fqn, type(module)))
        return fqn in ("blocks.0", "blocks.2")

    assert fully_shard_units(model, units=even_blocks) == ["", "blocks.0", "blocks.2"]
    assert ("blocks.1.up", nn.Linear) in seen


def test_containers_without_a_forward_are_never_units():
    model = MlpStack()
    with pytest.raises(ValueError, match=r"ModuleList has no forward.*MlpBlock"):
        fully_shard_units(model, units=nn.ModuleList)
    assert fully_shard_units(model, units=(nn.ModuleList, nn.Linear))[1] == "blocks.0.up"
    assert "blocks" not in sharded_modules(model)


def test_modules_without_parameters_are_never_units():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    assert fully_shard_units(model, units=lambda fqn, module: True) == ["", "0"]


def test_every_unit_is_named_for_get_submodule():
    model = MlpStack()
    names = fully_shard_units(model)
    assert all(isinstance(model.get_submodule(name), FSDPModule) for name in names)


def test_what_is_inside_attention_that_reads_it_is_never_a_unit():
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8))
    assert fully_shard_units(model, units=nn.Linear) == ["", "1"]
    assert ["0.out_proj.weight"] in taken_by(model)[""]
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16))
    names = fully_shard_units(model, units=(nn.Linear, nn.MultiheadAttention))
    assert names == ["", "0.self_attn", "0.linear1", "0.linear2"]
    assert ["0.self_attn.out_proj.weight"] in taken_by(model)["0.self_attn"]


# --- min_params -------------------------------------------------------------------------------


def test_small_units_are_left_to_the_unit_around():
    model = Transformer(depth=1)
    linear, norm = 8 * 8 + 8, 16
    names = fully_shard_units(
        model, units=(TransformerBlock, nn.Linear, nn.LayerNorm), min_params=linear
    )
    assert norm < linear and names == [
        "",
        "blocks.0.attention.qkv",
        "blocks.0.attention.out",
        "blocks.0.mlp.0",
        "blocks.0.mlp.2",
        "head",
    ]  # the block itself would own nothing but two norms


def test_what_small_units_leave_counts_for_the_unit_around():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    assert fully_shard_units(model, units=(nn.Linear, nn.Sequential), min_params=40) == ["", "0"]
    assert len(taken_by(model)["0"]) == 4


# --- again, and after fully_shard by hand -------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [{}, {"units": (nn.Linear, MlpBlock)}, {"units": nn.Linear, "min_params": 62}],
    ids=["auto", "classes", "min_params"],
)
def test_a_second_call_changes_nothing(how):
    model = MlpStack()
    names = fully_shard_units(model, **how)
    before = {fqn: (type(m), list(m._parameters.values())) for fqn, m in model.named_modules()}
    hooks = {fqn: len(m._forward_hooks) for fqn, m in model.named_modules()}
    assert fully_shard_units(model, **how) == names
    for fqn, module in model.named_modules():
        kind, params = before[fqn]
        assert type(module) is kind and len(module._forward_hooks) == hooks[fqn]
        assert all(a is b for a, b in zip(module._parameters.values(), params, strict=True))


@pytest.mark.parametrize("by_hand", list(itertools.product([False, True], repeat=3))[1:])
def test_units_made_by_hand_stay_and_the_others_come(by_hand):
    model = MlpStack()
    for block, is_sharded in zip(model.blocks, by_hand, strict=True):
        if is_sharded:
            fully_shard(block, reshard_after_forward=False)
    kept = [vars(block).get("_meshard_unit") for block in model.blocks]
    assert fully_shard_units(model) == ["", "blocks.0", "blocks.1", "blocks.2"]
    for block, unit in zip(model.blocks, kept, strict=True):
        assert unit is None or vars(block)["_meshard_unit"] is unit


def test_units_of_another_grain_are_named_too():
    model = MlpStack(depth=2)
    fully_shard(model.blocks[0].up)
    assert fully_shard_units(model) == ["", "blocks.0", "blocks.0.up", "blocks.1"]


# --- arguments ----------------------------------------------------------------------------------


def test_arguments_of_fully_shard_reach_every_unit_and_overrides_one():
    model = MlpStack()
    seen = []

    def overrides(fqn, module):
        seen.append((fqn, type(module).__name__))
        return {"reshard_after_forward": False} if fqn == "blocks.1" else None

    fully_shard_units(
        model,
        reshard_after_forward=True,
        overrides=overrides,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    )
    units = [vars(m)["_meshard_unit"] for m in (model, *model.blocks)]
    assert [u.settings.reshard_after_forward for u in units] == [True, True, False, True]
    assert {u.input_dtype for u in units} == {torch.bfloat16}
    assert sorted(seen) == [("", "MlpStack"), *((f"blocks.{n}", "MlpBlock") for n in range(3))]


def test_a_unit_may_have_a_mesh_of_its_own():
    model = MlpStack()
    mesh = init_device_mesh("cpu", (4,))
    hybrid = init_device_mesh("cpu", (2, 2))
    fully_shard_units(model, mesh, overrides=lambda fqn, _: {"mesh": hybrid} if fqn else {})
    assert model.scale.device_mesh.ndim == 1
    assert model.blocks[0].up.weight.device_mesh.ndim == 2


@pytest.mark.parametrize("name", ["mesh", "mp_policy", "offload_policy", "reshard_after_forward"])
def test_none_in_overrides_is_the_default(name):
    model = MlpStack()
    mesh = init_device_mesh("cpu", (2, 2))
    chosen = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        "reshard_after_forward": False,
    }
    fully_shard_units(model, mesh, overrides=lambda fqn, _: {name: None}, **chosen)
    unit = vars(model.blocks[0])["_meshard_unit"]
    assert model.blocks[0].up.weight.device_mesh == mesh  # that of the call
    assert (unit.input_dtype is None) is (name == "mp_policy")
    assert (unit.settings.reshard_after_forward is None) is (name == "reshard_after_forward")


def test_a_model_of_one_layer_has_the_units_of_one_of_several():
    model = MlpStack()
    del model.blocks[1:]
    assert fully_shard_units(model) == ["", "blocks.0"]


def test_ignored_params_stay_and_do_not_count():
    model = MlpStack()
    ignored = {model.scale, *model.blocks[1].parameters()}
    assert fully_shard_units(model, ignored_params=iter(ignored)) == ["", "blocks.0", "blocks.2"]
    assert type(model.scale) is nn.Parameter and model.scale in ignored


def unchanged_after(error, match, model, *args, **kwargs):
    with pytest.raises(error, match=match):
        fully_shard_units(model, *args, **kwargs)
    assert not sharded_modules(model)
    assert all(type(param) is nn.Parameter for param in model.parameters())


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"units": "MlpBlock"}, ValueError, "units must be .auto., .*got .MlpBlock."),
        ({"units": nn.Conv2d}, ValueError, "matches no module inside MlpStack.*Linear, MlpBlock"),
        ({"units": lambda fqn, module: False}, ValueError, "matches no module"),
        ({"units": [MlpBlock]}, TypeError, "units must be 'auto'"),
        ({"units": ("MlpBlock",)}, TypeError, "units must be 'auto'"),
        ({"units": ()}, TypeError, "units must be 'auto'"),
        ({"units": None}, TypeError, "units must be 'auto'"),
        ({"mesh": 4}, TypeError, "mesh must be a DeviceMesh or None, got int"),
        ({"min_params": 1.5}, TypeError, "min_params must be an int"),
        ({"reshard": True}, TypeError, "unexpected keyword argument .reshard"),
        ({"module": None}, TypeError, "multiple values for argument .module"),
        ({"reshard_after_forward": 3}, ValueError, "must divide the 4 ranks"),
        ({"overrides": lambda fqn, m: 1}, TypeError, "overrides returned 1 for unit"),
        ({"overrides": lambda fqn, m: {"x": 1}}, TypeError, "unexpected keyword argument .x"),
        ({"overrides": lambda fqn, m: {"mesh": 4}}, TypeError, "mesh must be a DeviceMesh"),
        ({"overrides": lambda fqn, m: {"ignored_params": set()}}, TypeError, "whole model"),
    ],
)
def test_wrong_arguments_leave_the_model_as_it_was(kwargs, error, match):
    unchanged_after(error, match, MlpStack(), **kwargs)


def test_a_parameter_that_cannot_be_sharded_leaves_the_model_as_it_was():
    model = MlpStack()
    model.temperature = nn.Parameter(torch.tensor(1.0))
    unchanged_after(ValueError, "'temperature' is a scalar", model)


def test_a_root_without_a_forward_is_refused():
    unchanged_after(ValueError, "the root is a ModuleList", nn.ModuleList([nn.Linear(2, 2)] * 2))
    with pytest.raises(TypeError, match=r"needs an nn\.Module, got list"):
        fully_shard_units([nn.Linear(2, 2)])


def test_sync_init_has_nothing_to_send_on_meta():
    with torch.device("meta"):
        model = MlpStack()
    unchanged_after(ValueError, r"no values.*'blocks.2.up.weight'", model, sync_init=True)


# --- narrow optimizers ----------------------------------------------------------------------------


def test_trainable_parameters_in_less_than_float32_warn_once():
    model = MlpStack().bfloat16()
    with pytest.warns(UserWarning, match=r"14 trainable parameters.*bfloat16.*param_dtype") as seen:
        fully_shard_units(model)
    assert len(seen) == 1 and seen[0].filename == __file__


def test_frozen_or_wide_parameters_do_not_warn():
    fully_shard_units(MlpStack().bfloat16().requires_grad_(False))
    fully_shard_units(MlpStack().double())
