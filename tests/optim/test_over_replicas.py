"""``local_optimizer(over_replicas=True)``: state, and reduced gradients, in parts over replicas."""

import copy
import io
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import CommLedger, GradientSync, fully_shard, local_optimizer, overlap_optimizer
from meshard.checkpoint import Checkpointer
from tests.support.integer_model import LEARNING_RATE, IntegerModel, integer_loss
from tests.support.models import Made, seeded
from tests.support.parity import assert_same, full_grads, full_state, own_part, whole
from tests.support.ranks import on_ranks

ADAM, ADAMW, SGD = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD
FULL, SCATTER, NONE = GradientSync.FULL, GradientSync.REDUCE_SCATTER, GradientSync.NONE
SCHEDULES = {"full": [FULL, FULL], "scatter": [SCATTER, FULL], "none": [NONE, FULL]}
OPTIMIZERS = {
    "adamw": (ADAMW, {"lr": 0.01}),
    "adamw foreach": (ADAMW, {"lr": 0.01, "foreach": True}),
    "momentum": (SGD, {"lr": 0.1, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
}


def mesh_of(replicas, shards):
    names = ("replicate", "shard")
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=names)


def make(mesh, dtype=torch.float32):
    """Return three units and a root, with sizes that neither ranks nor replicas divide."""
    layers = [nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7)) for _ in range(3)]
    head, extra = nn.Linear(7, 3), nn.Parameter(torch.empty(9, 7))
    model = seeded(Made(forward, layers=layers, head=head, extra=extra)).to(dtype)
    for layer in layers:
        fully_shard(layer, mesh)
    return fully_shard(model, mesh)


def forward(model, x, has_extra=True):
    for layer in model.layers:
        x = layer(x)
    return model.head(x + model.extra[:1] if has_extra else x)


def backward(model, step, schedule="full", scale=1.0):
    """Accumulate a window of data that differs between ranks."""
    for number, mode in enumerate(SCHEDULES[schedule]):
        generator = torch.Generator().manual_seed(100 * step + 10 * number + dist.get_rank())
        model.set_gradient_sync(mode)
        x = torch.randn(4, 7, generator=generator).to(next(model.parameters()).dtype)
        (model(x).square().mean() * scale).backward()


def train(model, optimizer, steps=range(3), schedule="full"):
    for step in steps:
        backward(model, step, schedule)
        optimizer.step()
        optimizer.zero_grad()


def states_of(optimizer, part=whole):
    """Return each tensor of the state."""
    states = optimizer.state_dict()["state"]
    found = {f"{i}.{key}": part(each) for i, own in states.items() for key, each in own.items()}
    return dict(sorted(found.items()))


def both(mesh, cls=ADAMW, dtype=torch.float32, **options):
    """Return two models: one with its state in parts, one as ever."""
    ours, theirs = make(mesh, dtype), make(mesh, dtype)
    options = {"lr": 0.01} | options
    one = local_optimizer(ours, cls, over_replicas=True, **options)
    return (ours, one), (theirs, local_optimizer(theirs, cls, **options))


# --- the numbers of whole state ---------------------------------------------------------------


@on_ranks(4)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_replicas_are_equal_bit_for_bit_in_each_schedule(schedule):
    pairs = both(mesh_of(2, 2))
    for model, optimizer in pairs:
        train(model, optimizer, schedule=schedule)
    (ours, one), (theirs, other) = pairs
    assert_same(full_state(ours), full_state(theirs), bitwise=True)
    assert_same(states_of(one), states_of(other), bitwise=True)


