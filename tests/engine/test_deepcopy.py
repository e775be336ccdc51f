"""Deep copies of sharded modules."""

import copy
import gc
import io
import os
import pickle
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import CommLedger, GradientSync
from tests.support import insides
from tests.support.against_plain import check_gradients, inputs_of
from tests.support.cases import CASES
from tests.support.live_memory import live_tensor_bytes
from tests.support.models import MlpBlock, seeded
from tests.support.parity import assert_same, full_grads, full_state, train
from tests.support.ranks import on_ranks, on_threads


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def shard(case, model, mesh_shape=(2,)):
    mesh = init_device_mesh("cpu", mesh_shape)
    for unit in case.units(model):
        meshard.fully_shard(unit, mesh)
    return model


@pytest.mark.parametrize(
    ("case_name", "mesh_shape"),
    [
        ("transformer_tied", (2,)),
        ("uneven", (2,)),
        ("frozen_beside", (2,)),
        ("mixed_dtype", (2,)),
        ("mlp_stack", (2, 2)),
    ],
)
def test_a_copy_trains_by_itself(case_name, mesh_shape):
    """Train, copy, train both on different data: both are like plain models and their copies."""
    case, num_ranks = CASES[case_name], torch.Size(mesh_shape).numel()

    @on_threads(num_ranks)
    def run():
        rank = dist.get_rank()
        model, plain = shard(case, case.build(), mesh_shape), case.build()
        train(model, case.batches(2, rank), sgd, loss_fn=case.loss)
        train(plain, case.whole_batches(2, num_ranks), sgd, loss_fn=case.loss)
        copied, plain_copy = copy.deepcopy(model), copy.deepcopy(plain)
        assert [type(module) for module in copied.modules()] == [type(m) for m in model.modules()]
        assert insides.labels(copied) == insides.labels(model)
        for old, new in zip(model.parameters(), copied.parameters(), strict=True):
            assert old is not new and new.device_mesh is old.device_mesh
            assert new.requires_grad == old.requires_grad and isinstance(new, nn.Parameter)
        for one, other in ((model, plain), (copied, plain_copy), (model, plain)):
            whole = [case.whole_batch(step, num_ranks) for step in range(3, 5)]
            train(one, [case.batch(step, rank) for step in range(3, 5)], sgd, loss_fn=case.loss)
            train(other, whole, sgd, loss_fn=case.loss)
            assert_same(full_state(model), full_state(plain), case.dtype)
            assert_same(full_state(copied), full_state(plain_copy), case.dtype)

    run()


@on_ranks(2)
def test_a_copy_keeps_settings_and_hooks_as_its_own_and_no_gradients():
    case = CASES["mlp_stack"]
    model = shard(case, case.build())
    model.set_requires_all_reduce(False)
    model.blocks[0].set_reshard_after_forward(False)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[2]])
    heard = []
    model.blocks[1].register_forward_hook(lambda module, args, output: heard.append(module))
    batch = case.batch(0, dist.get_rank())
    case.loss(model(batch)).backward()
    model.blocks[0].unshard()  # whole, and shown whole

    copied = copy.deepcopy(model)
    own = [insides.own_units(each.blocks[0])[0].settings for each in (model, copied)]
    assert own[1].reshard_after_forward is False
    assert own[1].sync is own[0].sync is GradientSync.REDUCE_SCATTER
    for each, settings in zip((model, copied), own, strict=True):
        prefetched = [ref() for ref in settings.forward_prefetch]
        assert prefetched == insides.own_units(each.blocks[2])
    # The gradients are those of an open window, which the copy has not.
    with pytest.raises(RuntimeError, match="window"):
        model.set_gradient_divide_factor(3.0)
    copied.set_gradient_divide_factor(None)
    copied.set_requires_all_reduce(True)
    assert own[0].sync is GradientSync.REDUCE_SCATTER

    model.blocks[0].reshard()
    before = full_grads(model)
    assert all(param.grad is None for param in copied.parameters())  # as of any module
    heard.clear()
    with CommLedger(copied) as ledger, CommLedger(model) as of_the_first:
        case.loss(copied(batch)).backward()
    assert not of_the_first.counts
    assert ledger.counts["reduce_scatter"] == 4
    assert heard == [copied.blocks[1]]
    assert_same(full_grads(model), before, bitwise=True)
    assert_same(full_grads(copied), before, bitwise=True)


