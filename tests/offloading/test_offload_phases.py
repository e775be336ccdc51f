"""Models that leave their device for a phase, and come back."""

import copy
import gc
import io
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef

import meshard
from meshard import CPUOffloadPolicy, MixedPrecisionPolicy
from meshard.optim.local_step import LocalStep
from tests.support import insides
from tests.support.models import seeded
from tests.support.parity import assert_same, full_grads, own_grads, own_state
from tests.support.ranks import on_fake_ranks, on_ranks, on_threads
from tests.support.sharding import sharded_case
from tests.support.spread import spread


def objects(model, optimizer):
    params = list(model.parameters())
    grads = [param.grad for param in params]
    state = [value for param in params for value in optimizer.state[param].values()]
    return [id(each) for each in (*params, *grads, *state)]


def train(case, model, optimizer, between):
    seen = []
    for step in range(4):
        for number in range(2):
            case.loss(model(case.batch(10 * step + number, dist.get_rank()))).backward()
            between()
        seen.append(own_grads(model))
        optimizer.step()
        between()
        seen.append(own_state(model))
        if step % 2:
            optimizer.zero_grad()
        between()
    return seen


def interrupted(case_name, mesh_shape, foreach, **kwargs):
    results = []
    for is_interrupted in (False, True):
        case, model, _ = sharded_case(case_name, mesh_shape, **kwargs)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=foreach)

        def rest(model=model, optimizer=optimizer):
            before = objects(model, optimizer)
            for move in (meshard.offload, meshard.offload, meshard.onload, meshard.onload):
                move(model, optimizer)
                assert objects(model, optimizer) == before

        results.append(train(case, model, optimizer, rest if is_interrupted else lambda: None))
    for ours, theirs in zip(*reversed(results), strict=True):
        assert_same(ours, theirs, bitwise=True)


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.slow
@on_threads(4)
@spread(
    row=[
        ("mlp_stack", {}),
        ("uneven", {"reshard_after_forward": False}),
        ("mixed_dtype", {}),
        ("frozen_beside", {"mp_policy": MIXED}),
        ("transformer_tied", {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    ],
    foreach=[True, False],
)
def test_training_goes_on_bit_for_bit(row, foreach):
    interrupted(row[0], (2, 2), foreach, **row[1])


@on_ranks(2)
def test_training_goes_on_bit_for_bit_in_processes():
    interrupted("transformer", (2,), True)


def memory(model, optimizer):
    """Return weak references to all storage of shards, gradients and AdamW's moments, by bytes."""
    found = []
    for unit in insides.units(model):
        found.append(unit.group.unit_params.flat_shard.buffer)
        for param in unit.group.params:
            state = optimizer.state[param.sharded]
            found += [param.sharded.grad._local_tensor]
            found += [state[name]._local_tensor for name in ("exp_avg", "exp_avg_sq")]
    storages = [tensor.untyped_storage() for tensor in found]
    return [(storage._weak_ref(), storage.nbytes()) for storage in storages]


def freed_bytes(storages):
    return sum(size for weak, size in storages if torch.UntypedStorage._expired(weak))


def test_memory_is_given_back_to_the_byte():
    # One rank: a group may hold what it has sent for a while after.
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(3)])
    try:
        for layer in (*model, model):
            meshard.fully_shard(layer)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 16)).sum().backward()
        optimizer.step()
        # The first DTensor of a process imports modules, whose frames only a collection frees.
        gc.collect()
        gc.disable()
        num_counts = 3
        for move in (meshard.offload, meshard.onload, meshard.offload):
            before = memory(model[:3], optimizer)
            move(model, optimizer)
            # Shards and gradients, and two moments. The first time, each gradient is followed by a
            # count.
            assert freed_bytes(before) == 4 * 3 * 16 * 16 * 4 + num_counts * 4
            num_counts = 0
        assert all(param.full_tensor().isfinite().all() for param in model.parameters())
    finally:
        gc.enable()
        dist.destroy_process_group()


