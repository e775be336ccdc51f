"""Schedules of torch.distributed.pipelining over stages that ``fully_shard`` has sharded.

Two stages, or four in two pairs, on two ranks each. The oracle is the plain model in one process on
the whole batch.

Zero-bubble schedules and DualPipeV split a backward: first the gradients of a stage's inputs, later
those of the parameters, which they write into ``.grad`` themselves, outside of any backward.
"""

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import meshard
from tests.support.models import Made
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import on_fake_ranks, on_ranks

DIM = 6
NUM_MICROBATCHES = 4
NUM_STEPS = 2
SINGLE = ("ScheduleGPipe", "Schedule1F1B")
LOOPED = ("ScheduleLoopedBFS", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
runs_on_gloo = pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="V-shaped schedules of torch 2.11 fail on gloo, of whatever library the stages are",
)


def by_name(*names):
    """Parametrize by schedules; all but the first are slow."""
    rows = []
    for index, name in enumerate(names):
        marks = [runs_on_gloo] if name in V_SHAPED else []
        rows.append(pytest.param(name, marks=[*marks, pytest.mark.slow] if index else marks))
    return pytest.mark.parametrize("name", rows)


def part(*, has_scale):
    """Return a stage: two blocks, which are units, and maybe a parameter of its own.

    Without one it returns what a unit inside it has returned.
    """

    def forward(m, x):
        x = x if m.scale is None else x * m.scale
        return m.blocks[1](x + m.blocks[0](x))

    layers = [(nn.Linear(DIM, DIM + 1), nn.Tanh(), nn.Linear(DIM + 1, DIM)) for _ in range(2)]
    scale = nn.Parameter(torch.ones(DIM)) if has_scale else None
    return Made(forward, blocks=[nn.Sequential(*each) for each in layers], scale=scale)


def parts(count):
    torch.manual_seed(0)
    return [part(has_scale=index != 1) for index in range(count)]


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn((2, 2, 2 * NUM_MICROBATCHES, DIM), generator=generator).unbind()


def stages_of(name, rank):
    if name in SINGLE:
        return [rank]
    return [rank, 3 - rank] if name in V_SHAPED else [rank, rank + 2]


class Step(NamedTuple):
    """What one rank has after one step."""

    loss: float | None  # of the whole batch; only where the last stage is
    grads: dict  # of this rank's stages, whole
    reduced: list  # the units that our library has reduced


