"""Replicated modules: ways to run a step, graphs and hooks."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import meshard
from tests.support.integer_model import IntegerModel, integer_batch, integer_loss
from tests.support.models import seeded
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.ranks import on_ranks, on_threads
from tests.support.replicated import Pair, run
from tests.support.spread import spread


class Interrupted(IntegerModel):
    """Raises in its forward or its backward, if it is told to."""

    raises_in = ""

    def forward(self, x):
        for place, block in enumerate(self.blocks):
            x = block(x)
            if place == 1 and self.raises_in == "forward":
                raise ValueError("in forward")
            if place == 1 and self.raises_in == "backward" and x.requires_grad:
                x.register_hook(_fail)
        return x + self.shift


def _fail(_):
    raise ValueError("in backward")


@on_ranks(2)
@spread(when=[0, 1, 2, 1], where=["forward", "backward"])
def test_after_an_exception_the_next_step_has_the_same_bits(where, when):
    pair = Pair(Interrupted())
    for number in range(4):
        if number == when:
            pair.ours.raises_in = where
            with pytest.raises(ValueError, match=f"in {where}"):
                run(pair.ours, integer_batch(number, dist.get_rank()))
            pair.ours.raises_in = ""
            if where == "backward":
                with pytest.raises(RuntimeError, match=r"the last backward .* raised"):
                    pair.optimizers[0].step()
        pair.step(number)
    pair.backward(4)
    pair.compare()
    pair.assert_views()


@on_ranks(2)
def test_gradients_stay_after_a_forward_that_raised():
    pair = Pair(Interrupted())
    pair.step(0)
    pair.backward(1)
    pair.ours.raises_in = "forward"
    with pytest.raises(ValueError, match="in forward"):
        pair.ours(integer_batch(1, 0))
    pair.ours.raises_in = ""
    pair.compare()
    pair.backward(2)
    pair.compare()


class RecomputedBlocks(IntegerModel):
    """Recomputes its blocks in backward."""

    use_reentrant = False

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x + self.shift


@on_ranks(2)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_inside_and_around(use_reentrant, whole):
    model = IntegerModel() if whole else RecomputedBlocks()
    model.use_reentrant = use_reentrant

    def needs(x):
        return x.requires_grad_() if use_reentrant else x

    def run_whole(model, x):
        integer_loss(checkpoint(model, needs(x), use_reentrant=use_reentrant)).backward()

    pair = Pair(model)
    way = run_whole if whole else lambda model, x: run(model, needs(x))
    pair.steps(range(4), way, way)
    pair.backward(4, way, way)
    pair.assert_views()


def two_forwards(model, x):
    first, second = model(x), model(x + 1)
    integer_loss(second).backward()
    integer_loss(first).backward()


def two_forwards_in_order(model, x):
    first, second = model(x), model(x + 1)
    integer_loss(first).backward()
    integer_loss(second).backward()


def several_backwards(model, x):
    loss = integer_loss(model(x))
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()


def one_loss_of_two_forwards(model, x):
    (integer_loss(model(x)) + integer_loss(model(x - 1))).backward()


def with_a_regulariser(model, x):
    loss = integer_loss(model(x))
    for param in model.parameters():
        loss = loss + 3 * param.sum()
    loss.backward()


def with_an_early_regulariser(model, x):
    penalty = sum(param.sum() for param in model.parameters())
    (integer_loss(model(x)) + 2 * penalty).backward()


def after_evaluation(model, x):
    if dist.get_rank() == 1:
        with torch.no_grad():
            model(x)
    model.eval()
    run(model, x)
    model.train()


def after_a_forward_alone(model, x):
    model(x + 1)
    run(model, x)


WAYS = {
    way.__name__: way
    for way in (
        two_forwards,
        two_forwards_in_order,
        several_backwards,
        one_loss_of_two_forwards,
        with_a_regulariser,
        with_an_early_regulariser,
        after_evaluation,
        after_a_forward_alone,
    )
}


@on_ranks(2)
@spread(name=[*WAYS], as_views=[True, False])
def test_ways_to_run_a_step(name, as_views):
    pair = Pair(gradient_as_bucket_view=as_views)
    pair.steps(range(4), WAYS[name], WAYS[name])
    for number in (4, 5):  # added to what is there
        pair.backward(number, WAYS[name], WAYS[name])
        pair.compare()
    if as_views:
        pair.assert_views()


@on_ranks(2)
def test_reductions_may_outlast_a_backward_that_is_not_the_last():
    pair = Pair()
    for number in range(3):
        pair.ours.set_is_last_backward(False)
        pair.backward(10 * number)
        pair.backward(10 * number + 1)
        pair.ours.set_is_last_backward(True)
        pair.backward(10 * number + 2)
        pair.compare()
        pair.update()
    pair.ours.set_is_last_backward(False)
    pair.backward(40)
    with pytest.raises(RuntimeError, match="still in flight"):
        pair.optimizers[0].step()
    meshard.finalize_gradients(pair.ours)
    pair.compare()
    pair.update()


@on_ranks(2)
def test_gradients_from_outside_of_any_forward():
    """A backward that no forward belongs to: a penalty of the parameters, not of the data."""
    pair = Pair()
    pair.step(0)

    def penalty(model, scale):
        (scale * sum(param.sum() for param in model.parameters())).backward()

    for number in range(1, 4):
        penalty(pair.ours, 2.0)
        penalty(pair.plain, 4.0)  # of both ranks
        pair.backward(number)
        pair.compare()
        pair.update()
    pair.backward(4)
    with pytest.raises(RuntimeError, match="outside the forward of the replicated module"):
        penalty(pair.ours, 2.0)


@on_ranks(2)
def test_two_replicated_modules_in_one_graph():
    """Two replicated modules, one after the other in one graph, as of a GAN."""
    first, second = IntegerModel(), IntegerModel(seed=3)
    pairs = Pair(first), Pair(second)

    def chain(one, two, x):
        integer_loss(two(torch.cat([one(x), x[:, :3]], dim=1))).backward()

    for number in range(4):
        chain(pairs[0].ours, pairs[1].ours, integer_batch(number, dist.get_rank()))
        for rank in range(2):
            chain(pairs[0].plain, pairs[1].plain, integer_batch(number, rank))
        for pair in pairs:
            pair.compare()
            pair.update()


@on_ranks(2)
def test_one_rank_alone_may_evaluate():
    """What a module returns in evaluation, on one rank alone, is that of the plain one."""
    pair = Pair()
    for number in range(3):
        pair.step(number)
        if dist.get_rank() == number % 2:
            for context in (torch.no_grad, torch.inference_mode):
                with context():
                    x = integer_batch(number, 7)
                    assert torch.equal(pair.ours(x), pair.plain(x))
    assert_same(full_state(pair.ours), full_state(pair.plain), bitwise=True)
    assert all(grad is None for grad in full_grads(pair.ours).values())


def smooth():
    return seeded(nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)), 0)


def penalty_of_inputs(model, x):
    x = x.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    slope.square().sum().backward()


def penalty_of_parameters(model, x):
    output = model(x)
    slopes = torch.autograd.grad(output.square().sum(), [*model.parameters()], create_graph=True)
    (output.sum() + sum(slope.square().sum() for slope in slopes)).backward()


@on_ranks(2)
@pytest.mark.parametrize("way", [penalty_of_inputs, penalty_of_parameters])
def test_gradients_of_gradients(way):
    pair = Pair(smooth().double())

    def double(model, x):
        way(model, x.double())

    for number in range(4):
        pair.backward(number, double, double)
        assert_same(full_grads(pair.ours), full_grads(pair.plain), torch.float64)
        pair.ours.zero_grad()
        pair.plain.zero_grad()
    assert pair.ours.num_replaced_gradients == 0


@on_ranks(2, timeout=120)
@pytest.mark.parametrize(
    "what",
    ["blocks", *(pytest.param(each, marks=pytest.mark.slow) for each in ("module", "wrapper"))],
)
def test_compiled(what):
    model = smooth()
    if what == "blocks":
        for layer in model:
            layer.compile(backend="aot_eager")
    pair = Pair(model)
    if what == "module":
        pair.ours.compile(backend="aot_eager")
    called = torch.compile(pair.ours, backend="aot_eager") if what == "wrapper" else pair.ours

    def way(model, x):
        (called if model is pair.ours else model)(x).square().sum().backward()

    with warnings.catch_warnings():
        # torch asks inputs that are no leaves for their gradients while it traces.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        for number in range(4):
            pair.backward(number, way, way)
            assert_same(full_grads(pair.ours), full_grads(pair.plain))
            pair.ours.zero_grad()
            pair.plain.zero_grad()
        pair.backward(4, way, way)
    pair.assert_views()


@on_ranks(2)
def test_forward_may_be_called_directly():
    pair = Pair()

    def way(model, x):
        integer_loss(model.forward(x)).backward()

    pair.steps(range(3), way, way)


@on_ranks(2)
def test_hooks_may_return_other_tensors():
    pair, seen = Pair(), []
    pair.ours.shift.register_post_accumulate_grad_hook(seen.append)
    for model in (pair.ours, pair.plain):
        for param in model.parameters():
            param.register_hook(lambda grad: grad.clone() * 2)
    pair.steps(range(3))
    assert len(seen) == 3  # of this rank alone


class Around(nn.Module):
    """A plain module around a replicated one."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return self.inner(x) + self.shift


