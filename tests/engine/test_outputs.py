"""Tensors in whatever a unit returns, and outputs in which none are found."""

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as peer_fully_shard
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
from tests.support.models import MlpBlock, seeded
from tests.support.ranks import on_fake_ranks, on_ranks, on_threads

Named = namedtuple("Named", ["hidden", "label"])


@dataclasses.dataclass
class Plain:
    hidden: Any
    label: str = "plain"


@dataclasses.dataclass(frozen=True)
class Frozen:
    hidden: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    hidden: Any


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


class ModelOutput(OrderedDict):
    """A dict with attributes, registered with pytree in the way Hugging Face does it."""

    @property
    def hidden(self):
        return self["hidden"]


class Unregistered(OrderedDict):
    @property
    def hidden(self):
        return self["hidden"]


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
OPAQUE = (Opaque, lambda o: o.hidden)


class Wrapping(nn.Module):
    """Blocks that hand ``form(x)`` to one another."""

    def __init__(self, form):
        super().__init__()
        self.wrap, self.unwrap = WRAPS.get(form, OPAQUE)
        self.blocks = nn.ModuleList(WrappingBlock(form) for _ in range(3))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        value = self.wrap(x)
        for block in self.blocks:
            value = block(value)
        return self.head(self.unwrap(value))


class WrappingBlock(MlpBlock):
    def __init__(self, form):
        super().__init__(6, 8)
        self.wrap, self.unwrap = WRAPS.get(form, OPAQUE)

    def forward(self, value):
        return self.wrap(super().forward(self.unwrap(value)))


@pytest.mark.parametrize("form", WRAPS)
@on_threads(2)
def test_units_may_return_any_container(form):
    ledger = check_gradients(*sharded_and_plain(Wrapping(form)))
    assert ledger.counts == {"all_gather": 7, "reduce_scatter": 4}


@pytest.mark.parametrize("form", WRAPS)
@on_fake_ranks(1)
def test_casts_reach_into_containers(form):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    model, _ = sharded_and_plain(Wrapping(form), mp_policy=policy)
    block, seen = model.blocks[1], []
    block.up.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    value = block(block.wrap(torch.ones(2, 6)))
    assert seen == [torch.bfloat16]
    assert block.unwrap(value).dtype == torch.float64
    block.unwrap(value).sum().backward()


class Receiver(nn.Module):
    """Returns what it gets."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, value):
        return value


def cast(value, dtype):
    """Return ``value`` as it comes through a unit that casts its inputs to ``dtype``."""
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    with torch.no_grad():
        return meshard.fully_shard(Receiver(), mp_policy=policy)(value)


@pytest.mark.parametrize("form", WRAPS)
@on_fake_ranks(1)
def test_casting_copies_what_changes_and_nothing_else(form):
    wrap, unwrap = WRAPS[form]
    value = wrap(torch.ones(2))
    assert cast(value, torch.float32) is value
    narrow = cast(value, torch.bfloat16)
    assert type(narrow) is type(value)
    assert unwrap(narrow).dtype == torch.bfloat16
    assert unwrap(value).dtype == torch.float32


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


class StashingBlock(MlpBlock):
    """Returns nothing and leaves its result on an attribute."""

    def forward(self, x):
        self.__dict__["result"] = super().forward(x)


class Stashing(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(StashingBlock(6, 8) for _ in range(3))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        for block in self.blocks:
            block(x)
            x = block.__dict__["result"]
        return self.head(x)


@pytest.mark.parametrize("interleaved", [False, True])
@on_ranks(2)
def test_units_that_return_nothing_stay_whole_and_say_so(interleaved):
    def step(model, rank):
        losses = []
        for number in range(2):
            losses.append(model(inputs_of(rank, number)).square().mean())
            if not interleaved:
                losses.pop().backward()
        for loss in losses:
            loss.backward()

    model, plain = sharded_and_plain(Stashing())
    with pytest.warns(UserWarning, match="returned a NoneType") as caught:
        check_training(model, plain, step)
    assert insides.unsharded_units(model) == []
    assert len(caught) == 3
    for number, each in enumerate(caught):
        assert f"unit 'blocks.{number}' returned a NoneType" in str(each.message)
        assert "register_dataclass" in str(each.message)


@on_ranks(2)
def test_units_whose_outputs_are_not_found_stay_unsharded_and_say_so():
    with pytest.warns(UserWarning, match="returned a Opaque") as caught:
        check_gradients(*sharded_and_plain(Wrapping("opaque")))
    assert len(caught) == 3
    for number, each in enumerate(caught):
        assert f"unit 'blocks.{number}' returned a Opaque" in str(each.message)


class FrozenInside(nn.Module):
    """The block has nothing to train, but gradients pass through it."""

    def __init__(self):
        super().__init__()
        self.inlet = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([StashingBlock(6, 8).requires_grad_(False)])

    def forward(self, x, through=True):
        x = self.inlet(x)
        self.blocks[0](x if through else x.detach())
        return x + self.blocks[0].__dict__["result"]


@on_ranks(2)
def test_hidden_outputs_of_frozen_units_matter_if_an_input_is_trained():
    model, plain = sharded_and_plain(FrozenInside())
    model(torch.ones(1, 6), through=False).sum().backward()  # warnings are errors
    with torch.no_grad():
        model(torch.ones(1, 6))
    with pytest.warns(UserWarning, match="no tensor was found"):
        check_gradients(model, plain)


@pytest.mark.parametrize("form", [None, "opaque"])
@on_ranks(2)
def test_the_peer_has_freed_what_it_does_not_find(form):
    mesh = init_device_mesh("cpu", (2,))
    model = seeded(Stashing() if form is None else Wrapping(form))
    for block in model.blocks:
        peer_fully_shard(block, mesh=mesh)
    loss = peer_fully_shard(model, mesh=mesh)(torch.ones(1, 6)).sum()
    with pytest.raises(RuntimeError, match="storage of size 0"):
        loss.backward()
