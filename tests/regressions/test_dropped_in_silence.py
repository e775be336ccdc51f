"""Gradients, weights and requests that something else dropped."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import meshard
from meshard import CPUOffloadPolicy
from tests.support.integer_model import IntegerModel, fill_with_halves, integer_batch, integer_loss
from tests.support.models import Made, Ones, seeded
from tests.support.ranks import on_threads
from tests.support.replicated import Pair


def with_head(fails):
    def forward(model, x):
        if fails.pop("forward", False):
            raise ZeroDivisionError
        return model.body(x)

    body, head = nn.Linear(IntegerModel.in_dim, 4), nn.Linear(4, 3, bias=False)
    return fill_with_halves(Made(forward, body=body, head=head))


@on_threads(2)
def test_an_evaluation_that_fails_keeps_what_a_chunk_of_the_head_has_brought():
    fails = {}
    pair = Pair(with_head(fails), make=meshard.fully_shard)

    def step(model, x):
        h = model(x)
        d = h.detach().requires_grad_()
        integer_loss(nn.functional.linear(d, model.head.weight)).backward()
        if model is pair.ours:
            fails["forward"] = True
            with torch.no_grad(), pytest.raises(ZeroDivisionError):
                model(x)
        h.backward(d.grad)

    pair.steps(range(2), step, step)


@on_threads(1)
def test_a_forward_that_fails_drops_what_a_chunk_of_the_head_has_brought():
    """The page says that a failed forward drops the step."""
    fails = {}
    model = meshard.fully_shard(with_head(fails))
    x = integer_batch(0, 0)
    d = model(x).detach().requires_grad_()
    integer_loss(nn.functional.linear(d, model.head.weight)).backward()
    fails["forward"] = True
    with pytest.raises(ZeroDivisionError):
        model(x)
    assert not meshard.pending_gradients(model)
    h = model(x)
    integer_loss(nn.functional.linear(h, model.head.weight)).backward()
    plain = with_head({})
    integer_loss(plain.head(plain(x))).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad.full_tensor(), theirs.grad)


@on_threads(1)
def test_two_optimizers_clear_gradients_that_are_still_copied_to_the_host():
    model = meshard.fully_shard(Ones().bfloat16(), offload_policy=CPUOffloadPolicy())
    optimizers = [torch.optim.SGD([param], lr=0.1) for param in model.parameters()]
    model.set_is_last_backward(False)
    model(1.0, 1.0).backward()
    for optimizer in optimizers:
        optimizer.zero_grad()
    model.set_is_last_backward(True)
    model(1.0, 1.0).backward()
    for param in model.parameters():
        assert (param.grad.full_tensor() == 1).all()


@on_threads(1)
def test_an_unshard_after_a_backward_that_failed_is_there_in_the_next_forward():
    model = seeded(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    for layer in model:
        meshard.fully_shard(layer, reshard_after_forward=False)
    meshard.fully_shard(model)
    out = model(torch.ones(1, 4))
    out.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        out.sum().backward()
    model[1].unshard()
    model[0](torch.ones(1, 4))
    assert model[1].weight.shape == (4, 4) and type(model[1].weight.data) is torch.Tensor


@pytest.mark.parametrize("reads", ["kept", "unsharded by the user"])
@on_threads(2)
def test_a_backward_that_keeps_its_graph_leaves_the_weights_that_another_loss_has_read(reads):
    """It ended the process: the second loss reads them before any output gets its gradient."""

    def step(model, x):
        h = model(x)
        if model is pair.ours and reads != "kept":
            model.unshard()
        weight = model.head.weight
        losses = integer_loss(h), integer_loss(nn.functional.linear(h, weight))
        losses[0].backward(retain_graph=True)
        losses[1].backward()

    def shard(model):
        meshard.fully_shard(model.body)
        return meshard.fully_shard(model, reshard_after_forward=reads != "kept")

    pair = Pair(with_head({}), make=shard)
    pair.steps(range(2), step, step)


@on_threads(2)
def test_a_gradient_that_comes_after_its_bucket_was_sent_is_refused():
    def forward(model, x):
        x = (x + 0.0).requires_grad_()
        return checkpoint(model.inner, model.first(x), use_reentrant=True) + model.inner(x)

    layers = {name: nn.Linear(4, 4) for name in ("first", "inner")}
    model = meshard.replicate(seeded(Made(forward, **layers)), bucket_cap_mb=1e-5)
    with pytest.raises(RuntimeError, match=r"'inner.*second gradient.*use_reentrant=False"):
        model(torch.ones(2, 4)).sum().backward()
    model.reset_iter_state()