@on_ranks(2)
def test_modules_around_may_be_copied():
    pair = Pair()
    pair.steps(range(2))
    twin = copy.deepcopy(Around(pair.ours))
    assert isinstance(twin.inner, meshard.ReplicateModule)
    plain = Around(copy.deepcopy(pair.plain))
    for number in range(3):
        run(twin, integer_batch(number, dist.get_rank()))
        for rank in range(2):
            run(plain, integer_batch(number, rank))
        assert_same(full_grads(twin.inner), full_grads(plain.inner), bitwise=True)
    pair.steps(range(3, 5))


@on_ranks(2)
def test_parts_of_a_model_may_be_replicated_by_themselves():
    model = IntegerModel()
    meshard.replicate(model.blocks[0])
    meshard.replicate(model.blocks[1])
    run(model, integer_batch(0, dist.get_rank()))
    for block in model.blocks[:2]:
        weight = block.linear.weight.grad.clone()
        dist.broadcast(weight, 0)
        assert torch.equal(weight, block.linear.weight.grad)


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, *, recomputes):
        x = self.first(x)
        return checkpoint(self.second, x, use_reentrant=True) if recomputes else self.second(x)


@on_threads(2)
def test_a_recomputation_does_not_rebuild_buckets():
    """The first backward recorded the order; the next forward is one that a backward runs again."""
    plain = seeded(Recomputed())
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (2,))
    for unit in (model.second, model):
        meshard.replicate(unit, mesh)

    def step(module, rank, share):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(rank))
        outputs = [module(x, recomputes=False), module(x + 1, recomputes=True)]
        for output in outputs:
            (output.square().sum() * share).backward()

    for _ in range(2):
        step(model, dist.get_rank(), 1.0)
        for rank in range(2):
            step(plain, rank, 0.5)
    assert_same(full_grads(model), full_grads(plain))
