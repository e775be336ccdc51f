"""Deep copies of sharded modules, and their moving averages."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import meshard
from meshard import CommLedger, GradientSync
from tests.support import insides
from tests.support.against_plain import check_gradients, inputs_of, mean_square, sharded_and_plain
from tests.support.cases import CASES
from tests.support.models import MlpBlock, seeded
from tests.support.parity import assert_same, full_grads, full_state, own_part, train
from tests.support.ranks import on_fake_ranks, on_ranks, on_threads
from tests.support.sharding import sharded_case
from tests.support.spread import slow


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("case_name", "mesh_shape"),
    [
        ("transformer_tied", (2,)),
        slow("uneven", (2,)),
        ("frozen_beside", (2,)),
        slow("mixed_dtype", (2,)),
        ("mlp_stack", (2, 2)),
    ],
)
def test_a_copy_trains_by_itself(case_name, mesh_shape):
    case, num_ranks = CASES[case_name], torch.Size(mesh_shape).numel()

    @on_threads(num_ranks)
    def run():
        rank, (_, model, plain) = dist.get_rank(), sharded_case(case_name, mesh_shape)
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
    case, model, _ = sharded_case("mlp_stack")
    model.set_requires_all_reduce(False)
    model.blocks[0].set_reshard_after_forward(False)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[2]])
    heard = []
    model.blocks[1].register_forward_hook(lambda module, args, output: heard.append(module))
    batch = case.batch(0, dist.get_rank())
    case.loss(model(batch)).backward()
    model.blocks[0].unshard()

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


@on_threads(2)
def test_a_unit_is_copied_out_of_its_root():
    _, model, plain = sharded_case("mlp_stack")
    mean_square(model, dist.get_rank()).backward()
    block = copy.deepcopy(model.blocks[1])
    (unit,) = insides.units(block)
    assert unit.is_root and unit.fqn == "" and unit.label == "(root)"
    check_gradients(block, copy.deepcopy(plain.blocks[1]))
    # The copy may become a part of something else.
    mean_square(meshard.fully_shard(nn.Sequential(block, nn.Linear(6, 2))), 0).backward()
    assert not unit.is_root


@on_threads(2)
def test_units_of_several_modules_are_copied():
    plain = seeded(nn.Sequential(nn.Linear(6, 6), MlpBlock(6, 8), nn.Tanh(), nn.Linear(6, 6)))
    model = copy.deepcopy(plain)
    meshard.fully_shard(model[1].up)  # a unit inside one of the list
    meshard.fully_shard([model[0], model[3], model[1]])
    copied = copy.deepcopy(model)
    del model
    assert check_gradients(copied, plain).counts["reduce_scatter"] == 2


@on_threads(2)
def test_a_copy_in_the_middle_of_something_is_refused():
    model, _ = sharded_and_plain(nn.Sequential(nn.Linear(4, 4)), ("0",))
    x = torch.ones(1, 4)
    for what, unit in ((model, r"\(root\)"), (model[0], "0")):
        handle = model[0].register_forward_hook(lambda *_, what=what: copy.deepcopy(what))
        text = f"inside the forward or backward of unit '{unit}'"
        with pytest.raises(RuntimeError, match=text):
            model(x)
        handle.remove()
    with meshard.no_sync(model):
        model(x).sum().backward()
    with pytest.raises(RuntimeError, match=r"'0' holds gradients that .* zero_grad"):
        copy.deepcopy(model)
    meshard.finalize_gradients(model)
    for _ in meshard.microbatches(model, [x, x]):
        with pytest.raises(RuntimeError, match=r"inside a loop over microbatches\(\)"):
            copy.deepcopy(model)
    copied = copy.deepcopy(model)

    copied(x).sum().backward()  # nothing of this left a trace


@on_threads(2)
@pytest.mark.parametrize("optimizer_first", [False, True])
def test_a_model_and_its_optimizer_are_copied_together(optimizer_first):
    case, model, _ = sharded_case("mlp_stack")
    optimizer, rank = sgd(model.parameters()), dist.get_rank()

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


@on_threads(2)
def test_gradients_and_optimizer_states_are_pickled_and_copied():
    def pickled(what, factor):
        file = io.BytesIO()
        torch.save(what, file)
        assert file.tell() < factor * sharded_bytes + 50_000 * (factor - 1)
        file.seek(0)
        return torch.load(file, weights_only=False)

    case, model, _ = sharded_case("transformer")
    optimizer = torch.optim.AdamW(model.parameters())
    case.loss(model(case.batch(0, dist.get_rank()))).backward()
    optimizer.step()
    grads = {name: param.grad for name, param in model.named_parameters()}
    sharded_bytes = sum(grad.to_local().nbytes for grad in grads.values())
    for loaded in (pickled(grads, 2), copy.deepcopy(grads)):
        for name, grad in grads.items():
            assert_same(loaded[name].to_local(), grad.to_local(), bitwise=True, what=name)
            assert loaded[name].placements == grad.placements
    other = torch.optim.AdamW(model.parameters())
    other.load_state_dict(pickled(optimizer.state_dict(), 3))
    for name, param in model.named_parameters():
        for key, value in optimizer.state[param].items():
            loaded = other.state[param][key]
            assert_same(own_part(loaded), own_part(value), bitwise=True, what=f"{key} of {name}")


@on_threads(2)
@pytest.mark.parametrize(
    ("use_buffers", "multi", "reshard_after_forward"),
    [(False, True, None), (True, False, None), (False, False, False), (False, True, False)],
)
def test_a_moving_average_follows_and_is_evaluated(use_buffers, multi, reshard_after_forward):
    plain = nn.Sequential(MlpBlock(6, 8), MlpBlock(6, 8), nn.BatchNorm1d(6, momentum=0.5))
    model, _ = sharded_and_plain(plain, ("0", "1"), reshard_after_forward=reshard_after_forward)
    average_fn = {"multi_avg_fn": get_ema_multi_avg_fn(0.5)} if multi else {}
    averages = [
        AveragedModel(each, use_buffers=use_buffers, **average_fn) for each in (model, plain)
    ]
    optimizers = [sgd(each.parameters()) for each in (model, plain)]
    for step in range(4):
        x = inputs_of(0, step)  # of both ranks: BatchNorm sees a whole batch
        for each, optimizer, averaged in zip((model, plain), optimizers, averages, strict=True):
            each(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            averaged.update_parameters(each)
        if multi and reshard_after_forward is False:
            for unit in (*averages[0].module[:2], averages[0].module):
                unit.reshard()  # foreach kernels raise no version
        assert_same(full_state(averages[0]), full_state(averages[1]))
        for averaged in averages:
            averaged.eval()
        with torch.no_grad():
            assert_same(averages[0](x), averages[1](x), what=f"output of average {step}")
            for averaged in averages:
                averaged.train()
        assert_same(full_state(model), full_state(plain))


class Noted(nn.Module):
    """Notes whether gradients are recorded while it is copied."""

    def __deepcopy__(self, memo):
        copied = Noted()
        copied.was_enabled = torch.is_grad_enabled()
        return copied


@on_fake_ranks(1)
@pytest.mark.parametrize("is_enabled", [False, True])
def test_a_copy_keeps_the_gradient_mode(is_enabled):
    model = meshard.fully_shard(nn.Sequential(nn.Linear(2, 2), Noted()))
    with torch.set_grad_enabled(is_enabled):
        assert copy.deepcopy(model)[1].was_enabled is is_enabled
