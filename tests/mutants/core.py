"""What every implementation of the reduction must get right: few cases, with their numbers.

Two lessons of other implementations are in here: equality of replicas does not see a factor that is
wrong everywhere, so every case has an absolute oracle; and a mesh with an axis of one rank is a
case of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshard
from meshard import MixedPrecisionPolicy
from meshard._comm.gradient_buffer import GradientLayout
from tests.support.models import Ones, Table, Tables
from tests.support.strategies import MODES
from tests.support.threads import run_threads

Grads = tuple[float | None, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What each rank does, and what it must find."""

    name: str
    play: Callable[..., Any]  # on every rank
    mesh: tuple[int, ...]
    args: tuple[Any, ...] = ()
    right: Any  # of every rank

    @property
    def num_ranks(self) -> int:
        return torch.Size(self.mesh).numel()

    def run(self) -> list[Any]:
        """Return what each rank has found."""
        return run_threads(self.play, self.num_ranks, self.mesh, *self.args)


def sharded(mesh: tuple[int, ...], model: nn.Module | None = None, **policy: torch.dtype) -> Any:
    mp_policy = MixedPrecisionPolicy(**policy)
    device_mesh = init_device_mesh("cpu", mesh)
    return meshard.fully_shard(model or Ones(), device_mesh, mp_policy=mp_policy)


def values(model: nn.Module) -> Grads:
    """Return the first element of each gradient."""
    grads = [param.grad for param in model.parameters()]
    a, b = (None if grad is None else grad.full_tensor().view(-1)[0].item() for grad in grads)
    return a, b


def backward(model: Any, mode: str, *args: Any) -> None:
    model.set_gradient_sync(MODES[mode])
    model(*args).backward()


Script = Sequence[tuple[str, float | None, float | None]]  # mode, gradient of a, gradient of b


def script(
    mesh: tuple[int, ...],
    microbatches: Script,
    factor: float | None = None,
    policy: dict[str, torch.dtype] | None = None,
) -> Grads:
    """Every rank has the same gradients."""
    model = sharded(mesh, **(policy or {}))
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    for microbatch in microbatches:
        backward(model, *microbatch)
    return values(model)


def number_of_the_rank(mesh: tuple[int, ...], schedule: str) -> Grads:
    """The first gradient is the number of the rank, those that follow are zero."""
    model = sharded(mesh)
    for k, mode in enumerate(schedule):
        backward(model, mode, 0.0 if k else float(dist.get_rank()), 0.0)
    return values(model)


def change_factor(mesh: tuple[int, ...]) -> str | Grads:
    model = sharded(mesh)
    backward(model, "R", 1.0, 1.0)
    try:
        model.set_gradient_divide_factor(1.0)
    except RuntimeError:
        return "refused"
    backward(model, "F", 1.0, 1.0)
    return values(model)


