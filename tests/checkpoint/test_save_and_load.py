"""What was saved is what is loaded, on any ranks and any mesh."""

import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshard
from meshard.checkpoint import Checkpointer, CheckpointError
from tests.checkpoint.runs import (
    LAYOUTS,
    assert_same_values,
    check_loads,
    net,
    train,
    trained,
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
    "local": lambda model: meshard.local_optimizer(model, torch.optim.AdamW, lr=0.01),
    "overlapped": lambda model: meshard.overlap_optimizer(model, torch.optim.AdamW, lr=0.01),
}


SHARDED = [each for each in LAYOUTS if each != "plain"]
LOADED_ON = {"plain": 1, "fully_shard": 2, "columns": 3, "replicate": 3, "HSDP": 4}


@spread(layout=SHARDED, optimizer=[*OPTIMIZERS])
@on_ranks(4)
def test_a_resumed_run_is_the_run_bit_for_bit(tmp_path, layout, optimizer):
    def built(seed):
        torch.manual_seed(seed * 100 + dist.get_rank()), random.seed(seed)
        model = net(layout, seed)
        made = OPTIMIZERS[optimizer](model)
        scaler = meshard.ShardedGradScaler("cpu", init_scale=2.0**seed)
        return model, made, torch.optim.lr_scheduler.CosineAnnealingLR(made, 10), scaler

    model, made, scheduler, scaler = built(4)
    checkpointer = Checkpointer(tmp_path)
    train(model, made, 3, scheduler)
    checkpointer.save(3, model, made, scheduler=scheduler, scaler=scaler)
    losses, drawn = train(model, made, 3, scheduler), random.random()

    again, made_again, scheduler_again, scaler_again = built(1)
    loaded = checkpointer.load(again, made_again, scheduler=scheduler_again, scaler=scaler_again)
    assert scaler_again.get_scale() == 16.0
    assert (loaded.step, loaded.random) == (3, "restored")
    assert torch.equal(train(again, made_again, 3, scheduler_again), losses)
    assert random.random() == drawn
    assert_same_values(values_of(again, made_again), values_of(model, made))


def save_on_ranks(folder, layout):
    torch.manual_seed(dist.get_rank())
    model, optimizer = trained(layout, 2)
    Checkpointer(folder).save(2, model, optimizer)
    return values_of(model, optimizer)


def load_on_ranks(folder, layout, expected):
    return check_loads(Checkpointer(folder), layout, expected).random


@pytest.mark.parametrize("saved_as", SHARDED)
def test_any_mesh_loads_what_any_other_has_saved(run_ranks, tmp_path, saved_as):
    expected = run_ranks(save_on_ranks, 4, tmp_path, saved_as)[0]
    for loaded_as, num_ranks in LOADED_ON.items():
        outcomes = run_ranks(load_on_ranks, num_ranks, tmp_path, loaded_as, expected)
        assert set(outcomes) == {"restored" if num_ranks == 4 else "derived"}


def test_one_process_needs_no_process_group(tmp_path):
    model, optimizer = trained("plain")
    Checkpointer(tmp_path).save(1, model, optimizer)
    check_loads(Checkpointer(tmp_path), "plain", values_of(model, optimizer))


def test_what_is_saved_and_loaded_under_inference_mode_can_train_and_be_saved_again(tmp_path):
    (model, optimizer), checkpointer = trained("plain"), Checkpointer(tmp_path)
    with torch.inference_mode():
        checkpointer.async_save(1, model, optimizer)
        optimizer = torch.optim.AdamW(model.parameters())  # without state
        checkpointer.load(model, optimizer)
    train(model, optimizer, 1)
    checkpointer.async_save(2, model, optimizer).wait()


class Average:
    """Loads into parameters in place, so the caller must have turned off gradients."""

    def __init__(self, model):
        self.params = [nn.Parameter(param.detach().clone()) for param in model.parameters()]

    def state_dict(self):
        return {"params": [param.detach() for param in self.params]}

    def load_state_dict(self, state):
        for param, saved in zip(self.params, state["params"], strict=True):
            param.copy_(saved)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_users_pass_along_is_loaded_in_the_mode_of_the_caller(mode, tmp_path):
    model, checkpointer = nn.Linear(2, 2), Checkpointer(tmp_path)
    checkpointer.save(1, model, average=Average(model))
    with mode():
        average = Average(nn.Linear(2, 2))
        checkpointer.load(model, average=average)
    assert all(map(torch.equal, average.params, model.parameters()))


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


