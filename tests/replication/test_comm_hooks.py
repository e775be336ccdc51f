"""Communication hooks of DDP on replicated modules."""

import contextlib
import copy
import itertools
import os
from functools import partial
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
from tests.support.models import MlpStack, Ones, seeded
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.ranks import on_ranks
from tests.support.replicated import SMALL, bucket_sizes
from tests.support.spread import mostly_slow

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
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


def batches(steps=STEPS, dtype=FP32):
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    return [
        torch.randn(5, 16, generator=generator, dtype=torch.float64).to(dtype) for _ in range(steps)
    ]


def replicated(hook=None, model=Net, **kwargs):
    """Return a replicated model of small buckets, with a hook that has no state."""
    module = meshard.replicate(seeded(model()), bucket_cap_mb=SMALL, **kwargs)
    if hook is not None:
        module.register_comm_hook(None, hook)
    return module


def run(model, x):
    model(x).square().sum().backward()


def bf16(state, bucket):
    """Torch's hook, under a name that DDP does not refuse on the CPU."""
    return default_hooks.bf16_compress_hook(state, bucket)


@pytest.fixture(autouse=True)
def numpy(request):
    """Skip tests with ``power`` in their name where PowerSGD's state cannot be made."""
    if "power" in request.node.name:
        pytest.importorskip("numpy")


def power_state(**options):
    return powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=2, **options
    )


def local_state():
    subgroup, _ = dist.new_subgroups(group_size=2)
    return post_localSGD_hook.PostLocalSGDState(None, subgroup, start_localSGD_iter=4)


def no_state():
    return None


batched_state = partial(power_state, batch_tensors_with_same_shape=True)
allreduce, power = default_hooks.allreduce_hook, powerSGD_hook.powerSGD_hook
HOOKS = {  # how a state is made, the hook, and the dtype that it sends
    "allreduce": (no_state, allreduce, FP32),
    "powerSGD": (power_state, power, FP32),
    "fp16": (no_state, default_hooks.fp16_compress_hook, FP16),
    "bf16": (no_state, bf16, BF16),
    "post_localSGD": (local_state, post_localSGD_hook.post_localSGD_hook, FP32),
    "batched_powerSGD": (power_state, powerSGD_hook.batched_powerSGD_hook, FP32),
    "powerSGD of equal shapes": (batched_state, power, FP32),
    "powerSGD in fp16": (power_state, default_hooks.fp16_compress_wrapper(power), FP16),
    "noop": (no_state, debugging_hooks.noop_hook, FP32),
}


_orthogonalize = powerSGD_hook._orthogonalize


def orthogonalize(matrices, epsilon=0):
    """Mend torch 2.13, where the batched hook fails in DDP too: it passes a matrix for a batch."""
    _orthogonalize(matrices if matrices.dim() == 3 else matrices.unsqueeze(0), epsilon)


@on_ranks(4)
@pytest.mark.parametrize(
    ("name", "as_views"),
    mostly_slow(
        zip(HOOKS, itertools.cycle([True, False]), strict=False),
        ("powerSGD in fp16", False),
        ("bf16", False),
        ("post_localSGD", True),
        ("noop", True),
    ),
)
def test_ten_steps_are_those_of_ddp(name, as_views):
    make_state, hook, dtype = HOOKS[name]
    ours, theirs = seeded(Net()), seeded(Net())
    meshard.replicate(ours, gradient_as_bucket_view=as_views)
    peer = DistributedDataParallel(theirs, gradient_as_bucket_view=as_views)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.02, momentum=0.9) for m in (ours, theirs)]
    for each in (ours, peer):
        each.register_comm_hook(make_state(), hook)
    with mock.patch.object(powerSGD_hook, "_orthogonalize", orthogonalize):
        for number, x in enumerate(batches()):
            for each in (ours, peer):
                each(x).square().mean().backward()
            # DDP lists the gradients of a bucket in another order, before it rebuilds its buckets,
            # and more than two ranks add them in another order.
            assert_same(full_grads(ours), full_grads(theirs), dtype, bitwise=number > 0)
            for optimizer in optimizers:
                if number:
                    optimizer.step()
                optimizer.zero_grad()
    assert_same(full_state(ours), full_state(theirs), bitwise=True)


