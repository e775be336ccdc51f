"""Gathers of tensors of several dtypes as bytes."""

import pytest
import torch
import torch.distributed as dist

from meshard._comm.cpu import WorkCommunicator
from meshard._params.subclass_params import Form, PackedGather, agree_on_forms
from tests.support.threads import run_threads

INPUTS = {
    "two dtypes": [torch.arange(3, dtype=torch.int8), torch.tensor([[0.5, 2.5]])],
    "one": [torch.arange(6.0).view(2, 3)],
    "not contiguous": [torch.arange(6.0).view(2, 3).t(), torch.tensor([True])],
    "without dims": [torch.tensor(3.0), torch.tensor(4, dtype=torch.int64)],
    "some empty": [torch.zeros(2, 0), torch.zeros(0, 3, dtype=torch.bfloat16), torch.ones(1)],
    "narrow": [torch.ones(3).to(torch.float8_e4m3fn), torch.ones(5, dtype=torch.bfloat16)],
}


def gather(per_rank, forms, times=1):
    group = dist.group.WORLD
    packed = PackedGather(forms, group.size(), torch.device("cpu"))
    addresses = []
    for _ in range(times):
        assert all(not out.untyped_storage().nbytes() or not out.numel() for out in packed.outputs)
        source = packed.pack(per_rank[dist.get_rank()])
        rows = WorkCommunicator().gather(source, group=group, label="unit").rows()
        packed.allocate()
        packed.copy_out(rows)
        addresses.append([out.clone() for out in packed.outputs])
        assert all(out._version == 0 for out in packed.outputs)
        packed.free()
    return addresses[-1]


@pytest.mark.parametrize("name", INPUTS)
def test_what_goes_in_comes_out_rank_by_rank(name):
    base = INPUTS[name]
    per_rank = [[(tensor.float() * rank).to(tensor.dtype) for tensor in base] for rank in range(3)]
    for outputs in run_threads(gather, 3, per_rank, [Form.of(tensor) for tensor in base], times=2):
        for number, output in enumerate(outputs):
            parts = [rank[number] for rank in per_rank]
            expected = (
                torch.stack(parts)
                if not parts[0].dim()
                else torch.cat([part.float() for part in parts]).to(parts[0].dtype)
            )
            assert output.dtype == expected.dtype
            assert torch.equal(output.float(), expected.float())


def agree(per_rank):
    group, own = dist.group.WORLD, per_rank[dist.get_rank()]
    forms = agree_on_forms(
        [Form.of(t) for t in own], group, device=torch.device("cpu"), label="unit"
    )
    return gather(per_rank, forms)


def test_ranks_with_fewer_rows_are_padded_with_zeros():
    per_rank = [[torch.full((rows, 2), rows + 1.0)] for rows in (2, 1, 0)]
    for (output,) in run_threads(agree, 3, per_rank):
        assert output[:, 0].tolist() == [3, 3, 2, 0, 0, 0]


@pytest.mark.parametrize(
    "other",
    [[torch.ones(2, 2)], [torch.ones(2).double()], [torch.ones(2), torch.ones(1)], []],
    ids=["row shape", "dtype", "number", "none"],
)
def test_ranks_that_differ_in_more_all_raise(other):
    per_rank = [[torch.ones(2)], other]

    def run():
        with pytest.raises(RuntimeError, match="unit 'unit' cannot be gathered"):
            agree(per_rank)
        return True

    assert run_threads(run, 2) == [True, True]
