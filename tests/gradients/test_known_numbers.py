"""What every implementation of the reduction must get right: few cases, with their numbers.

Two lessons of other implementations are in here: equality of replicas does not see a factor that is
wrong everywhere, so every case has an absolute oracle; and a mesh with an axis of one rank is a
case of its own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import MixedPrecisionPolicy
from tests.support.models import Ones, Table, Tables
from tests.support.ones import run as backward
from tests.support.strategies import MODES
from tests.support.threads import run_threads


class Case(NamedTuple):
    """What each rank does, and what it must find."""

    play: Callable[..., Any]  # on every rank
    mesh: tuple[int, ...]
    args: tuple[Any, ...]
    right: Any  # of every rank

    def run(self):
        return run_threads(self.play, torch.Size(self.mesh).numel(), self.mesh, *self.args)


def sharded(mesh, model=None, **policy):
    mp_policy = MixedPrecisionPolicy(**policy)
    return meshard.fully_shard(model or Ones(), init_device_mesh("cpu", mesh), mp_policy=mp_policy)


def values(model):
    """Return the first element of each gradient."""
    grads = [param.grad for param in model.parameters()]
    return tuple(None if g is None else g.full_tensor().view(-1)[0].item() for g in grads)


def script(mesh, microbatches, factor=None, **policy):
    """Every rank has the same gradients: of each microbatch, the mode and both gradients."""
    model = sharded(mesh, **policy)
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    for microbatch in microbatches:
        backward(model, *microbatch)
    return values(model)


def number_of_the_rank(mesh, schedule):
    """The first gradient is the number of the rank, those that follow are zero."""
    model = sharded(mesh)
    for k, mode in enumerate(schedule):
        backward(model, mode, 0.0 if k else float(dist.get_rank()), 0.0)
    return values(model)


def change_factor(mesh):
    model = sharded(mesh)
    backward(model, "R", 1.0, 1.0)
    try:
        model.set_gradient_divide_factor(1.0)
    except RuntimeError:
        return "refused"
    backward(model, "F", 1.0, 1.0)
    return values(model)


def clear_what_is_on_its_way(mesh):
    model = sharded(mesh)
    model.set_manual_backward_finalization(True)  # so backwards leave reductions in flight
    backward(model, "F", 100.0, 100.0)
    model.zero_grad()
    backward(model, "F", 2.5, None)
    model.finalize_backward()
    return values(model)


def units_of_their_own(mesh, microbatches):
    """Two units and a root without parameters; each entry has a mode per unit, the root's last.

    Return the gradients of both units after each microbatch.
    """
    model = Tables([[(4,)], [(4,)], []])
    for unit in (*model.units, model):
        sharded(mesh, unit)
    found = []
    for modes, gradients in microbatches:
        for unit, mode in zip([*model.units, model], modes, strict=True):
            unit.set_gradient_sync(MODES[mode], recurse=False)
        rows = [None if value is None else [torch.full((4,), value)] for value in gradients]
        model([*rows, []]).backward()
        found.append(values(model))
    return tuple(found)


def large_beside_small(mesh):
    """256 on one rank, 1 on the others: the sum is 256 if bfloat16 adds it up one by one."""
    model = sharded(mesh, reduce_dtype=torch.bfloat16)
    model.set_gradient_divide_factor(1.0)
    backward(model, "F", 1.0 if dist.get_rank() else 256.0, 1.0)
    return values(model)


def fine_float64(mesh):
    model = sharded(mesh, Ones(dtype=torch.float64))
    backward(model, "F", torch.tensor(1 + 2.0**-40, dtype=torch.float64), 1.0)
    return values(model)


def narrow_before_wide(mesh):
    model = sharded(mesh, Table([(4,), (4,)], [torch.bfloat16, torch.float32]))
    backward(model, "F", torch.zeros(()), [torch.ones(4), torch.full((4,), 257.0)])
    return values(model)


def freeze_in_window(mesh):
    model = sharded(mesh)
    backward(model, "R", 1.0, 1.0)
    model.b.requires_grad_(False)
    backward(model, "F", 1.0, 1.0)
    return values(model)


class Stop(Exception):
    """Raised in the middle of a forward."""


def raise_in_window(mesh):
    """Return the gradients after the exception, and after a window that follows."""
    model = sharded(mesh)
    backward(model, "F", 1.0, 1.0)
    backward(model, "R", 1.0, 1.0)

    def stop(*_):
        raise Stop

    handle = model.register_forward_pre_hook(stop)
    with pytest.raises(Stop):
        model(1.0, 1.0)
    handle.remove()
    void = values(model)
    backward(model, "F", 4.0, 4.0)
    return void, values(model)


def reduced_in(dtype):
    def narrow_script(mesh, microbatches):
        return script(mesh, microbatches, reduce_dtype=dtype)

    return narrow_script


BOTH = (1.0, 1.0)
N, R, F = ("N", *BOTH), ("R", *BOTH), ("F", *BOTH)
IN_BFLOAT16, IN_FLOAT16 = reduced_in(torch.bfloat16), reduced_in(torch.float16)
WIDE = [("R", 256.0, 0.0), R, R, R, F]
UNDERFLOW = [("R", -(2.0**-149), 1.0), ("F", None, 1.0)]  # half of the smallest float32 is -0.0
SKIPPED = [("RRR", BOTH), ("FFF", (1.0, None))]
MIXED = [("FNR", BOTH), ("NFR", BOTH), ("FFF", BOTH)]
MIXED_RIGHT = ((1.0, None), (1.0, 2.0), (3.0, 3.0))
HSDP = (2, 2)
CASES = {
    "ranks_average": Case(number_of_the_rank, HSDP, ("RF",), (1.5, 0.0)),
    "partials_have_the_shard_groups_share": Case(script, HSDP, ([R, F],), (2.0, 2.0)),
    "a_group_of_one_divides_once": Case(script, (2, 1), ([F], 4.0), (0.5, 0.5)),
    "partials_are_wide": Case(IN_BFLOAT16, HSDP, (WIDE,), (260.0, 4.0)),
    "another_parameter_on_full": Case(
        script, HSDP, ([("R", 2.5, None), ("F", None, 25.0)],), (2.5, 25.0)
    ),
    "whole_gradients_are_reduced_once": Case(script, (2,), ([N, F],), (2.0, 2.0)),
    "full_twice": Case(script, HSDP, ([F, F],), (2.0, 2.0)),
    "a_narrow_wire_is_divided": Case(IN_BFLOAT16, HSDP, ([F],), (1.0, 1.0)),
    "one_factor_per_window": Case(change_factor, HSDP, (), "refused"),
    "cleared_on_its_way": Case(clear_what_is_on_its_way, HSDP, (), (2.5, None)),
    "a_unit_that_full_skips": Case(
        units_of_their_own, HSDP, (SKIPPED,), ((None, None), (2.0, 1.0))
    ),
    "a_mode_for_each_unit": Case(units_of_their_own, HSDP, (MIXED,), MIXED_RIGHT),
    "ranks_are_summed_wide": Case(large_beside_small, (4,), (), (259.0, 4.0)),
    "float16_is_divided_before_it_is_narrowed": Case(
        IN_FLOAT16, (4,), ([("F", 98304.0, 1.0)],), (98304.0, 1.0)
    ),
    "float64_stays": Case(fine_float64, HSDP, (), (1 + 2.0**-40, 1.0)),
    "the_widest_on_the_wire": Case(narrow_before_wide, HSDP, (), (1.0, 257.0)),
    "frozen_in_a_window": Case(freeze_in_window, HSDP, (), (2.0, 1.0)),
    "a_void_window": Case(raise_in_window, HSDP, (), ((None, None), (4.0, 4.0))),
    "a_partial_that_underflows": Case(script, HSDP, (UNDERFLOW, 16.0), (0.0, 0.5)),
}


@pytest.mark.parametrize("name", CASES)
def test_every_rank_has_the_right_numbers(name):
    case = CASES[name]
    assert case.run() == [case.right] * torch.Size(case.mesh).numel()
