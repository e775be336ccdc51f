"""A Hugging Face GPT-2, sharded by one call, against one process."""

import os
import re

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from meshard import describe, fully_shard_units, materialize
from tests import ROOT
from tests.support.against_plain import check_training
from tests.support.parity import assert_same, full_state
from tests.support.ranks import on_fake_ranks, on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.extras]  # importing transformers takes seconds

SMALL = {"vocab_size": 61, "n_positions": 12, "n_embd": 16, "n_layer": 3, "n_head": 2}


def gpt2(**config):
    # Not at the top: it takes seconds, which collecting the quick tests would pay for.
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    tokens = {"bos_token_id": 0, "eos_token_id": 0} if config else {}
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**no_dropout, **tokens, **config, loss_type="ForCausalLM")
    )


def step(model, rank):
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, SMALL["vocab_size"], (2, 10), generator=generator)
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


@pytest.mark.parametrize(("mesh_shape", "recompute"), [((4,), False), ((2, 2), True)])
@on_ranks(4, timeout=200)
def test_gpt2_sharded_by_auto_trains_like_one_process(mesh_shape, recompute):
    plain, model = gpt2(**SMALL).train(), gpt2(**SMALL).train()
    if recompute:
        # Renamed in transformers 5.
        old = "gradient_checkpointing_enable"
        getattr(model, "activation_checkpointing_enable", getattr(model, old))()
    names = fully_shard_units(model, init_device_mesh("cpu", mesh_shape))
    assert names == ["", "transformer.h.0", "transformer.h.1", "transformer.h.2"]
    assert model.lm_head.weight is model.transformer.wte.weight
    check_training(model, plain, step, steps=5)


@on_ranks(2, timeout=200)
def test_its_own_init_gives_the_values_of_one_process():
    plain = gpt2(**SMALL)
    torch.manual_seed(3)
    plain.apply(plain._init_weights)
    with torch.device("meta"):
        model = gpt2(**SMALL)
    fully_shard_units(model)
    torch.manual_seed(3)
    materialize(model, init=model._init_weights)
    assert_same(full_state(model), full_state(plain), bitwise=True)


@on_fake_ranks(8)
def test_the_table_in_the_documents_is_what_describe_prints():
    page = (ROOT / "docs" / "how-to" / "units.md").read_text()
    (table,) = re.findall(r"```text\n(unit .*?)\n```", page, re.DOTALL)
    with torch.device("meta"):
        model = gpt2()
    fully_shard_units(model)
    assert describe(model) == table