def test_a_cast_also_casts_the_state_of_a_second_optimizer(tmp_path):
    def built(dtype):
        critic = nn.Linear(2, 2).to(dtype)
        optimizer = torch.optim.AdamW(critic.parameters())
        critic(torch.ones(1, 2, dtype=dtype)).sum().backward()
        optimizer.step()
        return critic, optimizer

    checkpointer, model = Checkpointer(tmp_path), nn.Linear(1, 1)
    critic, optimizer = built(torch.float32)
    checkpointer.save(1, model, critic=critic, second=optimizer)
    critic, optimizer = built(torch.bfloat16)
    checkpointer.load(model, critic=critic, second=optimizer, cast=True)
    assert optimizer.state[critic.weight]["exp_avg"].dtype == torch.bfloat16
    optimizer.step()


def test_the_state_of_a_tied_parameter_is_found_by_each_of_its_names(tmp_path):
    def built(first, second):
        model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in (first, second)})
        model[second].weight = model[first].weight
        optimizer = torch.optim.AdamW(model.parameters())
        model[first](torch.ones(1, 2)).sum().backward()
        return model, optimizer

    checkpointer, (model, optimizer) = Checkpointer(tmp_path), built("embed", "head")
    optimizer.step()
    checkpointer.save(1, model, optimizer)
    expected = values_of(model, optimizer)["embed.weight.exp_avg"]
    model, optimizer = built("head", "embed")
    checkpointer.load(model, optimizer)
    assert torch.equal(values_of(model, optimizer)["head.weight.exp_avg"], expected)


def test_of_tied_parameters_that_are_two_here_one_gets_the_state(tmp_path):
    names = ("a", "b", "c")
    tied = nn.ParameterDict(dict.fromkeys(names, nn.Parameter(torch.ones(2))))
    optimizer, checkpointer = (
        torch.optim.SGD(tied.parameters(), momentum=0.9),
        Checkpointer(tmp_path),
    )
    tied["a"].sum().backward()
    optimizer.step()
    checkpointer.save(1, tied, optimizer)
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in "bc"})
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    loaded = checkpointer.load(model, optimizer, strict=False)
    assert loaded.missing == ["optimizer.c"]
    assert optimizer.state[model["b"]]["momentum_buffer"].tolist() == [1, 1]
    assert torch.equal(model["b"], tied["a"]) and torch.equal(model["c"], tied["a"])


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_an_optimizer_that_has_a_tied_parameter_twice_is_refused(tmp_path):
    weight = nn.Parameter(torch.ones(2))
    model, optimizer = nn.ParameterList([weight, weight]), torch.optim.SGD([weight, weight])
    with pytest.raises(CheckpointError, match=r"SGD has the parameter '0' twice"):
        Checkpointer(tmp_path).save(1, model, optimizer)


def test_a_parameter_of_several_modules_has_one_name_and_two_have_two(tmp_path):
    checkpointer, model, inner = Checkpointer(tmp_path), nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer, outer = torch.optim.SGD(inner.parameters()), nn.ModuleDict({"inner": inner})
    checkpointer.save(1, model, optimizer, inner=inner, outer=outer)
    checkpointer.load(model, optimizer, inner=inner, outer=outer)
    other = nn.Linear(1, 1)
    optimizer = torch.optim.SGD([*outer.parameters(), *other.parameters()])
    with pytest.raises(CheckpointError, match=r"two parameters 'inner\.weight', of the model"):
        checkpointer.save(2, outer, optimizer, inner=other)


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


def derived_numbers(folder):
    torch.manual_seed(0)
    Checkpointer(folder).load(nn.Linear(1, 1))
    return torch.rand(1).item()


def test_ranks_that_were_not_there_get_seeds_of_their_own(run_ranks, tmp_path):
    Checkpointer(tmp_path).save(0, nn.Linear(1, 1))
    first = run_ranks(derived_numbers, 3, tmp_path)
    assert len(set(first)) == 3
    assert run_ranks(derived_numbers, 3, tmp_path) == first


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
