"""May each parameter choose its dim and its mesh, also where torch's fully_shard fails?"""

import copy
import functools
import gc
import re
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common as torch_common
from torch.distributed.tensor import Replicate, Shard

import meshard
from meshard import CommLedger, GradientSync, MixedPrecisionPolicy, ShardPlacementResult
from tests.support.fake import fake_group
from tests.support.models import UnevenMlp, seeded
from tests.support.parity import (
    assert_same,
    assert_same_run,
    full_grads,
    full_state,
    train,
    train_plain,
)
from tests.support.threads import run_threads

SGD = functools.partial(torch.optim.SGD, lr=0.1)
STEPS = 3


def last_dim(param):
    return Shard(param.dim() - 1)


def alternating(param):
    return Shard(param.shape[0] % param.dim())


# --- any dim, even or not -------------------------------------------------------------------


def loss_of(output):
    return (output + 0.5).square().mean()


def batch_of(step, rank, width=7):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, width, generator=generator)


def train_uneven(placement_fn, mesh_shape, reshard_after_forward, shard=meshard.fully_shard):
    model = seeded(UnevenMlp())
    mesh = init_device_mesh("cpu", mesh_shape)
    for module in (*model.layers, model):
        shard(
            module,
            mesh=mesh,
            shard_placement_fn=placement_fn,
            reshard_after_forward=reshard_after_forward,
        )
    mine = [batch_of(step, dist.get_rank()) for step in range(STEPS)]
    return train(model, mine, SGD, loss_fn=loss_of, reduce_loss="mean")


@pytest.mark.parametrize("reshard_after_forward", [True, False, 2])
@pytest.mark.parametrize("placement_fn", [last_dim, alternating])
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 4)])
def test_dims_that_nothing_divides_train_like_one_process(
    placement_fn, mesh_shape, reshard_after_forward
):
    num_ranks = 4 if len(mesh_shape) == 1 else 8
    batches = [torch.cat([batch_of(s, r) for r in range(num_ranks)]) for s in range(STEPS)]
    expected = train_plain(seeded(UnevenMlp()), batches, SGD, loss_fn=loss_of)
    runs = run_threads(train_uneven, num_ranks, placement_fn, mesh_shape, reshard_after_forward)
    for run in runs:
        assert_same_run(run, expected)


def test_torch_shards_dim_1_evenly_only():
    """Measured on torch 2.13: refused where the ranks do not divide the dim."""
    with fake_group(4):
        mesh = init_device_mesh("cpu", (4,))
        meshard.fully_shard(nn.Linear(7, 8), mesh, shard_placement_fn=last_dim)
        with pytest.raises(NotImplementedError, match="uneven sharding"):
            torch_fully_shard(nn.Linear(7, 8), mesh=mesh, shard_placement_fn=last_dim)


def forward_backward_of_dim_1(shard):
    layer = seeded(nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (4,))
    net = nn.Sequential(layer)
    for module in (layer, net):
        shard(module, mesh=mesh, shard_placement_fn=last_dim, reshard_after_forward=2)
    net(batch_of(0, 0, width=8)).square().sum().backward()
    return full_grads(net)


def test_torch_keeps_no_neighbours_of_dim_1(run_ranks):
    """Measured on torch 2.13: an int for reshard_after_forward fails in backward."""
    plain = nn.Sequential(seeded(nn.Linear(8, 8)))
    plain(batch_of(0, 0, width=8)).square().sum().backward()
    for grads in run_ranks(forward_backward_of_dim_1, 4, meshard.fully_shard, timeout=200):
        assert_same(grads, full_grads(plain))
    with pytest.raises(Exception, match=r"rank \d of 4"):
        run_ranks(forward_backward_of_dim_1, 4, torch_fully_shard)


# --- several meshes in one unit -------------------------------------------------------------


class Block(nn.Module):
    """A dense layer and an expert; the expert's parameters go onto a mesh of their own."""

    def __init__(self, dim):
        super().__init__()
        self.dense = nn.Linear(dim, dim)
        self.expert = nn.Linear(dim, dim)

    def forward(self, x):
        return x + self.expert(torch.tanh(self.dense(x)))


