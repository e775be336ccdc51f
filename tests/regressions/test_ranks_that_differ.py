"""Ranks that do different things: right gradients where they may, an error where they may not."""

import copy
import logging
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import meshard
from tests.support.against_plain import check_gradients, inputs_of, sharded_and_plain
from tests.support.integer_model import (
    IntegerModel,
    fill_with_halves,
    integer_batch,
    integer_loss,
    ternary,
)
from tests.support.models import ChosenBlocks, Made, MlpStack, seeded
from tests.support.rank_pool import RankError
from tests.support.ranks import on_threads
from tests.support.replicated import Pair
from tests.support.sharding import shard_blocks


def reading_model(returns_both):
    """Return a model that adds what it reads of a child's weights to the output of ``a``."""

    def read(reader):
        with torch.no_grad():
            return reader.child.weight.clamp(-1, 1).sum(0)

    def forward(model, x):
        model.first = ternary(model.a(x))
        out = model.c(model.first + model.b())
        return (out, model.first) if returns_both else out

    members = {
        "a": nn.Linear(IntegerModel.in_dim, 4),
        "b": Made(read, child=nn.Linear(4, 3, bias=False)),
        "c": nn.Linear(4, 2),
    }
    return fill_with_halves(Made(forward, **members))


@pytest.mark.parametrize(
    ("returns_both", "units"),
    [
        (True, ["a"]),
        (True, ["a", "c"]),
        (False, ["a"]),
        (False, ["a", "c"]),
    ],
)
@on_threads(2)  # which find a deadlock at once
def test_a_rank_whose_loss_leaves_out_what_comes_after_a_read(returns_both, units):
    def shard(model):
        for name in units:
            meshard.fully_shard(model.get_submodule(name))
        meshard.fully_shard(model.b.child, unshard_on_access=True)
        return meshard.fully_shard(model)

    def step_of(rank):
        def step(model, x):
            out = model(x)
            out = out[0] if returns_both else out
            integer_loss(out if rank == 0 else model.first).backward()
            model.first = None

        return step

    pair = Pair(reading_model(returns_both), make=shard)
    for number in range(2):
        step_of(dist.get_rank())(pair.ours, integer_batch(number, dist.get_rank()))
        for rank in range(2):
            step_of(rank)(pair.plain, integer_batch(number, rank))
    pair.compare()


# --- one rank calls a module of a unit by itself -------------------------------------------------


def with_head():
    return fill_with_halves(
        Made(
            lambda m, x: ternary(m.body(x)),
            body=nn.Linear(IntegerModel.in_dim, 4),
            head=nn.Linear(4, 3, bias=False),
        )
    )


def step_of(rank, model, x):
    """Train the head with a loss of its own, on rank 1 only."""
    h = model(x)
    d = h.detach().requires_grad_()
    if rank == 1:
        integer_loss(model.head(d)).backward()
        h.backward(d.grad)
    else:
        integer_loss(h).backward()


