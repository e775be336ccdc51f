"""Units whose backward some ranks leave out, and recomputations between them: one order on all."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.utils.checkpoint import checkpoint

import meshard
from meshard import GradientSync
from tests.support.models import seeded
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.ranks import on_ranks, on_threads

MESHES = {2: (2,), 4: (2, 2)}


class Heads(nn.Module):
    """A vision tower before the trunk, and an auxiliary head behind it, in one forward."""

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


def wrap(model, mesh_shape, **options):
    names = None if len(mesh_shape) == 1 else ("replicate", "shard")
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    for unit in (model.tower, *model.trunk, model.main, model.auxiliary):
        meshard.fully_shard(unit, mesh, **options)
    return meshard.fully_shard(model, mesh, **options)


def batch_of(rank, number=0):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * rank + number))


def loss_of(model, rank, skipped, number=0):
    """Leave ``skipped`` out of the loss on odd ranks."""
    leaves_out = skipped if rank % 2 else ""
    main, auxiliary = model(batch_of(rank, number), leaves_out != "tower")
    parts = {"main": main.square().mean(), "auxiliary": auxiliary.square().mean()}
    return sum(part for name, part in parts.items() if name != leaves_out)


def train(model, skipped, *, windows=2, microbatches=1, sync=GradientSync.FULL, step=None):
    for _ in range(windows):
        batches = range(microbatches)
        for number in meshard.microbatches(model, batches, until_last=sync):
            loss_of(model, dist.get_rank(), skipped, number).backward()
        if step is not None:
            step()


def train_plain(plain, skipped, *, windows=2, microbatches=1, step=None):
    world = dist.get_world_size()
    for _ in range(windows):
        for number in range(microbatches):
            for rank in range(world):
                (loss_of(plain, rank, skipped, number) / world).backward()
        if step is not None:
            step()


def grads_of(plain):
    return {name: param.grad for name, param in plain.named_parameters()}


SKIPPED = ["tower", "main", "auxiliary"]


@pytest.mark.parametrize("reshard_after_forward", [None, False])
@pytest.mark.parametrize("skipped", SKIPPED)
@pytest.mark.parametrize("num_ranks", MESHES)
def test_a_unit_that_one_rank_leaves_out(skipped, num_ranks, reshard_after_forward):
    @on_threads(num_ranks)
    def run():
        plain = seeded(Heads())
        options = {"reshard_after_forward": reshard_after_forward}
        model = wrap(copy.deepcopy(plain), MESHES[num_ranks], **options)
        train(model, skipped)
        train_plain(plain, skipped)
        assert_same(full_grads(model), grads_of(plain))

    run()


@pytest.mark.parametrize("skipped", SKIPPED)
@on_ranks(2)
def test_all_ranks_issue_the_same_collectives(skipped):
    model = wrap(seeded(Heads()), (2,))
    with meshard.CommLedger(model) as ledger:
        train(model, skipped)
    events = "".join(f"{event.op} {event.unit}\n" for event in ledger.events)
    text = torch.frombuffer(bytearray(events.encode()), dtype=torch.uint8).to(torch.int32)
    other = text.clone()
    dist.broadcast(other, 0)
    assert torch.equal(text, other), events


@pytest.mark.parametrize("sync", [GradientSync.NONE, GradientSync.REDUCE_SCATTER])
@pytest.mark.parametrize("skipped", SKIPPED)
def test_with_accumulation_and_replicas(skipped, sync):
    @on_threads(4)
    def run():
        plain = seeded(Heads())
        model = wrap(copy.deepcopy(plain), (2, 2))
        train(model, skipped, windows=1, microbatches=3, sync=sync)
        train_plain(plain, skipped, windows=1, microbatches=3)
        assert_same(full_grads(model), grads_of(plain))

    run()


@pytest.mark.parametrize("skipped", SKIPPED)
@on_ranks(2)
def test_with_an_optimizer_in_backward(skipped):
    plain = seeded(Heads())
    model = wrap(copy.deepcopy(plain), (2,))
    meshard.overlap_optimizer(model, torch.optim.SGD, lr=0.1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

    def step():
        optimizer.step()
        optimizer.zero_grad()

    train(model, skipped)
    train_plain(plain, skipped, step=step)
    assert_same(full_state(model), full_state(plain))


@pytest.mark.parametrize("skipped", SKIPPED)
@on_threads(2)
def test_in_the_last_of_several_forwards(skipped):
    plain = seeded(Heads())
    model = wrap(copy.deepcopy(plain), (2,))
    rank = dist.get_rank()
    (loss_of(model, rank, "") + loss_of(model, rank, skipped, 1)).backward()
    for rank in range(2):
        ((loss_of(plain, rank, "") + loss_of(plain, rank, skipped, 1)) / 2).backward()
    assert_same(full_grads(model), grads_of(plain))


@pytest.mark.parametrize("skipped", SKIPPED)
@on_threads(2)
def test_in_the_second_backward_through_one_graph(skipped):
    plain = seeded(Heads())
    model = wrap(copy.deepcopy(plain), (2,))
    rank = dist.get_rank()
    for each, module, share in [(rank, model, 1), *((other, plain, 2) for other in range(2))]:
        uses_tower = skipped != "tower" or each == 0
        main, auxiliary = (out.square().mean() / share for out in module(batch_of(each), True))
        (main + auxiliary).backward(retain_graph=True)
        if uses_tower:
            parts = {"main": main, "auxiliary": auxiliary}
            used = [part for name, part in parts.items() if name != skipped or each == 0]
            sum(used).backward()
        else:
            (main * 0.5).backward()
    assert_same(full_grads(model), grads_of(plain))


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
    plain = seeded(Chain())
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.layers:
        meshard.fully_shard(layer.frozen, mesh)
        meshard.fully_shard(layer, mesh)
    for unit in (model.first, model):
        meshard.fully_shard(unit, mesh)
    rank = dist.get_rank()
    for _ in range(2):
        model(batch_of(rank), rank == 0).backward()
        for each in range(2):
            (plain(batch_of(each), each == 0) / 2).backward()
    assert_same(full_grads(model), grads_of(plain))


@on_threads(2)
def test_an_output_without_backward_that_one_rank_keeps_changes_nothing():
    plain = seeded(Heads())
    model = wrap(copy.deepcopy(plain), (2,))
    rank, kept = dist.get_rank(), []
    for _ in range(2):
        output = model.auxiliary(batch_of(rank))  # with a graph, for a log
        if rank == 0:
            kept.append(output)
        del output
        model.main(batch_of(rank)).square().mean().backward()
    for each in (0, 1, 0, 1):
        (plain.main(batch_of(each)).square().mean() / 2).backward()
    assert_same(full_grads(model), grads_of(plain))
    assert len(kept) == (2 if rank == 0 else 0)


class OwnNorm(nn.Module):
    """A root with parameters of its own, which are complete early where the head is left out."""

    def __init__(self):
        super().__init__()
        self.inp, self.norm, self.head = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.norm(self.inp(x))
        return self.head(x), x


def own_norm_steps(model, rank, scale, how):
    """Leave the head out of the last loss on odd ranks."""
    first = model(batch_of(rank))
    if how == "kept graph":
        second = first
    elif how == "two forwards":
        second = model(batch_of(rank, 1))
    if how != "one backward":
        (sum(out.square().sum() for out in first) * scale).backward(
            retain_graph=how == "kept graph"
        )
    else:
        second = first
    outs = second[1:] if rank % 2 else second
    (sum(out.square().sum() for out in outs) * scale).backward()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("how", ["one backward", "two forwards", "kept graph"])
@pytest.mark.parametrize("reshard_after_forward", [None, False])
@pytest.mark.parametrize("num_ranks", MESHES)
def test_a_root_with_parameters_is_reduced_after_a_skipped_head(
    num_ranks, reshard_after_forward, how, frozen
):
    @on_threads(num_ranks)
    def run():
        plain = seeded(OwnNorm())
        plain.head.requires_grad_(not frozen)
        model = copy.deepcopy(plain)
        mesh = init_device_mesh("cpu", (num_ranks,))
        for unit in (model.head, model):
            meshard.fully_shard(unit, mesh, reshard_after_forward=reshard_after_forward)
        for _ in range(2):
            own_norm_steps(model, dist.get_rank(), 1.0, how)
        for _ in range(2):
            for rank in range(num_ranks):
                own_norm_steps(plain, rank, 1 / num_ranks, how)
        assert_same(full_grads(model), grads_of(plain))

    run()


class TwoOutputs(nn.Module):
    """A root with parameters of its own that returns more than one tensor."""

    def __init__(self):
        super().__init__()
        self.inp, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        x = self.norm(self.inp(x))
        return *(head(x) for head in self.heads), x


@on_threads(2)
def test_ranks_that_use_different_numbers_of_outputs():
    plain = seeded(TwoOutputs())
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (2,))
    for unit in (*model.heads, model):
        meshard.fully_shard(unit, mesh)
    rank = dist.get_rank()
    for each, module, share in [(rank, model, 1), *((other, plain, 2) for other in range(2))]:
        outputs = module(batch_of(each))
        used = outputs[-1:] if each % 2 else outputs
        (sum(out.square().mean() for out in used) / share).backward()
    assert_same(full_grads(model), grads_of(plain))


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
    plain = seeded(Repeated())
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (2,))
    for unit in (*model.layers, model.head, model):
        meshard.fully_shard(unit, mesh)

    def step(module, rank, share):
        used = [module(batch_of(rank, number)) for number in range(num_forwards)]
        if rank % 2:
            used[-1] = used[-1][:1]
        (sum(out.square().sum() for outs in used for out in outs) * share).backward()

    for _ in range(2):
        step(model, dist.get_rank(), 1.0)
        for rank in range(2):
            step(plain, rank, 0.5)
    assert_same(full_grads(model), grads_of(plain))


class Stage(nn.Module):
    """A stage of a pipeline. Odd data-parallel ranks do not use what its tower returns."""

    def __init__(self, uses_tower):
        super().__init__()
        self.tower, self.layer = nn.Linear(4, 4), nn.Linear(4, 4)
        self.uses_tower = uses_tower

    def forward(self, x):
        seen = self.tower(x)
        return self.layer(x + seen if self.uses_tower else x)


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
@on_ranks(4)
def test_a_tower_that_one_rank_leaves_out_of_a_pipeline(schedule):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    position, data = mesh["pipeline"].get_local_rank(), mesh["data"].get_local_rank()
    plain = [seeded(Stage(True), number) for number in range(2)]
    own = copy.deepcopy(plain[position])
    own.uses_tower = data == 0
    for unit in (own.tower, own.layer, own):
        meshard.fully_shard(unit, mesh["data"], reshard_after_forward=False)
    group = mesh["pipeline"].get_group()
    stage = PipelineStage(own, position, 2, torch.device("cpu"), group=group)
    pipeline = getattr(schedules, schedule)(stage, 4, nn.functional.mse_loss)
    batches = [torch.randn(8, 4, generator=torch.Generator().manual_seed(rank)) for rank in (0, 1)]
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
        assert_same(full_grads(own), grads_of(plain[position]))
        for module in (own, *plain):  # a step of the pipeline divides all that is in .grad
            module.zero_grad()


# --- recomputations -------------------------------------------------------------------------------


class Choice(nn.Module):
    """A layer that uses its second weight on even ranks only."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, uses_second):
        x = self.first(x).tanh()
        return self.second(x) if uses_second else x * 1.5


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
def test_recomputed_regions_and_unused_parameters(use_reentrant, inner):
    @on_threads(2)
    def run():
        plain = seeded(Regions(use_reentrant, inner))
        model = copy.deepcopy(plain)
        mesh = init_device_mesh("cpu", (2,))
        for unit in (*model.layers, model.head, model):
            meshard.fully_shard(unit, mesh, reshard_after_forward=True)
        rank = dist.get_rank()
        for _ in range(2):
            model(batch_of(rank).requires_grad_(), rank == 0).square().mean().backward()
            for each in range(2):
                loss = plain(batch_of(each).requires_grad_(), each == 0).square().mean() / 2
                loss.backward()
        assert_same(full_grads(model), grads_of(plain))

    run()


