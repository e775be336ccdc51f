"""Communication hooks of DDP on replicated modules."""

import contextlib
import copy
import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import meshard
from meshard import CommLedger, MixedPrecisionPolicy
from tests.support import insides
from tests.support.models import MlpStack, seeded
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.ranks import on_ranks
from tests.support.replicated import SMALL
from tests.support.spread import spread

STEPS = 11


class Net(nn.Module):
    """Layers that are used in another order than they are listed in, one of them a convolution."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(20, 12)
        self.first = nn.Linear(16, 24, bias=False)
        self.conv = nn.Conv2d(4, 6, 3, padding=1).to(memory_format=torch.channels_last)
        self.second = nn.Linear(36, 20)

    def forward(self, x):
        x = torch.tanh(self.first(x)).view(-1, 4, 2, 3)
        return self.head(torch.tanh(self.second(torch.tanh(self.conv(x)).flatten(1))))


def batches(steps=STEPS, dtype=torch.float32):
    """This rank's inputs."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    return [
        torch.randn(5, 16, generator=generator, dtype=torch.float64).to(dtype) for _ in range(steps)
    ]


def bf16(state, bucket):
    """Torch's hook, under a name that DDP does not refuse on the CPU."""
    return default_hooks.bf16_compress_hook(state, bucket)


def power_state(**options):
    return powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=2, **options
    )


def local_state():
    subgroup, _ = dist.new_subgroups(group_size=dist.get_world_size() // 2)
    return post_localSGD_hook.PostLocalSGDState(None, subgroup, start_localSGD_iter=4)


def nothing():
    return None


def batched_state():
    return power_state(batch_tensors_with_same_shape=True)


HOOKS = {
    "allreduce": (nothing, default_hooks.allreduce_hook),
    "powerSGD": (power_state, powerSGD_hook.powerSGD_hook),
    "fp16": (nothing, default_hooks.fp16_compress_hook),
    "bf16": (nothing, bf16),
    "post_localSGD": (local_state, post_localSGD_hook.post_localSGD_hook),
    "batched_powerSGD": (power_state, powerSGD_hook.batched_powerSGD_hook),
    "powerSGD of equal shapes": (batched_state, powerSGD_hook.powerSGD_hook),
    "powerSGD in fp16": (
        power_state,
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
    ),
    "noop": (nothing, debugging_hooks.noop_hook),
}
NARROW = {"fp16": torch.float16, "powerSGD in fp16": torch.float16, "bf16": torch.bfloat16}


_orthogonalize = powerSGD_hook._orthogonalize


def orthogonalize(matrices, epsilon=0):
    """Mend torch 2.13, where the batched hook fails in DDP too: it passes a matrix for a batch."""
    _orthogonalize(matrices if matrices.dim() == 3 else matrices.unsqueeze(0), epsilon)


@mock.patch.object(powerSGD_hook, "_orthogonalize", orthogonalize)
def parity(name, as_views):
    make_state, hook = HOOKS[name]
    ours, theirs = seeded(Net()), seeded(Net())
    meshard.replicate(ours, gradient_as_bucket_view=as_views)
    peer = DistributedDataParallel(theirs, gradient_as_bucket_view=as_views)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.02, momentum=0.9) for m in (ours, theirs)]
    for each in (ours, peer):
        each.register_comm_hook(make_state(), hook)
    for number, x in enumerate(batches()):
        for each in (ours, peer):
            each(x).square().mean().backward()
        if number == 0:
            # DDP lists the gradients of a bucket in another order, before it rebuilds its buckets,
            # and more than two ranks add them in another order.
            assert_same(full_grads(ours), full_grads(theirs), NARROW.get(name, torch.float32))
        else:
            assert_same(full_grads(ours), full_grads(theirs), bitwise=True)
        for optimizer in optimizers:
            if number:
                optimizer.step()
            optimizer.zero_grad()
    assert_same(full_state(ours), full_state(theirs), bitwise=True)


@spread(name=[*HOOKS], as_views=[True, False])
def test_ten_steps_are_those_of_ddp(run_ranks, name, as_views):
    if "powerSGD" in name:
        pytest.importorskip("numpy")  # which its state needs
    run_ranks(parity, 4 if name in ("post_localSGD", "powerSGD") else 2, name, as_views)


def compressed_in_several_buckets():
    """Every bucket has a state of its own, and collectives from gloo's threads never meet ours."""
    model = meshard.replicate(seeded(Net()), bucket_cap_mb=SMALL)
    state = power_state()
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for x in batches(1) * STEPS:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert len(model._meshard_buckets.units) > 3
    assert losses == sorted(losses, reverse=True)
    # Matrices are compressed, and no bucket is added up with the errors of another one.
    assert state.iter == STEPS
    assert set(state.error_dict) == set(range(len(model._meshard_buckets.units)))
    return full_state(model)


