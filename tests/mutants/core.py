"""What must every implementation of the reduction get right? Few cases, pinned, fast.

Two lessons of other implementations are in here: equality of replicas does not see a factor that is
wrong everywhere, so every case has an absolute oracle; and a mesh with an axis of one rank is a
case of its own.
"""

import itertools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import MixedPrecisionPolicy
from meshard._comm.gradient_buffer import GradientLayout
from tests.ranks.test_usage import MODES, Tables, oracle, run_window
from tests.support.parity import assert_same
from tests.support.threads import run_threads

SHAPES = [[(4,), (3, 2)], [(4,)]]
MESHES = [(2,), (2, 2), (1, 2), (2, 1)]
SCHEDULES = ["F", "FF", "RF", "NF", "RNRF"]
FACTORS = [None, 4.0]


def masks_of(schedule, num_ranks):
    """The first and the last microbatch use different parameters, of one size."""
    masks = []
    for k in range(len(schedule)):
        first, last = k == 0, k == len(schedule) - 1
        row = [[[first or not last, True], [last or not first]] for _ in range(num_ranks)]
        masks.append(row)
    return masks


def check_windows():
    """Sums over microbatches and ranks are exact, on every replica."""
    for mesh, schedule, factor in itertools.product(MESHES, SCHEDULES, FACTORS):
        num_ranks = mesh[0] * (mesh[1] if len(mesh) == 2 else 1)
        masks = masks_of(schedule, num_ranks)
        total = float(num_ranks) if factor is None else factor
        expected = oracle(SHAPES, schedule, masks, total)
        for policy in ({}, {"reduce_dtype": torch.float64}):
            results = run_threads(
                run_window, num_ranks, mesh, SHAPES, schedule, masks, factor, policy
            )
            for grads, _ in results:
                assert_same(grads, expected, bitwise=True, what=f"{mesh} {schedule} {factor}")


def two_windows(schedule):
    """The second window must not contain anything of the first."""
    model = meshard.fully_shard(Tables([[(4,)]]), init_device_mesh("cpu", (2, 2)))
    for _ in range(2):
        model.zero_grad()
        for sync in schedule:
            model.set_gradient_sync(MODES[sync])
            model([[torch.ones(4)]]).backward()
    grad = next(model.parameters()).grad.full_tensor()
    assert grad.tolist() == [float(len(schedule))] * 4, f"{schedule}: {grad}"


def check_windows_are_separate():
    """Accumulators are cleared when they have been reduced."""
    for schedule in ("NF", "RF", "NRF", "FRF", "NNF"):
        run_threads(two_windows, 4, schedule)


def many_ones(mode):
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    model = meshard.fully_shard(Tables([[(4,)]]), init_device_mesh("cpu", (2, 2)), mp_policy=policy)
    for k in range(300):
        model.set_gradient_sync(MODES["F" if k == 299 else mode])
        model([[torch.ones(4)]]).backward()
    grad = next(model.parameters()).grad.full_tensor()
    assert grad.tolist() == [300.0] * 4, f"{mode}: {grad}"


def check_accumulation_is_wide():
    """300 microbatches reduced in bfloat16, which counts to 256, add up to 300."""
    for mode in "NRF":
        run_threads(many_ones, 4, mode)


def change_factor_in_window():
    model = meshard.fully_shard(Tables([[(4,)]]), init_device_mesh("cpu", (2, 2)))
    model.set_gradient_sync(MODES["R"])
    model([[torch.ones(4)]]).backward()
    try:
        model.set_gradient_divide_factor(1.0)
    except RuntimeError:
        return
    model.set_gradient_sync(MODES["F"])
    model([[torch.ones(4)]]).backward()
    grad = next(model.parameters()).grad.full_tensor()
    assert grad.tolist() in ([2.0] * 4, [8.0] * 4), f"part of a window: {grad}"


def check_one_factor_per_window():
    """A factor holds for a whole window, or is refused."""
    run_threads(change_factor_in_window, 4)


def poisoned_padding():
    original = GradientLayout.allocate

    def allocate(self, dtype):
        return original(self, dtype).fill_(float("nan"))

    GradientLayout.allocate = allocate
    try:
        model = meshard.fully_shard(Tables([[(3,), (5, 2)]]), init_device_mesh("cpu", (4,)))
        for sync in "NF":
            model.set_gradient_sync(MODES[sync])
            model([[torch.ones(3), torch.ones(5, 2)]]).backward()
        unit = vars(model)["_meshard_unit"]
        shown = unit.gradients.sharded._shown.flat
        assert not shown.isnan().any(), f"rank {dist.get_rank()}: {shown}"
    finally:
        GradientLayout.allocate = original


def check_padding_is_clean():
    """What is in nobody's shard is zero, so that norms of flat shards are right."""
    run_threads(poisoned_padding, 4)


CHECKS = [
    check_windows,
    check_windows_are_separate,
    check_accumulation_is_wide,
    check_one_factor_per_window,
    check_padding_is_clean,
]
