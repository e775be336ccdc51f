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
from tests.support.models import seeded
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.ranks import on_ranks, on_threads
from tests.support.threads import run_threads

batch_of = functools.partial(inputs_of, shape=(5, 4))
PLACES = ("tower", "main", "auxiliary")
each_place = pytest.mark.parametrize("skipped", PLACES)


class Heads(nn.Module):
    """A vision tower before the trunk, and an auxiliary head behind it, in one forward."""

    units = ("tower", "trunk", "main", "auxiliary")

    def __init__(self):
        super().__init__()
        self.tower = nn.Linear(4, 4)
        self.trunk = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.main, self.auxiliary = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x, uses_tower=True):
        seen = self.tower(x)
        x = x + seen if uses_tower else x
        for layer in self.trunk:
            x = layer(x).tanh()
        return self.main(x), self.auxiliary(x)


def loss_of(model, rank, skipped, number=0):
    """Leave ``skipped`` out of the loss on odd ranks."""
    leaves_out = skipped if rank % 2 else ""
    main, auxiliary = model(batch_of(rank, number), leaves_out != "tower")
    parts = {"main": main.square().mean(), "auxiliary": auxiliary.square().mean()}
    return sum(part for name, part in parts.items() if name != leaves_out)


def one_backward(model, rank, skipped):
    return loss_of(model, rank, skipped)


def last_of_several_forwards(model, rank, skipped):
    return loss_of(model, rank, "") + loss_of(model, rank, skipped, 1)


def second_backward_through_a_graph(model, rank, skipped):
    main, auxiliary = (out.square().mean() for out in model(batch_of(rank)))
    (main + auxiliary).backward(retain_graph=True)
    if rank and skipped == "tower":
        return main * 0.5
    parts = {"main": main, "auxiliary": auxiliary}
    return sum(part for name, part in parts.items() if name != skipped or rank == 0)


@each_place
@pytest.mark.parametrize(
    ("mesh_shape", "options", "how"),
    [
        ((2,), {}, one_backward),
        ((2,), {"reshard_after_forward": False}, one_backward),
        ((2, 2), {}, one_backward),
        ((2,), {}, last_of_several_forwards),
        ((2,), {}, second_backward_through_a_graph),
    ],
    ids=["default", "kept", "hsdp", "last forward", "kept graph"],
)
def test_a_unit_that_one_rank_leaves_out(mesh_shape, options, how, skipped):
    def run():
        pair = sharded_and_plain(Heads(), Heads.units, mesh_shape, **options)
        ledger = check_gradients(*pair, functools.partial(how, skipped=skipped))
        return [(event.op, event.unit) for event in ledger.events]

    sent = run_threads(run, torch.Size(mesh_shape).numel())
    assert sent == [sent[0]] * len(sent), "ranks send different collectives"


@each_place
@pytest.mark.parametrize("sync", [GradientSync.NONE, GradientSync.REDUCE_SCATTER])
@on_threads(4)
def test_with_accumulation_and_replicas(skipped, sync):
    def window(module, rank):
        numbers = range(3)
        if module is model:
            numbers = meshard.microbatches(model, list(numbers), until_last=sync)
        for number in numbers:
            loss_of(module, rank, skipped, number).backward()

    model, plain = sharded_and_plain(Heads(), Heads.units, (2, 2))
    check_gradients(model, plain, window, times=1)


