"""Custom collectives, groups and limits that the user sets."""

import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_api as peer

import meshard
from meshard import CommLedger, GradientSync, MixedPrecisionPolicy
from meshard._comm import communicator
from meshard._torch.private import all_gather_single
from tests.support.models import MlpStack, seeded
from tests.support.parity import assert_same, full_grads
from tests.support.ranks import on_ranks
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


def train(mesh_shape=(2,), policy=None, prepare=None, model=None):
    """Train two windows of R and F; return gradients, counts, and what ``prepare`` returned."""
    mesh = init_device_mesh("cpu", mesh_shape)
    model = model or seeded(MlpStack())
    kwargs = {"mp_policy": policy} if policy else {}
    for block in model.blocks:
        meshard.fully_shard(block, mesh, **kwargs)
    first = prepare(model.blocks[0]) if prepare else None
    meshard.fully_shard(model, mesh, **kwargs)
    with CommLedger(model) as ledger:
        for sync in (GradientSync.REDUCE_SCATTER, GradientSync.FULL) * 2:
            model.set_gradient_sync(sync)
            model(torch.ones(1, 6) * (dist.get_rank() + 1)).sum().backward()
    return full_grads(model), ledger.counts, first


def use_custom(unit):
    gather, scatter = MyAllGather(), MyReduceScatter()
    unit.set_custom_all_gather(gather)
    unit.set_custom_reduce_scatter(scatter)
    return gather, scatter


def set_on_the_root(recurse):
    model = seeded(MlpStack())
    for block in model.blocks:
        meshard.fully_shard(block)
    meshard.fully_shard(model)
    gather = MyAllGather()
    model.set_custom_all_gather(gather, recurse=recurse)
    with CommLedger(model) as ledger:
        model(torch.ones(1, 6)).sum().backward()
    of_root = sum(event.unit == "(root)" for event in ledger.events if event.op == "all_gather")
    return gather.calls, ledger.counts["all_gather"], of_root


def test_what_is_set_on_the_root_holds_inside(run_ranks):
    for calls, gathers, _ in run_ranks(set_on_the_root, 2, True):
        assert calls == gathers > 3
    for calls, _, of_root in run_ranks(set_on_the_root, 2, False):
        assert calls == of_root


@spread(mesh_shape=[(3,), (2, 2), (2, 1)], policy=[None, BF16_COMPUTE, BF16_REDUCE])
def test_custom_collectives_give_the_same_gradients(mesh_shape, policy):
    num_ranks = mesh_shape[0] * (mesh_shape[1] if len(mesh_shape) > 1 else 1)
    plain = run_threads(train, num_ranks, mesh_shape, policy)
    custom = run_threads(train, num_ranks, mesh_shape, policy, use_custom)
    used = mesh_shape[-1] > 1
    for (grads, counts, (gather, scatter)), (expected, plain_counts, _) in zip(
        custom, plain, strict=True
    ):
        # The custom reduce-scatter adds in another order, and in the dtype in which it sends.
        dtype = torch.bfloat16 if policy is BF16_REDUCE else torch.float32
        assert_same(grads, expected, dtype, bitwise=mesh_shape[-1] <= 2 and not policy)
        assert counts == plain_counts
        assert gather.calls == (8 if used else 0)  # forward and backward of four microbatches
        assert scatter.calls == (4 if used else 0)
        if used:
            assert len(gather.given) == gather.calls
            assert gather.outputs <= set(gather.given)
            assert scatter.outputs <= set(scatter.given)


def train_on_gloo():
    return train((2,), None, use_custom)[::2]


def test_custom_collectives_on_gloo(run_ranks):
    plain = run_ranks(train, 2)
    for (grads, (gather, _)), (expected, _, _) in zip(
        run_ranks(count_on_gloo, 2), plain, strict=True
    ):
        assert_same(grads, expected, bitwise=True)
        assert gather == 8


def count_on_gloo():
    grads, (gather, scatter) = train_on_gloo()
    return grads, (gather.calls, scatter.calls)


def undone(unit):
    customs = use_custom(unit)
    unit.set_custom_all_gather(None)
    unit.set_custom_reduce_scatter(None)
    return customs


def test_none_undoes_a_custom_collective():
    for _, _, customs in run_threads(train, 2, prepare=undone):
        assert [custom.calls for custom in customs] == [0, 0]


def separate(unit):
    unit.set_separate_reduce_scatter_group()
    scatter = MyReduceScatter()
    unit.set_custom_reduce_scatter(scatter)
    return scatter


def train_in_second_group():
    grads, counts, scatter = train((2,), prepare=separate)
    ranks = dist.get_process_group_ranks(scatter.groups[0])
    return grads, counts, ranks, all(group is dist.group.WORLD for group in scatter.groups)


def test_gradients_travel_on_a_group_of_their_own(run_ranks):
    plain = run_ranks(train, 2)
    for (grads, counts, ranks, in_first), (expected, plain_counts, _) in zip(
        run_ranks(train_in_second_group, 2), plain, strict=True
    ):
        assert_same(grads, expected, bitwise=True)
        assert counts == plain_counts
        assert ranks == [0, 1]
        assert not in_first