@pytest.mark.slow
def test_power_sgd_in_several_buckets(run_ranks, monkeypatch):
    pytest.importorskip("numpy")
    monkeypatch.setenv("MESHARD_DEBUG", "1")
    monkeypatch.setenv("MESHARD_SHARED_MEMORY", "0")
    first, *others = run_ranks(compressed_in_several_buckets, 4)
    for other in others:
        assert_same(other, first, bitwise=True)


class Recorder:
    """Averages, and keeps what it was given."""

    def __init__(self):
        self.calls = []

    def __call__(self, state, bucket):
        sizes = [param.numel() for param in bucket.parameters()]
        parts = bucket.buffer().split(sizes)
        for param, part, gradient in zip(
            bucket.parameters(), parts, bucket.gradients(), strict=True
        ):
            assert gradient.shape == param.shape and gradient.data_ptr() == part.data_ptr()
            assert torch.equal(gradient.reshape(-1), part)
        self.calls.append(
            (bucket.index(), bucket.is_last(), bucket.buffer().dtype, bucket.parameters())
        )
        return default_hooks.allreduce_hook(state, bucket)

    def take(self):
        calls, self.calls = self.calls, []
        return calls

    def order(self, model):
        """Return the names of the parameters of each bucket."""
        names = {id(param): name for name, param in model.named_parameters()}
        return [[names[id(param)] for param in params] for *_, params in self.take()]


def run(model, x):
    model(x).square().sum().backward()


@on_ranks(2)
def test_buckets_have_ddps_protocol():
    model, plain, hook = seeded(Net()), seeded(Net()), Recorder()
    meshard.replicate(model, bucket_cap_mb=SMALL)
    meshard.replicate(plain, bucket_cap_mb=SMALL)
    model.register_comm_hook(None, hook)
    x, y, z = batches(3)
    run(model, x)
    calls = hook.take()
    assert [index for index, *_ in calls] == list(range(len(calls))) and len(calls) > 3
    assert [is_last for _, is_last, *_ in calls] == [False] * (len(calls) - 1) + [True]
    first = [param for *_, params in calls for param in params]
    assert set(map(id, first)) == set(map(id, model.parameters()))
    # Rebuilt: in the order in which gradients arrive, of which the last are those of ``first``.
    model.zero_grad()
    run(model, y)
    order = hook.order(model)
    assert order[-1] == ["first.weight"] and order[0][0].startswith("head")
    # Once per window, on the sum of its microbatches.
    model.zero_grad()
    for each in (model, plain):
        for batch in meshard.microbatches(each, [x, y, z]):
            run(each, batch)
    assert hook.order(model) == order
    assert_same(full_grads(model), full_grads(plain), bitwise=True)
    # Frozen parameters are in no bucket, and another bucket is the last one.
    for each in (model, plain):
        each.zero_grad()
        each.first.requires_grad_(False)
        run(each, z)
    assert_same(full_grads(model), full_grads(plain), bitwise=True)
    assert [is_last for _, is_last, *_ in hook.calls] == [False] * (len(order) - 2) + [True]
    assert hook.order(model) == order[:-1]


class Spoiling:
    """Adds one to every element, as an error that is fed back would, and averages."""

    def __call__(self, state, bucket):
        return default_hooks.allreduce_hook(state, bucket).then(lambda done: done.value() + 1)


