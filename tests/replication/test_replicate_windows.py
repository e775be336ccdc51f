"""Replicated modules: windows, clipping, scaling, hooks and divide factors."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshard
from meshard import CommLedger, GradientSync, register_reduce_hook
from tests.support.insides import large_from
from tests.support.integer_model import IntegerModel, integer_batch, integer_loss
from tests.support.models import Ones
from tests.support.parity import own_state
from tests.support.ranks import on_ranks, on_threads
from tests.support.replicated import SMALL, Pair, bucket_sizes, run
from tests.support.spread import spread

# Bytes: the gradients, and for each parameter whether a rank has used it.
WHOLE = 4 * sum(param.numel() + 1 for param in IntegerModel().parameters())


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
def test_pending_gradients_are_seen_finished_and_dropped_and_no_optimizer_steps_over_them():
    pair = Pair()
    for number, mode in enumerate((GradientSync.NONE, GradientSync.REDUCE_SCATTER) * 2):
        with meshard.gradient_sync(pair.ours, mode):
            pair.backward(number)
        assert len(meshard.pending_gradients(pair.ours)) == 7
        assert all(param.grad is None for param in pair.ours.parameters())
        for refused in (pair.optimizers[0].step, pair.ours.state_dict):
            with pytest.raises(RuntimeError, match="holds gradients that are"):
                refused()
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
def test_clipping_sends_nothing_because_every_rank_has_all_gradients(norm_type, narrow):
    dtype = torch.bfloat16 if narrow else torch.float32

    def way(model, x):
        integer_loss(model(x.to(dtype)).float()).backward()

    for max_norm in (1e-2, 1e6):
        pair = Pair(IntegerModel().to(dtype))
        for number in range(3):
            pair.backward(number, way, way)
            with CommLedger() as ledger:
                ours = meshard.clip_grad_norm_(pair.ours, max_norm, norm_type)
            assert ledger.counts == {}
            theirs = nn.utils.clip_grad_norm_(pair.plain.parameters(), max_norm, norm_type)
            torch.testing.assert_close(
                ours, theirs.float(), rtol=1e-6 if not narrow else 1e-2, atol=0
            )
            grads = [[param.grad for param in model.parameters()] for model in pair.both]
            torch.testing.assert_close(*grads)
            if max_norm > 1:  # nothing was clipped
                assert torch.equal(ours, meshard.get_total_norm(grads[0], norm_type))
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


@on_threads(2)
def test_a_scaled_step_that_one_rank_finds_infinite_is_skipped_by_all():
    line = nn.Linear(IntegerModel.in_dim, 5)  # whose gradients are proportional to its loss
    for param in line.parameters():
        nn.init.constant_(param, 0.5)
    pair = Pair(line)
    scaler = meshard.ShardedGradScaler(init_scale=4.0, growth_interval=100, device="cpu")
    plain = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    for number in range(4):
        is_bad = number == 2

        def way(model, x, is_bad=is_bad):
            is_ours = model is pair.ours
            factor = float("inf") if is_bad and not (is_ours and dist.get_rank() == 0) else 1.0
            (scaler if is_ours else plain).scale(factor * model(x).sum()).backward()

        pair.backward(number, way, way)
        before = own_state(pair.ours)
        for each, optimizer in zip((scaler, plain), pair.optimizers, strict=True):
            each.unscale_(optimizer)
            each.step(optimizer)
            each.update()
            optimizer.zero_grad()
        for ours, theirs, old in zip(
            pair.ours.parameters(), pair.plain.parameters(), before.values(), strict=True
        ):
            assert torch.equal(ours, theirs)
            assert torch.equal(ours, old) is is_bad
        assert scaler.get_scale() == plain.get_scale() == (2.0 if number >= 2 else 4.0)
    pair.backward(9)
    pair.assert_views()


@on_threads(2)
def test_reduce_hooks_see_every_bucket_once_also_after_they_were_made_anew():
    pair = Pair()
    seen = []

    class Double:
        @staticmethod
        def after(flat):
            seen.append(flat.numel())
            flat.mul_(2)

    handle = register_reduce_hook(pair.ours, Double())
    for number in range(3):
        pair.backward(number)
        for param in pair.plain.parameters():
            param.grad.mul_(2)
        pair.compare()
        pair.update()
        assert sum(seen) == sum(param.numel() for param in pair.plain.parameters())
        seen.clear()
    handle.remove()
    pair.step(3)
    assert not seen


@on_ranks(2)
@pytest.mark.parametrize(("large", "cap"), [(2**60, SMALL), (1, 25)])
def test_gradients_may_travel_compressed(large, cap):
    pair = Pair(bucket_cap_mb=cap)
    handle = register_reduce_hook(pair.ours, wire_dtype=torch.bfloat16)
    with large_from(large):
        pair.steps(range(3))
        with CommLedger(pair.ours) as ledger:
            pair.step(3)
        assert ledger.bytes == {"all_reduce": WHOLE // 2}
        handle.remove()
        with CommLedger(pair.ours) as ledger:
            pair.step(4)
        assert ledger.bytes == {"all_reduce": WHOLE}


@on_threads(2)
def test_what_no_rank_used_may_get_a_gradient_of_zero():
    model = meshard.replicate(Ones(), bucket_cap_mb=1e-5)
    assert len(bucket_sizes(model)) == 2
    model.set_reduce_scatter_unused_params(True)
    for _ in range(3):
        model(1.0).backward()
        assert model.a.grad.tolist() == [1.0] * 4 and model.b.grad.tolist() == [0.0] * 4
        model.zero_grad()