def back_to_one_group():
    mesh = init_device_mesh("cpu", (2,))
    model = meshard.fully_shard(seeded(MlpStack()), mesh)
    scatter = separate(model)
    model.set_separate_reduce_scatter_group(False)
    model(torch.ones(1, 6)).sum().backward()
    model.set_separate_reduce_scatter_group(True)
    model(torch.ones(1, 6)).sum().backward()
    model.set_separate_reduce_scatter_group(True)  # a second mesh group would be a leak
    return scatter.groups[0] is mesh.get_group(), scatter.groups[1] is mesh.get_group()


def test_the_second_group_can_be_turned_off_and_on(run_ranks):
    assert run_ranks(back_to_one_group, 2) == [(True, False)] * 2


def most_inputs_alive(limit, mesh_shape):
    scatter = MyReduceScatter()
    mesh = init_device_mesh("cpu", mesh_shape)
    model = seeded(MlpStack(depth=6))
    for block in model.blocks:
        meshard.fully_shard(block, mesh).set_custom_reduce_scatter(scatter)
    meshard.fully_shard(model, mesh)
    model(torch.ones(1, 6)).sum().backward()  # set late: effective all the same
    model.set_reduce_scatter_max_input_buffers(limit)
    scatter.most_alive = 0
    model(torch.ones(1, 6)).sum().backward()
    return scatter.most_alive, full_grads(model)


@pytest.mark.slow
def test_inputs_of_reductions_are_no_more_than_allowed():
    expected = None
    for limit, mesh_shape in ((1, (2, 2)), (2, (2, 2)), (3, (2, 2)), (1, (4,))):
        found = run_threads(most_inputs_alive, 4, limit, mesh_shape)
        assert all(alive <= limit for alive, _ in found), (limit, mesh_shape)
        assert limit > 1 or all(alive == 1 for alive, _ in found)
        expected = expected or found[0][1]
        assert_same(found[0][1], expected, bitwise=False)


@on_ranks(2)
def test_a_backend_without_memory_is_used_as_before_until_a_custom_collective_is_set():
    model = meshard.fully_shard(seeded(MlpStack()), init_device_mesh("cpu", (2,)))
    usual = model._meshard_unit.lifecycle.comm
    model.set_allocate_memory_from_process_group_for_comm(True)
    assert model._meshard_unit.group.comm is usual
    model(torch.ones(1, 6)).sum().backward()
    gather = MyAllGather()
    model.set_custom_all_gather(gather)
    model(torch.ones(1, 6)).sum().backward()
    assert gather.calls
    with pytest.raises(ValueError, match="memory of the process group and a custom collective"):
        model.set_allocate_memory_from_process_group_for_comm(True)


@on_ranks(2)
def test_a_custom_collective_overrides_the_memory_of_the_process_group():
    asked = []

    class Allocator:
        def supports_tensor_alloc(self, device):
            return True

        def allocate_tensor(self, numel, *, dtype, device):
            asked.append(numel)
            return torch.empty(numel, dtype=dtype, device=device)

    model = meshard.fully_shard(seeded(MlpStack()), init_device_mesh("cpu", (2,)))
    with mock.patch.object(communicator, "backend_of", return_value=Allocator()):
        model.set_allocate_memory_from_process_group_for_comm(True)
        model(torch.ones(1, 6)).sum().backward()
        assert asked
        model.set_custom_all_gather(MyAllGather())
        model.set_custom_reduce_scatter(MyReduceScatter())
        asked.clear()
        model(torch.ones(1, 6)).sum().backward()
        assert not asked


def stages():
    mesh = init_device_mesh("cpu", (2,))
    first, second = seeded(MlpStack()), seeded(MlpStack())
    for stage in (first, second):
        shard_blocks(stage, mesh)
    meshard.share_comm_ctx([first, second])
    units = [each._meshard_unit for each in (first, *first.blocks, second, *second.blocks)]
    memories = {
        id(comm._channels) for unit in units for comm in (unit.group.comm, unit.lifecycle.comm)
    }
    x = torch.ones(1, 6) * (dist.get_rank() + 1)
    second(first(x)).sum().backward()
    return len(memories), {
        **full_grads(first),
        **{f"2.{k}": v for k, v in full_grads(second).items()},
    }


def one_process():
    first, second = seeded(MlpStack()), seeded(MlpStack())
    x = torch.ones(2, 6) * torch.tensor([[1.0], [2.0]])
    (second(first(x)).sum() / 2).backward()
    grads = {name: param.grad for name, param in first.named_parameters()}
    return {**grads, **{f"2.{name}": param.grad for name, param in second.named_parameters()}}


def test_stages_of_a_pipeline_share_their_streams():
    expected = one_process()
    for num_memories, grads in run_threads(stages, 2):
        assert num_memories == 1
        assert_same(grads, expected, bitwise=False)
