"""Activation checkpointing: its cost in gathers, for every way to nest it."""

import copy
import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import meshard
from meshard import CommLedger, GradientSync, microbatches
from tests.support.covering import covering
from tests.support.models import MlpStack, seeded
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.ranks import on_ranks
from tests.support.sharding import shard_blocks

MICROBATCHES = 3


def save_products(context, op, *args, **kwargs):
    is_product = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = functools.partial(create_selective_checkpoint_contexts, save_products)
KINDS = {
    "none": None,
    "reentrant": {"checkpoint_impl": CheckpointImpl.REENTRANT},
    "plain": {"checkpoint_impl": CheckpointImpl.NO_REENTRANT},
    "selective": {"checkpoint_impl": CheckpointImpl.NO_REENTRANT, "context_fn": SELECTIVE},
}


def plain_names(values):
    return {name.replace("_checkpoint_wrapped_module.", ""): v for name, v in values.items()}


def build(kind, nesting, reshard):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = seeded(MlpStack())
    wrap = functools.partial(checkpoint_wrapper, **KINDS[kind]) if KINDS[kind] else lambda m: m
    shard = functools.partial(meshard.fully_shard, mesh=mesh, reshard_after_forward=reshard)
    for number, block in enumerate(model.blocks):
        if nesting == "inside":  # fully_shard(checkpoint(block))
            model.blocks[number] = shard(wrap(block))
        elif nesting == "outside":  # checkpoint(fully_shard(block))
            model.blocks[number] = wrap(shard(block))
        else:  # parts of a unit
            block.up, block.down = wrap(block.up), wrap(block.down)
            shard(block)
    return shard(model)


def count(kind, nesting, reshard, mode=GradientSync.REDUCE_SCATTER):
    """Train both for two windows, compare, and return the collectives of the second."""
    model, plain = build(kind, nesting, reshard), seeded(MlpStack())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    xs = torch.randn(2, MICROBATCHES, 3, 6, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        with CommLedger() as ledger:
            for x in microbatches(model, list(xs[dist.get_rank()]), until_last=mode):
                model(x).square().mean().backward()
        for number in range(MICROBATCHES):
            plain(xs[:, number].flatten(0, 1)).square().mean().backward()
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


@covering(
    "kind, nesting, reshard",
    itertools.product(KINDS, ["inside", "outside", "parts"], [None, True, False]),
)
def test_recomputing_gathers_nothing_more(run_ranks, kind, nesting, reshard):
    expected = {
        "all_gather": GATHERS[reshard] * MICROBATCHES,
        "reduce_scatter": 4 * MICROBATCHES,
    }
    assert run_ranks(count, 2, kind, nesting, reshard) == [expected] * 2


@pytest.mark.parametrize("nesting", ["inside", "outside"])
def test_recomputing_while_nothing_is_reduced(run_ranks, nesting):
    counts = run_ranks(count, 2, "plain", nesting, None, GradientSync.NONE)
    assert counts == [{"all_gather": 7 * MICROBATCHES, "reduce_scatter": 4}] * 2


def save_everything(context, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE


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


def around(policy, reshard):
    plain = seeded(Around(policy))
    model = shard_blocks(seeded(Around(policy)), reshard_after_forward=reshard)
    for number in range(2):
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(number))
        for each in (model, plain):
            each(x).square().mean().backward()
    assert_same(full_grads(model), full_grads(plain))


@pytest.mark.parametrize("policy", [save_products, save_everything])
def test_selective_checkpoints_do_not_see_gathers(run_ranks, policy):
    for reshard in (None, True, False):
        run_ranks(around, 2, policy, reshard)


class Segments(MlpStack):
    """Each checkpoint spans two units."""

    use_reentrant = False

    def __init__(self):
        super().__init__(depth=4)

    def forward(self, x):
        x = x * self.scale
        for start in (0, 2):
            pair = self.blocks[start : start + 2]
            run = functools.partial(self.run_pair, pair)
            x = checkpoint(run, x, use_reentrant=self.use_reentrant)
        return x + self.shift

    @staticmethod
    def run_pair(pair, x):
        return pair[1](pair[0](x))


def count_segments(use_reentrant, early_stop):
    mesh = init_device_mesh("cpu", (2,))
    model = seeded(Segments())
    model.use_reentrant = use_reentrant
    plain = copy.deepcopy(model)
    shard_blocks(model, mesh)
    xs = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))
    for _ in range(MICROBATCHES):
        with set_checkpoint_early_stop(early_stop), CommLedger() as ledger:
            model(xs[dist.get_rank()]).square().mean().backward()
        plain(xs.flatten(0, 1)).square().mean().backward()
        assert_same(full_grads(model), full_grads(plain))
    return ledger.counts