# --- views, and torch.autograd.grad ---------------------------------------------------------------


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
@on_ranks(2)
def test_a_unit_whose_view_of_its_input_is_not_used(overlapped):
    model = seeded(WithView())
    mesh = init_device_mesh("cpu", (2,))
    for unit in (model.first, model.second, model):
        meshard.fully_shard(unit, mesh)
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


def sharded_energy():
    plain = seeded(Energy())
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (2,))
    for unit in (*model.layers, model):
        meshard.fully_shard(unit, mesh)
    return model, plain


def forces_of(model, rank, **options):
    x = batch_of(rank).requires_grad_()
    return torch.autograd.grad(model(x), x, **options)[0]


@on_ranks(2)
def test_gradients_by_inputs_reduce_nothing():
    model, plain = sharded_energy()
    rank = dist.get_rank()
    for _ in range(2):
        with meshard.CommLedger(model) as ledger:
            forces = forces_of(model, rank)
        assert_same(forces, forces_of(plain, rank))
        assert set(ledger.counts) == {"all_gather"}
    model(batch_of(rank)).backward()
    for each in range(2):
        (plain(batch_of(each)) / 2).backward()
    assert_same(full_grads(model), grads_of(plain))


@on_ranks(2)
def test_gradients_by_inputs_in_the_middle_of_a_window():
    model, plain = sharded_energy()
    rank = dist.get_rank()
    with meshard.no_sync(model):
        model(batch_of(rank)).backward()
    forces_of(model, rank)
    assert meshard.pending_gradients(model)
    model(batch_of(rank, 1)).backward()
    for each in range(2):
        ((plain(batch_of(each)) + plain(batch_of(each, 1))) / 2).backward()
    assert_same(full_grads(model), grads_of(plain))


@on_ranks(2)
def test_a_loss_of_forces_is_reduced_once():
    model, plain = sharded_energy()
    rank = dist.get_rank()
    for _ in range(2):
        with meshard.CommLedger(model) as ledger:
            forces_of(model, rank, create_graph=True).square().mean().backward()
        for each in range(2):
            (forces_of(plain, each, create_graph=True).square().mean() / 2).backward()
    assert_same(full_grads(model), grads_of(plain))
    assert ledger.counts["reduce_scatter"] == 3