@pytest.mark.slow
@on_ranks(4)
@mock.patch.dict(os.environ, MESHARD_DEBUG="1", MESHARD_SHARED_MEMORY="0")
def test_power_sgd_feeds_back_the_errors_of_each_bucket_to_itself():
    """The collectives that the hook issues from gloo's threads never meet ours."""
    model, state = replicated(), power_state()
    model.register_comm_hook(state, power)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for x in batches(1) * STEPS:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    num_buckets = len(bucket_sizes(model))
    assert num_buckets > 3
    assert losses == sorted(losses, reverse=True)
    assert state.iter == STEPS
    assert set(state.error_dict) == set(range(num_buckets))
    of_first = [full_state(model)]
    dist.broadcast_object_list(of_first)
    assert_same(full_state(model), of_first[0], bitwise=True)


class Recorder:
    """Averages, and keeps what it was given."""

    def __init__(self):
        self.calls = []

    def __call__(self, state, bucket):
        params, gradients = bucket.parameters(), bucket.gradients()
        parts = bucket.buffer().split([param.numel() for param in params])
        for param, part, gradient in zip(params, parts, gradients, strict=True):
            assert gradient.shape == param.shape and gradient.data_ptr() == part.data_ptr()
            assert torch.equal(gradient.reshape(-1), part)
        self.calls.append((bucket.index(), bucket.is_last(), bucket.buffer().dtype, params))
        return allreduce(state, bucket)

    def take(self):
        calls, self.calls = self.calls, []
        return calls

    def order(self, model):
        """Return the names of the parameters of each bucket."""
        names = {id(param): name for name, param in model.named_parameters()}
        return [[names[id(param)] for param in params] for *_, params in self.take()]


@on_ranks(2)
def test_buckets_have_ddps_protocol():
    hook = Recorder()
    model, plain = replicated(hook), replicated()
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


@on_ranks(2)
def test_parameters_that_no_rank_used_get_nothing_from_a_hook():
    def spoil(state, bucket):
        """Add one to every element, as an error that is fed back would."""
        return allreduce(state, bucket).then(lambda done: done.value() + 1)

    model = meshard.replicate(Ones())
    model.register_comm_hook(None, spoil)
    model(2.0, 2.0).backward()  # after which buckets are rebuilt
    model.zero_grad()
    model(2.0).backward()
    assert model.b.grad is None
    assert model.a.grad.tolist() == [3.0] * 4
    # Added to a bucket in which the other parameter has a gradient.
    model(None, 2.0).backward()
    assert model.a.grad.tolist() == model.b.grad.tolist() == [3.0] * 4
    model.zero_grad()
    model(2.0, 2.0 if dist.get_rank() else None).backward()
    assert model.a.grad.tolist() == [3.0] * 4
    assert model.b.grad.tolist() == [2.0] * 4


@on_ranks(2)
@pytest.mark.parametrize("large_from", [1, 2**60])
@pytest.mark.parametrize("factor", [None, 1.0, 6.0])
def test_a_divide_factor_counts_from_what_the_hook_divides_by(factor, large_from):
    models = replicated(), replicated(allreduce)
    with insides.large_from(large_from):
        for model in models:
            model.set_gradient_divide_factor(factor)
            run(model, batches(1)[0])
    assert_same(*map(full_grads, models))


@on_ranks(2)
def test_uneven_batches_with_a_hook():
    grads = []
    for model in (replicated(), replicated(allreduce)):
        for batch, weight in meshard.uneven_batches(model, batches(1 + dist.get_rank())):
            (weight * model(batch).square().sum()).backward()
            grads.append(full_grads(model))
            model.zero_grad()
    assert len(grads) == 4
    assert_same(grads[0], grads[2])
    assert_same(grads[1], grads[3])


@on_ranks(2)
@pytest.mark.parametrize(
    ("policy", "dtype"),
    [
        ({"param_dtype": BF16}, BF16),
        ({"param_dtype": BF16, "reduce_dtype": FP32}, FP32),
        ({"reduce_dtype": FP16}, FP16),
    ],
)
def test_a_bucket_has_the_dtype_of_reductions(policy, dtype):
    hook, policy = Recorder(), MixedPrecisionPolicy(**policy)
    models = [meshard.replicate(seeded(MlpStack()), mp_policy=policy) for _ in range(2)]
    models[0].register_comm_hook(None, hook)
    for model in models:
        model(torch.full((2, 6), 1.0 + dist.get_rank())).sum().backward()
    assert [kind for _, _, kind, _ in hook.calls] == [dtype]
    assert all(param.grad.dtype == FP32 for param in models[0].parameters())
    assert_same(*map(full_grads, models), BF16)


