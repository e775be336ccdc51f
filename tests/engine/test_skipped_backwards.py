"""Units whose backward some ranks leave out, and recomputations between them: one order on all."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.utils.checkpoint import checkpoint

import meshard
from meshard import GradientSync
from tests.support.against_plain import SGD, check_gradients, inputs_of, sharded_and_plain
from tests.support.models import Made, seeded
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.ranks import on_ranks, on_threads
from tests.support.threads import run_threads

batch_of = functools.partial(inputs_of, shape=(5, 4))
each_place = pytest.mark.parametrize("skipped", ["tower", "main", "auxiliary"])


def layer(out=4):
    return nn.Linear(4, out)


UNITS = ("tower", "trunk", "main", "auxiliary")


def heads():
    """Return a vision tower before a trunk, and an auxiliary head behind it, in one forward."""

    def forward(model, x, uses_tower=True):
        seen = model.tower(x)
        x = x + seen if uses_tower else x
        for each in model.trunk:
            x = each(x).tanh()
        return model.main(x), model.auxiliary(x)

    return Made(forward, tower=layer(), trunk=[layer(), layer()], main=layer(3), auxiliary=layer(3))


def loss_of(model, rank, skipped, number=0):
    """Leave ``skipped`` out of the loss on odd ranks."""
    leaves_out = skipped if rank % 2 else ""
    main, auxiliary = model(batch_of(rank, number), leaves_out != "tower")
    parts = {"main": main.square().mean(), "auxiliary": auxiliary.square().mean()}
    return sum(part for name, part in parts.items() if name != leaves_out)


def last_of_several_forwards(model, rank, skipped):
    return loss_of(model, rank, "") + loss_of(model, rank, skipped, 1)


def second_backward_through_a_graph(model, rank, skipped):
    main, auxiliary = (out.square().mean() for out in model(batch_of(rank)))
    (main + auxiliary).backward(retain_graph=True)
    if rank and skipped == "tower":
        return main * 0.5
    parts = {"main": main, "auxiliary": auxiliary}
    return sum(part for name, part in parts.items() if name != skipped or rank == 0)


def frozen_before_its_backward(model, rank, skipped):
    loss = loss_of(model, rank, skipped)
    getattr(model, skipped).weight.requires_grad_(False)
    return loss


def window(model, rank, skipped, *, sync):
    numbers = range(3)
    if isinstance(model, meshard.FSDPModule):
        numbers = meshard.microbatches(model, numbers, until_last=sync)
    for number in numbers:
        loss_of(model, rank, skipped, number).backward()


@each_place
@pytest.mark.parametrize(
    ("mesh_shape", "options", "how"),
    [
        ((2,), {}, loss_of),
        ((2,), {"reshard_after_forward": False}, loss_of),
        ((2,), {}, last_of_several_forwards),
        ((2,), {}, second_backward_through_a_graph),
        ((2,), {}, frozen_before_its_backward),
        ((2,), {"reshard_after_forward": False}, frozen_before_its_backward),
        ((2, 2), {}, functools.partial(window, sync=GradientSync.NONE)),
        ((2, 2), {}, functools.partial(window, sync=GradientSync.REDUCE_SCATTER)),
    ],
    ids=[
        "default",
        "kept",
        "last forward",
        "kept graph",
        "frozen",
        "kept and frozen",
        "window",
        "window of partial sums",
    ],
)
def test_a_unit_that_one_rank_leaves_out(mesh_shape, options, how, skipped):
    def run():
        pair = sharded_and_plain(heads(), UNITS, mesh_shape, **options)
        ledger = check_gradients(*pair, functools.partial(how, skipped=skipped))
        return [(event.op, event.unit) for event in ledger.events]

    sent = run_threads(run, torch.Size(mesh_shape).numel())
    assert sent == [sent[0]] * len(sent), "ranks send different collectives"


@each_place
@pytest.mark.parametrize("how", [loss_of, frozen_before_its_backward])
@on_threads(2)
def test_with_an_optimizer_in_backward(how, skipped):
    model, plain = sharded_and_plain(heads(), UNITS)
    meshard.overlap_optimizer(model, torch.optim.SGD, lr=0.1)
    optimizer = SGD(plain.parameters())
    for _ in range(2):
        how(model, dist.get_rank(), skipped).backward()
        for rank in range(2):
            (how(plain, rank, skipped) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(full_state(model), full_state(plain))


@each_place
@pytest.mark.parametrize("how", [loss_of, frozen_before_its_backward])
@on_threads(2)
def test_under_replicate_with_cast_copies(how, skipped):
    plain = seeded(heads())
    policy = meshard.MixedPrecisionPolicy(param_dtype=torch.float64)
    mesh = init_device_mesh("cpu", (2,))
    model = meshard.replicate(copy.deepcopy(plain), mesh, bucket_cap_mb=1e-4, mp_policy=policy)
    check_gradients(model, plain, functools.partial(how, skipped=skipped))


@on_threads(2)
def test_a_frozen_unit_inside_another_that_one_rank_leaves_out():
    def forward(model, x, uses_all):
        inner = model.frozen(x)
        return (x + inner) * model.scale + model.shift if uses_all else x * model.scale

    def around():
        frozen, scale = layer().requires_grad_(False), nn.Parameter(torch.ones(4))
        return Made(forward, frozen=frozen, scale=scale, shift=nn.Parameter(torch.zeros(4)))

    plain = Made(
        lambda m, x, uses_all: m.layers[1](m.layers[0](m.first(x), uses_all), uses_all),
        first=layer(),
        layers=[around(), around()],
    )
    pair = sharded_and_plain(
        plain, ("layers.0.frozen", "layers.0", "layers.1.frozen", "layers.1", "first")
    )
    check_gradients(*pair, lambda model, rank: model(batch_of(rank), rank == 0).square().mean())


@on_threads(2)
def test_an_output_without_backward_that_one_rank_keeps_changes_nothing():
    kept = []

    def step(model, rank):
        output = model.auxiliary(batch_of(rank))  # with a graph, for a log
        if rank == 0:
            kept.append(output)
        return model.main(batch_of(rank)).square().mean()

    check_gradients(*sharded_and_plain(heads(), UNITS), step)


def sum_of(outputs):
    return sum(out.square().sum() for out in outputs)


def used_of(outputs, rank):
    """Leave the heads out on odd ranks."""
    return outputs[-1:] if rank % 2 else outputs


def without_a_head(model, rank):
    return sum_of(used_of(model(batch_of(rank)), rank))


def without_a_head_of_a_second_forward(model, rank):
    first, second = (model(batch_of(rank, number)) for number in range(2))
    sum_of(first).backward()
    return sum_of(used_of(second, rank))


def without_a_head_of_a_kept_graph(model, rank):
    outputs = model(batch_of(rank))
    sum_of(outputs).backward(retain_graph=True)
    return sum_of(used_of(outputs, rank))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("how", "num_heads", "reshard"),
    [
        (without_a_head, 1, None),
        (without_a_head, 2, False),
        (without_a_head_of_a_second_forward, 1, None),
        (without_a_head_of_a_second_forward, 1, False),
        (without_a_head_of_a_kept_graph, 1, None),
        (without_a_head_of_a_kept_graph, 1, False),
    ],
)
@on_threads(2)
def test_a_root_with_parameters_is_reduced_after_a_skipped_head(how, num_heads, reshard, frozen):
    """The parameters that the root owns itself are complete early where the head is left out."""

    def forward(model, x):
        x = model.norm(model.inp(x))
        return *(head(x) for head in model.heads), x

    plain = Made(
        forward, inp=layer(), norm=nn.LayerNorm(4), heads=[layer() for _ in range(num_heads)]
    )
    plain.heads.requires_grad_(not frozen)
    check_gradients(*sharded_and_plain(plain, ("heads",), reshard_after_forward=reshard), how)


def choice():
    """Return a layer that uses its second weight only where it is told to."""
    return Made(
        lambda m, x, uses_second: (
            m.second(m.first(x).tanh()) if uses_second else m.first(x).tanh() * 1.5
        ),
        first=layer(),
        second=layer(),
    )


@pytest.mark.parametrize("num_forwards", [1, 2])
@on_threads(2)
def test_a_later_use_that_one_rank_leaves_out(num_forwards):
    """Two layers run several times, once without grad, with a head in between."""

    def forward(model, x):
        first, second = model.layers
        x = model.inp(x)
        with torch.no_grad():
            target = second(x, True)
        x = second(first(x + target, False), True)
        return model.head(x), first(x, True)

    def step(model, rank):
        outputs = [model(batch_of(rank, number)) for number in range(num_forwards)]
        if rank % 2:
            outputs[-1] = outputs[-1][:1]
        return sum(map(sum_of, outputs))

    plain = Made(forward, layers=[choice(), choice()], inp=layer(), head=layer())
    check_gradients(*sharded_and_plain(plain, ("layers", "head")), step)


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
@on_ranks(4)
def test_a_tower_that_one_rank_leaves_out_of_a_pipeline(schedule):
    """Odd data-parallel ranks do not use what the tower of a stage returns."""

    def forward(stage, x):
        seen = stage.tower(x)
        return stage.layer(x + seen if stage.uses_tower else x)

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    position, data = mesh["pipeline"].get_local_rank(), mesh["data"].get_local_rank()
    plain = [seeded(Made(forward, tower=layer(), layer=layer()), number) for number in range(2)]
    own = copy.deepcopy(plain[position])
    own.uses_tower = data == 0
    for unit in (own.tower, own.layer, own):
        meshard.fully_shard(unit, mesh["data"], reshard_after_forward=False)
    group = mesh["pipeline"].get_group()
    stage = PipelineStage(own, position, 2, torch.device("cpu"), group=group)
    pipeline = getattr(schedules, schedule)(stage, 4, nn.functional.mse_loss)
    batches = [inputs_of(rank, shape=(8, 4)) for rank in range(2)]
    targets = [batch.roll(1, 0) for batch in batches]
    for _ in range(2):
        if position == 0:
            pipeline.step(batches[data])
        else:
            pipeline.step(target=targets[data], losses=[])
        for rank in range(2):
            for part in plain:
                part.uses_tower = rank == 0
            output = plain[1](plain[0](batches[rank]))
            (nn.functional.mse_loss(output, targets[rank]) / 2).backward()
        assert_same(full_grads(own), full_grads(plain[position]))
        for module in (own, *plain):  # a step of the pipeline divides all that is in .grad
            module.zero_grad()


@on_threads(2)
def test_a_unit_without_parameters_among_those_that_one_rank_leaves_out():
    def forward(model, x):
        side = x
        for each in model.side:
            side = each(side)
        return model.main(x), side

    plain = Made(forward, main=layer(), side=[layer(), nn.Tanh(), layer()])

    def step(model, rank):
        main, side = model(batch_of(rank))
        return main.square().mean() + (0 if rank else side.square().mean())

    check_gradients(*sharded_and_plain(plain, ("main", "side")), step)


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
@on_threads(2)
def test_recomputed_regions_and_unused_parameters(use_reentrant, inner):
    """Two checkpointed regions of two units each end with an operation outside of them."""

    def region(layers, x, uses_second):
        for each in layers:
            if inner:
                x = checkpoint(each, x, uses_second, use_reentrant=False)
            else:
                x = each(x, uses_second)
        return nn.functional.layer_norm(x, (4,)).tanh()

    def forward(model, x, uses_second):
        for layers in (model.layers[:2], model.layers[2:]):
            x = checkpoint(region, layers, x, uses_second, use_reentrant=use_reentrant)
        return model.head(x, uses_second)

    def step(model, rank):
        return model(batch_of(rank).requires_grad_(), rank == 0).square().mean()

    plain = Made(forward, layers=[choice() for _ in range(4)], head=choice())
    check_gradients(*sharded_and_plain(plain, ("layers", "head"), reshard_after_forward=True), step)


def energy_of(model, rank, number=0):
    return model(batch_of(rank, number)).sum()


def forces_of(model, rank):
    x = batch_of(rank).requires_grad_()
    return torch.autograd.grad(model(x).sum(), x)[0]


@on_threads(2)
def test_gradients_by_inputs_reduce_nothing_and_open_no_window():
    def step(module, rank):
        if module is plain:
            return energy_of(module, rank) + energy_of(module, rank, 1)
        for _ in range(2):
            with meshard.CommLedger(module) as ledger, meshard.no_sync(module):
                forces = forces_of(module, rank)
            assert_same(forces, forces_of(plain, rank))
            assert set(ledger.counts) == {"all_gather"}
        assert not meshard.pending_gradients(module)
        with meshard.no_sync(module):
            energy_of(module, rank).backward()
        forces_of(module, rank)  # in the middle of a window
        assert meshard.pending_gradients(module)
        return energy_of(module, rank, 1)

    plain = nn.Sequential(layer(), nn.Tanh(), layer(), nn.Tanh(), layer(), nn.Tanh())
    model, _ = sharded_and_plain(plain, ("0", "2", "4"))
    check_gradients(model, plain, step, times=1)
