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
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import meshard
from meshard import CommLedger, GradientSync, microbatches
from tests.support.against_plain import (
    SGD,
    check_gradients,
    inputs_of,
    mean_square,
    sharded_and_plain,
)
from tests.support.models import MlpStack, seeded
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.ranks import on_ranks, on_threads

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


def plain_names(values):
    return {name.replace("_checkpoint_wrapped_module.", ""): v for name, v in values.items()}


def build(kind, nesting, **options):
    """Checkpoint a sharded block ("outside"), shard a checkpointed one, or checkpoint its parts."""
    model = seeded(MlpStack())
    wrap = functools.partial(checkpoint_wrapper, **WRAPS[kind]) if kind else lambda module: module
    for number, block in enumerate(model.blocks):
        if nesting == "inside":
            model.blocks[number] = meshard.fully_shard(wrap(block), **options)
        elif nesting == "outside":
            model.blocks[number] = wrap(meshard.fully_shard(block, **options))
        else:
            block.up, block.down = wrap(block.up), wrap(block.down)
            meshard.fully_shard(block, **options)
    return meshard.fully_shard(model, **options)


def count(model, mode):
    """Train for two windows beside the plain model, and return the collectives of the second."""
    plain = seeded(MlpStack())
    optimizers = [SGD(each.parameters()) for each in (model, plain)]
    for _ in range(2):
        with CommLedger(model) as ledger:
            for number in microbatches(model, range(MICROBATCHES), until_last=mode):
                model(inputs_of(dist.get_rank(), number)).square().mean().backward()
        for number in range(MICROBATCHES):
            whole = torch.cat([inputs_of(rank, number) for rank in range(2)])
            plain(whole).square().mean().backward()
        assert_same(plain_names(full_grads(model)), full_grads(plain))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same(plain_names(full_state(model)), full_state(plain))
    return ledger.counts


# Four units with the root. Without resharding each is gathered once a microbatch, with it again in
# backward, except for the root by default. Recomputing costs nothing more, however it is nested:
# a unit is whole in its backward already when what is inside is computed again.
GATHERS = {None: 7, True: 8, False: 4}


@pytest.mark.parametrize(
    ("kind", "nesting", "reshard"),
    [
        (None, "inside", True),
        ("reentrant", "inside", None),
        ("reentrant", "outside", True),
        ("reentrant", "parts", False),
        ("plain", "inside", True),
        ("plain", "outside", None),
        ("plain", "parts", None),
        ("selective", "inside", False),
        ("selective", "outside", None),
    ],
)
@on_threads(2)
def test_recomputing_gathers_nothing_more(kind, nesting, reshard):
    model = build(kind, nesting, reshard_after_forward=reshard)
    assert count(model, GradientSync.REDUCE_SCATTER) == {
        "all_gather": GATHERS[reshard] * MICROBATCHES,
        "reduce_scatter": 4 * MICROBATCHES,
    }


@pytest.mark.parametrize("nesting", ["inside", "outside"])
@on_threads(2)
def test_recomputing_while_nothing_is_reduced(nesting):
    counts = count(build("plain", nesting), GradientSync.NONE)
    assert counts == {"all_gather": 7 * MICROBATCHES, "reduce_scatter": 4}


class Around(MlpStack):
    """Each checkpoint spans a unit and what follows, which backward recomputes first."""

    def __init__(self, policy):
        super().__init__()
        self.contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(
                lambda x, block=block: (block(x * self.scale).square() + 1e-3).sqrt(),
                x,
                use_reentrant=False,
                context_fn=self.contexts,
            )
        return x


@pytest.mark.parametrize("policy", [save_products, save_everything])
@pytest.mark.parametrize("reshard", [None, True, False])
@on_threads(2)
def test_selective_checkpoints_do_not_see_gathers(reshard, policy):
    check_gradients(*sharded_and_plain(Around(policy), reshard_after_forward=reshard))


class Segments(MlpStack):
    """Each checkpoint spans two units."""

    def __init__(self, use_reentrant):
        super().__init__(depth=4)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = x * self.scale
        for start in (0, 2):
            run = nn.Sequential(*self.blocks[start : start + 2])
            x = checkpoint(run, x, use_reentrant=self.use_reentrant)
        return x + self.shift


@pytest.mark.parametrize(
    ("use_reentrant", "early_stop"), [(True, True), (False, True), (False, False)]
)
@on_ranks(2)
def test_a_checkpoint_around_several_units(use_reentrant, early_stop):
    with set_checkpoint_early_stop(early_stop):
        ledger = check_gradients(*sharded_and_plain(Segments(use_reentrant)), times=3)
    assert ledger.counts == {"all_gather": 9, "reduce_scatter": 5}


@pytest.mark.parametrize("use_reentrant", [False, True])
@on_ranks(2)
def test_dropout_is_repeated_as_it_was(use_reentrant):
    def gradients(**options):
        model = seeded(MlpStack())
        for number, block in enumerate(model.blocks):
            block.up = nn.Sequential(block.up, nn.Dropout(0.5))
            meshard.fully_shard(block)
            if options:
                model.blocks[number] = checkpoint_wrapper(block, **options)
        meshard.fully_shard(model)
        torch.manual_seed(dist.get_rank())
        mean_square(model, 0).backward()
        return plain_names(full_grads(model))

    expected = gradients()
    kind = WRAPS["reentrant" if use_reentrant else "plain"]
    assert_same(gradients(**kind, preserve_rng_state=True), expected, bitwise=True)
    other = gradients(**kind, preserve_rng_state=False)
    assert max((other[name] - expected[name]).abs().max() for name in other) > 0.01


class Fickle(nn.Module):
    """Computes something else when it runs again."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        return self.down(torch.sin(self.up(x if self.runs == 1 else x[:1])))


@on_threads(2)
def test_a_failed_determinism_check_leaves_the_next_step_right():
    model, plain = sharded_and_plain(nn.Sequential(Fickle(), nn.Linear(6, 2)), ("0", "1"))
    fickle = model[0]
    model[0] = checkpoint_wrapper(fickle, CheckpointImpl.NO_REENTRANT)
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match="different metadata"):
        mean_square(model, 0).backward()
    for each in (fickle, plain[0]):
        each.forward = lambda x, each=each: each.down(torch.sin(each.up(x)))
    model[0] = fickle
    check_gradients(model, plain)


@pytest.mark.parametrize("kind", [None, "plain"])
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@on_ranks(2)
def test_autocast_computes_as_it_does_on_one_process(param_dtype, kind):
    """Compare with the plain model under the same autocast."""
    policy = meshard.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    model, plain = build(kind, "outside", mp_policy=policy), seeded(MlpStack())
    is_exact = param_dtype is None
    for _ in range(MICROBATCHES):
        losses = []
        for each in (model, plain):
            with torch.autocast("cpu", torch.bfloat16):
                loss = each(inputs_of(0)).float().square().mean()  # the same on both ranks
            loss.backward()
            losses.append(loss.detach())
        dtype = torch.float32 if is_exact else torch.bfloat16
        assert_same(losses[0], losses[1], dtype, bitwise=is_exact)
    ours, theirs = plain_names(full_grads(model)), full_grads(plain)
    for name, gradient in theirs.items():
        error = (ours[name] - gradient).norm() / gradient.norm()
        assert error < (1e-6 if is_exact else 0.05), f"{name}: {error}"
