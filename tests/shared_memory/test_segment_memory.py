"""Memory that a segment keeps from one phase of a step to the next."""

import os

import torch
import torch.distributed as dist

from meshard._comm.communicator import StepPhase
from meshard._shared_memory.channel import open_channel

NAME = ("all_gather", "unit", 1)


def held_after(units):
    """Return the bytes of this rank's segment after steps of two sizes.

    Args:
        units: What each unit wants trimmed: whether everything.
    """
    met, held = open_channel(dist.group.WORLD), []
    for numel in [1 << 20, 1 << 10, 1 << 10, 1 << 10, 1 << 10, 1 << 10]:
        message = met.publish(torch.ones(numel), NAME)
        theirs = met.receive(message, 1 - dist.get_rank(), numel, torch.float32)
        assert (theirs == 1.0).all()  # also where it has been given back in between
        met.acknowledge(message)
        dist.barrier()
        for everything in units:
            met.release_cached_memory(StepPhase.STEP, is_tight=everything)
        held.append(os.fstat(met._own.descriptor).st_blocks * 512 >> 20)
    return held


def held_in_parts(in_forward, in_backward):
    """Return what is held after the beginnings of three backwards, and of forwards, in MiB."""
    met, held = open_channel(dist.group.WORLD), []
    for _ in range(3):
        for part, numel in ((StepPhase.FORWARD, in_forward), (StepPhase.BACKWARD, in_backward)):
            met.release_cached_memory(part)
            held.append(os.fstat(met._own.descriptor).st_blocks * 512 >> 20)
            message = met.publish(torch.ones(numel), NAME)
            theirs = met.receive(message, 1 - dist.get_rank(), numel, torch.float32)
            assert (theirs == 1.0).all()
            met.acknowledge(message)
            dist.barrier()
    return held


def test_a_backward_does_not_keep_what_only_forwards_need(run_ranks):
    # What a backward needs is not known before the first is over.
    assert run_ranks(held_in_parts, 2, 1 << 20, 1 << 10) == [[0, 4, 4, 0, 0, 0]] * 2


def test_a_forward_keeps_what_backwards_need(run_ranks):
    # The peak is in backward: to give memory back before it is to touch it anew for nothing.
    assert run_ranks(held_in_parts, 2, 1 << 10, 1 << 20) == [[0, 0, 4, 4, 4, 4]] * 2


def test_memory_that_the_last_steps_have_not_needed_is_given_back(run_ranks):
    assert run_ranks(held_after, 2, [False, False]) == [[4, 4, 4, 4, 0, 0]] * 2
    # A root that is kept whole, say, asks before units that are not.
    for units in [True], [True, False], [False, True]:
        assert run_ranks(held_after, 2, units) == [[0] * 6] * 2