@pytest.mark.parametrize(
    ("use_reentrant", "early_stop"), [(True, True), (False, True), (False, False)]
)
def test_a_checkpoint_around_several_units(run_ranks, use_reentrant, early_stop):
    counts = run_ranks(count_segments, 2, use_reentrant, early_stop)
    assert counts == [{"all_gather": 9, "reduce_scatter": 5}] * 2


class Dropping(MlpStack):
    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.up = nn.Sequential(block.up, nn.Dropout(0.5))


def drop_alike(use_reentrant, preserve_rng_state):
    """Return how far recomputed gradients are from those of a run without checkpoints."""
    mesh, x = init_device_mesh("cpu", (2,)), torch.ones(3, 6)
    grads = []
    for is_checkpointed in (False, True):
        model = seeded(Dropping())
        for number, block in enumerate(model.blocks):
            meshard.fully_shard(block, mesh)
            if is_checkpointed:
                model.blocks[number] = checkpoint_wrapper(
                    block,
                    CheckpointImpl.REENTRANT if use_reentrant else CheckpointImpl.NO_REENTRANT,
                    preserve_rng_state=preserve_rng_state,
                )
        meshard.fully_shard(model, mesh)
        torch.manual_seed(dist.get_rank())
        model(x).square().mean().backward()
        grads.append(plain_names(full_grads(model)))
    return max((grads[1][name] - grads[0][name]).abs().max().item() for name in grads[0])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_dropout_is_repeated_as_it_was(run_ranks, use_reentrant):
    assert run_ranks(drop_alike, 2, use_reentrant, True) == [0.0, 0.0]
    assert min(run_ranks(drop_alike, 2, use_reentrant, False)) > 0.01


class Fickle(nn.Module):
    """Computes something else when it runs again."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        return self.down(torch.sin(self.up(x if self.runs == 1 else x[:1])))


@on_ranks(2)
def test_a_failed_determinism_check_leaves_the_next_step_right():
    mesh = init_device_mesh("cpu", (2,))
    model, x = nn.Sequential(Fickle(), nn.Linear(6, 2)), torch.ones(3, 6)
    for layer in model:
        meshard.fully_shard(layer, mesh)
    model[0] = checkpoint_wrapper(model[0], CheckpointImpl.NO_REENTRANT)
    meshard.fully_shard(model, mesh)
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match="different metadata"):
        model(x).sum().backward()
    inner = model[0]._checkpoint_wrapped_module
    inner.runs = 0
    inner.forward = lambda x: inner.down(torch.sin(inner.up(x)))
    model.zero_grad()
    plain = nn.Sequential(Fickle(), nn.Linear(6, 2))
    plain.load_state_dict(plain_names(full_state(model)))
    model(x).sum().backward()
    plain(x).sum().backward()
    assert_same(plain_names(full_grads(model)), full_grads(plain))


@on_ranks(2)
@pytest.mark.parametrize("kind", ["none", "plain"])
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_autocast_computes_as_it_does_on_one_process(param_dtype, kind):
    """Compare with the plain model under the same autocast."""
    policy = meshard.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (2,))
    plain, model = seeded(MlpStack()), seeded(MlpStack())
    for number, block in enumerate(model.blocks):
        unit = meshard.fully_shard(block, mesh, mp_policy=policy)
        if KINDS[kind]:
            model.blocks[number] = checkpoint_wrapper(unit, **KINDS[kind])
    meshard.fully_shard(model, mesh, mp_policy=policy)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))  # the same on both ranks
    for _ in range(MICROBATCHES):
        losses = []
        for each in (model, plain):
            with torch.autocast("cpu", torch.bfloat16):
                loss = each(x).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
        exact = param_dtype is None
        dtype = torch.float32 if exact else torch.bfloat16
        assert_same(losses[0], losses[1], dtype, bitwise=exact)
    ours, theirs = plain_names(full_grads(model)), full_grads(plain)
    for name, gradient in theirs.items():
        error = (ours[name] - gradient).norm() / gradient.norm()
        assert error < (1e-6 if exact else 0.05), f"{name}: {error}"
