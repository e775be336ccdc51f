"""Memory that a segment keeps from one phase of a step to the next, and that a step takes."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshard import local_optimizer
from meshard._comm.communicator import StepPhase
from meshard._shared_memory import communicator
from meshard._shared_memory.channel import open_channel
from tests.support.against_plain import sharded_and_plain
from tests.support.models import Made
from tests.support.parity import assert_same, full_state
from tests.support.ranks import on_ranks

LARGE, SMALL = 1 << 20, 1 << 10  # elements: 4 MiB and less than one


def held_by(channel):
    """Return the MiB of this rank's segment."""
    return os.fstat(channel._own.descriptor).st_blocks * 512 >> 20


def pass_on(channel, numel):
    """Send a message, and read that of the other rank."""
    message = channel.publish(torch.ones(numel), ("all_gather", "unit", 1))
    theirs = channel.receive(message, 1 - dist.get_rank(), numel, torch.float32)
    assert (theirs == 1.0).all()  # also where memory has been given back in between
    channel.acknowledge(message)
    dist.barrier()


@pytest.mark.parametrize(
    ("in_forward", "in_backward", "expected"),
    [
        # What a backward needs is not known before the first is over.
        pytest.param(LARGE, SMALL, [0, 4, 4, 0, 0, 0], id="a backward keeps what it needs itself"),
        # The peak is in backward: to give memory back before it is to touch it anew for nothing.
        pytest.param(SMALL, LARGE, [0, 0, 4, 4, 4, 4], id="a forward keeps what backwards need"),
    ],
)
@on_ranks(2)
def test_as_a_phase_begins_memory_is_kept(in_forward, in_backward, expected):
    channel, held = open_channel(dist.group.WORLD), []
    for _ in range(3):
        for phase, numel in ((StepPhase.FORWARD, in_forward), (StepPhase.BACKWARD, in_backward)):
            channel.release_cached_memory(phase)
            held.append(held_by(channel))
            pass_on(channel, numel)
    assert held == expected


@pytest.mark.parametrize(
    ("are_tight", "expected"),
    [
        ([False, False], [4, 4, 4, 4, 0, 0]),
        ([True], [0] * 6),
        # A root that is kept whole, say, asks before units that are not.
        ([True, False], [0] * 6),
        ([False, True], [0] * 6),
    ],
)
@on_ranks(2)
def test_memory_that_the_last_steps_have_not_needed_is_given_back(are_tight, expected):
    channel, held = open_channel(dist.group.WORLD), []
    for numel in [LARGE] + [SMALL] * 5:
        pass_on(channel, numel)
        for is_tight in are_tight:  # of each unit
            channel.release_cached_memory(StepPhase.STEP, is_tight=is_tight)
        held.append(held_by(channel))
    assert held == expected


class SquareRoots(TorchDispatchMode):
    """Notes how many bytes, and tensors, each square root of an AdamW is taken of."""

    def __init__(self):
        super().__init__()
        self.taken = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == "aten::_foreach_sqrt":
            self.taken.append((sum(each.nbytes for each in args[0]), len(args[0])))
        return func(*args, **(kwargs or {}))


def trained(make_optimizer):
    """Return parameters, what each kernel of the last step took, and the MiB held after steps."""
    channels, held = [], []

    def opened(*args, **kwargs):
        channels.append(open_channel(*args, **kwargs))
        return channels[-1]

    def forward(model, value):
        inputs = (torch.full((1, layer.in_features), value) for layer in model.layers)
        return sum(layer(x).square().sum() for layer, x in zip(model.layers, inputs, strict=True))

    # Three weights of 4 MiB, of which each rank has half, and three small ones.
    widths = [1024] * 3 + [8] * 3
    layers = [nn.Linear(width, width, bias=False) for width in widths]
    with mock.patch.object(communicator, "open_channel", opened):
        model, _ = sharded_and_plain(Made(forward, layers=layers), ("layers",))
        optimizer = make_optimizer(model)
        for step in range(3):
            model(step + 1.0).backward()
            dist.barrier()  # a rank keeps what another one has not read yet
            with SquareRoots() as roots:
                optimizer.step()
            held.append([held_by(channel) for channel in channels])
            optimizer.zero_grad()
    return full_state(model), roots.taken, held


@on_ranks(2)
def test_a_local_step_takes_large_parameters_one_by_one_and_small_ones_together_beside_no_segment():
    adamw = {"lr": 0.1, "foreach": True}
    local, taken, held = trained(lambda model: local_optimizer(model, torch.optim.AdamW, **adamw))
    assert taken == [(2 << 20, 1)] * 3 + [(3 * 8 * 8 * 4 // 2, 3)]
    ordinary, _, also_held = trained(lambda model: torch.optim.AdamW(model.parameters(), **adamw))
    assert_same(ordinary, local, bitwise=True)
    assert held == also_held == [[0]] * 3
