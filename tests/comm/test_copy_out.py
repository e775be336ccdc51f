"""Copies of gathered rows into unsharded parameters."""

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from meshard._comm.all_gather import GatherPlan
from meshard._comm.communicator import Done
from meshard._comm.cpu import WorkCommunicator
from meshard._mesh.layout import FlatLayout, ParamLayout
from meshard._params.flat_params import FlatShard, UnshardedMemoryPool
from meshard._params.unit_params import MemoryLocation

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)


class Told(WorkCommunicator):
    """Gathers what it is told that the ranks have."""

    def __init__(self, rows):
        super().__init__()
        self._rows = rows

    def _start_all_gather(self, memory, source, group, label):
        return Done(torch.stack(self._rows))


def shards_of(whole, params, rank):
    return [
        tensor.narrow(p.shard_dim, p.owned_rows(rank).start, len(p.owned_rows(rank)))
        for tensor, p in zip(whole, params, strict=True)
    ]


def gathered(whole, params, count):
    """Return the views that a gather among ``count`` ranks has filled."""
    layout = FlatLayout.build(params, [tensor.dtype for tensor in whole])
    storages = [FlatShard(layout, rank, MemoryLocation(CPU)) for rank in range(count)]
    for rank, storage in enumerate(storages):
        storage.fill(shards_of(whole, params, rank))
    memory = UnshardedMemoryPool(layout, CPU)
    plan = GatherPlan(layout, layout, memory.views)
    for _ in range(2):  # the second time everything is there already
        started = plan.start(
            storages[0].buffer,
            storages[0].segments,
            comm=Told([storage.buffer for storage in storages]),
            group=SimpleNamespace(size=lambda: count, rank=lambda: 0),
            label="unit",
        )
        memory.allocate()
        for view in memory.views:
            view.fill_(5)
        plan.copy_out(started.result)
        started.release()
    return memory.views


@given(data=st.data(), count=st.integers(2, 5))
def test_parameters_of_few_sizes_are_whole(data, count):
    shapes = st.sampled_from([(count,), (2 * count,), (count, 2), (2 * count, 3), (3,), (0,)])
    params, whole = [], []
    for _ in range(data.draw(st.integers(1, 9))):
        shape = data.draw(shapes)
        params.append(ParamLayout(torch.Size(shape), 0, count))
        whole.append(torch.randn(shape).to(data.draw(st.sampled_from(DTYPES))))
    views = gathered(whole, params, count)
    for view, original in zip(views, whole, strict=True):
        assert torch.equal(view, original)