def in_pipeline(name, reshard, **kwargs):
    """Train by one schedule: a function for four ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pp, dp = mesh["pp"], mesh["dp"]
    indices = stages_of(name, pp.get_local_rank())
    modules = parts(2 if name in SINGLE else 4)
    own = {index: modules[index] for index in indices}
    for part in own.values():
        for unit in (*part.blocks, part):
            meshard.fully_shard(unit, mesh=dp, reshard_after_forward=reshard)
    stages = [
        PipelineStage(part, index, len(modules), torch.device("cpu"), group=pp.get_group())
        for index, part in own.items()
    ]
    first_or_all = stages[0] if name in SINGLE else stages
    loss_fn = nn.functional.mse_loss
    schedule = getattr(schedules, name)(first_or_all, NUM_MICROBATCHES, loss_fn, **kwargs)
    optimizer = torch.optim.SGD([p for part in own.values() for p in part.parameters()], lr=0.1)
    steps = []
    for number in range(NUM_STEPS):
        inputs, targets = (each[dp.get_local_rank()] for each in batch(number))
        loss, losses = None, []
        with meshard.CommLedger() as ledger:
            first = [inputs] if 0 in own else []
            if len(modules) - 1 in own:
                schedule.step(*first, target=targets, losses=losses)
                loss = torch.stack(losses).mean()
                dist.all_reduce(loss, group=dp.get_group())
            else:
                schedule.step(*first)
        grads = {
            f"{index}.{key}": grad
            for index, part in own.items()
            for key, grad in full_grads(part).items()
        }
        mean = None if loss is None else loss.item() / dp.size()
        reduced = [event.unit for event in ledger.events if event.op == "reduce_scatter"]
        steps.append(Step(mean, grads, reduced))
        optimizer.step()
        optimizer.zero_grad()
    return steps


def in_one_process(num_stages):
    model = nn.Sequential(*parts(num_stages))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    for number in range(NUM_STEPS):
        inputs, targets = (each.flatten(0, 1) for each in batch(number))
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        steps.append(Step(loss.item(), full_grads(model), []))
        optimizer.step()
        optimizer.zero_grad()
    return steps


def assert_right(of_ranks, name):
    """Compare losses, of which two ranks have one, and gradients, of which every rank has some."""
    expected = in_one_process(2 if name in SINGLE else 4)
    seen, num_losses = set(), 0
    for steps in of_ranks:
        for found, right in zip(steps, expected, strict=True):
            if found.loss is not None:
                num_losses += 1
                assert_same(found.loss, right.loss, what="loss")
            assert_same(found.grads, {key: right.grads[key] for key in found.grads})
            seen |= set(found.grads)
    assert seen == set(expected[0].grads)
    assert num_losses == 2 * NUM_STEPS


@pytest.mark.extras
@by_name("ScheduleZBVZeroBubble", *SINGLE, *LOOPED, "ScheduleDualPipeV")
def test_a_schedule_gives_the_gradients_of_the_whole_batch(run_ranks, name):
    of_ranks = run_ranks(in_pipeline, 4, name, False)
    assert_right(of_ranks, name)
    for steps in of_ranks:  # the first also finds out the shapes of what stages send
        stages = {key.split(".")[0] for key in steps[1].grads}
        once = ["blocks.1", "blocks.0"] * len(stages) + ["(root)"] * len(stages - {"1"})
        assert sorted(steps[1].reduced) == sorted(once)


@pytest.mark.extras
@pytest.mark.slow
@by_name(*SINGLE, *LOOPED[:2])
def test_a_schedule_that_splits_no_backward_may_reshard_after_forward(run_ranks, name):
    assert_right(run_ranks(in_pipeline, 4, name, None), name)


@pytest.mark.extras
@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.15", reason="schedules defer the wait since torch 2.15")
@by_name("ScheduleInterleavedZeroBubble", "ScheduleDualPipeV")
def test_a_schedule_may_wait_for_reductions_at_its_end(run_ranks, name):
    assert_right(run_ranks(in_pipeline, 4, name, False, defer_reduce_grad_wait=True), name)


def split_backward(part, inputs, *, is_manual=False, syncs=True):
    """Do on one stage what a schedule does (``is_manual``: since torch 2.15)."""
    sharded = [module for module in part.modules() if isinstance(module, meshard.FSDPModule)]
    for handle in [module.unshard(async_op=True) for module in sharded]:
        handle.wait()
    part.set_manual_backward_finalization(is_manual)
    loss = part(inputs).sum()
    part.set_is_last_backward(False)
    part.set_reshard_after_backward(False)
    part.set_requires_gradient_sync(False)
    _, groups = stage_backward_input([loss], None, [inputs], part.parameters())
    stage_backward_weight(part.parameters(), groups)
    part.set_is_last_backward(True)
    part.set_reshard_after_backward(True)
    part.set_requires_gradient_sync(syncs)
    states = meshard.fully_shard.state(part)._state_ctx.all_states
    if is_manual:
        part.finalize_backward(async_op=True).wait()
        states = []
    for state in states:
        for group in (state._fsdp_param_group, *state._fsdp_param_groups):
            group.post_backward()
        state._root_post_backward_final_callback()


def plain_and_part(reshard):
    plain, part = parts(1)[0], parts(1)[0]
    for unit in (*part.blocks, part):
        meshard.fully_shard(unit, reshard_after_forward=reshard)
    return plain, part


@pytest.mark.parametrize("is_manual", [False, True])
@pytest.mark.parametrize("reshard", [False, True, None])
@on_ranks(1)
def test_a_split_backward_is_right_or_names_the_units_that_were_resharded(reshard, is_manual):
    plain, part = plain_and_part(reshard)
    inputs = torch.randn(2, DIM, requires_grad=True)
    if reshard is False:
        plain(inputs).sum().backward()
        split_backward(part, inputs, is_manual=is_manual)
        assert_same(full_grads(part), full_grads(plain))
        return
    with pytest.raises(RuntimeError) as caught:
        split_backward(part, inputs, is_manual=is_manual)
    text = str(caught.value.__cause__ or caught.value)  # torch 2.13 wraps it
    assert "unit 'blocks.1' would get no gradients from this schedule" in text
    assert "reshard_after_forward=False" in text


@on_ranks(1)
def test_gradients_that_a_schedule_wrote_and_nothing_has_reduced_are_pending():
    plain, part = plain_and_part(False)
    for syncs in (False, True):
        inputs = torch.randn(2, DIM, requires_grad=True)
        plain(inputs).sum().backward()
        split_backward(part, inputs, syncs=syncs)
        names = [] if syncs else [name for name, _ in plain.named_parameters()]
        assert sorted(meshard.pending_gradients(part)) == sorted(names)
    assert_same(full_grads(part), full_grads(plain))


@on_fake_ranks(1)
def test_torchs_own_name_finds_the_state_too():
    """Its stages have imported ``fully_shard`` before anybody could replace it."""
    layer = meshard.fully_shard(nn.Linear(2, 2))
    state = torch_fsdp.fully_shard.state(layer)
    assert state is not None
    assert state is meshard.fully_shard.state(layer)
    assert torch_fsdp.fully_shard.state(nn.Linear(2, 2)) is None