@on_ranks(2)
def test_a_unit_is_copied_out_of_its_root():
    case, rank = CASES["mlp_stack"], dist.get_rank()
    model = shard(case, case.build())
    case.loss(model(case.batch(0, rank))).backward()
    block = copy.deepcopy(model.blocks[1])
    plain = copy.deepcopy(case.build().blocks[1])
    (unit,) = insides.units(block)
    assert unit.is_root and unit.fqn == "" and unit.label == "(root)"
    check_gradients(block, plain)
    # The copy may become a part of something else.
    outer = meshard.fully_shard(nn.Sequential(block, nn.Linear(6, 2)))
    outer(inputs_of(rank)).sum().backward()
    assert not unit.is_root


@on_ranks(2)
@pytest.mark.parametrize("root_is_sharded", [True, False])
def test_units_of_several_modules_are_copied(root_is_sharded):
    mesh = init_device_mesh("cpu", (2,))
    plain = seeded(nn.Sequential(nn.Linear(6, 6), MlpBlock(6, 8), nn.Tanh(), nn.Linear(6, 6)))
    model = copy.deepcopy(plain)
    meshard.fully_shard(model[1].up, mesh)  # a unit inside one of the list
    meshard.fully_shard([model[0], model[3], model[1]], mesh)
    if root_is_sharded:
        meshard.fully_shard(model, mesh)
    copied = copy.deepcopy(model)
    del model
    assert check_gradients(copied, plain).counts["reduce_scatter"] == 2


