"""Replicated modules: ways to run a step, graphs and hooks."""

import copy
import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import meshard
from tests.support.against_plain import check_gradients, inputs_of
from tests.support.integer_model import IntegerModel, integer_batch, integer_loss
from tests.support.models import Made, seeded
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.ranks import on_ranks, on_threads
from tests.support.replicated import Pair, run
from tests.support.spread import slow, spread


@contextmanager
def failing(pair, where):
    """Let the second block of the replicated model raise in its forward or its backward."""

    def fail(*_):
        raise ValueError(f"in {where}")

    def fail_later(module, args, output):
        output.register_hook(fail)

    hook = fail if where == "forward" else fail_later
    handle = pair.ours.blocks[1].register_forward_hook(hook)
    with pytest.raises(ValueError, match=f"in {where}"):
        yield
    handle.remove()


@on_ranks(2)
@spread(when=[0, 1, 2, 1], where=["forward", "backward"])
def test_after_an_exception_the_next_step_has_the_same_bits(where, when):
    pair = Pair()
    for number in range(4):
        if number == when:
            with failing(pair, where):
                run(pair.ours, integer_batch(number, dist.get_rank()))
            if where == "backward":
                with pytest.raises(RuntimeError, match=r"the last backward .* raised"):
                    pair.optimizers[0].step()
        pair.step(number)
    pair.backward(4)
    pair.compare()
    pair.assert_views()


@on_threads(2)
def test_buffers_are_sent_after_a_backward_that_raised_on_one_rank():
    rank = dist.get_rank()

    def forward(model, x):
        model.seen.fill_(rank)
        return x * model.scale

    model = Made(forward, scale=nn.Parameter(torch.ones(2)))
    model.register_buffer("seen", torch.zeros(1))
    meshard.replicate(model, broadcast_buffers=True)
    sent = []
    model.register_forward_pre_hook(lambda module, _: sent.append(module.seen.item()))
    for number in range(3):
        out = model(torch.ones(2))
        if number == 1 and rank == 1:
            out.register_hook(lambda _: 1 / 0)
            with model.no_sync(), pytest.raises(ZeroDivisionError):
                out.sum().backward()
        else:
            with model.no_sync():
                out.sum().backward()
    assert sent == [0, 0, 0]


@on_ranks(2)
def test_gradients_stay_after_a_forward_that_raised():
    pair = Pair()
    pair.step(0)
    pair.backward(1)
    with failing(pair, "forward"):
        pair.ours(integer_batch(1, 0))
    pair.compare()
    pair.backward(2)
    pair.compare()


@on_ranks(2)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_blocks_or_the_whole_module_may_be_recomputed(use_reentrant, whole):
    def recomputed(module, x):
        return checkpoint(module, x, use_reentrant=use_reentrant)

    def forward(model, x):
        for block in model.blocks:
            x = recomputed(block, x)
        return x + model.shift

    def way(model, x):
        x.requires_grad_(use_reentrant)
        integer_loss(recomputed(model, x) if whole else model(x)).backward()

    model = IntegerModel()
    pair = Pair(model if whole else Made(forward, blocks=[*model.blocks], shift=model.shift))
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
    (loss + 3 * sum(param.sum() for param in model.parameters())).backward()


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


@on_ranks(2)
@spread(
    way=[
        two_forwards,
        two_forwards_in_order,
        several_backwards,
        one_loss_of_two_forwards,
        with_a_regulariser,
        with_an_early_regulariser,
        after_evaluation,
        after_a_forward_alone,
    ],
    as_views=[True, False],
)
def test_ways_to_run_a_step(way, as_views):
    pair = Pair(gradient_as_bucket_view=as_views)
    pair.steps(range(4), way, way)
    for number in (4, 5):  # added to what is there
        pair.backward(number, way, way)
        pair.compare()
    if as_views:
        pair.assert_views()


