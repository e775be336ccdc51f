"""The function of docs/how-to/units.md that fills a model with adapters on the meta device."""

import re
import warnings

import pytest
import torch
import torch.distributed as dist

import meshard
from tests import ROOT
from tests.support.ranks import on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.extras]


def shown_function():
    text = (ROOT / "docs/how-to/units.md").read_text().split("### Adapters on the meta device")[1]
    names = {}
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], names)
    return names["give_values"]


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
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    warnings.simplefilter("ignore", FutureWarning)  # peft calls what transformers deprecates
    plain = transformers.LlamaForCausalLM(config)
    plain.save_pretrained(tmp_path)  # by the first rank
    dist.barrier()
    lora = peft.LoraConfig(
        **{"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | changes
    )
    with torch.device("meta"):
        model = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)
    meshard.fully_shard(model)
    if is_refused:
        with pytest.raises(AssertionError):
            shown_function()(model, tmp_path)
        return
    shown_function()(model, tmp_path)
    tokens = torch.arange(8)[None]
    assert torch.equal(model(input_ids=tokens).logits, plain(input_ids=tokens).logits)