class Net(nn.Module):
    """Blocks between parameters of the root, which has an expert too."""

    def __init__(self, dim=5):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(dim))
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.expert = nn.Linear(dim, dim)

    def forward(self, x):
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return self.expert(x)


def is_expert(name):
    return "expert" in name


def meshes(kind):
    """Return the mesh of most parameters, and that of the experts."""
    if kind == "flat":
        world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "edp"))
        return init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), world["edp"]
    world = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("ep", "nodes", "edp"))
    hybrid = init_device_mesh("cpu", (2, 4), mesh_dim_names=("nodes", "dp"))
    return hybrid, world["nodes", "edp"]


def build():
    return seeded(Net())


def shard(model, kind, **kwargs):
    most, of_experts = meshes(kind)
    experts = {param for name, param in model.named_parameters() if is_expert(name)}

    def placement_fn(param):
        return ShardPlacementResult(last_dim(param), of_experts) if param in experts else None

    for module in (*model.blocks, model):
        meshard.fully_shard(module, most, shard_placement_fn=placement_fn, **kwargs)
    return model


SCHEDULES = [
    [GradientSync.FULL],
    [GradientSync.NONE, GradientSync.REDUCE_SCATTER, GradientSync.FULL],
]


def train_experts(kind, schedule, divide_factor=None, **kwargs):
    model = shard(build(), kind, **kwargs)
    if divide_factor is not None:
        model.set_gradient_divide_factor(divide_factor)
    optimizer = SGD(model.parameters())
    records = []
    for step in range(STEPS):
        for number, mode in enumerate(schedule):
            model.set_gradient_sync(mode)
            loss_of(model(batch_of(10 * step + number, dist.get_rank(), width=5))).backward()
        norm = meshard.clip_grad_norm_(model, 1e6)
        grads = full_grads(model)
        optimizer.step()
        optimizer.zero_grad()
        records.append((grads, full_state(model), norm))
    return records


def simulate(num_ranks, schedule, divide_factor=None):
    """Return what every rank should see: each half of the ranks trains experts of its own."""
    halves = [build() for _ in range(2)]
    optimizers = [SGD(model.parameters()) for model in halves]
    records = []
    for step in range(STEPS):
        sums = [None, None]
        for rank in range(num_ranks):
            half = rank // (num_ranks // 2)
            model = copy.deepcopy(halves[half])
            for number in range(len(schedule)):
                loss_of(model(batch_of(10 * step + number, rank, width=5))).backward()
            grads = full_grads(model)
            sums[half] = (
                grads if sums[half] is None else {n: g + grads[n] for n, g in sums[half].items()}
            )
        own = divide_factor or num_ranks / 2
        everywhere = divide_factor or num_ranks
        for half, model in enumerate(halves):
            for name, param in model.named_parameters():
                if is_expert(name):
                    param.grad = sums[half][name] / own
                else:
                    param.grad = (sums[0][name] + sums[1][name]) / everywhere
        norms = [nn.utils.get_total_norm([p.grad for p in m.parameters()]) for m in halves]
        grads = [full_grads(model) for model in halves]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        records.append([(grads[h], full_state(halves[h]), norms[h]) for h in range(2)])
    return records