@pytest.fixture
def alone():
    """A trained model on one rank."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    meshard.fully_shard(model[0])
    meshard.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    yield model, optimizer
    dist.destroy_process_group()


def test_a_forward_meanwhile_names_the_remedy(alone):
    model, optimizer = alone
    message = r"unit '0' is on the host since meshard.offload\(module\); call meshard.onload"
    with meshard.offload(model, optimizer):
        with pytest.raises(RuntimeError, match=message):
            model[0](torch.ones(1, 4))
        with pytest.raises(RuntimeError, match=r"unit '\(root\)' is on the host"):
            model(torch.ones(1, 4))
        with pytest.raises(RuntimeError, match="is on the host"):
            model.unshard()
    model(torch.ones(1, 4))
    with pytest.raises(ZeroDivisionError), meshard.offload(model, optimizer):
        raise ZeroDivisionError
    model(torch.ones(1, 4))


def test_state_dicts_are_read_and_loaded_meanwhile(alone):
    model, optimizer = alone
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    meshard.offload(model, optimizer)
    stream = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), stream)
    saved = torch.load(io.BytesIO(stream.getvalue()), weights_only=False)
    for ours, theirs in zip(saved, before, strict=True):
        assert str(ours) == str(theirs)
    with torch.no_grad():
        for value in saved[0].values():
            value.mul_(2)
    model.load_state_dict(saved[0])
    replaced = weakref.ref(optimizer.state[model[0].weight]["exp_avg"])
    optimizer.load_state_dict(saved[1])
    assert replaced() is None
    meshard.onload(model, optimizer)
    assert torch.equal(model[0].weight.full_tensor(), 2 * before[0]["0.weight"].full_tensor())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def test_a_model_is_cast_meanwhile(alone):
    model, _ = alone
    meshard.offload(model)
    model.double()
    with pytest.raises(RuntimeError, match="is on the host"):
        model(torch.ones(1, 4).double())
    meshard.onload(model)
    assert model(torch.ones(1, 4).double()).dtype == torch.float64


def test_a_model_whose_gradients_are_pending_stays(alone):
    model, optimizer = alone
    optimizer.zero_grad()
    with meshard.no_sync(model):
        model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"unit '\(root\)' holds gradients that are not reduced"):
        meshard.offload(model, optimizer)
    meshard.finalize_gradients(model)
    meshard.offload(model, optimizer)
    meshard.onload(model, optimizer)


def test_a_model_that_runs_stays(alone):
    model, _ = alone
    hook = model[1].register_forward_hook(lambda *_: meshard.offload(model))
    with pytest.raises(RuntimeError, match=r"meshard.offload was called inside the forward or"):
        model(torch.ones(1, 4))
    hook.remove()
    out = model(torch.ones(1, 4))
    out.register_hook(lambda _: meshard.onload(model))
    with pytest.raises(RuntimeError, match=r"meshard.onload was called inside the forward or"):
        out.sum().backward()
    with meshard.offload(model):
        pass
    model(torch.ones(1, 4)).sum().backward()


def test_a_backward_after_the_phase_finds_its_weights(alone):
    model, optimizer = alone
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    expected = full_grads(model)
    optimizer.zero_grad()
    out = model(torch.ones(2, 4))
    with meshard.offload(model, optimizer):
        pass
    out.sum().backward()
    assert_same(full_grads(model), expected, bitwise=True)


def test_an_optimizer_whose_state_begins_later_is_moved(alone):
    model, _ = alone
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    meshard.offload(model, optimizer)
    optimizer.step()  # on the host: everything is there
    meshard.onload(model, optimizer)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


@on_threads(2)
def test_a_copy_of_a_model_that_rests_rests_too():
    case, model, _ = sharded_case("mlp_stack")
    meshard.offload(model)
    copied = copy.deepcopy(model)
    for each in (model, copied):
        with pytest.raises(RuntimeError, match=r"call meshard\.onload"):
            each(case.batch(0, 0))
        with (
            pytest.raises(RuntimeError, match=r"call meshard\.onload"),
            meshard.unsharded_params(each),
        ):
            pass
        meshard.onload(each)
        case.loss(each(case.batch(0, 0))).backward()
    assert_same(full_grads(copied), full_grads(model), bitwise=True)


@pytest.mark.parametrize("make_optimizer", [meshard.local_optimizer, meshard.overlap_optimizer])
@on_fake_ranks(2)
def test_optimizers_let_go_of_the_memory_of_shards_that_move(make_optimizer):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    meshard.fully_shard(model, init_device_mesh("cpu", (2,)))
    optimizer = make_optimizer(model, torch.optim.AdamW)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    memory = StorageWeakRef(model[0].weight.to_local().untyped_storage())
    meshard.offload(model)
    assert memory.expired()


@on_fake_ranks(1)  # of more ranks, a fake group leaves garbage in what it gathers
def test_an_optimizer_of_another_model_may_step_meanwhile(monkeypatch):
    """As if another thread offloaded a model between two lines of the step."""

    def run_late(stepper):
        meshard.offload(lent)
        run(stepper)

    run = LocalStep.run
    lent, *models = (meshard.fully_shard(seeded(nn.Linear(4, 4))) for _ in range(3))
    for model in models:
        optimizer = meshard.local_optimizer(model, torch.optim.AdamW)
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        monkeypatch.setattr(LocalStep, "run", run_late)  # for the second model
    assert_same(own_state(models[1]), own_state(models[0]), bitwise=True)
