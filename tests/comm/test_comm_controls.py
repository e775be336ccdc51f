"""Custom collectives, groups and limits that the user sets."""

import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_api as peer

import meshard
from meshard import CommLedger, GradientSync, MixedPrecisionPolicy
from meshard._comm import communicator
from meshard._torch.private import all_gather_single
from tests.support import insides
from tests.support.against_plain import check_gradients
from tests.support.models import MlpStack, seeded
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import on_ranks, on_threads
from tests.support.sharding import shard_blocks
from tests.support.spread import spread
from tests.support.threads import run_threads

BF16_COMPUTE = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BF16_REDUCE = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)


class Counting:
    """Allocates, and remembers what it was asked for."""

    def __init__(self):
        self.calls, self.groups, self.given, self.most_alive = 0, [], [], 0
        self.outputs, self._inputs = set(), []

    def allocate(self, size, *, dtype, device):
        tensor = torch.empty(size, dtype=dtype, device=device)
        self.given.append(tensor.data_ptr())
        return tensor

    def note(self, output_tensor, input_tensor, group):
        self.calls += 1
        self.outputs.add(output_tensor.data_ptr())
        self.groups.append(group)
        self._inputs.append(weakref.ref(input_tensor.untyped_storage()))
        self.most_alive = max(self.most_alive, sum(ref() is not None for ref in self._inputs))


class MyAllGather(Counting, peer.AllGather):
    """Written for FSDP2: a subclass of torch's own interface."""

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.note(output_tensor, input_tensor, group)
        return all_gather_single(output_tensor, input_tensor, group, async_op=async_op)


class MyReduceScatter(Counting, peer.ReduceScatter):
    """The same for gradients; on gloo as a plain all-reduce."""

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.note(output_tensor, input_tensor, group)
        assert op == dist.ReduceOp.SUM
        rows = input_tensor.view(group.size(), -1).clone()
        dist.all_reduce(rows, op, group)
        output_tensor.copy_(rows[group.rank()])


def step(model):
    model(torch.ones(1, 6) * (dist.get_rank() + 1)).sum().backward()


def train(mesh_shape=(2,), policy=None, prepare=None):
    """Train two windows of R and F; return gradients, counts, and what ``prepare`` returned."""
    mesh, policy = init_device_mesh("cpu", mesh_shape), policy or MixedPrecisionPolicy()
    model = seeded(MlpStack())
    for block in model.blocks:
        meshard.fully_shard(block, mesh, mp_policy=policy)
    first = prepare(model.blocks[0]) if prepare else None
    meshard.fully_shard(model, mesh, mp_policy=policy)
    with CommLedger(model) as ledger:
        for sync in (GradientSync.REDUCE_SCATTER, GradientSync.FULL) * 2:
            model.set_gradient_sync(sync)
            step(model)
    return full_grads(model), ledger.counts, first


def with_counts_apart(expected, scatter):
    """Each custom reduce-scatter is followed by a small all-reduce: which parameters are used."""
    apart = {"all_reduce": expected.get("all_reduce", 0) + scatter.calls}
    return {**expected, **apart} if scatter.calls else expected


def use_custom(unit):
    gather, scatter = MyAllGather(), MyReduceScatter()
    unit.set_custom_all_gather(gather)
    unit.set_custom_reduce_scatter(scatter)
    return gather, scatter


@on_ranks(2)
@pytest.mark.parametrize("recurse", [True, False])
def test_what_is_set_on_the_root_holds_inside_too_unless_recurse_is_false(recurse):
    model, gather = shard_blocks(seeded(MlpStack())), MyAllGather()
    model.set_custom_all_gather(gather, recurse=recurse)
    with CommLedger(model) as ledger:
        step(model)
    units = [event.unit for event in ledger.events if event.op == "all_gather"]
    assert len(units) > 3
    assert gather.calls == (len(units) if recurse else units.count("(root)"))


@spread(mesh_shape=[(3,), (2, 2), (2, 1)], policy=[None, BF16_COMPUTE, BF16_REDUCE])
def test_custom_collectives_give_the_same_gradients(mesh_shape, policy):
    def compare():
        expected, plain_counts, _ = train(mesh_shape, policy)
        grads, counts, (gather, scatter) = train(mesh_shape, policy, use_custom)
        # The custom reduce-scatter adds in another order, and in the dtype in which it sends.
        dtype = torch.bfloat16 if policy is BF16_REDUCE else torch.float32
        assert_same(grads, expected, dtype, bitwise=mesh_shape[-1] <= 2 and not policy)
        used = mesh_shape[-1] > 1
        assert counts == with_counts_apart(plain_counts, scatter)
        assert gather.calls == (8 if used else 0)  # forward and backward of four microbatches
        assert scatter.calls == (4 if used else 0)
        if used:
            assert len(gather.given) == gather.calls
            assert gather.outputs <= set(gather.given)
            assert scatter.outputs <= set(scatter.given)

    run_threads(compare, torch.Size(mesh_shape).numel())


