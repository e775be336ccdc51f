"""What was saved is what is loaded, on any ranks and any mesh."""

import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshard
from meshard.checkpoint import Checkpointer
from tests.checkpoint.runs import (
    LAYOUTS,
    assert_same_values,
    net,
    train,
    values_of,
)
from tests.support.ranks import on_ranks
from tests.support.spread import spread

OPTIMIZERS = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "SGD in groups": lambda model: torch.optim.SGD(
        [
            {"params": model.layers.parameters(), "lr": 0.1},
            {"params": [model.embed.weight], "lr": 0.2, "momentum": 0.9},
        ]
    ),
    "flat": lambda model: meshard.flat_optimizer(model, torch.optim.AdamW, lr=0.01),
    "overlapped": lambda model: meshard.overlap_optimizer(model, torch.optim.AdamW, lr=0.01),
}


SHARDED = [each for each in LAYOUTS if each != "plain"]
LOADED_ON = {"plain": 1, "fully_shard": 2, "columns": 3, "replicate": 3, "HSDP": 4}


def run_of(layout, optimizer, seed):
    model = net(layout, seed)
    made = OPTIMIZERS[optimizer](model)
    scaler = meshard.ShardedGradScaler("cpu", init_scale=2.0**seed)
    return model, made, torch.optim.lr_scheduler.CosineAnnealingLR(made, 10), scaler


@spread(layout=SHARDED, optimizer=[*OPTIMIZERS])
@on_ranks(4)
def test_a_resumed_run_is_the_run_bit_for_bit(tmp_path, layout, optimizer):
    torch.manual_seed(dist.get_rank())
    model, made, scheduler, scaler = run_of(layout, optimizer, 4)
    checkpointer = Checkpointer(tmp_path)
    train(model, made, 3, scheduler)
    checkpointer.save(3, model, made, scheduler=scheduler, scaler=scaler)
    losses = train(model, made, 3, scheduler)

    torch.manual_seed(99)
    again, made_again, scheduler_again, scaler_again = run_of(layout, optimizer, 1)
    loaded = checkpointer.load(again, made_again, scheduler=scheduler_again, scaler=scaler_again)
    assert scaler_again.get_scale() == 16.0
    assert (loaded.step, loaded.random) == (3, "restored")
    assert torch.equal(train(again, made_again, 3, scheduler_again), losses)
    assert_same_values(values_of(again, made_again), values_of(model, made))


def save_on_ranks(folder, layout):
    model = net(layout)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(dist.get_rank())
    train(model, optimizer, 2)
    Checkpointer(folder).save(2, model, optimizer)
    return values_of(model, optimizer)


def load_on_ranks(folder, layout, expected):
    model = net(layout, seed=5)
    optimizer = torch.optim.AdamW(model.parameters())
    loaded = Checkpointer(folder).load(model, optimizer)
    assert_same_values(values_of(model, optimizer), expected)
    assert model.head.weight is model.embed.weight
    train(model, optimizer, 1)
    return loaded.random


@pytest.mark.parametrize("saved_as", SHARDED)
def test_any_mesh_loads_what_any_other_has_saved(run_ranks, tmp_path, saved_as):
    expected = run_ranks(save_on_ranks, 4, tmp_path, saved_as)[0]
    for loaded_as, num_ranks in LOADED_ON.items():
        outcomes = run_ranks(load_on_ranks, num_ranks, tmp_path, loaded_as, expected)
        assert set(outcomes) == {"restored" if num_ranks == 4 else "derived"}


def test_one_process_needs_no_process_group(tmp_path):
    model = net("plain")
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    expected = values_of(model, optimizer)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, model, optimizer)
    other = net("plain", seed=3)
    optimizer = torch.optim.AdamW(other.parameters())
    checkpointer.load(other, optimizer)
    assert_same_values(values_of(other, optimizer), expected)