class CopiesItself(nn.Module):
    """Copies a module inside its forward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x, what=None):
        if what is not None:
            copy.deepcopy(what)
        return self.inner(x)


@on_ranks(2)
def test_a_copy_in_the_middle_of_something_is_refused():
    mesh = init_device_mesh("cpu", (2,))
    model = CopiesItself()
    for unit in (model.inner, model):
        meshard.fully_shard(unit, mesh)
    x = torch.ones(1, 4)
    with pytest.raises(RuntimeError, match=r"inside the forward or backward of unit '\(root\)'"):
        model(x, what=model)
    model.inner.register_forward_hook(lambda *_: copy.deepcopy(model.inner))
    with pytest.raises(RuntimeError, match="inside the forward or backward of unit 'inner'"):
        model(x)
    model.inner._forward_hooks.popitem()
    with meshard.no_sync(model):
        model(x).sum().backward()
    with pytest.raises(RuntimeError, match=r"'inner' holds gradients that .* zero_grad"):
        copy.deepcopy(model)
    meshard.finalize_gradients(model)
    copied = copy.deepcopy(model)
    for wrong in (lambda: pickle.dumps(model), lambda: torch.save(model, io.BytesIO())):
        with pytest.raises(TypeError, match=r"unit '.*' cannot be pickled here.* state_dict"):
            wrong()
    with pytest.raises(TypeError, match=r"CopiesItself needs copy\.deepcopy"):
        copy.copy(model)
    with pytest.raises(TypeError, match=r"inside meshard\.unsharded_params"):
        pickle.dumps(meshard.fully_shard(nn.Sequential(nn.Linear(2, 2)), mesh)[0])
    copied(x).sum().backward()  # nothing of this left a trace


@on_ranks(2)
@pytest.mark.parametrize("is_checked", ["0", "1"])
def test_a_copy_on_one_rank_only_leaves_the_next_model_alone(is_checked):
    """As a moving average on rank 0. With or without the check of collectives."""
    os.environ["MESHARD_DEBUG"] = is_checked
    try:
        case, rank = CASES["mlp_stack"], dist.get_rank()
        models = [shard(case, case.build())]
        averages = [copy.deepcopy(models[0]) for _ in range(1 - rank)]
        models += [shard(case, case.build()), copy.deepcopy(models[0])]
        for model in models:
            case.loss(model(case.batch(0, rank))).backward()
            assert_same(full_grads(model), full_grads(models[0]), bitwise=True)
        assert len(averages) == 1 - rank
    finally:
        del os.environ["MESHARD_DEBUG"]


@on_ranks(2)
def test_deleting_a_copy_frees_every_byte_without_the_garbage_collector():
    case = CASES["transformer_tied"]
    model = shard(case, case.build())
    rank = dist.get_rank()
    case.loss(model(case.batch(0, rank))).backward()
    first = copy.deepcopy(model)
    case.loss(first(case.batch(0, rank))).backward()
    sgd(first.parameters()).step()
    del first  # what is made or imported once has been
    gc.collect()
    gc.disable()
    try:
        before = live_tensor_bytes()
        copied = copy.deepcopy(model)
        optimizer = sgd(copied.parameters())
        case.loss(copied(case.batch(0, rank))).backward()
        optimizer.step()
        watched = [weakref.ref(copied), *insides.engine_refs(copied)]
        assert live_tensor_bytes() > before
        del copied, optimizer
        assert insides.left_alive(watched) == []
        dist.barrier()
        deadline = time.monotonic() + 10  # for gloo's threads to let go of works that are over
        while live_tensor_bytes() != before and time.monotonic() < deadline:
            time.sleep(0.2)
        assert live_tensor_bytes() == before
    finally:
        gc.enable()
    case.loss(model(case.batch(0, rank))).backward()


@on_ranks(2)
@pytest.mark.parametrize("optimizer_first", [False, True])
def test_a_model_and_its_optimizer_are_copied_together(optimizer_first):
    case = CASES["mlp_stack"]
    model = shard(case, case.build())
    optimizer = sgd(model.parameters())
    rank = dist.get_rank()

    def step(one, its):
        case.loss(one(case.batch(0, rank))).backward()
        its.step()
        its.zero_grad()

    step(model, optimizer)
    if optimizer_first:
        its, copied = copy.deepcopy((optimizer, model))
    else:
        copied, its = copy.deepcopy((model, optimizer))
    step(model, optimizer)
    between = full_state(model)
    assert all(not torch.equal(between[k], v) for k, v in full_state(copied).items())
    step(copied, its)
    assert_same(full_state(copied), between, bitwise=True)


@on_ranks(2)
def test_gradients_and_optimizer_states_are_pickled_and_copied():
    case = CASES["transformer"]
    model = shard(case, case.build())
    optimizer = torch.optim.AdamW(model.parameters())
    case.loss(model(case.batch(0, dist.get_rank()))).backward()
    optimizer.step()
    grads = {name: param.grad for name, param in model.named_parameters()}
    sharded_bytes = sum(grad.to_local().nbytes for grad in grads.values())
    file = io.BytesIO()
    torch.save(grads, file)
    assert file.tell() < 2 * sharded_bytes + 50_000
    file.seek(0)
    for loaded in (torch.load(file, weights_only=False), copy.deepcopy(grads)):
        assert_same(
            {name: grad.to_local() for name, grad in loaded.items()},
            {name: grad.to_local() for name, grad in grads.items()},
            bitwise=True,
        )
        assert all(loaded[name].placements == grad.placements for name, grad in grads.items())
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    assert file.tell() < 3 * sharded_bytes + 100_000
    file.seek(0)
    other = torch.optim.AdamW(model.parameters())
    other.load_state_dict(torch.load(file, weights_only=False))
    for param in model.parameters():
        for key, value in optimizer.state[param].items():
            assert torch.equal(
                getattr(other.state[param][key], "_local_tensor", other.state[param][key]),
                getattr(value, "_local_tensor", value),
            )
