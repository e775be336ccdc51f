"""Uneven batches: ranks with fewer of them train like the others."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import GradientSync
from tests.support.models import seeded
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.ranks import on_ranks, on_threads
from tests.support.spread import spread

COUNTS = [3, 2, 5, 1]  # batches of each rank
LONGEST = max(COUNTS)


def net(*between):
    return seeded(nn.Sequential(nn.Linear(3, 4), *between, nn.Tanh(), nn.Linear(4, 2)))


def batch_of(rank, number):
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(10 * rank + number))


def own_batches():
    rank = dist.get_rank()
    return [batch_of(rank, number) for number in range(COUNTS[rank])]


def ranks_with(number):
    return [rank for rank, count in enumerate(COUNTS) if number < count]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def replicated(model=None, **options):
    return meshard.replicate(model or net(), bucket_cap_mb=4e-5, **options)


def sharded(model=None, mesh=None):
    model = model or net()
    meshard.fully_shard(model[0], mesh)
    return meshard.fully_shard(model, mesh)


def hsdp(model=None):
    return sharded(model, init_device_mesh("cpu", (2, 2)))


def loss_of(model, batch):
    return model(batch).square().sum()


def assert_same_on_all_ranks(values):
    for name, value in values.items():
        of_first = value.detach().clone()
        dist.broadcast(of_first, 0)
        assert torch.equal(value, of_first), name


@on_ranks(4)
@spread(wrap=[replicated, sharded, hsdp], factor=[None, 7.0])
def test_ranks_without_a_batch_step_with_the_others(wrap, factor):
    plain = net()
    model = wrap(copy.deepcopy(plain))
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    optimizer, weights = sgd(model), []
    for batch, weight in meshard.uneven_batches(model, own_batches()):
        weights.append(weight)
        (weight * loss_of(model, batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    own = COUNTS[dist.get_rank()]
    assert weights == [1.0] * own + [0.0] * (LONGEST - own)

    optimizer = sgd(plain)
    for number in range(LONGEST):
        for rank in ranks_with(number):
            loss = loss_of(plain, batch_of(rank, number))
            (loss / (factor or len(ranks_with(number)))).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(full_state(model), full_state(plain))
    assert_same_on_all_ranks(full_state(model))

    for each in (model, plain):  # after the loop the number of ranks divides again
        each.zero_grad()
        loss_of(each, batch_of(0, 0)).backward()
    expected = full_grads(plain)
    if factor is not None:
        expected = {name: grad * dist.get_world_size() / factor for name, grad in expected.items()}
    assert_same(full_grads(model), expected)


@on_ranks(4)
def test_a_rank_that_has_run_out_gets_its_last_batch_again():
    model, rank = replicated(), dist.get_rank()
    seen = [batch for batch, _ in meshard.uneven_batches(model, own_batches())]
    assert len(seen) == LONGEST
    for number, batch in enumerate(seen):
        assert torch.equal(batch, batch_of(rank, min(number, COUNTS[rank] - 1)))


def ends_window(number):
    """Windows of two iterations. The last one, of one, is ended by hand."""
    return number % 2 == 1


def train_plain_windows():
    """Divide each window by the number of ranks that have a batch when it ends."""
    model = net()
    optimizer = sgd(model)
    for number in range(LONGEST):
        for rank in ranks_with(number):
            loss_of(model, batch_of(rank, number)).backward()
        if ends_window(number) or number == LONGEST - 1:
            by_hand = not ends_window(number)  # outside of the loop, where all ranks count
            for param in model.parameters():
                param.grad /= len(COUNTS if by_hand else ranks_with(number))
            optimizer.step()
            optimizer.zero_grad()
    return full_state(model)


@on_ranks(4)
@spread(wrap=[replicated, sharded, hsdp], in_backward=[False, True])
def test_a_window_of_several_iterations_is_divided_by_the_ranks_of_the_last(wrap, in_backward):
    model = wrap()
    optimizer = sgd(model)
    if in_backward:
        optimizer = meshard.overlap_optimizer(model, torch.optim.SGD, lr=1e-2, momentum=0.9)
    for number, (batch, weight) in enumerate(meshard.uneven_batches(model, own_batches())):
        mode = GradientSync.FULL if ends_window(number) else GradientSync.NONE
        with meshard.gradient_sync(model, mode):
            (weight * loss_of(model, batch)).backward()
        if ends_window(number):
            optimizer.step()
            optimizer.zero_grad()
    meshard.finalize_gradients(model)
    optimizer.step()
    assert_same(full_state(model), train_plain_windows())


@on_ranks(4)
@pytest.mark.parametrize("wrap", [replicated, hsdp])
def test_microbatches_of_each_batch_make_a_window(wrap):
    model, plain = wrap(), net()
    for number, (batch, weight) in enumerate(meshard.uneven_batches(model, own_batches())):
        for part in meshard.microbatches(model, batch.chunk(3)):
            (weight * loss_of(model, part)).backward()
        for rank in ranks_with(number):
            (loss_of(plain, batch_of(rank, number)) / len(ranks_with(number))).backward()
        assert_same(full_grads(model), full_grads(plain))
        for each in (model, plain):
            each.zero_grad()


@on_threads(4)
def test_parameters_on_a_mesh_of_their_own_are_divided_by_its_share_of_the_ranks():
    pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pairs", "own"))["own"]
    model = seeded(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
    meshard.fully_shard(model[1], pair)
    meshard.fully_shard(model)
    batches = [torch.ones(1, 1)] * COUNTS[dist.get_rank()]
    for number, (batch, weight) in enumerate(meshard.uneven_batches(model, batches)):
        (weight * model(batch).sum()).backward()
        # Two of these four ranks form each mesh of the second layer.
        own = [rank for rank in ranks_with(number) if rank // 2 == dist.get_rank() // 2]
        share = len(ranks_with(number)) / 4
        assert model[1].bias.grad.full_tensor().item() == pytest.approx(len(own) / (2 * share))
        model.zero_grad()


@on_ranks(4)
def test_a_scaler_steps_on_all_ranks_alike():
    model = replicated()
    optimizer, scaler = sgd(model), meshard.ShardedGradScaler("cpu", init_scale=4.0)
    for batch, weight in meshard.uneven_batches(model, own_batches()):
        scaler.scale(weight * loss_of(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 4.0
    assert_same_on_all_ranks(full_state(model))


@on_ranks(2)
@pytest.mark.parametrize("is_here", [False, True])
def test_a_rank_without_any_batch_raises_on_all_ranks(is_here):
    model = sharded()
    batches = [] if dist.get_rank() == is_here else [batch_of(0, 0)]
    with pytest.raises(RuntimeError, match=rf"rank\(s\) \[{int(is_here)}\] passed no batch at all"):
        next(meshard.uneven_batches(model, batches))
    loss_of(model, batch_of(0, 0)).backward()


@on_ranks(2)
def test_without_batches_on_all_ranks_the_loop_is_empty():
    assert list(meshard.uneven_batches(sharded(), [])) == []


@on_ranks(4)
@pytest.mark.parametrize("when", [1, 3])
def test_all_ranks_may_leave_the_loop_in_the_same_iteration(when):
    model, plain = replicated(), net()
    for number, _ in enumerate(meshard.uneven_batches(model, own_batches())):
        if number == when:
            break
    for each in (model, plain):
        loss_of(each, batch_of(0, 0)).backward()
    assert_same(full_grads(model), full_grads(plain))


def test_a_plain_module_is_refused():
    with pytest.raises(ValueError, match="no unit"):
        meshard.uneven_batches(net(), [])


@on_ranks(2)
def test_a_change_of_the_ranks_inside_a_window_of_partial_sums_is_an_error():
    """Part of it is divided already, by another number of ranks."""
    model, batches = sharded(), [batch_of(0, 0)] * (1 + dist.get_rank())
    told = pytest.raises(RuntimeError, match="has divided part of this window by 2")
    with told, meshard.gradient_sync(model, GradientSync.REDUCE_SCATTER):
        for batch, weight in meshard.uneven_batches(model, batches):
            (weight * loss_of(model, batch)).backward()