def count_poison(mesh: tuple[int, ...]) -> int:
    """Return how many elements of the flat shard hold what was in memory before."""
    original = GradientLayout.allocate

    def allocate(self: GradientLayout, dtype: torch.dtype) -> torch.Tensor:
        return original(self, dtype).fill_(float("nan"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientLayout, "allocate", allocate)
        model = sharded(mesh, Table([(3,), (5, 2)]))
        dist.barrier()  # all ranks have patched
        for sync in "NF":
            backward(model, sync, torch.zeros(()), [torch.ones(3), torch.ones(5, 2)])
        dist.barrier()
    unit = vars(model)["_meshard_unit"]
    return int(unit.gradients.sharded._published.flat.isnan().sum())


def clear_what_is_on_its_way(mesh: tuple[int, ...]) -> Grads:
    model = sharded(mesh)
    model.set_is_last_backward(False)
    backward(model, "F", 100.0, 100.0)
    model.zero_grad()
    model.set_is_last_backward(True)
    backward(model, "F", 2.5, None)
    return values(model)


def units_of_their_own(
    mesh: tuple[int, ...], script: Sequence[tuple[str, Any]]
) -> tuple[Grads, ...]:
    """Two units and a root without parameters; each entry has a mode per unit, the root's last.

    Return the gradients of both units after each microbatch.
    """
    model = Tables([[(4,)], [(4,)], []])
    for unit in model.units:
        sharded(mesh, unit)
    sharded(mesh, model)
    found = []
    for modes, (a, b) in script:
        for unit, mode in zip([*model.units, model], modes, strict=True):
            unit.set_gradient_sync(MODES[mode], recurse=False)
        rows = [None if value is None else [torch.full((4,), value)] for value in (a, b)]
        model([*rows, []]).backward()
        found.append(values(model))
    return tuple(found)


def large_beside_small(mesh: tuple[int, ...]) -> Grads:
    """256 on one rank, 1 on the others: the sum is 256 if bfloat16 adds it up one by one."""
    model = sharded(mesh, reduce_dtype=torch.bfloat16)
    model.set_gradient_divide_factor(1.0)
    backward(model, "F", 1.0 if dist.get_rank() else 256.0, 1.0)
    return values(model)


def fine_float64(mesh: tuple[int, ...]) -> Grads:
    model = sharded(mesh, Ones(dtype=torch.float64))
    backward(model, "F", torch.tensor(1 + 2.0**-40, dtype=torch.float64), 1.0)
    return values(model)


def narrow_before_wide(mesh: tuple[int, ...]) -> Grads:
    dtypes = [torch.bfloat16, torch.float32]
    model = sharded(mesh, Table([(4,), (4,)], dtypes))
    backward(model, "F", torch.zeros(()), [torch.ones(4), torch.full((4,), 257.0)])
    return values(model)


def freeze_in_window(mesh: tuple[int, ...]) -> Grads:
    model = sharded(mesh)
    backward(model, "R", 1.0, 1.0)
    model.b.requires_grad_(False)
    backward(model, "F", 1.0, 1.0)
    return values(model)


class Stop(Exception):
    """Raised in the middle of a forward."""


def raise_in_window(mesh: tuple[int, ...]) -> tuple[Grads, Grads]:
    """Return the gradients after the exception, and after a window that follows."""
    model = sharded(mesh)
    backward(model, "F", 1.0, 1.0)
    backward(model, "R", 1.0, 1.0)

    def stop(*_: object) -> None:
        raise Stop

    handle = model.register_forward_pre_hook(stop)
    with pytest.raises(Stop):
        model(1.0, 1.0)
    handle.remove()
    void = values(model)
    backward(model, "F", 4.0, 4.0)
    return void, values(model)


BF16, FP16 = {"reduce_dtype": torch.bfloat16}, {"reduce_dtype": torch.float16}
BOTH = (1.0, 1.0)
TINY = -(2.0**-149)  # the smallest of float32: half of it is -0.0

CASES = [
    Case(
        name="ranks_average",
        play=number_of_the_rank,
        mesh=(2, 2),
        args=("RF",),
        right=(1.5, 0.0),
    ),
    Case(
        name="partials_have_the_shard_groups_share",
        play=script,
        mesh=(2, 2),
        args=([("R", *BOTH), ("F", *BOTH)],),
        right=(2.0, 2.0),
    ),
    Case(
        name="a_group_of_one_divides_once",
        play=script,
        mesh=(2, 1),
        args=([("F", *BOTH)], 4.0),
        right=(0.5, 0.5),
    ),
    Case(
        name="partials_are_wide",
        play=script,
        mesh=(2, 2),
        args=([("R", 256.0, 0.0), *[("R", *BOTH)] * 3, ("F", *BOTH)], None, BF16),
        right=(260.0, 4.0),
    ),
    Case(
        name="another_parameter_on_full",
        play=script,
        mesh=(2, 2),
        args=([("R", 2.5, None), ("F", None, 25.0)],),
        right=(2.5, 25.0),
    ),
    Case(
        name="whole_gradients_are_reduced_once",
        play=script,
        mesh=(2,),
        args=([("N", *BOTH), ("F", *BOTH)],),
        right=(2.0, 2.0),
    ),
    Case(
        name="full_twice",
        play=script,
        mesh=(2, 2),
        args=([("F", *BOTH), ("F", *BOTH)],),
        right=(2.0, 2.0),
    ),
    Case(
        name="a_narrow_wire_is_divided",
        play=script,
        mesh=(2, 2),
        args=([("F", *BOTH)], None, BF16),
        right=(1.0, 1.0),
    ),
    Case(name="one_factor_per_window", play=change_factor, mesh=(2, 2), right="refused"),
    Case(name="padding_is_zero", play=count_poison, mesh=(4,), right=0),
    Case(
        name="cleared_on_its_way",
        play=clear_what_is_on_its_way,
        mesh=(2, 2),
        right=(2.5, None),
    ),
    Case(
        name="a_unit_that_full_skips",
        play=units_of_their_own,
        mesh=(2, 2),
        args=([("RRR", BOTH), ("FFF", (1.0, None))],),
        right=((None, None), (2.0, 1.0)),
    ),
    Case(
        name="a_mode_for_each_unit",
        play=units_of_their_own,
        mesh=(2, 2),
        args=([("FNR", BOTH), ("NFR", BOTH), ("FFF", BOTH)],),
        right=((1.0, None), (1.0, 2.0), (3.0, 3.0)),
    ),
    Case(name="ranks_are_summed_wide", play=large_beside_small, mesh=(4,), right=(259.0, 4.0)),
    Case(
        name="float16_is_divided_before_it_is_narrowed",
        play=script,
        mesh=(4,),
        args=([("F", 98304.0, 1.0)], None, FP16),
        right=(98304.0, 1.0),
    ),
    Case(name="float64_stays", play=fine_float64, mesh=(2, 2), right=(1 + 2.0**-40, 1.0)),
    Case(name="the_widest_on_the_wire", play=narrow_before_wide, mesh=(2, 2), right=(1.0, 257.0)),
    Case(name="frozen_in_a_window", play=freeze_in_window, mesh=(2, 2), right=(2.0, 1.0)),
    Case(
        name="a_void_window",
        play=raise_in_window,
        mesh=(2, 2),
        right=((None, None), (4.0, 4.0)),
    ),
    Case(
        name="a_partial_that_underflows",
        play=script,
        mesh=(2, 2),
        args=([("R", TINY, 1.0), ("F", None, 1.0)], 16.0),
        right=(0.0, 0.5),
    ),
]
BY_NAME = {case.name: case for case in CASES}