@on_ranks(1)
def test_a_future_may_be_done_when_it_is_waited_for_and_hold_another_tensor():
    class Late(torch.futures.Future):
        def __init__(self, tensor):
            super().__init__()
            self.tensor = tensor

        def wait(self):
            self.set_result(self.tensor / 2)
            return super().wait()

    model, plain = replicated(lambda state, bucket: Late(bucket.buffer())), seeded(Net())
    for x in batches(3):
        run(model, x)
        run(plain, x)
        expected = {name: grad / 2 for name, grad in full_grads(plain).items()}
        assert_same(full_grads(model), expected, bitwise=True)
        model.zero_grad()
        plain.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("in_future", [False, True])
def test_a_hook_that_raises_ends_the_step_only(in_future):
    def fail(_):
        raise ArithmeticError("the hook is out of luck")

    def hook(state, bucket):
        future = allreduce(state, bucket)
        if not is_armed or bucket.index() != 1:
            return future
        return future.then(fail) if in_future else fail(future.wait())

    model, plain, is_armed = replicated(hook), replicated(), True
    x, y = batches(2)
    with pytest.raises((ArithmeticError, RuntimeError), match="the hook is out of luck"):
        run(model, x)
    model.zero_grad()
    is_armed = False
    for each in (model, plain):
        run(each, y)
    assert_same(full_grads(model), full_grads(plain), bitwise=True)


@on_ranks(1)
def test_a_hook_must_return_a_future_of_a_tensor_as_large_as_the_bucket():
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
    layer.register_comm_hook(None, allreduce)
    with pytest.raises(RuntimeError, match="was called before"):
        layer.register_comm_hook(None, default_hooks.fp16_compress_hook)


@on_ranks(2)
def test_an_optimizer_in_backward_sees_what_the_hook_has_made_of_buckets_that_stay():
    hooks = Recorder(), Recorder()
    models = [replicated(hook) for hook in hooks]
    in_backward = meshard.overlap_optimizer(models[0], torch.optim.SGD, lr=0.05)
    ordinary = torch.optim.SGD(models[1].parameters(), lr=0.05)
    for x in batches(4):
        for model, optimizer in zip(models, (in_backward, ordinary), strict=True):
            run(model, x)
            optimizer.step()
            optimizer.zero_grad()
        first = hooks[0].order(models[0])
    assert_same(*map(full_state, models), bitwise=True)
    # From the third window on a hook may keep tensors by the index of a bucket.
    for x in batches(2):
        run(models[0], x)
        assert hooks[0].order(models[0]) == first
        models[0].zero_grad()


@on_ranks(2)
def test_a_copy_has_no_hook():
    hook, x = Recorder(), batches(1)[0]
    model = replicated(hook)
    other = copy.deepcopy(model)
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
def test_power_sgd_compresses_windows_as_in_ddp():
    """Two backwards without ``zero_grad``, and ``no_sync``, with a hook that keeps errors."""
    ours, theirs = (seeded(Net().double()) for _ in range(2))
    meshard.replicate(ours)
    peer = DistributedDataParallel(theirs)
    for each in (ours, peer):
        each.register_comm_hook(power_state(), power)
    for number, x in enumerate(batches(3 * 5, torch.float64)):
        for each in (ours, peer):
            with contextlib.nullcontext() if number % 3 == 2 else each.no_sync():
                run(each, x)
        if number % 3 == 2:
            assert_same(full_grads(ours), full_grads(theirs), torch.float64)
            ours.zero_grad()
            theirs.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_custom_all_reduce(is_sharded):
    numels, num_issued = [], []

    def counted(tensor, op, group, async_op):
        assert op == dist.ReduceOp.SUM
        numels.append(tensor.numel())
        return dist.all_reduce(tensor, op, group, async_op)

    grads = []
    for comm in (None, counted):
        if is_sharded:
            model = meshard.fully_shard(seeded(MlpStack()), init_device_mesh("cpu", (2, 1)))
        else:
            model = replicated(model=MlpStack)
        if comm is not None:
            model.set_custom_all_reduce(comm)
        for number in range(3):  # buckets are rebuilt meanwhile
            model.zero_grad()
            with CommLedger(model) as ledger:
                run(model, torch.full((2, 6), 1.0 + dist.get_rank() + number))
        grads.append(full_grads(model))
        num_issued.append(ledger.counts["all_reduce"])
    assert_same(*grads, bitwise=True)
    assert sum(numels) == 3 * sum(param.numel() for param in model.parameters())
    assert num_issued[1] == 2 * num_issued[0]  # who used what is sent beside
    unit = insides.units(model)[0]
    for undo in (dist.all_reduce, None):
        model.set_custom_all_reduce(counted)
        assert unit.group.comm is not unit.lifecycle.comm
        model.set_custom_all_reduce(undo)
        # Not only the same sums: gathers through shared memory, and buffers that are kept.
        assert unit.group.comm is unit.lifecycle.comm