class MasterWeights(torch.optim.Optimizer):
    """Keeps a float32 copy of each bfloat16 parameter."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["master"] = param.float()
                state["master"].sub_(param.grad, alpha=group["lr"])
                param.copy_(state["master"])


@on_ranks(2)
def test_state_keeps_a_dtype_that_is_wider_than_the_parameters(tmp_path):
    def built(seed):
        torch.manual_seed(seed)
        model = meshard.fully_shard(nn.Linear(4, 4).bfloat16())
        return model, MasterWeights(model.parameters(), {"lr": 1e-3})

    def step(model, optimizer):
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        states = [optimizer.state[param] for param in model.parameters()]
        return [each["master"].full_tensor().clone() for each in states]

    model, optimizer = built(0)
    step(model, optimizer)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, model, optimizer)
    expected = step(model, optimizer)
    model, optimizer = built(1)
    checkpointer.load(model, optimizer)
    for value, other in zip(step(model, optimizer), expected, strict=True):
        assert value.dtype == torch.float32
        assert torch.equal(value, other)


def test_tied_tensors_are_stored_once(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(0, net("plain"))
    manifest = checkpointer.manifest()
    assert "model.head.weight" not in manifest.tensors
    assert manifest.ties == {"model.head.weight": "model.embed.weight"}
    untied = net("plain", seed=3)
    untied.head.weight = nn.Parameter(torch.zeros(11, 6))
    checkpointer.load(untied)
    assert torch.equal(untied.head.weight, net("plain").embed.weight)


@on_ranks(2)
def test_random_states_are_those_of_the_save(tmp_path):
    random.seed(dist.get_rank())
    torch.manual_seed(dist.get_rank())
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(0, nn.Linear(1, 1))
    expected = random.random(), torch.rand(3)
    random.seed(7)
    torch.manual_seed(7)
    checkpointer.load(nn.Linear(1, 1))
    assert random.random() == expected[0]
    assert torch.equal(torch.rand(3), expected[1])


def derived_numbers(folder):
    torch.manual_seed(0)
    Checkpointer(folder).load(nn.Linear(1, 1))
    return torch.rand(1).item()


def test_ranks_that_were_not_there_get_seeds_of_their_own(run_ranks, tmp_path):
    Checkpointer(tmp_path).save(0, nn.Linear(1, 1))
    first = run_ranks(derived_numbers, 3, tmp_path)
    assert len(set(first)) == 3
    assert run_ranks(derived_numbers, 3, tmp_path) == first


# --- what is passed along ------------------------------------------------------------------


class Loader:
    """A data loader of which each rank has its own state."""

    def __init__(self):
        self.state = {"at": dist.get_rank(), "seen": {3: b"x", "y": (1, float("inf"))}}
        self.state["generator"] = torch.full((4,), dist.get_rank(), dtype=torch.uint8)

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


@on_ranks(2)
def test_what_differs_between_ranks_is_kept_for_each(tmp_path):
    checkpointer, loader = Checkpointer(tmp_path), Loader()
    expected = loader.state
    checkpointer.save(1, nn.Linear(1, 1), loader=loader, tokens=5, rank=dist.get_rank())
    loader.state = None
    loaded = checkpointer.load(nn.Linear(1, 1), loader=loader)
    assert torch.equal(loader.state.pop("generator"), expected.pop("generator"))
    assert loader.state == expected
    assert loaded.extra == {"tokens": 5, "rank": dist.get_rank()}


@on_ranks(2)
def test_averages_and_second_optimizers_are_parts_of_their_own(tmp_path):
    model, average = net("fully_shard"), net("fully_shard", seed=4)
    first = torch.optim.AdamW([model.embed.weight])
    second = torch.optim.SGD(model.layers.parameters(), lr=0.1, momentum=0.5)
    train(model, first, 1)
    second.step()
    expected = values_of(average)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, model, first, second=second, average=average, best=torch.tensor(2.5))
    with torch.no_grad():
        for param in average.parameters():
            param.zero_()
    best = torch.zeros(())
    checkpointer.load(model, first, second=second, average=average, best=best)
    assert_same_values(values_of(average), expected)
    assert best == 2.5
