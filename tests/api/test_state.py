"""State dicts, saved by torch: what is in them, on which rank."""

import copy
import functools
import io
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from tests.support.against_plain import inputs_of, sharded_and_plain
from tests.support.models import Made, MlpStack
from tests.support.parity import assert_same, full_state
from tests.support.ranks import on_ranks
from tests.support.sharding import sharded_case


@on_ranks(2)
def test_edits_of_shards_reach_a_forward_that_would_reuse_unsharded_parameters():
    case, model, plain = sharded_case("mlp_stack")
    batch = case.batch(0, 0)

    def edits(module):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5, foreach=True)
        yield lambda: [param.mul_(2) for param in module.parameters()]
        yield lambda: [getattr(p, "_local_tensor", p).add_(1) for p in module.parameters()]
        yield lambda: [setattr(p, "grad", p.detach().clone()) for p in module.parameters()]
        yield optimizer.step

    model.set_reshard_after_forward(False)
    with torch.no_grad():
        for ours, theirs in zip(edits(model), edits(plain), strict=True):
            assert_same(model(batch), plain(batch))
            ours()
            theirs()
        assert_same(model(batch), plain(batch))


@on_ranks(4)
def test_a_state_dict_is_pickled_and_copied():
    """Without the whole buffer, and what a mesh has got for neighbours, or for reductions."""
    case, model, plain = sharded_case("transformer", (2, 2), reshard_after_forward=2)
    model.set_separate_reduce_scatter_group()
    case.loss(model(case.batch(0, 0))).backward()
    state = model.state_dict()
    file = io.BytesIO()
    with warnings.catch_warnings():
        # each saves its own
        warnings.filterwarnings("ignore", "rank 0 pickles a sharded state_dict")
        torch.save(state, file)
    sharded_bytes = sum(value.to_local().nbytes for value in state.values())
    assert len(file.getvalue()) < 2 * sharded_bytes + 50_000
    assert b"meshard" not in file.getvalue().replace(b"_meshard_tag", b"")
    file.seek(0)
    for loaded in (torch.load(file), copy.deepcopy(state)):
        for name, value in state.items():
            assert torch.equal(loaded[name].to_local(), value.to_local())
            assert loaded[name].placements == value.placements
        model.load_state_dict(loaded)
        assert_same(full_state(model), full_state(plain), bitwise=True)


@on_ranks(2)
@torch.no_grad()
def test_an_edit_between_two_calls_of_a_unit_in_one_forward_reaches_the_second():
    def forward(model, x):
        for each in (model.shared, model.other, model.shared):  # the second is gathered ahead
            x = each(x)
        return x

    plain = Made(forward, shared=nn.Linear(6, 6), other=nn.Linear(6, 6))
    model, plain = sharded_and_plain(plain, ("shared", "other"))

    def edit(weight, *_):
        weight.mul_(2)

    for each in (model, plain):
        each.other.register_forward_hook(functools.partial(edit, each.shared.weight))
    for _ in range(2):
        assert_same(model(inputs_of(0)), plain(inputs_of(0)))


@pytest.mark.parametrize("keep_vars", [False, True])
@pytest.mark.parametrize("is_manual", [False, True])
@on_ranks(2)
def test_a_state_dict_that_a_running_forward_makes_has_the_shards(keep_vars, is_manual):
    def keep(*_):
        kept.update(model.state_dict(keep_vars=keep_vars))

    plain, kept = MlpStack(), {}
    plain.blocks[1].again = plain.blocks[1].up
    model, plain = sharded_and_plain(plain)
    model.blocks[1].up.register_forward_hook(keep)
    if is_manual:
        model.blocks[0].unshard()
    with torch.set_grad_enabled(is_manual):
        model(inputs_of(0))
    shards = {name: value.full_tensor().detach() for name, value in kept.items()}
    assert_same(shards, dict(plain.state_dict()))
    assert all(isinstance(value, torch.nn.Parameter) is keep_vars for value in kept.values())


@on_ranks(2)
def test_a_unit_that_is_resharded_while_its_state_dict_is_made_has_its_shards():
    """As by the thread that trains, while another one makes the state dict."""
    model, _ = sharded_and_plain(MlpStack())
    model.blocks[1].unshard()
    model.blocks[1].down.register_state_dict_post_hook(lambda *_: model.blocks[1].reshard())
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())


@pytest.mark.parametrize(
    ("what", "mesh_shape"),
    [
        ("sharded", (2,)),
        ("sharded", (2, 1)),
        ("beside a buffer", (2,)),
        ("copied", (2,)),
        ("full", (2,)),
        ("made full", (2,)),
    ],
)
@on_ranks(2)
def test_rank_0_is_warned_that_it_saves_its_shards_only(what, mesh_shape):
    _, model, _ = sharded_case("mlp_stack", mesh_shape)
    if what == "beside a buffer":
        model.register_buffer("plain", torch.ones(1))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options) if what == "full" else model.state_dict()
    if what == "copied":
        state = copy.deepcopy(state)
    if what == "made full":
        for name, value in state.items():
            state[name] = value.full_tensor()
    file = io.BytesIO()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        copy.deepcopy(state)
        pickle.dumps(model.state_dict()["blocks.0.up.weight"])
        torch.save({"model": state}, file)
    file.seek(0)
    if "full" not in what:
        model.load_state_dict(torch.load(file)["model"])
    is_part = "full" not in what and mesh_shape == (2,)  # replicas have all
    assert len(caught) == (is_part and dist.get_rank() == 0)
    for text in (str(each.message) for each in caught):
        assert "not those of the other 1 ranks" in text and "full_state_dict=True" in text