@each_place
@on_threads(2)
def test_with_an_optimizer_in_backward(skipped):
    model, plain = sharded_and_plain(Heads(), Heads.units)
    meshard.overlap_optimizer(model, torch.optim.SGD, lr=0.1)
    optimizer = SGD(plain.parameters())
    for _ in range(2):
        loss_of(model, dist.get_rank(), skipped).backward()
        for rank in range(2):
            (loss_of(plain, rank, skipped) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(full_state(model), full_state(plain))


class Around(nn.Module):
    """A layer around a frozen one, which odd ranks leave out, and with a scale of its own."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.scale, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x, uses_all):
        inner = self.frozen(x)
        x = (x + inner if uses_all else x) * self.scale
        return x + self.shift if uses_all else x


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Around() for _ in range(2))

    def forward(self, x, uses_all):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, uses_all)
        return x.square().mean()


@on_threads(2)
def test_a_frozen_unit_inside_another_that_one_rank_leaves_out():
    units = ("layers.0.frozen", "layers.0", "layers.1.frozen", "layers.1", "first")
    pair = sharded_and_plain(Chain(), units)
    check_gradients(*pair, lambda model, rank: model(batch_of(rank), rank == 0))


@on_threads(2)
def test_an_output_without_backward_that_one_rank_keeps_changes_nothing():
    kept = []

    def step(model, rank):
        output = model.auxiliary(batch_of(rank))  # with a graph, for a log
        if rank == 0:
            kept.append(output)
        return model.main(batch_of(rank)).square().mean()

    check_gradients(*sharded_and_plain(Heads(), Heads.units), step)


class OwnNorm(nn.Module):
    """A root with parameters of its own, which are complete early where the head is left out."""

    def __init__(self, num_heads=1):
        super().__init__()
        self.inp, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(num_heads))

    def forward(self, x):
        x = self.norm(self.inp(x))
        return *(head(x) for head in self.heads), x


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
    plain = OwnNorm(num_heads)
    plain.heads.requires_grad_(not frozen)
    check_gradients(*sharded_and_plain(plain, ("heads",), reshard_after_forward=reshard), how)


class Choice(nn.Module):
    """A layer that uses its second weight on even ranks only."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, uses_second):
        x = self.first(x).tanh()
        return self.second(x) if uses_second else x * 1.5


class Repeated(nn.Module):
    """Two layers that run several times, once without grad, with a head in between."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Choice() for _ in range(2))
        self.inp, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        first, second = self.layers
        x = self.inp(x)
        with torch.no_grad():
            target = second(x, True)
        x = x + target
        x = second(first(x, False), True)
        return self.head(x), first(x, True)


@pytest.mark.parametrize("num_forwards", [1, 2])
@on_threads(2)
def test_a_later_use_that_one_rank_leaves_out(num_forwards):
    def step(model, rank):
        outputs = [model(batch_of(rank, number)) for number in range(num_forwards)]
        if rank % 2:
            outputs[-1] = outputs[-1][:1]
        return sum(map(sum_of, outputs))

    check_gradients(*sharded_and_plain(Repeated(), ("layers", "head")), step)


class Stage(nn.Module):
    """A stage of a pipeline. Odd data-parallel ranks do not use what its tower returns."""

    def __init__(self):
        super().__init__()
        self.tower, self.layer = nn.Linear(4, 4), nn.Linear(4, 4)
        self.uses_tower = True

    def forward(self, x):
        seen = self.tower(x)
        return self.layer(x + seen if self.uses_tower else x)


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
@on_ranks(4)
def test_a_tower_that_one_rank_leaves_out_of_a_pipeline(schedule):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    position, data = mesh["pipeline"].get_local_rank(), mesh["data"].get_local_rank()
    plain = [seeded(Stage(), number) for number in range(2)]
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


class Regions(nn.Module):
    """Two checkpointed regions of two units each, which end with an operation outside of them."""

    def __init__(self, use_reentrant, inner):
        super().__init__()
        self.layers = nn.ModuleList(Choice() for _ in range(4))
        self.head = Choice()
        self.use_reentrant, self.inner = use_reentrant, inner

    def region(self, first, x, uses_second):
        for layer in self.layers[first : first + 2]:
            if self.inner:
                x = checkpoint(layer, x, uses_second, use_reentrant=False)
            else:
                x = layer(x, uses_second)
        return nn.functional.layer_norm(x, (4,)).tanh()

    def forward(self, x, uses_second):
        for first in (0, 2):
            x = checkpoint(self.region, first, x, uses_second, use_reentrant=self.use_reentrant)
        return self.head(x, uses_second)


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
@on_threads(2)
def test_recomputed_regions_and_unused_parameters(use_reentrant, inner):
    def step(model, rank):
        return model(batch_of(rank).requires_grad_(), rank == 0).square().mean()

    plain = Regions(use_reentrant, inner)
    check_gradients(*sharded_and_plain(plain, ("layers", "head"), reshard_after_forward=True), step)


class FirstColumn(nn.Module):
    """Returns a view of its input beside what it computes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x), x[:, 0]


class WithView(nn.Module):
    """No output of its second layer reaches the loss."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), FirstColumn()

    def forward(self, x):
        x = self.first(x)
        self.second(x)
        return x.square().sum()


@pytest.mark.parametrize("overlapped", [False, True])
@on_threads(2)
def test_a_unit_whose_view_of_its_input_is_not_used(overlapped):
    model, _ = sharded_and_plain(WithView(), ("first", "second"))
    if overlapped:
        meshard.overlap_optimizer(model, torch.optim.SGD, lr=0.1)
    for _ in range(2):
        with meshard.CommLedger(model) as ledger:
            model(torch.ones(2, 4)).backward()
    reduced = [event.unit for event in ledger.events if event.op == "reduce_scatter"]
    assert sorted(reduced) == ["first", "second"]


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x.sum()


def forces_of(model, rank, **options):
    x = batch_of(rank).requires_grad_()
    return torch.autograd.grad(model(x), x, **options)[0]


@on_threads(2)
def test_gradients_by_inputs_reduce_nothing():
    model, plain = sharded_and_plain(Energy(), ("layers",))
    rank = dist.get_rank()
    for _ in range(2):
        with meshard.CommLedger(model) as ledger:
            forces = forces_of(model, rank)
        assert_same(forces, forces_of(plain, rank))
        assert set(ledger.counts) == {"all_gather"}
    check_gradients(model, plain, lambda model, rank: model(batch_of(rank)))


@on_threads(2)
def test_gradients_by_inputs_in_the_middle_of_a_window():
    def window(module, rank):
        if module is plain:
            return module(batch_of(rank)) + module(batch_of(rank, 1))
        with meshard.no_sync(module):
            module(batch_of(rank)).backward()
        forces_of(module, rank)
        assert meshard.pending_gradients(module)
        return module(batch_of(rank, 1))

    model, plain = sharded_and_plain(Energy(), ("layers",))
    check_gradients(model, plain, window, times=1)


@on_threads(2)
def test_a_loss_of_forces_is_reduced_once():
    ledger = check_gradients(
        *sharded_and_plain(Energy(), ("layers",)),
        lambda model, rank: forces_of(model, rank, create_graph=True).square().mean(),
    )
    assert ledger.counts["reduce_scatter"] == 3