def assert_simulated(runs, expected):
    for rank, run in enumerate(runs):
        for step, record in enumerate(run):
            wanted = expected[step][rank // (len(runs) // 2)]
            for what, one, other in zip(("grad", "param", "norm"), record, wanted, strict=True):
                assert_same(one, other, what=f"rank {rank}, step {step}, {what}")


@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_parameter_is_reduced_over_its_own_mesh(schedule, reshard_after_forward):
    runs = run_threads(
        train_experts, 4, "flat", schedule, reshard_after_forward=reshard_after_forward
    )
    assert_simulated(runs, simulate(4, schedule))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_replicas_of_several_meshes(schedule):
    runs = run_threads(train_experts, 8, "hybrid", schedule, reshard_after_forward=2)
    assert_simulated(runs, simulate(8, schedule))


def test_one_divide_factor_holds_for_all_meshes():
    runs = run_threads(train_experts, 4, "flat", SCHEDULES[0], divide_factor=8.0)
    assert_simulated(runs, simulate(4, SCHEDULES[0], divide_factor=8.0))


def test_real_processes_agree(run_ranks):
    runs = run_ranks(train_experts, 4, "flat", SCHEDULES[1], timeout=200)
    assert_simulated(runs, simulate(4, SCHEDULES[1]))


def train_peer(shard_with, result_of, divide_factor):
    most, of_experts = meshes("flat")
    model = build()
    experts = {param for name, param in model.named_parameters() if is_expert(name)}

    # Of dim 0 for all: torch shards other dims evenly only. Made once: it asks for the same object.
    own, others = result_of(Shard(0), of_experts), result_of(Shard(0), most)

    def placement_fn(param):
        return own if param in experts else others

    for module in (*model.blocks, model):
        shard_with(module, mesh=most, shard_placement_fn=placement_fn)
    for module in (*model.blocks, model):
        if divide_factor is not None:
            module.set_gradient_divide_factor(divide_factor)
        module.set_force_sum_reduction_for_comms(True)  # torch has no PREMUL_SUM on gloo
    loss_of(model(batch_of(0, dist.get_rank(), width=5))).backward()
    return full_grads(model)


def torch_result(placement, mesh):
    return torch_common.ShardPlacementResult(placement, torch_common.FSDPMeshInfo(mesh, 0))


@pytest.mark.slow
@pytest.mark.parametrize("divide_factor", [None, 1.0])
def test_torch_divides_by_the_same(run_ranks, divide_factor):
    """By the ranks of each parameter's own mesh; and its results for a placement fit here."""
    theirs = run_ranks(train_peer, 4, torch_fully_shard, torch_result, divide_factor, timeout=200)
    ours = run_ranks(train_peer, 4, meshard.fully_shard, ShardPlacementResult, divide_factor)
    moved = run_ranks(train_peer, 4, meshard.fully_shard, torch_result, divide_factor)
    for one, other, third in zip(ours, theirs, moved, strict=True):
        assert_same(one, other)
        assert_same(third, other)


def look_at_units():
    model = shard(build(), "flat")
    most = model.scale.device_mesh
    assert model.blocks[0].dense.weight.placements == (Shard(0),)
    assert model.blocks[0].dense.weight.device_mesh == most
    expert = model.blocks[0].expert.weight
    assert expert.placements == (Shard(1),) and expert.device_mesh.mesh_dim_names == ("edp",)
    with CommLedger(model) as ledger:
        model(batch_of(0, 0, width=5)).sum().backward()
    in_order = ["(root)", "blocks.0", "blocks.1"]
    units = [label for name in in_order for label in (name, f"{name} on edp=2")]
    gathers = [event for event in ledger.events if event.op == "all_gather"]
    assert sorted({event.unit for event in gathers}) == sorted(units)
    assert {event.group_size for event in gathers if "edp" in event.unit} == {2}
    assert {event.group_size for event in gathers if "edp" not in event.unit} == {4}
    reduced = [event.unit for event in ledger.events if event.op == "reduce_scatter"]
    first = list(dict.fromkeys(reduced))  # in a process of its own, each comes once
    assert first == [
        "blocks.1 on edp=2",
        "blocks.1",
        "blocks.0 on edp=2",
        "blocks.0",
        "(root) on edp=2",
        "(root)",
    ]
    assert [line.split("  ")[0] for line in meshard.describe(model).splitlines()[1:7]] == units
    with CommLedger(model) as ledger:  # now that the order is known
        model(batch_of(0, 0, width=5)).sum().backward()
    gathered = [event.unit for event in ledger.events if event.op == "all_gather"]
    assert gathered == [*units, *units[4:], *units[2:4]]
    return len(gathers), len(reduced)


def test_every_mesh_has_a_unit_and_the_inner_one_is_reduced_first(run_ranks):
    counts = run_ranks(look_at_units, 4, timeout=200)
    assert counts == [(2 * 2 * 3 - 2, 2 * 3)] * 4  # the root, both of it, stays whole for backward


def call_setters():
    model = shard(build(), "flat")
    block = model.blocks[0]
    own = [vars(block)["_meshard_unit"], *vars(block)["_meshard_unit"].companions]
    assert len(own) == 2
    block.set_requires_gradient_sync(False, recurse=False)
    assert {unit.settings.sync for unit in own} == {GradientSync.NONE}
    block.set_gradient_sync(GradientSync.FULL, recurse=False)
    block.set_unshard_in_backward(False)
    assert not any(unit.settings.unshard_in_backward for unit in own)
    block.set_unshard_in_backward(True)
    model.set_modules_to_forward_prefetch([block])
    prefetched = vars(model)["_meshard_unit"].settings.forward_prefetch
    assert [ref() for ref in prefetched] == own
    model.set_modules_to_forward_prefetch([])
    seen = []
    hook = type("Hook", (), {"after": lambda self, shard: seen.append(shard.numel())})()
    handle = meshard.register_reduce_hook(block, hook, recurse=False)
    block.unshard()
    assert block.dense.weight.shape == block.expert.weight.shape == (5, 5)
    assert type(block.dense.weight) is type(block.expert.weight) is nn.Parameter
    block.reshard()
    assert block.expert.weight.device_mesh.size() == 2
    handle_of_gather = block.unshard(async_op=True)
    handle_of_gather.wait()
    assert type(block.expert.weight) is nn.Parameter
    block.reshard()
    model(batch_of(0, 0, width=5)).sum().backward()
    assert len(seen) == 2
    handle.remove()


def test_calls_on_a_module_reach_all_of_its_units():
    run_threads(call_setters, 4)


def edit_after_a_forward():
    model = shard(build(), "flat")
    x = batch_of(0, 0, width=5)
    before = model(x)  # without a backward, the root is left whole
    for param in (model.scale, model.expert.weight, model.expert.bias):
        param.data.to_local().mul_(2)  # raises no version
    after = model(x)
    plain = build()
    assert_same(before, plain(x))
    with torch.no_grad():
        for param in (plain.scale, plain.expert.weight, plain.expert.bias):
            param.mul_(2)
    assert_same(after, plain(x))


def test_what_a_forward_left_whole_is_not_trusted_on_any_mesh():
    run_threads(edit_after_a_forward, 4)


class Stop(Exception):
    pass


def fail_inside():
    model = shard(build(), "flat")
    x = batch_of(0, 0, width=5)

    def stop(*_):
        raise Stop

    handle = model.blocks[1].expert.register_forward_hook(stop)
    with pytest.raises(Stop):
        model(x)
    handle.remove()
    for param in model.parameters():
        assert hasattr(param, "device_mesh")
    model(x).square().sum().backward()
    plain = build()
    plain(x).square().sum().backward()
    assert_same(full_grads(model), full_grads(plain))


def test_an_exception_leaves_all_meshes_sharded():
    run_threads(fail_inside, 4)


def compute_in_bfloat16():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = shard(build(), "flat", mp_policy=policy)
    seen = []
    model.blocks[0].expert.register_forward_hook(lambda m, a, y: seen.append((a[0].dtype, y.dtype)))
    out = model(batch_of(0, 0, width=5))
    assert out.dtype == torch.bfloat16 and seen == [(torch.bfloat16, torch.bfloat16)]
    unit = vars(model)["_meshard_unit"]
    assert [(each.casts.inputs, each.casts.outputs) for each in (unit, *unit.companions)] == [
        (torch.bfloat16, None),
        (None, None),
    ]
    return out.float()


def test_inputs_and_outputs_are_cast_once():
    expected = build()(batch_of(0, 0, width=5))
    for out in run_threads(compute_in_bfloat16, 4):
        assert_same(out, expected, torch.bfloat16)


class Inner(nn.Module):
    """A unit whose parameters are all on another mesh, inside of one that has both."""

    def __init__(self):
        super().__init__()
        self.block = Block(5)
        self.head = nn.Linear(5, 5)

    def forward(self, x):
        return self.head(self.block(x))


def nest():
    most, of_experts = meshes("flat")
    model = seeded(Inner())
    meshard.fully_shard(
        model.block.expert,
        most,
        shard_placement_fn=lambda _: ShardPlacementResult(Shard(0), of_experts),
    )
    assert not vars(model.block.expert)["_meshard_unit"].companions

    head = set(model.head.parameters())

    def head_elsewhere(param):
        return ShardPlacementResult(Shard(0), of_experts) if param in head else None

    meshard.fully_shard(model, most, shard_placement_fn=head_elsewhere)
    x = batch_of(0, 0, width=5)
    optimizer = SGD(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        grads = full_grads(model)
        optimizer.step()
    alive = weakref.ref(model.head.weight)
    state = full_state(model)
    gc.disable()
    try:
        del model, optimizer
        assert alive() is None
    finally:
        gc.enable()
    return grads, state


def test_units_nest_and_a_deleted_model_is_gone_at_once():
    plain = seeded(Inner())
    optimizer = SGD(plain.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        plain(batch_of(0, 0, width=5)).square().sum().backward()
        grads = full_grads(plain)
        optimizer.step()
    for found in run_threads(nest, 4):
        assert_same(found[0], grads)
        assert_same(found[1], full_state(plain))


def materialize_several():
    with torch.device("meta"):
        model = Net()
        model.reset_parameters = lambda: nn.init.ones_(model.scale)
    shard(model, "flat")
    torch.manual_seed(3)
    meshard.materialize(model)
    return full_state(model)


@pytest.fixture
def world():
    with fake_group(8):
        yield init_device_mesh("cpu", (8,))


def refused(text, result_of):
    layer = nn.Linear(4, 4)
    before = dict(layer.named_parameters())
    with pytest.raises(ValueError, match=text):
        meshard.fully_shard(layer, shard_placement_fn=result_of)
    assert type(layer) is nn.Linear
    assert all(layer.get_parameter(name) is param for name, param in before.items())


def test_a_mesh_of_three_axes_is_refused(world):
    mesh = init_device_mesh("cpu", (2, 2, 2))
    text = r"shard_placement_fn for parameter 'weight': fully_shard needs a 1D mesh"
    refused(text, lambda _: ShardPlacementResult(Shard(0), mesh))


def test_a_mesh_on_another_device_is_refused(world):
    mesh = DeviceMesh("meta", torch.arange(8))
    text = r"shard_placement_fn returned .* for parameter 'weight', .* meshes of one device type"
    refused(text, lambda _: ShardPlacementResult(Shard(0), mesh))


@pytest.mark.parametrize("result", [Replicate(), 1, (Shard(0), None)])
def test_other_results_are_refused(world, result):
    text = re.escape(f"shard_placement_fn returned {result!r} for parameter 'weight'; return")
    refused(text, lambda _: result)
    refused("shard_placement_fn returned", lambda _: ShardPlacementResult(result, world))


def test_a_dim_that_is_not_there_is_refused(world):
    text = "for parameter 'weight', which has only 2 dims"
    refused(text, lambda _: ShardPlacementResult(Shard(2), world))


def test_an_int_must_divide_the_ranks_of_every_mesh():
    with fake_group(8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("ep", "edp"))
        layer = nn.Linear(4, 4)

        def placement_fn(param):
            return ShardPlacementResult(Shard(0), mesh["ep"]) if param is layer.bias else None

        with pytest.raises(ValueError, match=r"reshard_after_forward=4 must divide the 2 ranks"):
            meshard.fully_shard(layer, reshard_after_forward=4, shard_placement_fn=placement_fn)
        assert type(layer) is nn.Linear


def test_materialized_values_are_those_of_an_unsharded_model(run_ranks):
    torch.manual_seed(3)
    plain = Net()
    nn.init.ones_(plain.scale)
    for state in run_ranks(materialize_several, 4, timeout=200):
        assert_same(state, full_state(plain), bitwise=True)
