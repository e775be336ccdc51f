"""Steps that fail, of which no trace may be left."""

import contextlib
import datetime
import os
import threading
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import meshard
from meshard import CommLedger, GradientSync
from tests.support import insides
from tests.support.against_plain import check_gradients, inputs_of, sharded_and_plain
from tests.support.insides import unsharded_bytes
from tests.support.models import Made, MlpStack, seeded
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import fake_group, on_ranks, on_threads
from tests.support.sharding import shard_blocks


def fail(*_):
    raise ZeroDivisionError


def fail_in_backward(module, args, output):
    output.register_hook(fail)


def two_models(mesh_shape=(2,)):
    mesh = init_device_mesh("cpu", mesh_shape)
    return [shard_blocks(seeded(MlpStack(depth=4)), mesh) for _ in range(2)]


def backward(model, step=0):
    model(inputs_of(dist.get_rank(), step)).square().mean().backward()


def run_failing_step(model, where="forward"):
    """Raise in a later block, on the batch of another step."""
    if where == "forward":
        handle = model.blocks[2].register_forward_pre_hook(fail)
    else:
        handle = model.blocks[1].register_forward_hook(fail_in_backward)
    with pytest.raises(ZeroDivisionError):
        backward(model, 1)
    handle.remove()


def assert_same_models(model, untouched):
    assert_same(full_grads(model), full_grads(untouched), bitwise=True)
    for each in (model, untouched):
        assert unsharded_bytes(each) == 0 and not meshard.pending_gradients(each)


@pytest.mark.parametrize(
    ("where", "mesh_shape"), [("forward", (2,)), ("backward", (2,)), ("forward", (2, 2))]
)
def test_a_step_after_a_failure_is_as_if_it_had_not_been(where, mesh_shape):
    @on_threads(torch.Size(mesh_shape).numel())
    def run():
        model, untouched = two_models(mesh_shape)
        for _ in range(2):  # in the very first step, and in one that has a recorded order
            run_failing_step(model, where)
            if where == "forward":  # after a backward, the next use cleans up
                assert all(isinstance(param, DTensor) for param in model.parameters())
                assert unsharded_bytes(model) == 0
            counts = []
            for each in (model, untouched):
                each.zero_grad()
                with CommLedger(each) as ledger:
                    backward(each)
                counts.append(ledger.counts)
            assert_same_models(model, untouched)
        assert counts[0] == counts[1]

    run()


@on_threads(2)
def test_a_reduction_that_fails_after_a_split_backward_voids_the_step():
    model, untouched = two_models()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with meshard.no_sync(model):
        backward(model)
    model.set_all_reduce_hook(fail, recurse=False)  # of the root, which comes last
    with pytest.raises(ZeroDivisionError):
        meshard.fully_shard.state(model).post_backward()
    with pytest.raises(RuntimeError, match="so some gradients are missing"):
        optimizer.step()
    model.set_all_reduce_hook(None)
    for each in (model, untouched):
        backward(each)
    assert_same_models(model, untouched)


@pytest.mark.parametrize("then", ["try again", "go on with another graph"])
def test_a_backward_that_raised_is_noticed_before_autograd_drops_it(monkeypatch, then):
    kept = insides.keep_backward_callbacks(monkeypatch)  # as autograd's thread of a device does
    with fake_group(1):
        models = [shard_blocks(seeded(MlpStack())) for _ in range(2)]
        model, untouched = models
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = torch.ones(2, 6)
        graphs = [each(batch).square().sum() for each in models]
        handle = model.blocks[1].register_forward_hook(fail_in_backward)
        loss = model(batch).sum()
        handle.remove()
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        assert len(kept) == 1
        drop_late = threading.Timer(0.2, kept.clear)
        drop_late.start()
        with pytest.raises(RuntimeError, match="so some gradients are missing"):
            optimizer.step()
        for each, graph in zip(models, graphs, strict=True):
            (each(batch).square().sum() if then == "try again" else graph).backward()
        assert_same(full_grads(model), full_grads(untouched), bitwise=True)
        drop_late.join()
        optimizer.step()
        assert unsharded_bytes(model) == 0


@pytest.mark.parametrize("sync", list(GradientSync))
@on_threads(2)
def test_a_failing_evaluation_between_microbatches_keeps_their_gradients(sync):
    """Also those of a window that is over, which may be the one of the first microbatch."""
    model, untouched = two_models()
    for each in (model, untouched):
        for microbatch in range(2):
            each.set_gradient_sync(GradientSync.FULL if microbatch else sync)
            each.set_is_last_backward(microbatch == 1)
            backward(each, microbatch)
            if each is model:
                with torch.no_grad():
                    run_failing_step(model)
    assert_same(full_grads(model), full_grads(untouched), bitwise=True)


@on_threads(2)
@pytest.mark.filterwarnings("ignore:unit .* returned a NoneType")
def test_a_forward_that_returns_none_while_an_error_is_handled_has_not_failed():
    def step(model, rank):
        outputs = []
        try:
            raise RuntimeError("out of memory, say")
        except RuntimeError:
            model(torch.ones(2, 4, requires_grad=True), outputs)
        return outputs[0].sum()

    plain = Made(lambda m, x, into: into.append(m.linear(x)), linear=nn.Linear(4, 4))
    check_gradients(*sharded_and_plain(plain, (), reshard_after_forward=True), step)