class Some(nn.Module):
    """Two parameters, of which a call may use one."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, scale, names):
        return sum((scale * getattr(self, name)).sum() for name in names)


@on_ranks(2)
def test_parameters_that_no_rank_used_get_nothing_from_a_hook():
    model = meshard.replicate(Some())
    model.register_comm_hook(None, Spoiling())
    rank = dist.get_rank()
    model(2.0, ["one", "two"]).backward()  # after which buckets are rebuilt
    model.zero_grad()
    model(2.0, ["one"]).backward()
    assert model.two.grad is None
    assert model.one.grad.tolist() == [3.0] * 3
    # Added to a bucket in which the other parameter has a gradient.
    model(2.0, ["two"]).backward()
    assert model.one.grad.tolist() == model.two.grad.tolist() == [3.0] * 3
    model.zero_grad()
    model(2.0, ["one", "two"] if rank else ["one"]).backward()  # one rank used it
    assert model.one.grad.tolist() == [3.0] * 3
    assert model.two.grad.tolist() == [2.0] * 3


@on_ranks(2)
@pytest.mark.parametrize("factor", [None, 1.0, 6.0])
def test_a_divide_factor_holds_with_a_hook(factor):
    """A divide factor counts from what the hook divides by."""
    grads = []
    for hook in (None, default_hooks.allreduce_hook):
        model = meshard.replicate(seeded(Net()), bucket_cap_mb=SMALL)
        if hook is not None:
            model.register_comm_hook(None, hook)
        model.set_gradient_divide_factor(factor)
        run(model, batches(1)[0])
        grads.append(full_grads(model))
    assert_same(*grads)


@on_ranks(2)
def test_uneven_batches_with_a_hook():
    grads = []
    for hook in (None, default_hooks.allreduce_hook):
        model = meshard.replicate(seeded(Net()))
        if hook is not None:
            model.register_comm_hook(None, hook)
        for batch in meshard.uneven_batches(model, batches(1 + dist.get_rank())):
            if batch is not None:
                run(model, batch)
            grads.append(full_grads(model))
            model.zero_grad()
    assert len(grads) == 4
    assert_same(grads[0], grads[2])
    assert_same(grads[1], grads[3])


@on_ranks(2)
@pytest.mark.parametrize(
    ("policy", "dtype"),
    [
        (MixedPrecisionPolicy(param_dtype=torch.bfloat16), torch.bfloat16),
        (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            torch.float32,
        ),
        (MixedPrecisionPolicy(reduce_dtype=torch.float16), torch.float16),
    ],
)
def test_a_bucket_has_the_dtype_of_reductions(policy, dtype):
    model, plain, hook = seeded(MlpStack()), seeded(MlpStack()), Recorder()
    for each in (model, plain):
        meshard.replicate(each, mp_policy=policy)
    model.register_comm_hook(None, hook)
    for each in (model, plain):
        each(torch.full((2, 6), 1.0 + dist.get_rank())).sum().backward()
    assert [kind for _, _, kind, _ in hook.calls] == [dtype]
    assert all(param.grad.dtype == torch.float32 for param in model.parameters())
    assert_same(full_grads(model), full_grads(plain), torch.bfloat16)


class _Late(torch.futures.Future):
    """A future whose work begins when it is waited for."""

    def __init__(self):
        super().__init__()
        self.awaited = threading.Event()

    def wait(self):
        self.awaited.set()
        return super().wait()


def halve_later(state, bucket):
    future = _Late()

    def work():
        future.awaited.wait(30)
        future.set_result(bucket.buffer() / 2)

    threading.Thread(target=work).start()
    return future


@on_ranks(1)
def test_a_future_may_be_done_later_and_hold_another_tensor():
    model, plain = seeded(Net()), seeded(Net())
    meshard.replicate(model, bucket_cap_mb=SMALL).register_comm_hook(None, halve_later)
    for x in batches(3):
        run(model, x)
        run(plain, x)
        expected = {name: grad / 2 for name, grad in full_grads(plain).items()}
        assert_same(full_grads(model), expected, bitwise=True)
        model.zero_grad()
        plain.zero_grad()


class Failing:
    """Raises on the second bucket, or later in its future, while it is armed."""

    def __init__(self, *, in_future):
        self.in_future, self.is_armed = in_future, True

    def __call__(self, state, bucket):
        future = default_hooks.allreduce_hook(state, bucket)
        if not self.is_armed or bucket.index() != 1:
            return future
        if self.in_future:
            return future.then(self.fail)
        future.wait()
        return self.fail(future)

    def fail(self, _):
        raise ArithmeticError("the hook is out of luck")


@on_ranks(2)
@pytest.mark.parametrize("in_future", [False, True])
def test_a_hook_that_raises_ends_the_step_only(in_future):
    model, plain = seeded(Net()), seeded(Net())
    hook = Failing(in_future=in_future)
    meshard.replicate(model, bucket_cap_mb=SMALL).register_comm_hook(None, hook)
    meshard.replicate(plain, bucket_cap_mb=SMALL)
    x, y = batches(2)
    with pytest.raises((ArithmeticError, RuntimeError), match="the hook is out of luck"):
        run(model, x)
    model.zero_grad()
    hook.is_armed = False
    for each in (model, plain):
        run(each, y)
    assert_same(full_grads(model), full_grads(plain), bitwise=True)


@on_ranks(1)
def test_what_a_hook_must_return_is_said():
    def tensor(state, bucket):
        return bucket.buffer()

    def listed(state, bucket):
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future()

    def short(state, bucket):
        return debugging_hooks.noop_hook(state, bucket).then(lambda done: done.value()[1:])

    for hook, got in ((tensor, "tensor"), (listed, "one of list"), (short, "one of Tensor")):
        layer = meshard.replicate(nn.Linear(2, 2))
        layer.register_comm_hook(None, hook)
        with pytest.raises(TypeError, match=f"the 6 elements of bucket 0, got .*{got}"):
            layer(torch.ones(1, 2)).sum().backward()


@on_ranks(1)
def test_a_second_hook_is_refused():
    layer = meshard.replicate(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"callable as hook\(state, bucket\), got None"):
        layer.register_comm_hook(None, None)
    layer.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(RuntimeError, match="was called before"):
        layer.register_comm_hook(None, default_hooks.fp16_compress_hook)


@on_ranks(2)
def test_overlapped_steps_and_buckets_that_stay():
    """The optimizer's step in backward sees what the hook has made; buckets stay as they are."""
    models = [meshard.replicate(seeded(Net()), bucket_cap_mb=SMALL) for _ in range(2)]
    hooks = [Recorder(), Recorder()]
    for model, hook in zip(models, hooks, strict=True):
        model.register_comm_hook(None, hook)
    in_backward = meshard.overlap_optimizer(models[0], torch.optim.SGD, lr=0.05)
    ordinary = torch.optim.SGD(models[1].parameters(), lr=0.05)
    for x in batches(4):
        for model, optimizer in zip(models, (in_backward, ordinary), strict=True):
            run(model, x)
            optimizer.step()
            optimizer.zero_grad()
        first = hooks[0].order(models[0])
    assert_same(full_state(models[0]), full_state(models[1]), bitwise=True)
    # From the third window on a hook may keep tensors by the index of a bucket.
    in_backward.detach()
    for x in batches(2):
        run(models[0], x)
        assert hooks[0].order(models[0]) == first
        models[0].zero_grad()


