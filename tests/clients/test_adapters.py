"""Adapters of PEFT, by the blocks that the pages show."""

import copy
import re
import warnings

import pytest
import torch
import torch.distributed as dist

import meshard
from tests import ROOT
from tests.support.ranks import on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.extras]


def run_shown(page, after):
    """Run the first block after a text of a page, and return its names."""
    text = (ROOT / f"docs/how-to/{page}.md").read_text().split(after)[1]
    names = {}
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], names)
    return names


def tiny_llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize(
    ("changes", "is_refused"),
    [
        ({}, False),
        ({"target_modules": ["q_proj", "v_proj"], "init_lora_weights": "gaussian"}, False),
        ({"init_lora_weights": False}, True),
        ({"use_dora": True}, True),
        ({"modules_to_save": ["lm_head"]}, True),
    ],
    ids=str,
)
@on_ranks(2)
def test_a_model_begins_as_its_base(tmp_path, changes, is_refused):
    peft = pytest.importorskip("peft")
    warnings.simplefilter("ignore", FutureWarning)  # peft calls what transformers deprecates
    plain = tiny_llama()
    plain.save_pretrained(tmp_path)  # by the first rank
    dist.barrier()
    lora = peft.LoraConfig(
        **{"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | changes
    )
    with torch.device("meta"):
        model = peft.get_peft_model(tiny_llama(), lora)
    meshard.fully_shard(model)
    give_values = run_shown("units", "### Adapters on the meta device")["give_values"]
    if is_refused:
        with pytest.raises(AssertionError):
            give_values(model, tmp_path)
        return
    give_values(model, tmp_path)
    tokens = torch.arange(8)[None]
    assert torch.equal(model(input_ids=tokens).logits, plain(input_ids=tokens).logits)


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
@on_ranks(2)
def test_a_merged_model_is_that_of_peft_alone(tmp_path, kind):
    peft = pytest.importorskip("peft")
    safetensors = pytest.importorskip("safetensors.torch")
    warnings.simplefilter("ignore", FutureWarning)
    if kind == "ia3":
        config = peft.IA3Config(task_type="CAUSAL_LM")
    else:
        config = peft.LoraConfig(
            r=4, target_modules="all-linear", task_type="CAUSAL_LM", use_dora=kind == "dora"
        )
    model = peft.get_peft_model(tiny_llama(), config)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(0.1 * torch.randn(param.shape))
    alone = copy.deepcopy(model).merge_and_unload().state_dict()
    for layer in model.get_base_model().model.layers:
        meshard.fully_shard(layer)
    meshard.fully_shard(model)
    run_shown("weights", "### Merge adapters")["save_merged"](model, tmp_path)
    saved = safetensors.load_file(tmp_path / "model.safetensors")
    assert saved.keys() == alone.keys()
    for name, value in saved.items():
        assert torch.equal(value, alone[name]), name


@on_ranks(2)
def test_a_model_with_adapters_generates_as_the_plain_one():
    peft = pytest.importorskip("peft")
    warnings.simplefilter("ignore", FutureWarning)
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    plain = peft.get_peft_model(tiny_llama(), config).eval()
    model = copy.deepcopy(plain)
    meshard.fully_shard(model)
    meshard.register_fsdp_forward_method(model, "generate")
    tokens = torch.arange(8)[None] + dist.get_rank()
    how = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    ours, theirs = (each.generate(input_ids=tokens, **how) for each in (model, plain))
    assert torch.equal(ours, theirs)
