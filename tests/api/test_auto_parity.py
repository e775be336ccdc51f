"""Models whose units one call chooses, against one process."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from meshard import fully_shard_units
from tests.support.cases import CASES
from tests.support.models import seeded
from tests.support.parity import assert_same_run, train, train_plain

ADAM = functools.partial(torch.optim.AdamW, lr=1e-2)
STEPS = 4
CHOICES = {
    "auto": "auto",
    "linear": (nn.Linear, nn.Embedding, nn.LayerNorm),
    "everything": lambda fqn, module: True,
}


def train_sharded(case_name, choice, min_params):
    case = CASES[case_name]
    model = case.build()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard_units(model, mesh, units=CHOICES[choice], min_params=min_params)
    batches = case.batches(STEPS, dist.get_rank())
    return train(model, batches, ADAM, loss_fn=case.loss, reduce_loss="mean")


@pytest.mark.parametrize("case_name", ["transformer", "transformer_tied", "tied_inside"])
@pytest.mark.parametrize(
    ("choice", "min_params"), [("auto", 0), ("linear", 0), ("linear", 90), ("everything", 70)]
)
def test_any_choice_of_units_trains_like_one_process(run_ranks, case_name, choice, min_params):
    case = CASES[case_name]
    expected = train_plain(case.build(), case.whole_batches(STEPS, 2), ADAM, loss_fn=case.loss)
    for run in run_ranks(train_sharded, 2, case_name, choice, min_params):
        assert_same_run(run, expected, case.dtype)


class Encoder(nn.Module):
    """torch's own encoder, whose attention reads a weight of a module inside it."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        return self.encoder(x)


def run_encoder(units):
    model = seeded(Encoder())
    plain = seeded(Encoder())
    fully_shard_units(model, units=units)
    x = torch.ones(2, 3, 8).cumsum(1)
    for mode in (True, False):
        model.train(mode), plain.train(mode)
        with torch.set_grad_enabled(mode):
            torch.testing.assert_close(model(x), plain(x))
    return True


@pytest.mark.parametrize("units", [nn.MultiheadAttention, (nn.Linear, nn.LayerNorm), "auto"])
def test_attention_may_be_inside_units_or_be_one(run_ranks, units):
    assert all(run_ranks(run_encoder, 2, units))
