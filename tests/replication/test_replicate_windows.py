"""Replicated modules: windows, clipping, scaling, hooks and divide factors."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshard
from meshard import CommLedger, GradientSync
from tests.support.integer_model import IntegerModel, integer_batch, integer_loss
from tests.support.ranks import on_ranks, on_threads
from tests.support.replicated import SMALL, Pair, compressed, run
from tests.support.spread import spread

WHOLE = 4 * sum(param.numel() for param in IntegerModel().parameters())  # bytes


@on_threads(2)
@spread(until_last=[*GradientSync], as_views=[True, False])
def test_microbatches(until_last, as_views):
    pair = Pair(gradient_as_bucket_view=as_views)
    for window in range(3):
        numbers = range(4 * window, 4 * window + 4)
        for number in meshard.microbatches(pair.ours, list(numbers), until_last=until_last):
            pair.backward(number)
        pair.compare()
        pair.update()
    if as_views:
        pair.backward(20)
        pair.assert_views()


@on_threads(2)
def test_pending_gradients():
    """What is pending is seen, finished, dropped, and stepped over by nobody."""
    pair = Pair()
    for number, mode in enumerate((GradientSync.NONE, GradientSync.REDUCE_SCATTER) * 2):
        with meshard.gradient_sync(pair.ours, mode):
            pair.backward(number)
        left = meshard.pending_gradients(pair.ours)
        assert left and len(left) == 7
        assert all(param.grad is None for param in pair.ours.parameters())
        with pytest.raises(RuntimeError, match="holds gradients that are"):
            pair.optimizers[0].step()
        with pytest.raises(RuntimeError, match="holds gradients that are"):
            pair.ours.state_dict()
        meshard.finalize_gradients(pair.ours)
        assert not meshard.pending_gradients(pair.ours)
        pair.compare()
        pair.update()
        with meshard.gradient_sync(pair.ours, mode):
            run(pair.ours, integer_batch(77, dist.get_rank()))
        pair.ours.zero_grad()  # drops it
        assert not meshard.pending_gradients(pair.ours)
    pair.backward(9)
    pair.compare()
    pair.assert_views()


@on_ranks(2)
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping(norm_type, narrow):
    dtype = torch.bfloat16 if narrow else torch.float32
    for max_norm in (1e-2, 1e6):
        pair = Pair(IntegerModel().to(dtype))

        def way(model, x, dtype=dtype):
            integer_loss(model(x.to(dtype)).float()).backward()

        for number in range(3):
            pair.backward(number, way, way)
            with CommLedger() as ledger:
                ours = meshard.clip_grad_norm_(pair.ours, max_norm, norm_type)
            assert ledger.counts == {}  # every rank has all gradients
            theirs = nn.utils.clip_grad_norm_(pair.plain.parameters(), max_norm, norm_type)
            torch.testing.assert_close(
                ours, theirs.float(), rtol=1e-6 if not narrow else 1e-2, atol=0
            )
            for one, two in zip(pair.ours.parameters(), pair.plain.parameters(), strict=True):
                torch.testing.assert_close(one.grad, two.grad)
            if max_norm > 1:  # nothing was clipped
                grads = [param.grad for param in pair.ours.parameters()]
                assert torch.equal(ours, meshard.get_total_norm(grads, norm_type))
            pair.zero_grad()


@on_threads(2)
def test_torchs_functions_change_gradients_in_place():
    pair = Pair()
    for number in range(3):
        pair.backward(number)
        for model in pair.both:
            nn.utils.clip_grad_value_(model.parameters(), 2.0)
        pair.compare()
        pair.backward(number + 10)
        pair.compare()
        pair.zero_grad(set_to_none=False)
    pair.assert_views()


def line():
    """A model whose gradients are proportional to its loss."""
    model = nn.Sequential(nn.Linear(IntegerModel.in_dim, 5))
    for param in model.parameters():
        nn.init.constant_(param, 0.5)
    return model


@on_threads(2)
def test_loss_scaling():
    """A step that one rank finds infinite is skipped by all."""
    pair = Pair(line())
    scaler = meshard.ShardedGradScaler(init_scale=4.0, growth_interval=100, device="cpu")
    plain = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    for number in range(4):
        is_bad = number == 2
        factor = float("inf") if is_bad and dist.get_rank() == 1 else 1.0

        def way(model, x, factor=factor):
            scaler.scale(factor * model(x).sum()).backward()

        def plain_way(model, x, factor=float("inf") if is_bad else 1.0):
            plain.scale(factor * model(x).sum()).backward()

        pair.backward(number, way, plain_way)
        before = [param.detach().clone() for param in pair.ours.parameters()]
        for each, optimizer in zip((scaler, plain), pair.optimizers, strict=True):
            each.unscale_(optimizer)
            each.step(optimizer)
            each.update()
            optimizer.zero_grad()
        for ours, theirs, old in zip(
            pair.ours.parameters(), pair.plain.parameters(), before, strict=True
        ):
            assert torch.equal(ours, theirs)
            assert torch.equal(ours, old) is is_bad
        assert scaler.get_scale() == plain.get_scale() == (2.0 if number >= 2 else 4.0)
    pair.backward(9)
    pair.assert_views()


@on_threads(2)
def test_reduce_hooks_see_every_bucket():
    pair = Pair()
    seen = []

    def double(flat):
        seen.append(flat.numel())
        flat.mul_(2)

    class Double:
        after = staticmethod(double)

    handle = meshard.register_reduce_hook(pair.ours, Double())
    for number in range(3):
        pair.backward(number)
        for param in pair.plain.parameters():
            param.grad.mul_(2)
        pair.compare()
        pair.update()
        assert sum(seen) * 4 == WHOLE  # every bucket once, also after they were made anew
        seen.clear()
    handle.remove()
    pair.step(3)
    assert not seen


def test_gradients_may_travel_compressed(run_ranks):
    run_ranks(compressed, 2)


FACTORS = {
    "number": lambda: 4.0,
    "tensor": lambda: torch.tensor(4.0),
    "callable": lambda: lambda: torch.tensor(4),
    "None": lambda: None,
}


@on_threads(2)
@pytest.mark.parametrize("name", FACTORS)
def test_divide_factors(name):
    pair = Pair()
    factor = FACTORS[name]()
    pair.ours.set_gradient_divide_factor(factor)
    for number in range(3):
        pair.backward(number)
        for param in pair.plain.parameters():
            param.grad.div_(4 if factor is not None else dist.get_world_size())
        pair.compare()
        pair.update()
    with pair.ours.no_sync():
        pair.backward(4)
        with pytest.raises(RuntimeError, match="in the middle of a window"):
            pair.ours.set_gradient_divide_factor(2.0)
    with pytest.raises(ValueError, match="positive"):
        pair.ours.set_gradient_divide_factor(0)


@on_ranks(2)
@pytest.mark.parametrize(
    ("schedule", "expected"), [("F", 1), ("NNF", 1), ("RRF", 1), ("FFF", 3), ("NRF", 1)]
)
def test_one_all_reduce_per_bucket_of_exactly_its_bytes(schedule, expected):
    """One all-reduce per bucket and FULL, exactly the bytes of the gradients, nothing else."""
    pair = Pair()
    num_buckets = len(pair.ours._meshard_buckets.units)
    assert num_buckets > 2
    with CommLedger() as ledger:
        pair.step(0)
    assert ledger.counts == {"all_reduce": num_buckets}
    assert ledger.bytes == {"all_reduce": WHOLE}
    with CommLedger() as ledger:
        pair.backward(0)
        assert ledger.counts == {"broadcast": 1, "all_reduce": num_buckets}  # the order
        pair.ours.zero_grad()
    buckets = [unit for unit in pair.ours._meshard_buckets.units if unit.params]
    for _ in range(2):
        with CommLedger(pair.ours) as ledger:
            for letter in schedule:
                pair.ours.set_gradient_sync(
                    {"N": GradientSync.NONE, "F": GradientSync.FULL}.get(
                        letter, GradientSync.REDUCE_SCATTER
                    )
                )
                run(pair.ours, integer_batch(0, 0))
        assert ledger.counts == {"all_reduce": expected * len(buckets)}
        assert ledger.bytes == {"all_reduce": expected * WHOLE}
        assert {event.unit for event in ledger.events} == {unit.label for unit in buckets}
        pair.ours.zero_grad()


class First(nn.Sequential):
    """Uses the first of its modules."""

    def forward(self, x):
        return self[0](x)


@on_threads(2)
def test_what_nobody_used_may_get_a_gradient_of_zero():
    model = First(nn.Linear(2, 2), nn.Linear(2, 2))
    meshard.replicate(model, bucket_cap_mb=SMALL).set_reduce_scatter_unused_params(True)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        assert (model[1].weight.grad == 0).all() and (model[0].weight.grad == 1).all()
        model.zero_grad()
