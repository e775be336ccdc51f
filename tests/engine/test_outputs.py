"""Tensors in whatever a unit returns, and outputs in which none are found."""

import copy
import dataclasses
import warnings
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as peer_fully_shard
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils import _pytree as pytree

from meshard import CommLedger, MixedPrecisionPolicy
from meshard._engine.outputs import cast_floats, tensors_in
from tests.support.models import MlpBlock, seeded
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import on_ranks
from tests.support.sharding import shard_blocks

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

    def __init__(self, form, depth=3):
        super().__init__()
        self.wrap, self.unwrap = WRAPS.get(form, OPAQUE)
        self.blocks = nn.ModuleList(WrappingBlock(form) for _ in range(depth))
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


def shard(model, **kwargs):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return shard_blocks(model, mesh, **kwargs)


def train_wrapped(forms):
    for form in forms:
        model = seeded(Wrapping(form))
        plain = copy.deepcopy(model)
        shard(model)
        xs = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))
        for _ in range(2):
            with CommLedger(model) as ledger:
                model(xs[dist.get_rank()]).square().mean().backward()
            plain(xs.flatten(0, 1)).square().mean().backward()
            assert_same(full_grads(model), full_grads(plain), what=form)
        assert ledger.counts == {"all_gather": 7, "reduce_scatter": 4}, form


def test_units_may_return_any_container(run_ranks):
    run_ranks(train_wrapped, 2, list(WRAPS))


def note_dtype(seen, module, args):
    seen.append(args[0].dtype)


def cast_wrapped(forms):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    for form in forms:
        model = seeded(Wrapping(form))
        blocks = list(model.blocks)
        shard(model, mp_policy=policy)
        seen = []
        blocks[1].up.register_forward_pre_hook(
            lambda m, args, seen=seen: seen.append(args[0].dtype)
        )
        value = blocks[1](blocks[1].wrap(torch.ones(2, 6)))
        assert seen == [torch.bfloat16], form
        assert blocks[1].unwrap(value).dtype == torch.float64, form
        blocks[1].unwrap(value).sum().backward()


def test_casts_reach_into_containers(run_ranks):
    run_ranks(cast_wrapped, 2, list(WRAPS))


@pytest.mark.parametrize("form", list(WRAPS))
def test_casting_copies_what_changes_and_nothing_else(form):
    wrap, unwrap = WRAPS[form]
    value = wrap(torch.ones(2))
    assert cast_floats(value, torch.float32) is value
    cast = cast_floats(value, torch.bfloat16)
    assert type(cast) is type(value)
    assert unwrap(cast).dtype == torch.bfloat16
    assert unwrap(value).dtype == torch.float32


def test_packed_sequences_are_cast():
    packed = pack_padded_sequence(torch.ones(3, 2, 4), torch.tensor([3, 2]))
    cast = cast_floats(packed, torch.bfloat16)
    assert isinstance(cast, PackedSequence)
    assert cast.data.dtype == torch.bfloat16
    assert torch.equal(cast.batch_sizes, packed.batch_sizes)


def test_other_objects_and_modules_are_not_searched():
    held = nn.Linear(2, 2)
    for value in (Opaque(torch.ones(2)), held, nn.Linear, {torch.ones(2): 1}):
        assert tensors_in([value]) == []
        assert cast_floats([value], torch.bfloat16)[0] is value
    assert held.weight.dtype == torch.float32


class Stashing(nn.Module):
    """Its blocks return nothing and leave their result on an attribute."""

    def __init__(self, returned=None):
        super().__init__()
        self.blocks = nn.ModuleList(StashingBlock(6, 8) for _ in range(3))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        for block in self.blocks:
            block(x)
            x = block.__dict__["result"]
        return self.head(x)


class StashingBlock(MlpBlock):
    def forward(self, x):
        self.__dict__["result"] = super().forward(x)


def train_stashing(interleaved):
    model = seeded(Stashing())
    plain = copy.deepcopy(model)
    shard(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    xs = torch.randn(2, 2, 3, 6, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            if interleaved:
                losses = [model(x[dist.get_rank()]).square().mean() for x in xs]
                for loss in losses:
                    loss.backward()
            else:
                for x in xs:
                    model(x[dist.get_rank()]).square().mean().backward()
            for x in xs:
                plain(x.flatten(0, 1)).square().mean().backward()
            assert_same(full_grads(model), full_grads(plain))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    units = [vars(block)["_meshard_unit"] for block in model.blocks]
    assert [unit.group.state.name for unit in units] == ["SHARDED"] * 3
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("interleaved", [False, True])
def test_units_that_return_nothing_stay_whole_and_say_so(run_ranks, interleaved):
    for texts in run_ranks(train_stashing, 2, interleaved):
        assert len(texts) == 3
        for number, text in enumerate(texts):
            assert f"unit 'blocks.{number}' returned a NoneType" in text
            assert "register_dataclass" in text


def train_opaque():
    model = seeded(Wrapping("opaque"))
    plain = copy.deepcopy(model)
    shard(model)
    xs = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(xs[dist.get_rank()]).square().mean().backward()
            plain(xs.flatten(0, 1)).square().mean().backward()
            assert_same(full_grads(model), full_grads(plain))
    return [str(each.message) for each in caught]


def test_units_whose_outputs_are_not_found_stay_unsharded_and_say_so(run_ranks):
    for texts in run_ranks(train_opaque, 2):
        assert [f"unit 'blocks.{i}' returned a Opaque" in text for i, text in enumerate(texts)] == [
            True
        ] * 3


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
    model = seeded(FrozenInside())
    plain = copy.deepcopy(model)
    shard(model)
    x = torch.ones(1, 6)
    model(x, through=False).sum().backward()  # warnings are errors
    model.zero_grad()
    with torch.no_grad():
        model(x)
    with pytest.warns(UserWarning, match="no tensor was found"):
        model(x).square().sum().backward()
    plain(x).square().sum().backward()
    assert_same(full_grads(model), full_grads(plain))


@on_ranks(2)
@pytest.mark.parametrize("form", [None, "opaque"])
def test_the_peer_has_freed_what_it_does_not_find(form):
    mesh = init_device_mesh("cpu", (2,))
    model = seeded(Stashing() if form is None else Wrapping(form))
    for block in model.blocks:
        peer_fully_shard(block, mesh=mesh)
    loss = peer_fully_shard(model, mesh=mesh)(torch.ones(1, 6)).sum()
    with pytest.raises(RuntimeError, match="storage of size 0"):
        loss.backward()
