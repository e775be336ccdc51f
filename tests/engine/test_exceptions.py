"""Steps that fail, of which no trace may be left."""

import contextlib
import datetime
import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import meshard
from meshard import CommLedger, GradientSync
from meshard._engine import lifecycle
from meshard._torch.private import BackwardCall
from tests.support.cases import CASES
from tests.support.fake import fake_group
from tests.support.models import MlpStack, seeded
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import on_ranks
from tests.support.sharding import shard_blocks


class Boom(Exception):
    """What the failing steps raise."""


def raise_boom(*args):
    raise Boom


def raise_in_backward(module, args, output):
    output.register_hook(raise_boom)


def build(case, mesh_shape=(2,), depth=4):
    model = case.build() if depth is None else type(case.build())(depth=depth)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
    mesh = init_device_mesh("cpu", mesh_shape)
    for unit in case.units(model):
        meshard.fully_shard(unit, mesh)
    return model


def storages_in_use(model):
    """Bytes of whole parameters and of hidden gradients that the units hold."""
    total = 0
    for module in model.modules():
        unit = vars(module).get("_meshard_unit")
        if unit is not None:
            total += sum(
                storage.nbytes() for storage, _ in unit.group.unit_params.unsharded._storages
            )
            total += sum(p.unsharded.grad is not None for p in unit.group.params)
            assert not unit.gradients.is_pending
    return total


def fail_then_step(where, mesh_shape=(2,)):
    case = CASES["mlp_stack"]
    model, untouched = build(case, mesh_shape), build(case, mesh_shape)
    rank = torch.distributed.get_rank()
    batch = case.batch(0, rank)
    for _ in range(2):  # in the very first step, and in one that has a recorded order
        if where == "forward":
            handle = model.blocks[3].down.register_forward_pre_hook(raise_boom)
        else:
            handle = model.blocks[1].register_forward_hook(raise_in_backward)
        with pytest.raises(Boom):
            case.loss(model(batch)).backward()
        handle.remove()
        assert all(isinstance(param, DTensor) for param in model.parameters())
        if where == "forward":
            assert storages_in_use(model) == 0
        model.zero_grad()
        untouched.zero_grad()
        with CommLedger(model) as after_failure:
            case.loss(model(batch)).backward()
        with CommLedger(untouched) as ordinary:
            case.loss(untouched(batch)).backward()
        assert_same(full_grads(model), full_grads(untouched), bitwise=True)
        assert storages_in_use(model) == storages_in_use(untouched) == 0
    assert after_failure.counts == ordinary.counts


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_after_a_failure_is_as_if_it_had_not_been(run_ranks, where):
    run_ranks(fail_then_step, 2, where)


@pytest.mark.slow
def test_a_failure_under_hsdp_is_forgotten_too(run_ranks):
    run_ranks(fail_then_step, 4, "forward", (2, 2))


@on_ranks(2)
def test_an_exception_voids_the_open_window():
    """Half a window is not a gradient: what it had accumulated does not leak into the next."""
    case = CASES["mlp_stack"]
    model, untouched = build(case), build(case)
    rank = torch.distributed.get_rank()
    for sync in (GradientSync.NONE, GradientSync.FULL):
        model.set_gradient_sync(sync)
        handle = None
        if sync is GradientSync.FULL:
            handle = model.blocks[2].register_forward_pre_hook(raise_boom)
            with pytest.raises(Boom):
                model(case.batch(1, rank))
            handle.remove()
        else:
            case.loss(model(case.batch(0, rank))).backward()
    assert storages_in_use(model) == 0
    for each in (model, untouched):
        case.loss(each(case.batch(2, rank))).backward()
    assert_same(full_grads(model), full_grads(untouched), bitwise=True)