@on_ranks(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_replicas_are_equal_bit_for_bit_with_each_optimizer(name):
    cls, options = OPTIMIZERS[name]
    pairs = both(mesh_of(2, 2), cls, **options)
    for model, optimizer in pairs:
        train(model, optimizer)
    (ours, one), (theirs, other) = pairs
    assert_same(full_state(ours), full_state(theirs), bitwise=True)
    assert_same(states_of(one), states_of(other), bitwise=True)


@on_ranks(4)
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_integer_gradients_are_exact_on_any_mesh(shape, schedule):
    def run(*, over_replicas):
        model = IntegerModel()
        mesh = mesh_of(*shape)
        for block in model.blocks:
            fully_shard(block, mesh)
        fully_shard(model, mesh).set_gradient_divide_factor(1.0)
        options = {"lr": LEARNING_RATE, "over_replicas": over_replicas}
        optimizer = local_optimizer(model, SGD, **options)
        for step in range(3):
            for number, mode in enumerate(SCHEDULES[schedule]):
                generator = torch.Generator().manual_seed(9 * step + 3 * number + dist.get_rank())
                model.set_gradient_sync(mode)
                x = torch.randint(-1, 2, (3, 7), generator=generator).float()
                integer_loss(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return full_state(model)

    assert_same(run(over_replicas=True), run(over_replicas=False), bitwise=True)


@on_ranks(4)
def test_parts_of_gradients_are_those_of_whole_ones():
    pairs = both(mesh_of(2, 2))
    for model, _ in pairs:
        backward(model, 0)
    (ours, _), (theirs, _) = pairs
    assert_same(full_grads(ours), full_grads(theirs), bitwise=True)
    numbers = [sum(own_part(p.grad).numel() for p in model.parameters()) for model, _ in pairs]
    assert numbers[0] < 0.7 * numbers[1]


@on_ranks(4)
@pytest.mark.parametrize("mode", [SCATTER, NONE])
def test_pending_gradients_are_finalized_into_parts(mode):
    pairs = both(mesh_of(2, 2))
    for model, optimizer in pairs:
        model.set_gradient_sync(mode)
        model(torch.ones(2, 7)).sum().backward()
        with pytest.raises(RuntimeError, match="not reduced"):
            optimizer.step()
        meshard.finalize_gradients(model)
        optimizer.step()
    assert_same(full_state(pairs[0][0]), full_state(pairs[1][0]), bitwise=True)


@on_ranks(4)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("wait", ["step", "gather"])
def test_steps_in_backward(schedule, wait):
    mesh = mesh_of(2, 2)
    ours, theirs = make(mesh), make(mesh)
    options = {"lr": 0.01, "max_unit_norm": 1e9}
    one = overlap_optimizer(ours, ADAMW, over_replicas=True, wait=wait, **options)
    other = overlap_optimizer(theirs, ADAMW, **options)
    for model, optimizer in ((ours, one), (theirs, other)):
        train(model, optimizer, schedule=schedule)
    one.wait()
    assert_same(full_state(ours), full_state(theirs), bitwise=True)
    assert_same(states_of(one), states_of(other), bitwise=True)
    assert all(param.grad is None for param in ours.parameters())


# --- bytes and memory -------------------------------------------------------------------------


@on_ranks(4)
def test_bytes_and_state_follow_the_formula():
    """Per unit: R rows of a part and its counts, and an all-gather of R parts, in 16 bytes."""
    replicas, shards = 2, 2
    mesh = mesh_of(replicas, shards)
    model = make(mesh)
    optimizer = local_optimizer(model, ADAM, lr=0.01, over_replicas=True)
    train(model, optimizer, [0])
    with CommLedger() as ledger:
        train(model, optimizer, [1])
    assert "all_reduce" not in ledger.counts
    num_elements = num_own = 0
    root = [model.extra, *model.head.parameters()]
    expected_scatter, expected_gather = [], []
    for params in [*map(list, map(nn.Module.parameters, model.layers)), root]:
        rows = [math.ceil(own_part(p).size(0) / replicas) for p in params]
        part = sum(n * math.prod(p.shape[1:]) for n, p in zip(rows, params, strict=True))
        # Counts follow the gradients; both are padded to 16 bytes in the narrowest dtype.
        expected_scatter.append(4 * replicas * 8 * math.ceil((part + len(params)) / 8))
        expected_gather.append(16 * replicas * math.ceil(4 * part / 16))
        num_elements += sum(own_part(p).numel() for p in params)
        num_own += sum(own_part(optimizer.state[p]["exp_avg"]).numel() for p in params)
    found = [e.payload_bytes for e in ledger.events if e.op == "reduce_scatter"]
    for size in expected_scatter:
        found.remove(size)
    gathers = [e.payload_bytes for e in ledger.events if e.op == "all_gather"]
    for size in expected_gather:
        gathers.remove(size)
    assert len(found) == 8 + 4  # two microbatches over the shard group, and the first is FULL too
    counted = torch.tensor([num_own, num_elements])
    dist.all_reduce(counted)
    assert counted[0] * replicas == counted[1]  # each element has its state once


# --- around the step --------------------------------------------------------------------------


@on_ranks(4)
def test_norms_count_each_element_once():
    ((ours, _), (theirs, _)) = both(mesh_of(2, 2))
    backward(ours, 0)
    backward(theirs, 0)
    expected = torch.stack([grad.norm() for grad in full_grads(theirs).values()]).norm()
    for clip in (meshard.clip_grad_norm_, nn.utils.clip_grad_norm_):
        norm = clip(ours.parameters(), 1e9)
        torch.testing.assert_close(whole(norm), expected)
    meshard.clip_grad_norm_(ours, 0.1)
    clipped = torch.stack([grad.norm() for grad in full_grads(ours).values()]).norm()
    torch.testing.assert_close(clipped, torch.tensor(0.1))


@on_ranks(4)
def test_an_overflow_in_one_part_skips_the_step_on_all_ranks():
    pairs = both(mesh_of(2, 2))
    results = []
    for model, optimizer in pairs:
        scaler = meshard.ShardedGradScaler("cpu", init_scale=4.0)
        before = after = full_state(model)
        for step, scale in enumerate([1.0, 1e38, 1.0]):
            backward(model, step, scale=scaler.scale(torch.tensor(scale)).item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if step == 1:
                assert_same(full_state(model), after, bitwise=True)
            after = full_state(model)
        assert not torch.equal(before["head.bias"], after["head.bias"])
        results.append(after)
    assert_same(results[0], results[1], bitwise=True)


@on_ranks(4)
def test_weights_are_whole_wherever_they_are_read():
    pairs = both(mesh_of(2, 2))
    for read in (
        full_state,
        lambda model: {"x": model(torch.ones(1, 7)).detach()},
        lambda model: {k: whole(v) for k, v in model.state_dict().items()},
        lambda model: {k: v.to_local().clone() for k, v in model.named_parameters()},
    ):
        found = []
        for model, optimizer in pairs:
            backward(model, 3)
            optimizer.step()
            found.append(read(model))
            optimizer.zero_grad()
        assert_same(found[0], found[1], bitwise=True)


def unsharded(model):
    with meshard.unsharded_params(model):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def through_host(model):
    meshard.offload(model)
    meshard.onload(model)
    return full_state(model)


def saved(model, folder):
    store = Checkpointer(folder)
    store.save(1, model)
    other = make(mesh_of(2, 2))
    store.load(other)
    return full_state(other)


READS = {
    "state_dict": lambda model, _: {k: whole(v) for k, v in model.state_dict().items()},
    "full_tensor": lambda model, _: {k: p.full_tensor() for k, p in model.named_parameters()},
    "to_local": lambda model, _: {k: p.to_local().clone() for k, p in model.named_parameters()},
    "a forward": lambda model, _: {"x": model(torch.ones(1, 7)).detach()},
    "unsharded_params": lambda model, _: unsharded(model),
    "a copy": lambda model, _: full_state(copy.deepcopy(model)),
    "offload": lambda model, _: through_host(model),
    "a checkpoint": saved,
}


@on_ranks(4)
@pytest.mark.parametrize("name", READS)
def test_what_reads_weights_waits_for_the_gather(name, tmp_path):
    pairs, found = both(mesh_of(2, 2), wait="gather"), []
    for number, (model, optimizer) in enumerate(pairs):
        train(model, optimizer)
        backward(model, 3)
        optimizer.step()
        found.append(READS[name](model, tmp_path / str(number)))
    assert_same(found[0], found[1], bitwise=True)


@on_ranks(4)
def test_a_step_that_raised_leaves_no_gradient():
    pairs = both(mesh_of(2, 2))
    for model, optimizer in pairs:
        train(model, optimizer, [0])
        output = model(torch.ones(1, 7))
        output.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            output.sum().backward()
        optimizer.zero_grad()
        train(model, optimizer, [1])
    assert_same(full_state(pairs[0][0]), full_state(pairs[1][0]), bitwise=True)


@on_ranks(4)
def test_frozen_and_unused_parameters():
    """One parameter is used by rank 1 alone, then by no rank, and one is frozen."""
    pairs = both(mesh_of(2, 2))
    for model, optimizer in pairs:
        model.layers[1][0].bias.requires_grad_(False)
        for step in range(3):
            x = torch.full((1, 7), 0.1 * step + dist.get_rank())
            model(x, has_extra=dist.get_rank() == 1 and step < 2).sum().backward()
            assert model.layers[1][0].bias.grad is None
            assert (model.extra.grad is None) == (step == 2)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(full_state(pairs[0][0]), full_state(pairs[1][0]), bitwise=True)


@on_ranks(4)
def test_gradients_that_users_set():
    pairs = both(mesh_of(2, 2))
    for model, optimizer in pairs:
        for param in model.parameters():
            param.grad = param.detach().clone()
        optimizer.step()
    assert_same(full_state(pairs[0][0]), full_state(pairs[1][0]), bitwise=True)


@on_ranks(4)
def test_hooks_see_parts():
    pairs, seen = both(mesh_of(2, 2)), []
    for model, _ in pairs:
        meshard.register_reduce_hook(model, Doubled())
        model.layers[0][0].weight.register_hook(lambda grad: seen.append(grad) or grad * 2)
        backward(model, 0)
    assert_same(full_grads(pairs[0][0]), full_grads(pairs[1][0]), bitwise=True)
    assert seen[0].placements == pairs[0][0].layers[0][0].weight.grad.placements


class Doubled:
    """A hook on reductions."""

    def after(self, shard):
        shard.mul_(2)


# --- float32 masters --------------------------------------------------------------------------


@on_ranks(4)
@pytest.mark.parametrize("over_replicas", [False, True])
def test_masters_are_float32_and_parameters_bfloat16(over_replicas):
    """The oracle: ordinary AdamW on float32 copies, whose gradients are what ``.grad`` shows."""
    model = make(mesh_of(2, 2), torch.bfloat16)
    options = {"lr": 0.01, "master_dtype": torch.float32, "over_replicas": over_replicas}
    optimizer = local_optimizer(model, ADAMW, **options)
    masters = [whole(param).float().requires_grad_() for param in model.parameters()]
    oracle = ADAMW(masters, lr=0.01)
    for step in range(4):
        backward(model, step)
        for master, param in zip(masters, model.parameters(), strict=True):
            assert param.grad.dtype == torch.float32 and param.dtype == torch.bfloat16
            master.grad = whole(param.grad)
        optimizer.step()
        oracle.step()
        optimizer.zero_grad()
        for master, param in zip(masters, model.parameters(), strict=True):
            assert torch.equal(whole(param), master.bfloat16())
            assert torch.equal(whole(optimizer.state[param]["master"]), master)
    saved = optimizer.state_dict()
    again = local_optimizer(model, ADAMW, **options)
    again.load_state_dict(saved)
    assert_same(states_of(again), states_of(optimizer), bitwise=True)


# --- state dicts and checkpoints --------------------------------------------------------------


@on_ranks(4)
def test_state_dicts_go_both_ways():
    """Of the ordinary optimizer, and of DCP's functions, which make a state of zeros first."""
    ((ours, one), (theirs, other)) = both(mesh_of(2, 2))
    train(theirs, other)
    ours.load_state_dict(theirs.state_dict())
    one.load_state_dict(copy.deepcopy(other.state_dict()))  # torch loads without a copy
    assert_same(states_of(one), states_of(other), bitwise=True)
    train(ours, one, [5])
    train(theirs, other, [5])
    assert_same(full_state(ours), full_state(theirs), bitwise=True)
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    copied = copy.deepcopy(one.state_dict())
    one.load_state_dict(copied)
    saved = get_optimizer_state_dict(ours, one)
    fresh = make(mesh_of(2, 2))
    fresh.load_state_dict(ours.state_dict())
    new = local_optimizer(fresh, ADAMW, lr=0.01, over_replicas=True)
    set_optimizer_state_dict(fresh, new, saved)
    assert_same(states_of(new), states_of(one), bitwise=True)


@on_ranks(4)
@pytest.mark.parametrize("is_first", [True, False])
def test_checkpoints_go_to_any_mesh(tmp_path, is_first):
    """From parts on 2x2 to whole state on 1x4, and the other way; the numbers go on."""
    shapes = [(2, 2), (1, 4)] if is_first else [(1, 4), (2, 2)]
    model = make(mesh_of(*shapes[0]))
    optimizer = local_optimizer(model, ADAMW, lr=0.01, over_replicas=is_first)
    train(model, optimizer)
    store = Checkpointer(tmp_path / "checkpoints")
    store.save(3, model, optimizer)
    for shape in (shapes[1], shapes[0]):
        other = make(mesh_of(*shape))
        resumed = local_optimizer(other, ADAMW, lr=0.01, over_replicas=shape == (2, 2))
        store.load(other, resumed)
        assert_same(full_state(other), full_state(model), bitwise=True)
        assert_same(states_of(resumed), states_of(optimizer), bitwise=True)
        train(other, resumed, [3])
    train(model, optimizer, [3])
    assert_same(full_state(other), full_state(model), bitwise=True)


# --- refusals ---------------------------------------------------------------------------------


def whole_shards():
    return fully_shard(nn.Sequential(nn.Linear(7, 4)))


def shards_in_host_memory():
    offload = meshard.CPUOffloadPolicy(pin_memory=False)
    return fully_shard(nn.Sequential(nn.Linear(7, 4)), mesh_of(2, 2), offload_policy=offload)


def replicated():
    return meshard.replicate(nn.Sequential(nn.Linear(7, 4)), mesh_of(2, 2))


def hybrid():
    return fully_shard(nn.Sequential(nn.Linear(7, 4)), mesh_of(2, 2))


@on_ranks(4)
@pytest.mark.parametrize(
    ("build", "count", "text"),
    [
        (whole_shards, 2, "'.root.' is refused, as its mesh has no replicas"),
        (replicated, 2, "replicate keeps gradients whole: call fully_shard on a mesh"),
        (hybrid, 1, "the optimizer has only some of its trainable parameters"),
        (shards_in_host_memory, 2, "its shards are in host memory"),
    ],
)
def test_what_cannot_be_cut_is_refused(build, count, text):
    model = build()
    params = list(model.parameters())
    with pytest.raises(ValueError, match=text):
        local_optimizer(model, ADAMW, params[:count], over_replicas=True)
    model(torch.ones(1, 7)).sum().backward()
    assert type(params[0].grad) is type(params[0].data)  # nothing has changed
    if build is not replicated:
        assert params[0].grad.placements == params[0].placements


@on_ranks(4)
def test_a_gather_that_is_waited_for_later():
    pairs = both(mesh_of(2, 2), wait="gather")
    for model, optimizer in pairs:
        train(model, optimizer)
        optimizer.wait()
    assert_same(full_state(pairs[0][0]), full_state(pairs[1][0]), bitwise=True)
    with pytest.raises(ValueError, match="wait must be"):
        local_optimizer(pairs[0][0], ADAMW, wait="never")