@pytest.mark.parametrize("then", ["the root", "the same part", "another part"])
@on_threads(2)
def test_a_forward_may_follow_that_of_a_unit_alone_that_was_interrupted(then):
    def stop(*_):
        raise KeyboardInterrupt

    def step(model, rank):
        part = {"the root": model, "the same part": model.head, "another part": model.body}[then]
        if isinstance(model.head, meshard.FSDPModule):
            handle = model.head.register_forward_pre_hook(stop)
            with pytest.raises(KeyboardInterrupt):
                model.head(inputs_of(rank))
            handle.remove()
            with torch.no_grad():
                part(inputs_of(rank))
            assert all(isinstance(param, DTensor) for param in model.parameters())
        return part(inputs_of(rank)).square().mean()

    def forward(m, x):
        return m.head(m.body(x)) @ m.own.weight

    layers = {name: nn.Linear(6, 6) for name in ("body", "head", "own")}
    units = ("body", "head")
    check_gradients(
        *sharded_and_plain(Made(forward, **layers), units, reshard_after_forward=False), step
    )


@pytest.mark.parametrize("sync", list(GradientSync))
@on_threads(2)
def test_after_an_interrupted_forward_a_state_dict_has_shards_and_the_next_step_is_right(sync):
    def interrupt(*_):
        raise KeyboardInterrupt

    model, untouched = two_models()
    for each in (model, untouched):
        each.set_gradient_sync(sync)
    handle = model.blocks[2].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        backward(model, 1)
    handle.remove()
    state = model.state_dict()
    assert all(isinstance(value, DTensor) for value in state.values())
    assert unsharded_bytes(model) == 0
    for each in (model, untouched):
        each.set_gradient_sync(GradientSync.FULL)
        backward(each)
    assert_same_models(model, untouched)


@on_threads(2)
def test_a_backward_that_raises_inside_a_forward_fails_both():
    """A forward that trains a part of itself on its input."""
    model, untouched = two_models()

    def train_inside(module, args):
        x = args[0].detach().requires_grad_()
        x.register_hook(fail)  # the last hook: gradients of the block are there
        model.blocks[0](x).square().mean().backward()

    handle = model.blocks[2].register_forward_pre_hook(train_inside)
    with pytest.raises(ZeroDivisionError):
        backward(model, 1)
    handle.remove()
    model.reset_iter_state()
    assert unsharded_bytes(model) == 0
    for each in (model, untouched):
        backward(each)
    assert_same_models(model, untouched)


@on_threads(2)
def test_a_forward_that_goes_on_after_a_backward_in_it_has_raised_is_told_so():
    catches = [True]

    def forward(model, x):
        out = model.outer(x)
        inner = model.inner(out.detach())
        if catches[0]:
            inner.register_hook(fail)
        with contextlib.suppress(ZeroDivisionError):
            inner.sum().backward()
        return out

    units = {"outer": nn.Linear(4, 4), "inner": nn.Linear(4, 4)}
    model, plain = sharded_and_plain(Made(forward, **units), ("outer", "inner"))
    with pytest.raises(RuntimeError, match="a backward inside the forward of unit"):
        model(torch.ones(2, 4))
    catches[0] = False
    for each in (model, plain):
        each(torch.ones(2, 4)).sum().backward()
    assert_same(full_grads(model), full_grads(plain))


@pytest.mark.slow  # it waits for timeouts
@pytest.mark.parametrize("shared_memory", ["1", "0"])
@pytest.mark.parametrize("left", ["a batch", "a backward"])
@on_ranks(2)
@mock.patch.dict(os.environ)
def test_a_rank_that_others_leave_alone_is_told_what_it_waited_for(left, shared_memory):
    os.environ["MESHARD_SHARED_MEMORY"] = shared_memory
    mesh = DeviceMesh.from_group(dist.new_group(timeout=datetime.timedelta(seconds=2)), "cpu")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for unit in (*model, model):
        meshard.fully_shard(unit, mesh)
    x = torch.ones(1, 4)
    model(x).sum().backward()
    if left == "a backward":
        if dist.get_rank() == 1:
            model[0].register_forward_hook(fail_in_backward)
        out = model(x)
        if dist.get_rank() == 1:
            with pytest.raises(ZeroDivisionError):
                out.sum().backward()
    if dist.get_rank() == 0:
        # A second error, of the gather that was started ahead, would be one more warning.
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(RuntimeError) as caught:
                model(x) if left == "a batch" else out.sum().backward()
        text = str(caught.value)
        waited = "all-gather" if left == "a batch" else "reduction"
        assert f"waited for the {waited} of unit '0'" in text and text.count("waited") == 1
        assert "as many batches" in text and "MESHARD_DEBUG=1" in text
    dist.barrier()


@pytest.mark.parametrize("shard", [meshard.fully_shard, meshard.replicate])
@on_threads(2)
def test_a_backward_that_begins_with_a_gradient_after_a_failed_one_is_right_or_refused(shard):
    """Dropping what the failed one left would drop that gradient too, in silence."""
    model = shard(seeded(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))))
    out = model(torch.ones(1, 3))
    penalty = sum(param.square().sum() for param in model.parameters())
    out.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        out.sum().backward()
    if shard is meshard.fully_shard:  # the penalty was computed from weights that stay installed
        with pytest.raises(RuntimeError):
            penalty.backward()
        return
    penalty.backward()
    for param in model.parameters():
        assert torch.equal(param.grad, 2 * param)


@on_threads(2)
def test_a_forward_may_go_on_after_a_unit_inside_was_cancelled():
    def cancel(*_):
        raise GeneratorExit  # no Exception, so torch calls no hooks after it

    def forward(model, x):
        with contextlib.suppress(GeneratorExit):
            x = model.inner(x)
        return model.head(x)

    plain = Made(forward, inner=nn.Linear(6, 6), head=nn.Linear(6, 1))
    plain.inner.register_forward_hook(cancel)
    model, plain = sharded_and_plain(plain, ("inner",))
    check_gradients(model, plain)
    with torch.no_grad():
        model(inputs_of(0))
    assert insides.unsharded_units(model) == []
