"""Activation checkpointing: its cost in gathers, for every way to nest it."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import meshard
from meshard import GradientSync
from tests.support.against_plain import (
    check_gradients,
    check_training,
    inputs_of,
    mean_square,
    sharded_and_plain,
)
from tests.support.models import Made, MlpBlock, MlpStack
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import on_fake_ranks, on_ranks, on_threads

MICROBATCHES = 3


def save_products(context, op, *args, **kwargs):
    is_product = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def save_everything(context, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE


SELECTIVE = functools.partial(create_selective_checkpoint_contexts, save_products)
WRAPS = {
    "reentrant": {"checkpoint_impl": CheckpointImpl.REENTRANT},
    "plain": {"checkpoint_impl": CheckpointImpl.NO_REENTRANT},
    "selective": {"checkpoint_impl": CheckpointImpl.NO_REENTRANT, "context_fn": SELECTIVE},
}


def build(kind, nesting, **options):
    """Checkpoint a sharded block ("outside"), shard a checkpointed one, or checkpoint its parts."""
    plain = MlpStack()
    wrap = functools.partial(checkpoint_wrapper, **WRAPS[kind])
    for number, block in enumerate(plain.blocks):
        if nesting == "parts":
            block.up, block.down = wrap(block.up), wrap(block.down)
        else:
            plain.blocks[number] = wrap(block)
    wrapped = [f"blocks.{number}._checkpoint_wrapped_module" for number in range(3)]
    return sharded_and_plain(plain, wrapped if nesting == "outside" else ["blocks"], **options)


# Four units with the root. Without resharding each is gathered once a microbatch, with it again in
# backward, except for the root by default. Recomputing costs nothing more, however it is nested:
# a unit is whole in its backward already when what is inside is computed again.
GATHERS = {None: 7, True: 8, False: 4}


REDUCED, NONE = GradientSync.REDUCE_SCATTER, GradientSync.NONE


@pytest.mark.parametrize(
    ("kind", "nesting", "reshard", "mode"),
    [
        ("reentrant", "inside", None, REDUCED),
        ("reentrant", "outside", True, REDUCED),
        ("reentrant", "parts", False, REDUCED),
        ("plain", "inside", True, REDUCED),
        ("plain", "inside", None, NONE),
        ("plain", "outside", None, NONE),
        ("plain", "parts", None, REDUCED),
        ("selective", "inside", False, REDUCED),
        ("selective", "outside", None, REDUCED),
    ],
)
@on_threads(2)
def test_recomputing_gathers_nothing_more(kind, nesting, reshard, mode):
    def window(module, rank):
        numbers = range(MICROBATCHES)
        if isinstance(module, meshard.FSDPModule):
            numbers = meshard.microbatches(module, numbers, until_last=mode)
        for number in numbers:
            module(inputs_of(rank, number)).square().mean().backward()

    pair = build(kind, nesting, reshard_after_forward=reshard)
    assert check_training(*pair, window, steps=2).counts == {
        "all_gather": GATHERS[reshard] * MICROBATCHES,
        "reduce_scatter": 4 * (1 if mode is NONE else MICROBATCHES),
    }


@pytest.mark.parametrize(
    ("policy", "reshard"),
    [(save_products, None), (save_everything, True), (save_everything, False)],
)
@on_threads(2)
def test_selective_checkpoints_do_not_see_gathers(policy, reshard):
    """Each checkpoint spans a unit and what follows, which backward recomputes first."""
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def forward(model, x):
        for block in model.blocks:
            x = checkpoint(
                lambda x, block=block: (block(x * model.scale).square() + 1e-3).sqrt(),
                x,
                use_reentrant=False,
                context_fn=contexts,
            )
        return x

    blocks = [MlpBlock(6, 10) for _ in range(3)]
    plain = Made(forward, scale=nn.Parameter(torch.empty(6)), blocks=blocks)
    check_gradients(*sharded_and_plain(plain, reshard_after_forward=reshard))


def in_pairs(use_reentrant):
    """Return four blocks, of which two each are in a checkpoint."""

    def forward(model, x):
        for start in (0, 2):
            run = nn.Sequential(*model.blocks[start : start + 2])
            x = checkpoint(run, x * model.scale, use_reentrant=use_reentrant)
        return x

    blocks = [MlpBlock(6, 10) for _ in range(4)]
    return Made(forward, scale=nn.Parameter(torch.empty(6)), blocks=blocks)


@pytest.mark.parametrize(
    ("use_reentrant", "early_stop"), [(True, True), (False, True), (False, False)]
)
@on_threads(2)
def test_a_checkpoint_around_several_units(use_reentrant, early_stop):
    with set_checkpoint_early_stop(early_stop):
        check_gradients(*sharded_and_plain(in_pairs(use_reentrant)), times=3)


@on_threads(2)
def test_a_unit_that_begins_with_the_recomputed_node_is_not_over():
    """The first node of the last unit recomputes all three, whose first is still to be gathered."""

    def forward(model, x):
        return checkpoint(nn.Sequential(*model.blocks), x, use_reentrant=False)

    blocks = [Made(lambda m, x: x * m.scale, scale=nn.Parameter(torch.empty(6))) for _ in range(3)]
    check_gradients(*sharded_and_plain(Made(forward, blocks=blocks)))


@on_fake_ranks(2)
def test_a_second_backward_through_reentrant_checkpoints_communicates_as_the_first():
    model, _ = sharded_and_plain(in_pairs(use_reentrant=True))
    loss, sent = mean_square(model, 0), []
    for _ in range(2):
        with meshard.CommLedger(model) as ledger:
            loss.backward(retain_graph=True)
        events = [(event.op, event.unit) for event in ledger.events]
        sent.append([each for each in events if each != ("all_gather", "(root)")])
    assert sent[0] == sent[1]


@on_threads(2)
def test_a_frozen_teacher_may_be_deleted_before_backward_recomputes():
    def forward(model, x):
        y = checkpoint(lambda x: torch.sin(model.student(x) + model.shift), x, use_reentrant=False)
        with torch.no_grad():
            target = model.teacher(x)
        return y - target

    def step(model, rank):
        loss = mean_square(model, rank)
        if isinstance(model, meshard.FSDPModule) or rank == 1:  # the plain one has run both batches
            del model.teacher
        return loss

    members = {"student": MlpBlock(6, 8), "teacher": nn.Linear(6, 6)}
    plain = Made(forward, shift=nn.Parameter(torch.empty(6)), **members)
    check_gradients(*sharded_and_plain(plain, members), step, times=1)


@on_threads(2)
def test_gradients_that_come_in_parts_are_reduced_once():
    """Those of a layer in several reentrant checkpoints, of which ranks run different numbers."""

    def repeated(block, x, times):
        for _ in range(times):
            x = checkpoint(block.layer, x, use_reentrant=True)
        return x

    def forward(model, x, times=1):
        return model.block(x * model.scale, times)

    block = Made(repeated, layer=nn.Linear(6, 6))
    pair = sharded_and_plain(
        Made(forward, block=block, scale=nn.Parameter(torch.empty(6))), ("block",)
    )

    def step(model, rank):
        return model(inputs_of(rank), 1 + rank).square().mean()

    assert check_gradients(*pair, step).counts["reduce_scatter"] == 2


@pytest.mark.parametrize("kind", ["plain", "reentrant"])
@on_ranks(2)
def test_dropout_is_repeated_as_it_was(kind):
    def gradients(**options):
        plain = MlpStack()
        for block in plain.blocks:
            block.up = nn.Sequential(block.up, nn.Dropout(0.5))
        model, _ = sharded_and_plain(plain)
        for number, block in enumerate(model.blocks) if options else ():
            model.blocks[number] = checkpoint_wrapper(block, **options)
        torch.manual_seed(dist.get_rank())
        mean_square(model, 0).backward()
        return dict(enumerate(full_grads(model).values()))

    expected = gradients()
    assert_same(gradients(**WRAPS[kind], preserve_rng_state=True), expected, bitwise=True)
    other = gradients(**WRAPS[kind], preserve_rng_state=False)
    assert max((other[name] - expected[name]).abs().max() for name in other) > 0.01


@on_threads(2)
def test_a_failed_determinism_check_leaves_the_next_step_right():
    fickle = Made(  # computes something else when it runs again
        lambda m, x: m.down(torch.sin(m.up(x if next(m.firsts, False) else x[:1]))),
        up=nn.Linear(6, 8),
        down=nn.Linear(8, 6),
        firsts=iter([True]),
    )
    model, plain = sharded_and_plain(nn.Sequential(fickle, nn.Linear(6, 2)), ("0", "1"))
    fickle = model[0]
    model[0] = checkpoint_wrapper(fickle, CheckpointImpl.NO_REENTRANT)
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match="different metadata"):
        mean_square(model, 0).backward()
    for each in (fickle, plain[0]):
        each.forward = lambda x, each=each: each.down(torch.sin(each.up(x)))
    model[0] = fickle
    check_gradients(model, plain)


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@on_ranks(2)
def test_autocast_computes_as_it_does_on_one_process(param_dtype, is_checkpointed):
    policy = meshard.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    if is_checkpointed:
        model, plain = build("plain", "outside", mp_policy=policy)
    else:
        model, plain = sharded_and_plain(MlpStack(), mp_policy=policy)
    is_exact = param_dtype is None
    for _ in range(MICROBATCHES):
        losses = []
        for each in (model, plain):
            with torch.autocast("cpu", torch.bfloat16):
                loss = each(inputs_of(0)).float().square().mean()  # the same on both ranks
            loss.backward()
            losses.append(loss.detach())
        dtype = torch.float32 if is_exact else torch.bfloat16
        assert_same(*losses, dtype, bitwise=is_exact)
    ours = full_grads(model)
    for name, gradient in full_grads(plain).items():
        error = (ours[name] - gradient).norm() / gradient.norm()
        assert error < (1e-6 if is_exact else 0.05), f"{name}: {error}"


@pytest.mark.parametrize("use_reentrant", [False, True])
@on_fake_ranks(2)
def test_between_its_recomputation_and_its_backward_a_unit_has_its_shards(use_reentrant):
    seen = []

    def segment(model, x):
        middle = model.first(x) * 2
        if middle.requires_grad:
            middle.register_hook(lambda _: seen.append(type(model.first.up.weight)))
        return model.second(middle)

    model = Made(
        lambda m, x: checkpoint(segment, m, x, use_reentrant=use_reentrant),
        first=MlpBlock(8, 8),
        second=MlpBlock(8, 8),
    )
    for unit in (model.first, model.second, model):
        meshard.fully_shard(unit)
    model(torch.ones(2, 8, requires_grad=True)).sum().backward()
    assert seen == [DTensor]
