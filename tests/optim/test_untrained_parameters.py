"""Parameters that no optimizer steps: warned about once. Programs that are right: no warning."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import meshard
from tests.support.models import Made, seeded
from tests.support.ranks import on_ranks

SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
STEPS = 6


def make(**modules):
    parts = {"body": nn.Linear(4, 4), "head": nn.Linear(4, 4)} | modules
    return seeded(Made(lambda m, x: m.head(m.body(x)), **parts))


def sharded(model=None, **kwargs):
    model = make() if model is None else model
    meshard.fully_shard(model.body, **kwargs)
    return meshard.fully_shard(model, **kwargs)


def told(model, *optimizers, changes=()):
    """Return the texts of the warnings of some steps; ``changes`` come before step 0, 1, ..."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(STEPS):
            if number < len(changes) and changes[number] is not None:
                changes[number](model)
            model(torch.ones(2, 4)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
    return [str(each.message) for each in caught]


def replace_head(model):
    model.head = nn.Linear(4, 4)


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("make_optimizer", [None, meshard.local_optimizer])
@on_ranks(2)
def test_a_head_that_was_replaced_after_the_optimizer_was_built_is_warned_about_once(
    make_optimizer, before
):
    model = sharded()
    optimizer = (
        make_optimizer(model, SGD, lr=0.1) if make_optimizer else SGD(model.parameters(), lr=0.1)
    )
    (text,) = told(model, optimizer, changes=[*[None] * before, replace_head])
    assert "'head.weight', 'head.bias' (2 in all)" in text
    assert "before fully_shard" in text and "requires_grad_(False)" in text


@on_ranks(2)
def test_a_head_that_was_made_before_is_noticed_when_it_is_put_in():
    model, head = sharded(), nn.Linear(4, 4)
    optimizer = SGD(model.parameters(), lr=0.1)
    assert told(model, optimizer) == []
    (text,) = told(model, optimizer, changes=[lambda m: setattr(m, "head", head)])
    assert "'head.weight', 'head.bias' (2 in all)" in text


@pytest.mark.parametrize("apply", [sharded, meshard.replicate])
@on_ranks(2)
def test_parameters_of_units_that_were_left_out_are_warned_about(apply):
    model = apply(make())
    optimizer = SGD([*model.body.parameters(), model.head.weight], lr=0.1)
    (text,) = told(model, optimizer)
    assert "'head.bias' (1 in all)" in text


@on_ranks(2)
def test_ordinary_tensors_in_the_data_of_sharded_parameters_are_warned_about_once():
    model = sharded()
    model.head.weight.data = torch.full((4, 4), 2.0)
    before = model.head.weight.full_tensor()
    (text,) = told(model, SGD(model.parameters(), lr=0.0))
    assert ".data of sharded parameters 'head.weight' was assigned an ordinary tensor" in text
    assert torch.equal(model.head.weight.full_tensor(), before)  # as the text says


# --- programs that are right -----------------------------------------------------------------


def in_turn():
    model = sharded()
    return model, SGD(model.body.parameters(), lr=0.1), SGD(model.head.parameters(), lr=0.1)


class Rarely:
    """Steps in every second step."""

    def __init__(self, optimizer):
        self.optimizer, self.count = optimizer, 0

    def step(self):
        self.count += 1
        if self.count % 2 == 0:
            self.optimizer.step()


def rarely():
    model = sharded()
    later = Rarely(SGD(model.head.parameters(), lr=0.1))
    return model, SGD(model.body.parameters(), lr=0.1), later


def frozen():
    model = make()
    model.body.requires_grad_(False)
    sharded(model)
    return model, SGD(model.head.parameters(), lr=0.1)


def unused():
    model = sharded(make(other=nn.Linear(4, 4)))
    used = [param for name, param in model.named_parameters() if not name.startswith("other")]
    return model, SGD(used, lr=0.1)


def ignored():
    model = make()
    sharded(model, ignored_params={model.head.bias})
    return model, SGD([p for n, p in model.named_parameters() if n != "head.bias"], lr=0.1)


def stages():
    """Two roots, as the stages of a pipeline on one rank."""
    model = make()
    optimizers = [SGD(meshard.fully_shard(each).parameters()) for each in (model.body, model.head)]
    return model, *optimizers


def adapters():
    model = make(body=nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)))
    model.head.requires_grad_(False)
    sharded(model)
    return model, ADAMW([p for p in model.parameters() if p.requires_grad])


def in_backward_and_later():
    model = sharded()
    optimizer = meshard.overlap_optimizer(model, ADAMW, model.body.parameters())
    return model, SGD(model.head.parameters()), optimizer


def in_backward_without_a_call_of_step():
    model = sharded()
    meshard.overlap_optimizer(model, ADAMW, model.body.parameters())
    return model, SGD(model.head.parameters())


def owned():
    model = sharded()
    matrices = meshard.owner_optimizer(
        model, torch.optim.Muon, lr=0.1, select=lambda _, param: param.dim() == 2
    )
    return model, matrices, SGD([model.body.bias, model.head.bias])


def stepped_by_hooks():
    model = sharded()
    for param in model.head.parameters():
        optimizer = SGD([param], lr=0.1)
        param.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    return model, SGD(model.body.parameters(), lr=0.1)


def with_a_state_made_by_torch():
    model = sharded()
    first, second = (ADAMW(part.parameters()) for part in (model.body, model.head))
    get_optimizer_state_dict(model, first)  # steps it
    return model, first, second


def recurrent():
    model = Made(lambda m, x: m.head(m.body(x)[0]), body=nn.RNN(4, 4), head=nn.Linear(4, 4))
    sharded(seeded(model))
    return model, SGD(model.parameters(), lr=0.1)


def replicated():
    model = meshard.replicate(make())
    return model, SGD(model.parameters())


@pytest.mark.parametrize(
    "program",
    [
        in_turn,
        rarely,
        frozen,
        unused,
        ignored,
        stages,
        adapters,
        in_backward_and_later,
        in_backward_without_a_call_of_step,
        owned,
        stepped_by_hooks,
        with_a_state_made_by_torch,
        recurrent,
        replicated,
    ],
)
@on_ranks(2)
def test_a_program_that_is_right_is_not_warned(program):
    assert told(*program()) == []
