"""``describe``: what is where, to the byte, at any number of ranks."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import meshard
from meshard import GradientSync, MixedPrecisionPolicy, describe, fully_shard, fully_shard_units
from meshard.diagnostics import readable_bytes
from tests.support.models import Adapted, MixedDtypeBlock, Transformer
from tests.support.ranks import fake_group, on_fake_ranks, on_ranks


def rows(table):
    """Return the cells of each line by the name of its unit, and the warnings."""
    head, *lines = table.splitlines()
    assert head.split()[:5] == ["unit", "parameters", "dtype", "unsharded", "per"]
    warnings = [line for line in lines if line.startswith("warning")]
    units = [line for line in lines if line not in warnings]
    return {line.split("  ")[0].strip(): line.split() for line in units}, warnings


@on_fake_ranks(8)
def test_a_table_of_a_transformer_on_eight_ranks():
    model = Transformer(vocab=16, dim=8, depth=2, tied=True)
    fully_shard_units(model)
    assert describe(model).splitlines() == [
        "unit      parameters  dtype    unsharded  per rank  padding  mesh     policies",
        "(root)           144  float32      576 B      80 B     64 B  shard 8",
        "blocks.0         848  float32     3392 B     432 B     64 B  shard 8",
        "blocks.1         848  float32     3392 B     432 B     64 B  shard 8",
        "total          1,840              7360 B     944 B    192 B",
    ]


@on_fake_ranks(2)
def test_a_table_is_the_same_while_units_are_unsharded():
    layers = [fully_shard(nn.Linear(4, 4), reshard_after_forward=False) for _ in range(2)]
    model = fully_shard(nn.Sequential(*layers))
    tables = [describe(model)]
    layers[1].register_forward_hook(lambda *_: tables.append(describe(model)))
    model(torch.ones(1, 4))
    tables.append(describe(model))
    with meshard.unsharded_params(model):
        tables.append(describe(model))
    assert len(tables) == 4 and len(set(tables)) == 1


@pytest.mark.parametrize("rank", [0, 63, 64, 255])
def test_sixty_four_rows_over_256_ranks_cost_four_times(rank):
    with fake_group(256, rank):
        layer = nn.Linear(8, 64, bias=False)
        fully_shard(layer)
        cells, warnings = rows(describe(layer))
    # One row of 8 floats for each of 256 ranks, of which 64 are there.
    assert cells["(root)"][1:9] == ["512", "float32", "2048", "B", "32", "B", "6144", "B"]
    assert warnings == [
        "warning: (root) gathers and reduces 4.00 times its parameters: dim 0 of 'weight' has 64 "
        "rows for 256 ranks. Shard another dim (shard_placement_fn), or over fewer ranks."
    ]


@on_fake_ranks(256)
def test_another_dim_or_fewer_ranks_cure_it():
    wide = nn.Linear(256, 64, bias=False)
    fully_shard(wide, shard_placement_fn=lambda param: Shard(1))
    hybrid = nn.Linear(8, 64, bias=False)
    fully_shard(hybrid, init_device_mesh("cpu", (4, 64)))
    for layer in (wide, hybrid):
        cells, warnings = rows(describe(layer))
        assert not warnings and cells["(root)"][7:9] == ["0", "B"]
    assert "replicate 4 x shard 64" in describe(hybrid)
    assert cells["(root)"][5:7] == ["32", "B"]  # of 2048, over 64 ranks


def test_bytes_are_those_that_are_sent():
    with fake_group(6), meshard.CommLedger() as ledger:
        model = Transformer(vocab=11, depth=1)
        fully_shard_units(model, units=(nn.Linear, nn.Embedding))
        cells, _ = rows(describe(model))
        for module in model.modules():
            if isinstance(module, meshard.FSDPModule):
                module.unshard()
                module.reshard()
    assert len(ledger.events) == len(cells) - 1
    for event in ledger.events:
        assert event.payload_bytes == 6 * int(cells[event.unit][5])  # "per rank"
        unsharded, padding = int(cells[event.unit][3]), int(cells[event.unit][7])
        assert event.payload_bytes == unsharded + padding


def test_several_dtypes_and_policies():
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    with fake_group(2):
        layer = fully_shard(nn.Linear(4, 4), mp_policy=policy, reshard_after_forward=False)
        layer.set_gradient_sync(GradientSync.NONE)
        layer.set_gradient_divide_factor(3)
        adapted = fully_shard(Adapted(4))
        exact = MixedPrecisionPolicy(accumulate_dtype=torch.float64)
        frozen = fully_shard(nn.Linear(4, 4).requires_grad_(False), mp_policy=exact)
        for module, policies in (
            (layer, "shard 2  reshard_after_forward=False, param_dtype=bfloat16, reduce_dtype="
             "float32, output_dtype=float32, gradient_sync=NONE, divide_factor=3"),
            (adapted, "partly frozen"),
            (frozen, "accumulate_dtype=float64, frozen"),
        ):  # fmt: skip
            assert describe(module).splitlines()[1].endswith(policies)


@on_fake_ranks(2)
def test_parameters_that_would_be_stepped_in_bfloat16_are_warned_of():
    model = MixedDtypeBlock(6)
    fully_shard(model)
    table = describe(model)
    _, warnings = rows(table)
    assert "float32 + bfloat16" in table
    (warning,) = warnings
    assert "less than float32 (first 'linear.weight')" in warning
    assert not rows(describe(model.requires_grad_(False)))[1]


@pytest.mark.parametrize("is_on", [True, False])
@on_ranks(2)
def test_the_last_line_states_whether_and_why_ranks_use_shared_memory(is_on):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHARD_SHARED_MEMORY", str(int(is_on)))
        layer = fully_shard(nn.Linear(4, 4))
        before = describe(layer).splitlines()[-1]
        layer(torch.ones(1, 4))
        after = describe(layer).splitlines()[-1]
    if is_on:
        assert before.endswith("not known before the first step")
        assert after == "shared memory: on"
    else:
        assert before == after == "shared memory: off: MESHARD_SHARED_MEMORY=0"


@on_fake_ranks(4)
def test_parameters_in_no_unit_have_a_line():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[1])
    cells, _ = rows(describe(model))
    assert cells["(no unit)"][2:7] == ["20", "float32", "80", "B", "80"]
    assert cells["total"][1:] == ["40", "160", "B", "112", "B", "48", "B"]
    fully_shard(model[0]), fully_shard(model)
    assert rows(describe(model))[0]["(root)"][1] == "0"  # a unit without parameters


@on_fake_ranks(4)
def test_units_without_a_root_have_their_own_names_and_what_is_left_is_named():
    model = Transformer(vocab=16, dim=8, depth=2)
    model.head.requires_grad_(False)
    fully_shard_units(model.blocks[0], units=nn.Linear)
    fully_shard(model.blocks[1])
    cells, warnings = rows(describe(model))
    names = [name for name in cells if name not in ("(no unit)", "total")]
    assert names[0] == "blocks.0" and "blocks.1" in names and "(root)" not in names
    assert all(name.startswith("blocks.0.") for name in names[1:-1]) and len(names) > 3
    assert [line for line in warnings if "in no unit" in line] == [
        "warning: 'embedding.weight', 'norm.weight', 'norm.bias' are trainable and in no unit: "
        "each rank would train them apart. Apply fully_shard to the module around them too, or "
        "name them in ignored_params."
    ]
    left = {*model.embedding.parameters(), *model.norm.parameters()}
    fully_shard(model, ignored_params=left)
    cells, warnings = rows(describe(model))
    assert "(root)" in cells and not any("in no unit" in line for line in warnings)


def test_meta_models_are_described_like_others():
    tables = []
    for device in ("meta", "cpu"):
        with fake_group(16), torch.device(device):
            model = Transformer()
            fully_shard_units(model)
            tables.append(describe(model))
    assert tables[0] == tables[1]


def test_bytes_are_readable():
    for num_bytes, text in [
        (0, "0 B"),
        (9999, "9999 B"),
        (10_000, "9.8 KiB"),
        (2**20 - 1, "1024.0 KiB"),
        (2**20, "1.0 MiB"),
        (5 * 2**40, "5.0 TiB"),
        (5 * 2**50, "5120.0 TiB"),
    ]:
        assert readable_bytes(num_bytes) == text


@pytest.mark.parametrize("over_replicas", [False, True])
@pytest.mark.parametrize("reshard", [None, False])
def test_a_large_model_is_told_what_takes_less_memory(over_replicas, reshard):
    """Four layers of 2 GiB, of which 1 GiB is on each of two ranks that hold shards."""
    with fake_group(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(2**14, 2**13, bias=False) for _ in range(4)))
        for layer in model:
            fully_shard(layer, mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh)
        if over_replicas:
            meshard.local_optimizer(model, torch.optim.AdamW, over_replicas=True)
        *lines, last = describe(model).splitlines()
    expected = ["2.0 GiB by reshard_after_forward=True"] if reshard is False else []
    if over_replicas:
        assert sum("state over replicas" in line for line in lines) == 4
    else:
        expected.append("1.5 GiB by local_optimizer(..., over_replicas=True)")
    expected += [
        '2.0 GiB by local_optimizer(..., state_device="cpu")',
        "4.0 GiB by CPUOffloadPolicy()",
    ]
    named = ", ".join(expected[:3])
    assert last == f"less memory per rank: {named}; see the page 'Out of memory'"
