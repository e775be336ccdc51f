"""Windows in which a microbatch has failed: nothing of them is used, and the next one is right."""

import contextlib

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import GradientSync
from tests.support.integer_model import integer_batch, integer_loss
from tests.support.ranks import on_threads
from tests.support.replicated import SMALL, Pair
from tests.support.sharding import shard_blocks


class Stop(Exception):
    """Raised in the middle of a backward."""


def stop(*_):
    raise Stop


class StopsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    backward = stop


# What raises above the first output that a unit has a hook on.


def in_the_loss(model, x):
    loss = integer_loss(model(x))
    loss.register_hook(stop)
    loss.backward()


def in_a_hook_on_a_view(model, x):
    out = model(x) * 1
    out.register_hook(stop)
    integer_loss(out).backward()


def in_a_function(model, x):
    integer_loss(StopsInBackward.apply(model(x))).backward()


def in_autograd_grad(model, x):
    x = x.requires_grad_()
    torch.autograd.grad(StopsInBackward.apply(model(x)).sum(), x, create_graph=True)


def behind_the_output(model, x):
    """Raise below the first output, in the middle of the model."""

    def make_it_raise(module, args, out):
        out.register_hook(stop)

    handle = model.blocks[0].register_forward_hook(make_it_raise)
    try:
        integer_loss(model(x)).backward()
    finally:
        handle.remove()


FAILURES = [in_the_loss, in_a_hook_on_a_view, in_a_function, in_autograd_grad, behind_the_output]
NONE, REDUCE_SCATTER, FULL = GradientSync
WINDOWS = [
    *[(in_the_loss, until_last) for until_last in GradientSync],
    (in_a_hook_on_a_view, NONE),
    (in_a_function, REDUCE_SCATTER),
    (in_autograd_grad, FULL),
    (behind_the_output, REDUCE_SCATTER),
]
KINDS = {
    "fully_shard": shard_blocks,
    "hybrid": lambda model: shard_blocks(model, init_device_mesh("cpu", (2, 1))),
    "replicate": lambda model: meshard.replicate(model, bucket_cap_mb=SMALL),
}


def microbatch(model, x):
    integer_loss(model(x)).backward()


def window(pair, until_last, *, fails=microbatch):
    """Run two microbatches of the sharded model, of which the second may fail."""
    rank = torch.distributed.get_rank()
    for number in meshard.microbatches(pair.ours, range(2), until_last=until_last):
        run = fails if number == 1 else microbatch
        run(pair.ours, integer_batch(number, rank))


def plain_window(pair):
    for number in range(2):
        for rank in range(torch.distributed.get_world_size()):
            microbatch(pair.plain, integer_batch(number, rank))


@pytest.mark.parametrize(("fails", "until_last"), WINDOWS)
@pytest.mark.parametrize("kind", KINDS)
@on_threads(2)
def test_a_window_that_is_run_again_holds_each_microbatch_once(kind, fails, until_last):
    pair = Pair(make=KINDS[kind])
    for _ in range(2):
        with pytest.raises(Stop):
            window(pair, until_last, fails=fails)
        window(pair, until_last)
        plain_window(pair)
        pair.compare()
        pair.update()


@pytest.mark.parametrize("fails", FAILURES)
@on_threads(2)
def test_reset_iter_state_voids_a_window_of_a_schedule_by_hand(fails):
    pair, rank = Pair(make=shard_blocks), torch.distributed.get_rank()
    for is_again in (False, True):
        pair.ours.set_gradient_sync(GradientSync.NONE)
        microbatch(pair.ours, integer_batch(0, rank))
        pair.ours.set_gradient_sync(GradientSync.FULL)
        if is_again:
            microbatch(pair.ours, integer_batch(1, rank))
        else:
            with pytest.raises(Stop):
                fails(pair.ours, integer_batch(1, rank))
            pair.ours.reset_iter_state()
    plain_window(pair)
    pair.compare()


@pytest.mark.parametrize("until_last", list(GradientSync))
@on_threads(2)
def test_a_step_of_a_loop_that_went_on_after_a_failed_microbatch_is_refused(until_last):
    """As where a batch without memory is skipped; the next window is right."""
    pair, rank = Pair(make=shard_blocks), torch.distributed.get_rank()
    for number in meshard.microbatches(pair.ours, range(3), until_last=until_last):
        with contextlib.suppress(Stop):
            (behind_the_output if number == 1 else microbatch)(
                pair.ours, integer_batch(number, rank)
            )
    with pytest.raises(RuntimeError, match="microbatch"):
        pair.optimizers[0].step()
    pair.zero_grad()
    window(pair, until_last)
    plain_window(pair)
    pair.compare()
    pair.update()


def clips(model, optimizer):
    meshard.clip_grad_norm_(model, 1e9)


def steps(model, optimizer):
    optimizer.step()


def saves(model, optimizer):
    model.state_dict()


def offloads(model, optimizer):
    meshard.offload(model, optimizer)
    meshard.onload(model, optimizer)


def between_microbatches(model, x):
    raise Stop


ON_MESHES = [
    ((2,), in_the_loss),
    ((2, 1), in_the_loss),
    ((2, 1), between_microbatches),
]


@pytest.mark.parametrize(("mesh_shape", "fails"), ON_MESHES)
@pytest.mark.parametrize("use", [clips, steps, saves, offloads])
@on_threads(2)
def test_zero_grad_after_an_exception_in_a_window_allows_everything(use, mesh_shape, fails):
    pair = Pair(make=lambda model: shard_blocks(model, init_device_mesh("cpu", mesh_shape)))
    with pytest.raises(Stop):
        window(pair, REDUCE_SCATTER, fails=fails)
    pair.ours.zero_grad()
    use(pair.ours, pair.optimizers[0])
    window(pair, REDUCE_SCATTER)
    plain_window(pair)
    pair.compare()
