"""Training while every stream is late and freed memory is overwritten, on one NCCL rank.

Each time a comm stream is entered, and before each layer forward and backward, the current stream
sleeps, or all memory that is free for reuse on it is filled with NaN. So a wait that is
missing, or memory that is given back too early, makes a wrong number: gradients are integers, and
every bit is compared with plain training. Then waits are left out on purpose, which must be found.
"""

import contextlib
import functools
import random
from unittest import mock

import torch

import meshard
from meshard import CPUOffloadPolicy, MixedPrecisionPolicy
from meshard._comm import streams
from tests.cuda.device import Issuing, NotRehearsed
from tests.support.integer_model import LEARNING_RATE, IntegerModel, integer_batch, integer_loss
from tests.support.parity import assert_same, full_state, own_grads
from tests.support.sharding import shard_blocks
from tests.support.strategies import MODES

# Ten milliseconds. The host takes some for each overwriting, and only a stream that is behind the
# host can be late.
MOST_CYCLES = 20_000_000
SCHEDULES = ("F", "FF", "RRF", "RNF")
MIB = 2**20


def overwrite_free_memory():
    """Fill with NaN what the caching allocator would give the current stream next."""
    stream, sizes = torch.cuda.current_stream().cuda_stream, []
    for segment in torch.cuda.memory_snapshot():
        if segment["stream"] == stream:
            free = [each["size"] for each in segment["blocks"] if each["state"] == "inactive"]
            # Of large segments, only requests of more than a MiB are served.
            is_small = segment["segment_type"] == "small"
            sizes += [
                min(size, MIB) if is_small else size for size in free if is_small or size > MIB
            ]
    # All at once, so that each gets a block of its own.
    return [torch.full((size // 4,), torch.nan, device="cuda") for size in sorted(sizes)[::-1]]


class Disturbance:
    """Sleeps on the current stream, and overwrites what is free there."""

    def __init__(self, device):
        self._is_real, self._random = device.is_real, random.Random(0)

    def __call__(self, *_):
        if self._is_real:
            if self._random.random() < 0.4:
                torch.cuda._sleep(self._random.randrange(MOST_CYCLES))
            else:
                overwrite_free_memory()

    def around(self, model):
        """Be called before each module of ``model`` runs, forward and backward."""
        for module in model.modules():
            module.register_forward_pre_hook(self)
            module.register_forward_hook(self._before_backward)

    def _before_backward(self, module, _, output):
        output.register_hook(self)


class Disturbed(Issuing):
    """Collectives on streams that are late."""

    def __init__(self, disturb, device_module):
        super().__init__(device_module)
        self.disturb = disturb

    @contextlib.contextmanager
    def on_stream(self, comm_stream):
        with super().on_stream(comm_stream):
            self.disturb()
            yield


@contextlib.contextmanager
def entering_without_a_wait(self, comm_stream):
    with torch.cuda.stream(self._streams.setdefault(comm_stream, torch.cuda.Stream(priority=-1))):
        self.disturb()
        yield


def train(model, device, steps, make):
    """Return the gradients of each step, unread, and the parameters at the end."""
    optimizer, found = make(model), []
    for step in range(steps):
        schedule = SCHEDULES[step % len(SCHEDULES)]
        for number, mode in enumerate(schedule):
            if isinstance(model, meshard.FSDPModule):
                model.set_gradient_sync(MODES[mode])
                model.set_is_last_backward(number == len(schedule) - 1)
            x = integer_batch(10 * step + number, 0).to(device.kind)
            integer_loss(model(x)).backward()
        found.append(own_grads(model))
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(optimizer, meshard.OverlappedOptimizer):
        optimizer.wait()
    return [*found, full_state(model)]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def overlapped(model):
    return meshard.overlap_optimizer(model, torch.optim.SGD, lr=LEARNING_RATE, wait="gather")


def as_one_unit(model, mesh):
    """Without other units, a unit is reduced again while its last reduction is in flight."""
    return meshard.fully_shard(model, mesh)


def compare(device, steps, shape=(1,), *, shard=shard_blocks, make=sgd, input_buffers=3, **kwargs):
    """Train ``steps`` steps, late and not."""
    disturb, model = Disturbance(device), IntegerModel()
    with device.group_of_one(functools.partial(Disturbed, disturb)):
        expected = train(IntegerModel().to(device.kind), device, steps, sgd)
        disturb.around(model)
        shard(model, device.mesh(*shape), **kwargs)
        model.set_reduce_scatter_max_input_buffers(input_buffers)
        found = train(model, device, steps, make)
        device.synchronize()
        for number, (ours, plain) in enumerate(zip(found, expected, strict=True)):
            if make is sgd or number == steps:  # a step in backward takes the gradients
                ours = {name: value.to(device.kind) for name, value in ours.items()}
                assert_same(ours, plain, bitwise=True, what=f"step {number}")
    return f"{steps} steps"


def find(device, left_out):
    """Train with a wait left out."""
    if not device.is_real:
        raise NotRehearsed
    with left_out:
        try:
            compare(device, 20)
        except AssertionError:
            return "found"
    raise AssertionError("20 steps without this wait were right")


def checks(device):
    rows = {
        "resharding": {},
        "not resharding": {"reshard_after_forward": False},
        "one reduction at a time": {"input_buffers": 1},
        "HSDP": {"shape": (1, 1)},
        "HSDP as one unit": {"shape": (1, 1), "shard": as_one_unit},
        "HSDP, reduced in bfloat16": {
            "shape": (1, 1),
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
        },
        "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=device.is_real)},
        "optimizer in backward": {"make": overlapped},
    }
    steps = 40 if device.is_real else 8
    found = {name: lambda row=row: compare(device, steps, **row) for name, row in rows.items()}
    wait = mock.patch.object(streams.EventHandle, "_order", return_value=None)
    enter = mock.patch.object(Disturbed, "on_stream", entering_without_a_wait)
    found["no wait of compute"] = lambda: find(device, wait)
    found["no wait of comm streams"] = lambda: find(device, enter)
    return found