def own_part_of(whole):
    """Return what this rank has of a gradient, without a collective."""
    parts = whole.tensor_split([-(-len(whole) // 2)])
    return parts[dist.get_rank()]


def one_rank_calls_the_head(units):
    """Return the error that this rank gets, or check that its gradients are right."""
    plain, model = with_head(), with_head()
    for name in units:
        meshard.fully_shard(model.get_submodule(name), reshard_after_forward=name != "head")
    meshard.fully_shard(model).set_gradient_divide_factor(1.0)
    integer_loss(model(integer_batch(0, 0))).backward()  # so that nothing has to be prepared
    model.zero_grad()
    rank = dist.get_rank()
    try:
        step_of(rank, model, integer_batch(0, rank))
        meshard.clip_grad_norm_(model, 1e9)  # as a loop does, and the last chance to tell
    except RuntimeError as error:
        return str(error)
    for each in range(2):
        step_of(each, plain, integer_batch(0, each))
    for (name, param), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(param.grad.to_local(), own_part_of(wanted.grad)), name
    return None


@pytest.mark.parametrize("units", [["head"], ["body", "head"], ["body"], []])
def test_a_rank_that_calls_a_head_alone_is_an_error_on_all_ranks_or_right(
    run_ranks, monkeypatch, units
):
    monkeypatch.setenv("MESHARD_DEBUG", "1")
    monkeypatch.setenv("MESHARD_DEBUG_TIMEOUT", "2")
    one, other = run_ranks(one_rank_calls_the_head, 2, units, timeout=20)
    if "head" in units:  # rank 0 has no reason to gather it
        assert one is not None
    if one is None:
        assert other is None
    else:
        for text in (one, other):
            assert re.search("about to issue different collectives(.|\n)*of unit '", text), text


def wait_for_ever(path):
    model = meshard.fully_shard(with_head())
    integer_loss(model(integer_batch(0, 0))).backward()
    dist.barrier()
    if dist.get_rank() == 1:
        logging.getLogger("meshard").addHandler(logging.FileHandler(path))
    step_of(dist.get_rank(), model, integer_batch(0, dist.get_rank()))
    if dist.get_rank() == 0:
        dist.barrier()  # and never comes
    model(integer_batch(0, 0))


@pytest.mark.slow
def test_the_report_of_a_long_wait_for_a_head_that_one_rank_calls_names_the_unit(
    run_ranks, monkeypatch, tmp_path
):
    monkeypatch.setenv("MESHARD_STALL_SECONDS", "0.4")
    with pytest.raises(RankError):
        run_ranks(wait_for_ever, 2, tmp_path / "report", timeout=3)
    assert "of unit '(root)'" in (tmp_path / "report").read_text()


# --- what the report of a mismatch advises -------------------------------------------------------


class Hidden:
    """An output in which no tensor is found."""


def run_hiding(model, x):
    kept = checkpoint(model.checkpointed, x @ model.own.weight, use_reentrant=True)
    hidden = Hidden()
    hidden.both = kept, model.other(kept)
    return hidden


def run_around(model, x, uses_other=True):
    kept, other = model.hiding(x).both
    return model.last(kept + other if uses_other else kept)


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.filterwarnings("ignore:unit .* returned a Hidden")
@on_threads(2)
def test_a_rank_may_skip_a_unit_beside_a_reentrant_checkpoint_in_one_that_hides_its_output(parts):
    layers = {name: nn.Linear(6, 6) for name in ("checkpointed", "other", "own")}
    plain = Made(run_around, hiding=Made(run_hiding, **layers), last=nn.Linear(6, 6))
    units = ("hiding.checkpointed", "hiding.other", "hiding", "last")
    model, plain = sharded_and_plain(plain, units)

    def step(model, rank):
        return model(inputs_of(rank), uses_other=rank == 0 or not parts).square().mean()

    check_gradients(model, plain, step)


def skip_a_block():
    model = shard_blocks(seeded(ChosenBlocks()))
    blocks = (0, 2) if dist.get_rank() else (0, 1)
    with pytest.raises(RuntimeError, match="different collectives") as error:
        model(torch.ones(1, 6), blocks).sum().backward()
    return str(error.value)


def test_the_report_of_a_mismatch_lists_causes_by_how_common_they_are(run_ranks, monkeypatch):
    """With the remedy of each."""
    monkeypatch.setenv("MESHARD_DEBUG", "1")
    for text in run_ranks(skip_a_block, 2):
        lists_in_order = (
            "on one rank.*evaluation.*generate|evaluation.*generate.*on one rank",
            "skipped",
            r"dummy.*same place in the forward.*(times zero|0 \*|\* 0)",
            "(more|number of|as many) (batches|microbatches)",
        )
        places = [re.search(each, text.replace("\n", " ")) for each in lists_in_order]
        assert all(places), text
        starts = [place.start() for place in places]
        assert starts == sorted(starts), text


# --- experts: the output of a unit requires no grad on one rank -----------------------------------


def expert(module, x, is_empty, computes=False):
    y = module.layer(x) if computes or not is_empty else None
    return torch.zeros_like(x) if is_empty else y


def experts(forward, num=2, **options):
    """Return a sharded model with ``num`` experts, and the plain one."""
    blocks = [Made(expert, layer=nn.Linear(6, 6)) for _ in range(num)]
    plain = seeded(Made(forward, blocks=blocks, scale=nn.Parameter(torch.empty(6))))
    model = copy.deepcopy(plain)
    for block in model.blocks:
        meshard.fully_shard(block, mesh=init_device_mesh("cpu", (4,)), **options)
    return meshard.fully_shard(model), plain


def run_experts(model, x, is_empty, computes=False):
    for block in model.blocks:
        x = x + block(x, is_empty, computes)
    return x * model.scale


def loss_on(model, rank, number=0, **kwargs):
    return model(inputs_of(rank, number), rank == 1, **kwargs).square().mean()


@pytest.mark.parametrize("computes", [False, True])
@on_threads(4)
def test_a_rank_may_return_zeros_that_require_no_grad(computes):
    """As an expert without tokens does, whether or not it has used its weights."""

    def step(model, rank):
        return sum(loss_on(model, rank, number, computes=computes) for number in range(2))

    check_gradients(*experts(run_experts), step)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_forwards", [1, 2])
@on_threads(4)
def test_a_unit_whose_output_on_one_rank_requires_no_grad_may_be_unsharded(num_forwards, is_async):
    def step(model, rank):
        losses = []
        for number in range(num_forwards):
            losses.append(loss_on(model, rank, number))
            if isinstance(model, meshard.FSDPModule):
                model.blocks[0].unshard(async_op=is_async)
        sum(losses).backward()
        if isinstance(model, meshard.FSDPModule):
            model.blocks[0].reshard()

    check_gradients(*experts(run_experts), step)


@on_threads(4)
def test_a_unit_whose_output_on_one_rank_requires_no_grad_may_run_any_number_of_times():
    def run_repeatedly(model, x, is_empty, times):
        for _ in range(times):
            x = run_experts(model, x, is_empty)
        return model.blocks[0](x, is_empty) * model.scale

    model, plain = experts(run_repeatedly, reshard_after_forward=2)
    for times in (1, 2, 2, 0):  # so that the units that are gathered ahead do not always run
        check_gradients(model, plain, partial(loss_on, times=times), times=1)


@on_threads(4)
def test_a_unit_whose_output_on_one_rank_requires_no_grad_may_be_recomputed():
    def run_checkpointed(model, x, is_empty):
        for first in (0, 2):
            # The product runs both blocks again before the backward of either begins.
            x = checkpoint(
                run_two, model.blocks[first : first + 2], x, is_empty, use_reentrant=False
            )
        return x * model.scale

    def run_two(blocks, x, is_empty):
        return blocks[1](x + blocks[0](x, is_empty), False) * x.sin()

    check_gradients(*experts(run_checkpointed, num=4), loss_on)


NOT_OPEN = pytest.mark.xfail(strict=True, reason="on that rank no hook keeps the pass open")


@pytest.mark.parametrize("reshard_after_forward", [True, pytest.param(False, marks=NOT_OPEN)])
@on_threads(4)
def test_a_forward_that_all_ranks_leave_out_may_require_no_grad_on_one(reshard_after_forward):
    def run_last_expert(model, x, is_empty):
        return model.blocks[1](model.blocks[0](x, is_empty), is_empty)

    def step(model, rank):
        loss_on(model, rank)
        loss_on(model, 0, number=1).backward()

    options = {"reshard_after_forward": reshard_after_forward}
    check_gradients(*experts(run_last_expert, **options), step)


# --- a forward that raises on one rank ----------------------------------------------------------


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@on_threads(2)
def test_all_ranks_may_drop_a_step_in_which_one_rank_has_raised(reshard_after_forward):
    """They agree on it by a collective of their own, and all call ``reset_iter_state``."""
    options = {"reshard_after_forward": reshard_after_forward}
    model, plain = sharded_and_plain(MlpStack(depth=4), **options)
    check_gradients(model, plain)
    failed = torch.zeros(())
    if dist.get_rank() == 1:
        handle = model.blocks[-1].register_forward_hook(lambda *_: 1 / 0)
    try:
        model(inputs_of(dist.get_rank()))
    except ZeroDivisionError:
        failed += 1
        handle.remove()
    dist.all_reduce(failed)
    assert failed
    model.reset_iter_state()
    check_gradients(model, plain)