@on_ranks(2)
def test_a_copy_has_no_hook():
    model, hook = meshard.replicate(seeded(Net()), bucket_cap_mb=SMALL), Recorder()
    model.register_comm_hook(None, hook)
    other = copy.deepcopy(model)
    x = batches(1)[0]
    run(other, x)
    assert hook.take() == []
    run(model, x)
    assert hook.take() != []
    assert_same(full_grads(other), full_grads(model), bitwise=True)
    other.register_comm_hook(None, hook)
    other.zero_grad()
    run(other, x)
    assert hook.take() != []
    assert_same(full_grads(other), full_grads(model), bitwise=True)


@on_ranks(2)
def test_windows_are_compressed_as_in_ddp():
    """Two backwards without ``zero_grad``, and ``no_sync``, with a hook that keeps errors."""
    pytest.importorskip("numpy")
    ours, theirs = (seeded(Net().double()) for _ in range(2))
    meshard.replicate(ours)
    peer = DistributedDataParallel(theirs)
    for each in (ours, peer):
        each.register_comm_hook(power_state(), powerSGD_hook.powerSGD_hook)
    for number, x in enumerate(batches(3 * 5, torch.float64)):
        for each in (ours, peer):
            with contextlib.nullcontext() if number % 3 == 2 else each.no_sync():
                run(each, x)
        if number % 3 == 2:
            assert_same(full_grads(ours), full_grads(theirs), torch.float64)
            ours.zero_grad()
            theirs.zero_grad()


class Counted:
    """An all-reduce that counts."""

    def __init__(self):
        self.numel = 0

    def __call__(self, tensor, op, group, async_op):
        assert op == dist.ReduceOp.SUM
        self.numel += tensor.numel()
        return dist.all_reduce(tensor, op, group, async_op)


@on_ranks(2)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_custom_all_reduce(is_sharded):
    grads, mine = [], Counted()
    for comm in (None, mine):
        model = seeded(MlpStack())
        if is_sharded:
            meshard.fully_shard(model, init_device_mesh("cpu", (2, 1)))
        else:
            meshard.replicate(model, bucket_cap_mb=SMALL)
        if comm is not None:
            model.set_custom_all_reduce(comm)
        for number in range(3):  # buckets are rebuilt meanwhile
            model.zero_grad()
            with CommLedger(model) as ledger:
                run(model, torch.full((2, 6), 1.0 + dist.get_rank() + number))
        grads.append(full_grads(model))
        assert (
            ledger.counts.get("all_reduce", 0) == 1
            if is_sharded
            else ledger.counts["all_reduce"] > 1
        )
    assert_same(*grads, bitwise=True)
    assert mine.numel == 3 * sum(param.numel() for param in model.parameters())
    with pytest.raises(TypeError, match=r"a callable like torch\.distributed\.all_reduce"):
        model.set_custom_all_reduce(3)
    unit = insides.units(model)[0]
    for undo in (dist.all_reduce, None):
        model.set_custom_all_reduce(mine)
        assert unit.group.comm is not unit.lifecycle.comm
        model.set_custom_all_reduce(undo)
        # Not only the same sums: gathers through shared memory, and buffers that are kept.
        assert unit.group.comm is unit.lifecycle.comm
