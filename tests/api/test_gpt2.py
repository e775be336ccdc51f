"""A Hugging Face GPT-2, sharded by one call, against one process."""

import functools
import os
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from meshard import describe, fully_shard_units, materialize
from tests import ROOT
from tests.support.parity import assert_same, assert_same_run, full_state, train, train_plain
from tests.support.ranks import on_fake_ranks, on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.extras]  # importing transformers takes seconds

STEPS = 5
SMALL = {"vocab_size": 61, "n_positions": 12, "n_embd": 16, "n_layer": 3, "n_head": 2}
SGD = functools.partial(torch.optim.SGD, lr=0.3, momentum=0.9)
# Attention does not depend on the bias of its keys, whose gradient is rounding only: a usual eps
# would make steps of it.
ADAM = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-4)


def gpt2(**config):
    # Not at the top: it takes seconds, which collecting the quick tests would pay for.
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    tokens = {"bos_token_id": 0, "eos_token_id": 0} if config else {}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**no_dropout, **tokens, **config, loss_type="ForCausalLM")
    )


class Trained(nn.Module):
    """Tokens to the ``ModelOutput`` of a model that computes its own loss."""

    def __init__(self, recompute=False):
        super().__init__()
        torch.manual_seed(0)
        self.model = gpt2(**SMALL)
        if recompute:
            # Renamed in transformers 5.
            old = "gradient_checkpointing_enable"
            getattr(self.model, "activation_checkpointing_enable", getattr(self.model, old))()
        self.model.train()

    def forward(self, tokens):
        return self.model(input_ids=tokens, labels=tokens, use_cache=False)


def loss_of(output):
    return output.loss


def tokens(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, SMALL["vocab_size"], (2, 10), generator=generator)


def train_sharded(mesh_shape, optimizer_fn, recompute):
    wrapped = Trained(recompute)
    names = fully_shard_units(wrapped.model, init_device_mesh("cpu", mesh_shape))
    assert names == ["", "transformer.h.0", "transformer.h.1", "transformer.h.2"]
    assert wrapped.model.lm_head.weight is wrapped.model.transformer.wte.weight
    batches = [tokens(step, dist.get_rank()) for step in range(STEPS)]
    return train(wrapped, batches, optimizer_fn, loss_fn=loss_of, reduce_loss="mean")


@pytest.mark.parametrize(
    ("mesh_shape", "optimizer_fn", "recompute"),
    [((3,), SGD, False), ((2, 2), ADAM, True)],
)
def test_gpt2_sharded_by_auto_trains_like_one_process(
    run_ranks, mesh_shape, optimizer_fn, recompute
):
    num_ranks = 4 if mesh_shape == (2, 2) else mesh_shape[0]
    batches = [torch.cat([tokens(s, r) for r in range(num_ranks)]) for s in range(STEPS)]
    expected = train_plain(Trained(), batches, optimizer_fn, loss_fn=loss_of)
    moved = [p - expected[0].params[n] for n, p in expected[-1].params.items() if "ln" not in n]
    assert all(float(change.abs().max()) > 1e-3 for change in moved)
    for run in run_ranks(
        train_sharded, num_ranks, mesh_shape, optimizer_fn, recompute, timeout=200
    ):
        assert_same_run(run, expected)


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
