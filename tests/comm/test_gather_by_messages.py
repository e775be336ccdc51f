"""All-gathers through sockets, as messages that are received where they belong."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from meshard._comm import cpu


def gathered(count, few):
    """Gather several tensors at once, beside messages of the user in the same group."""
    rank, group = dist.get_rank(), dist.group.WORLD
    comm = cpu.WorkCommunicator()
    sources = [
        torch.arange(numel, dtype=torch.float32) + 1000 * rank for numel in (5, 5, 0, 70_000)
    ]
    outputs = [torch.full((count * source.numel(),), -1.0) for source in sources]
    message, received = torch.full((5,), 7.0 + rank), torch.empty(5)
    with (
        mock.patch.object(cpu, "_FEW", few),
        mock.patch.object(cpu, "start_all_gather_on", wraps=cpu.start_all_gather_on) as whole,
    ):
        in_flight = [
            comm.all_gather(output, source, group=group, label="unit")
            for output, source in zip(outputs, sources, strict=True)
        ]
        works = [dist.irecv(received, (rank - 1) % count), dist.isend(message, (rank + 1) % count)]
        for each in (*in_flight, *works):
            each.wait()
    assert received.unique().tolist() == [7.0 + (rank - 1) % count]
    for output, source in zip(outputs, sources, strict=True):
        own = source - 1000 * rank
        assert torch.equal(output, torch.cat([own + 1000 * other for other in range(count)]))
    return whole.call_count


@pytest.mark.default_rows(2)
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("few", [2, 8])
def test_few_ranks_send_messages_and_more_call_the_backend(run_ranks, count, few):
    by_backend = 4 if count > few else 1  # nothing is no message
    assert run_ranks(gathered, count, count, few) == [by_backend] * count