@on_ranks(2)
def test_gradients_are_there_after_a_backward_that_is_not_the_last():
    pair = Pair()
    for number in range(3):
        pair.ours.set_is_last_backward(False)
        pair.backward(10 * number)
        pair.compare()
        pair.backward(10 * number + 1)
        pair.ours.set_is_last_backward(True)
        pair.backward(10 * number + 2)
        pair.compare()
        pair.update()
    pair.ours.set_is_last_backward(False)
    pair.backward(40)
    pair.compare()
    pair.update()


@on_ranks(2)
def test_a_penalty_of_parameters_may_have_a_backward_without_a_forward():
    pair = Pair()
    pair.step(0)

    def penalty(model, scale):
        (scale * sum(param.sum() for param in model.parameters())).backward()

    for number in range(1, 4):
        penalty(pair.ours, 2.0)
        penalty(pair.plain, 4.0)  # of both ranks
        pair.step(number)
    pair.backward(4)
    penalty(pair.ours, 2.0)  # added to the gradients that are there
    penalty(pair.plain, 4.0)
    pair.compare()


@on_ranks(2)
def test_two_replicated_modules_may_be_in_one_graph():
    pairs = Pair(), Pair(IntegerModel(seed=3))

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
def test_one_rank_alone_may_evaluate_with_the_outputs_of_the_plain_module():
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
    return seeded(nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)))


def penalty_of_inputs(model, x):
    x = x.double().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    slope.square().sum().backward()


def penalty_of_parameters(model, x):
    output = model(x.double())
    slopes = torch.autograd.grad(output.square().sum(), [*model.parameters()], create_graph=True)
    (output.sum() + sum(slope.square().sum() for slope in slopes)).backward()


@on_ranks(2)
@pytest.mark.parametrize("way", [penalty_of_inputs, penalty_of_parameters])
def test_gradients_of_gradients(way):
    pair = Pair(smooth().double())
    for number in range(4):
        pair.backward(number, way, way)
        assert_same(full_grads(pair.ours), full_grads(pair.plain), torch.float64)
        pair.zero_grad()


@on_ranks(2, timeout=120)
@pytest.mark.parametrize(
    "what",
    ["blocks", *(slow(each) for each in ("module", "wrapper"))],
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
            pair.zero_grad()
        pair.backward(4, way, way)
    pair.assert_views()


@on_ranks(2)
def test_hooks_may_return_other_tensors():
    pair, seen = Pair(), []
    pair.ours.shift.register_post_accumulate_grad_hook(seen.append)
    for model in pair.both:
        for param in model.parameters():
            param.register_hook(lambda grad: grad.clone() * 2)
    pair.steps(range(3))
    assert len(seen) == 3  # of this rank alone


@on_ranks(2)
def test_a_module_around_a_replicated_one_may_be_copied():
    def around(inner):
        shift = nn.Parameter(torch.zeros(4))
        return Made(lambda m, x: m.inner(x) + m.shift, inner=inner, shift=shift)

    pair = Pair()
    pair.steps(range(2))
    twin = copy.deepcopy(around(pair.ours))
    assert isinstance(twin.inner, meshard.ReplicateModule)
    plain = around(copy.deepcopy(pair.plain))
    for number in range(3):
        run(twin, integer_batch(number, dist.get_rank()))
        for rank in range(2):
            run(plain, integer_batch(number, rank))
        assert_same(full_grads(twin.inner), full_grads(plain.inner), bitwise=True)
    pair.steps(range(3, 5))


@on_threads(2)
def test_a_recomputation_does_not_rebuild_buckets():
    """The first backward recorded the order; the next forward is one that a backward runs again."""

    def forward(m, x, recomputes):
        x = m.first(x)
        return checkpoint(m.second, x, use_reentrant=True) if recomputes else m.second(x)

    def step(module, rank):
        x = inputs_of(rank)
        outputs = module(x, recomputes=False), module(x + 1, recomputes=True)
        for output in outputs:
            output.square().sum().backward()

    plain = seeded(Made(forward, first=nn.Linear(6, 6), second=nn.Linear(6, 6)))
    model = copy.deepcopy(plain)
    for unit in (model.second, model):
        meshard.replicate(unit)
    check_gradients(model, plain, step)
