"""Gathers of tensors of several dtypes, which no flat shard holds."""

import pytest
import torch
import torch.distributed as dist

from meshard._comm.all_gather import GatherPlan
from meshard._comm.cpu import WorkCommunicator
from meshard._mesh.layout import FlatLayout, ParamLayout
from meshard._params.custom_gather import Form, agree_on_forms
from tests.support.ranks import on_threads

CPU = torch.device("cpu")
INPUTS = {
    "two dtypes": [torch.arange(3, dtype=torch.int8), torch.tensor([[0.5, 2.5]])],
    "one": [torch.arange(6.0).view(2, 3)],
    "not contiguous": [torch.arange(6.0).view(2, 3).t(), torch.tensor([True])],
    "without dims": [torch.tensor(3.0), torch.tensor(4, dtype=torch.int64)],
    "some empty": [torch.zeros(2, 0), torch.zeros(0, 3, dtype=torch.bfloat16), torch.ones(1)],
    "narrow": [torch.ones(3).to(torch.float8_e4m3fn), torch.ones(5, dtype=torch.bfloat16)],
}


def form_of(tensors):
    return [Form.of(tensor) for tensor in tensors]


def agree(own):
    return agree_on_forms(form_of(own), dist.group.WORLD, device=CPU, label="unit")


def gather(own, forms, times=1):
    """Return what all ranks have sent, each tensor of all ranks in one."""
    group, count = dist.group.WORLD, dist.get_world_size()
    outputs = [form.of_all(count, CPU) for form in forms]
    layouts = [ParamLayout(each.shape, 0, count) for each in outputs]
    on_wire = FlatLayout.build(layouts, [each.dtype for each in outputs])
    empty = FlatLayout.build([], [])
    plan, buffer = GatherPlan(empty, on_wire, outputs), torch.empty(0, dtype=torch.uint8)
    for _ in range(times):
        for each in outputs:
            each.view(torch.uint8).fill_(7) if each.numel() else None
        handle = plan.start(buffer, [], own, comm=WorkCommunicator(), group=group, label="unit")
        handle.wait()
        plan.copy_out(handle.result)
        handle.release()
    return outputs


@on_threads(3)
@pytest.mark.parametrize("name", INPUTS)
def test_what_goes_in_comes_out_rank_by_rank(name):
    base = INPUTS[name]
    per_rank = [[(tensor.float() * rank).to(tensor.dtype) for tensor in base] for rank in range(3)]
    outputs = gather(per_rank[dist.get_rank()], form_of(base), times=2)
    for output, parts in zip(outputs, zip(*per_rank, strict=True), strict=True):
        join = torch.cat if parts[0].dim() else torch.stack
        assert output.dtype == parts[0].dtype
        assert torch.equal(output.float(), join([part.float() for part in parts]))


@on_threads(3)
def test_ranks_with_fewer_rows_are_padded_with_zeros():
    rows = (2, 1, 0)[dist.get_rank()]
    own = [torch.full((rows, 2), rows + 1.0)]
    (output,) = gather(own, agree(own))
    assert output[:, 0].tolist() == [3, 3, 2, 0, 0, 0]


@on_threads(2)
@pytest.mark.parametrize(
    "other",
    [[torch.ones(2, 2)], [torch.ones(2).double()], [torch.ones(2), torch.ones(1)], []],
    ids=["row shape", "dtype", "number", "none"],
)
def test_ranks_that_differ_in_more_all_raise(other):
    with pytest.raises(RuntimeError, match="unit 'unit' cannot be gathered"):
        agree([[torch.ones(2)], other][dist.get_rank()])