@on_ranks(2)
def test_a_reduction_that_fails_after_a_split_backward_voids_the_step():
    """What a pipeline schedule calls after its last backward raises in a hook of the user."""
    case = CASES["mlp_stack"]
    model, untouched = build(case), build(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = case.batch(0, dist.get_rank())
    model.set_gradient_sync(GradientSync.NONE)
    case.loss(model(batch)).backward()
    model.set_gradient_sync(GradientSync.FULL)
    model.set_all_reduce_hook(raise_boom, recurse=False)  # of the root, which comes last
    with pytest.raises(Boom):
        meshard.fully_shard.state(model).post_backward()
    with pytest.raises(RuntimeError, match="raised, so gradients are those of some units only"):
        optimizer.step()
    model.set_all_reduce_hook(None)
    for each in (model, untouched):
        case.loss(each(batch)).backward()
    assert_same(full_grads(model), full_grads(untouched), bitwise=True)


class LateThread:
    """Stands in for autograd's thread of a device: drops the callback of a backward late."""

    def __init__(self, monkeypatch):
        queue = lifecycle.queue_backward_callback
        self._kept, self._may_drop, self._threads = [], threading.Event(), []

        def queue_and_keep(callback):
            queue(callback)
            self._kept.append(callback)

        monkeypatch.setattr(lifecycle, "queue_backward_callback", queue_and_keep)

    def drop_late(self, seconds=0.2):
        kept, self._kept = self._kept, []

        def drop():
            time.sleep(seconds)
            kept.clear()

        self._threads.append(threading.Thread(target=drop))
        self._threads[-1].start()

    def join(self):
        for thread in self._threads:
            thread.join()


def try_again(model, batch, kept):
    model(batch).square().sum().backward()


def go_on_with_another_graph(model, batch, kept):
    kept.backward()


@pytest.mark.parametrize("then", [try_again, go_on_with_another_graph])
def test_a_backward_that_raised_is_noticed_before_autograd_drops_it(monkeypatch, then):
    late = LateThread(monkeypatch)
    with fake_group(1):
        models = [shard_blocks(seeded(MlpStack())) for _ in range(2)]
        model, untouched = models
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = torch.ones(2, 6)
        kept = [each(batch).square().sum() for each in models]
        handle = model.blocks[1].register_forward_hook(raise_in_backward)
        loss = model(batch).sum()
        handle.remove()
        with pytest.raises(Boom):
            loss.backward()
        late.drop_late()
        with pytest.raises(RuntimeError, match="raised, so gradients are those of some units only"):
            optimizer.step()
        for each, graph in zip(models, kept, strict=True):
            then(each, batch, graph)
        assert_same(full_grads(model), full_grads(untouched), bitwise=True)
        late.join()
        optimizer.step()
        assert storages_in_use(model) == 0


def test_the_call_of_a_backward_is_found_from_another_thread():
    calls = []

    def find_in_a_thread(gradient):
        thread = threading.Thread(target=lambda: calls.append(BackwardCall()))
        thread.start()
        thread.join()
        calls.append(BackwardCall())
        assert not any(call.has_returned() for call in calls)

    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(find_in_a_thread)
    (leaf * 2).backward()
    assert len(calls) == 2 and all(call.has_returned() for call in calls)
    assert not BackwardCall().has_returned()  # outside of a backward nothing is known


@on_ranks(2)
def test_a_failing_evaluation_leaves_finished_gradients_alone():
    case = CASES["mlp_stack"]
    model = build(case)
    rank = torch.distributed.get_rank()
    case.loss(model(case.batch(0, rank))).backward()
    before = full_grads(model)
    handle = model.blocks[2].register_forward_pre_hook(raise_boom)
    with torch.no_grad(), pytest.raises(Boom):
        model(case.batch(1, rank))
    handle.remove()
    assert_same(full_grads(model), before, bitwise=True)


@pytest.mark.parametrize("sync", list(GradientSync))
@on_ranks(2)
def test_a_failing_evaluation_between_microbatches_keeps_their_gradients(sync):
    model, untouched = build(CASES["mlp_stack"]), build(CASES["mlp_stack"])
    for each in (model, untouched):
        for microbatch in range(2):
            each.set_gradient_sync(GradientSync.FULL if microbatch else sync)
            each.set_is_last_backward(microbatch == 1)
            batch = CASES["mlp_stack"].batch(microbatch, dist.get_rank())
            CASES["mlp_stack"].loss(each(batch)).backward()
            if each is model and microbatch == 0:
                handle = model.blocks[2].register_forward_pre_hook(raise_boom)
                with torch.no_grad(), pytest.raises(Boom):
                    model(batch)
                handle.remove()
    assert_same(full_grads(model), full_grads(untouched), bitwise=True)


def test_a_forward_inside_an_except_block_is_not_taken_for_a_failure():
    try:
        layer = meshard.fully_shard(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
        with pytest.raises(ZeroDivisionError):
            1 / 0  # noqa: B018
        try:
            raise ValueError
        except ValueError:
            layer(torch.ones(1, 3)).sum().backward()
        assert layer[0].weight.grad is not None
    finally:
        torch.distributed.destroy_process_group()


def one_batch_less():
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for unit in (model[0], model[1], model):
        meshard.fully_shard(unit, DeviceMesh.from_group(group, "cpu"))
    x = torch.ones(1, 4)
    model(x).sum().backward()
    if dist.get_rank() == 0:
        # A second error, of the gather that was started ahead, would be one more warning.
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(RuntimeError) as caught:
                model(x)
        assert "waited for the all-gather of unit '0'" in str(caught.value)
        assert "as many batches" in str(caught.value) and "MESHARD_DEBUG=1" in str(caught.value)
        assert str(caught.value).count("waited") == 1
    dist.barrier()


@pytest.mark.slow  # it waits for timeouts
@pytest.mark.parametrize("shared_memory", ["1", "0"])
def test_a_rank_with_fewer_batches_is_suspected(run_ranks, monkeypatch, shared_memory):
    monkeypatch.setenv("MESHARD_SHARED_MEMORY", shared_memory)
    run_ranks(one_batch_less, 2)


# --- found by reading ----------------------------------------------------------------------------


@pytest.mark.parametrize("shard", [meshard.fully_shard, meshard.replicate])
@on_ranks(2)
def test_a_backward_that_begins_with_a_gradient_after_a_failed_one_is_refused(shard):
    """Dropping what the failed one left would drop that gradient too, in silence."""
    model = shard(seeded(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))))
    out = model(torch.ones(1, 3))
    penalty = sum(param.square().sum() for param in model.parameters())
    out.register_hook(raise_boom)
    with pytest.raises(Boom):
        out.sum().backward()
    if shard is meshard.fully_shard:  # the penalty was computed from weights that stay installed
        with pytest.raises(RuntimeError):
            penalty.backward()
        return
    with pytest.raises(RuntimeError, match=r"dropped only now, .* call reset_iter_state\(\)"):
        penalty.backward(retain_graph=True)
    penalty.backward()
    for param in model.parameters():
        assert torch.equal(param.grad, 2 * param)


class Swallows(nn.Module):
    """Goes on after its first layer was cancelled."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x):
        with contextlib.suppress(GeneratorExit):  # no Exception, so torch calls no hooks after it
            x = self.inner(x)
        return self.head(x)


@on_ranks(2)
def test_a_forward_may_go_on_after_a_unit_inside_was_cancelled():
    def cancel(*_):
        raise GeneratorExit

    model, plain = seeded(Swallows()), seeded(Swallows())
    for each in (model, plain):
        each.inner.register_forward_hook(cancel)
    meshard.fully_shard(model.inner)
    meshard.fully_shard(model)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        plain(torch.ones(1, 3)).sum().backward()
    assert_same(full_grads(model), full_grads(plain))