@on_ranks(2)
def test_custom_collectives_on_gloo():
    grads, _, (gather, _) = train(prepare=use_custom)
    assert_same(grads, train()[0], bitwise=True)
    assert gather.calls == 8


@on_threads(2)
def test_none_undoes_a_custom_collective():
    def use_and_undo(unit):
        customs = use_custom(unit)
        unit.set_custom_all_gather(None)
        unit.set_custom_reduce_scatter(None)
        return customs

    customs = train(prepare=use_and_undo)[2]
    assert [custom.calls for custom in customs] == [0, 0]


def separate(unit):
    unit.set_separate_reduce_scatter_group()
    scatter = MyReduceScatter()
    unit.set_custom_reduce_scatter(scatter)
    return scatter


@on_ranks(2)
def test_gradients_may_travel_on_a_group_of_their_own():
    expected, plain_counts, _ = train()
    grads, counts, scatter = train(prepare=separate)
    assert_same(grads, expected, bitwise=True)
    assert counts == with_counts_apart(plain_counts, scatter)
    assert dist.get_process_group_ranks(scatter.groups[0]) == [0, 1]
    assert dist.group.WORLD not in scatter.groups


@on_ranks(2)
def test_the_second_group_can_be_turned_off_and_on():
    mesh = init_device_mesh("cpu", (2,))
    model = meshard.fully_shard(seeded(MlpStack()), mesh)
    scatter = separate(model)
    for is_separate in (False, True):
        model.set_separate_reduce_scatter_group(is_separate)
        step(model)
    model.set_separate_reduce_scatter_group(True)  # a second mesh group would be a leak
    assert [group is mesh.get_group() for group in scatter.groups] == [True, False]


@pytest.mark.slow
@on_threads(4)
def test_inputs_of_reductions_are_no_more_than_allowed():
    expected = None
    for limit, mesh_shape in ((1, (2, 2)), (2, (2, 2)), (3, (2, 2)), (1, (4,))):
        scatter = MyReduceScatter()
        model = shard_blocks(seeded(MlpStack(depth=6)), init_device_mesh("cpu", mesh_shape))
        for block in model.blocks:
            block.set_custom_reduce_scatter(scatter)
        step(model)
        model.set_reduce_scatter_max_input_buffers(limit)  # late: effective all the same
        scatter.most_alive = 0
        step(model)
        assert 1 <= scatter.most_alive <= limit, (limit, mesh_shape)
        expected = expected or full_grads(model)
        assert_same(full_grads(model), expected)


@on_ranks(2)
def test_a_backend_without_memory_is_used_as_before_until_a_custom_collective_is_set():
    model = meshard.fully_shard(seeded(MlpStack()))
    (unit,) = insides.units(model)
    usual = unit.lifecycle.comm
    model.set_allocate_memory_from_process_group_for_comm(True)
    assert unit.group.comm is usual
    step(model)
    gather = MyAllGather()
    model.set_custom_all_gather(gather)
    step(model)
    assert gather.calls


@on_ranks(2)
def test_a_custom_collective_overrides_the_memory_of_the_process_group():
    asked = []

    class Allocator:
        def supports_tensor_alloc(self, device):
            return True

        def allocate_tensor(self, numel, *, dtype, device):
            asked.append(numel)
            return torch.empty(numel, dtype=dtype, device=device)

    model = meshard.fully_shard(seeded(MlpStack()))
    with mock.patch.object(communicator, "backend_of", return_value=Allocator()):
        model.set_allocate_memory_from_process_group_for_comm(True)
        step(model)
        assert asked
        use_custom(model)
        model.set_allocate_memory_from_process_group_for_comm(True)
        asked.clear()
        step(model)
        assert not asked


@on_threads(2)
def test_stages_of_a_pipeline_share_their_streams():
    plain = nn.Sequential(*[seeded(MlpStack()) for _ in range(2)])
    model = nn.Sequential(*[shard_blocks(seeded(MlpStack())) for _ in range(2)])
    meshard.share_comm_ctx([*model])
    units = insides.units(model)
    comms = [comm for unit in units for comm in (unit.group.comm, unit.lifecycle.comm)]
    assert len({id(comm._rings) for comm in comms}) == 1
    check_gradients(model, plain)
