"""What the library makes for itself is where it needs it, whatever the default device is.

``torch.set_default_device("cuda")`` is common in scripts. Here the meta device stands for it: a
tensor that is made there, because nobody named a device, has no values.
"""

import pytest
import torch
from torch import nn

import meshard
from meshard.checkpoint import Checkpointer, load_pretrained, save_pretrained, stream_unsharded
from meshard.planning import plan
from tests.checkpoint.runs import assert_same_values, net, values_of
from tests.support.ranks import on_ranks

OPTIMIZERS = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "local": lambda model: meshard.local_optimizer(model, torch.optim.AdamW, lr=0.01),
    "overlapped": lambda model: meshard.overlap_optimizer(model, torch.optim.SGD, lr=0.01),
    "owners": lambda model: meshard.owner_optimizer(model, torch.optim.SGD, lr=0.01),
}


def values_after_a_run(folder, layout, optimizer, default_device):
    """Train, save, and go on in new objects; return what the model and its weights hold."""
    models = [net(layout, seed) for seed in (0, 1, 2)]
    torch.manual_seed(0)  # of dropout
    batches = torch.arange(6).reshape(2, 3) % 5
    with torch.device(default_device):
        checkpointer = Checkpointer(folder / "checkpoints")
        for model in models[:2]:
            made = OPTIMIZERS[optimizer](model)
            if checkpointer.latest_step() is not None:
                checkpointer.load(model, made)
            for batch in meshard.microbatches(model, batches):
                model(batch).square().mean().backward()
            if optimizer in ("AdamW", "local"):
                meshard.clip_grad_norm_(model, 1.0)
            with torch.device("cpu"):  # torch's AdamW counts steps on the default device
                made.step()
            made.zero_grad()
            checkpointer.async_save(1 + models.index(model), model, made).wait()
        save_pretrained(models[1], folder / "weights")
        load_pretrained(models[2], folder / "weights")
        loaded = dict(stream_unsharded(models[2]))
    return values_of(models[1], made) | {f"loaded {name}": each for name, each in loaded.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "optimizer"),
    [("fully_shard", each) for each in OPTIMIZERS] + [("replicate", "AdamW")],
)
@on_ranks(2)
def test_a_run_is_the_same_under_another_default_device(tmp_path, layout, optimizer):
    found, expected = (
        values_after_a_run(tmp_path / device, layout, optimizer, device)
        for device in ("meta", "cpu")
    )
    assert_same_values(found, expected)


def make_job():
    with torch.device("cuda"):
        model = meshard.fully_shard(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)

    def step():
        model(torch.ones(4, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def test_a_job_is_planned_the_same_under_another_default_device():
    plan(make_job, world_size=4)  # also counts what a process makes once
    expected = plan(make_job, world_size=4)
    with torch.device("cuda"):
        found = plan(make_job, world_size=4)
    assert found.to_json() == expected.to_json()
