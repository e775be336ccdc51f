"""Tensors in whatever a unit returns or leaves in its arguments, and where none are found."""

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils import _pytree as pytree

import meshard
from meshard import MixedPrecisionPolicy
from tests.support import insides
from tests.support.against_plain import (
    check_gradients,
    check_training,
    inputs_of,
    sharded_and_plain,
)
from tests.support.models import Made, MlpBlock
from tests.support.ranks import on_fake_ranks, on_ranks, on_threads

Named = namedtuple("Named", ["hidden", "label"])


Plain = dataclasses.make_dataclass("Plain", ["hidden", ("label", str, "plain")])
Frozen = dataclasses.make_dataclass("Frozen", ["hidden"], frozen=True)
Slotted = dataclasses.make_dataclass("Slotted", ["hidden"], frozen=True, slots=True)


@dataclasses.dataclass
class Computed:
    """Cannot be built by ``dataclasses.replace``."""

    given: dataclasses.InitVar[Any]
    hidden: Any = dataclasses.field(init=False)

    def __post_init__(self, given):
        self.hidden = given


class Opaque:
    """An object that neither pytree nor dataclasses know."""

    __slots__ = ("hidden",)

    def __init__(self, hidden):
        self.hidden = hidden


@dataclasses.dataclass
class Cyclic:
    hidden: Any
    itself: Any = None

    def __post_init__(self):
        self.itself = [self]


class Unregistered(OrderedDict):
    hidden = property(lambda self: self["hidden"])


class ModelOutput(Unregistered):
    """A dict with attributes, registered with pytree in the way Hugging Face does it."""


pytree.register_pytree_node(
    ModelOutput,
    lambda output: (list(output.values()), list(output.keys())),
    lambda values, keys: ModelOutput(zip(keys, values, strict=True)),
    serialized_type_name="tests.engine.test_outputs.ModelOutput",
)

WRAPS = {
    "dict": (lambda x: {"hidden": x, "label": 1}, lambda o: o["hidden"]),
    "list": (lambda x: [x, None], lambda o: o[0]),
    "tuple": (lambda x: (1, x), lambda o: o[1]),
    "namedtuple": (lambda x: Named(x, "a"), lambda o: o.hidden),
    "dataclass": (Plain, lambda o: o.hidden),
    "frozen": (Frozen, lambda o: o.hidden),
    "slotted": (Slotted, lambda o: o.hidden),
    "computed": (Computed, lambda o: o.hidden),
    "nested": (lambda x: Plain([{"a": Frozen((x,))}]), lambda o: o.hidden[0]["a"].hidden[0]),
    "model_output": (lambda x: ModelOutput(hidden=x), lambda o: o.hidden),
    "unregistered": (lambda x: Unregistered(hidden=x), lambda o: o.hidden),
    "cyclic": (Cyclic, lambda o: o.hidden),
}


def blocks_through(wrap, unwrap):
    """Return a model of blocks that hand ``wrap(x)`` to one another."""

    def forward(model, x):
        value = wrap(x)
        for block in model.blocks:
            value = block(value)
        return model.head(unwrap(value))

    blocks = [
        Made(lambda m, value: wrap(m.inner(unwrap(value))), inner=MlpBlock(6, 8)) for _ in range(3)
    ]
    return Made(forward, blocks=blocks, head=nn.Linear(6, 2))


@pytest.mark.parametrize("form", WRAPS)
@on_threads(2)
def test_units_may_return_any_container(form):
    check_gradients(*sharded_and_plain(blocks_through(*WRAPS[form])))


def cast(value, dtype):
    """Return ``value`` as it comes through a unit that casts its inputs to ``dtype``."""
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    with torch.no_grad():
        receiver = Made(lambda m, value: value, bias=nn.Parameter(torch.zeros(1)))
        return meshard.fully_shard(receiver, mp_policy=policy)(value)


@pytest.mark.parametrize("form", WRAPS)
@on_fake_ranks(1)
def test_casts_reach_into_containers_and_copy_what_changes_only(form):
    wrap, unwrap = WRAPS[form]
    value = wrap(torch.ones(2, 6))
    assert cast(value, torch.float32) is value
    narrow = cast(value, torch.bfloat16)
    assert type(narrow) is type(value)
    assert unwrap(narrow).dtype == torch.bfloat16
    assert unwrap(value).dtype == torch.float32
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    model, _ = sharded_and_plain(blocks_through(wrap, unwrap), mp_policy=policy)
    out = unwrap(model.blocks[1](value))
    assert out.dtype == torch.float64
    out.sum().backward()


@on_fake_ranks(1)
def test_packed_sequences_are_cast():
    packed = pack_padded_sequence(torch.ones(3, 2, 4), torch.tensor([3, 2]))
    narrow = cast(packed, torch.bfloat16)
    assert isinstance(narrow, PackedSequence)
    assert narrow.data.dtype == torch.bfloat16
    assert torch.equal(narrow.batch_sizes, packed.batch_sizes)


@on_fake_ranks(1)
def test_other_objects_and_modules_are_not_searched():
    held = nn.Linear(2, 2)
    for value in (Opaque(torch.ones(2)), held, nn.Linear, {torch.ones(2): 1}):
        (narrow,) = cast([value], torch.bfloat16)
        assert narrow is value
    assert held.weight.dtype == torch.float32


def stashing_block():
    """Return a block that returns nothing and leaves its result on an attribute."""
    return Made(lambda m, x: m.__dict__.update(result=m.inner(x)), inner=MlpBlock(6, 8))


def stashing():
    def forward(model, x):
        for block in model.blocks:
            block(x)
            x = block.__dict__["result"]
        return model.head(x)

    return Made(forward, blocks=[stashing_block() for _ in range(3)], head=nn.Linear(6, 2))


def alternating(model, rank):
    for number in range(2):
        model(inputs_of(rank, number)).square().mean().backward()


def interleaved(model, rank):
    losses = [model(inputs_of(rank, number)).square().mean() for number in range(2)]
    for loss in losses:
        loss.backward()


@pytest.mark.parametrize(
    ("returns", "step"),
    [("NoneType", alternating), ("NoneType", interleaved), ("Opaque", alternating)],
)
@on_ranks(2)
def test_units_whose_outputs_are_not_found_stay_unsharded_and_say_so(returns, step):
    plain = stashing() if returns == "NoneType" else blocks_through(Opaque, lambda o: o.hidden)
    model, _ = sharded_and_plain(plain)
    with pytest.warns(UserWarning, match=f"returned a {returns}") as caught:
        check_training(model, plain, step)
    assert (left := insides.unsharded_units(model)) == [], left
    assert len(caught) == 3
    for number, each in enumerate(caught):
        assert f"unit 'blocks.{number}' returned a {returns}" in str(each.message)
        assert "register_dataclass" in str(each.message)


@on_ranks(2)
def test_hidden_outputs_of_frozen_units_matter_if_an_input_is_trained():
    def forward(model, x, through=True):
        x = model.inlet(x)
        model.block(x if through else x.detach())
        return x + model.block.__dict__["result"]

    frozen = stashing_block().requires_grad_(False)
    plain = Made(forward, inlet=nn.Linear(6, 6), block=frozen)
    model, _ = sharded_and_plain(plain, ("block",))
    model(torch.ones(1, 6), through=False).sum().backward()  # warnings are errors
    with torch.no_grad():
        model(torch.ones(1, 6))
    with pytest.warns(UserWarning, match="no tensor was found"):
        check_gradients(model, plain)
