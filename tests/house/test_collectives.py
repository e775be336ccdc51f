"""Collectives: only the communicators of ``_comm`` and ``_shared_memory`` call them."""

import ast

from tests.house.sources import SOURCES, Source

COLLECTIVES = {
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
}
# What a process group's own methods are called, where torch's functions are called otherwise.
GROUP_METHODS = {"allreduce", "allgather", "alltoall", "alltoall_base", "_allgather_base"}
COMMUNICATORS = ("communicator", "streams", "blocking", "cpu")  # in the name of a file of _comm


def may_communicate(source):
    file = source.path.split("/")[-1]
    return source.room in ("_torch", "_shared_memory") or (
        source.room == "_comm" and any(part in file for part in COMMUNICATORS)
    )


def stray_collectives(sources):
    found = []
    for source in sources:
        if may_communicate(source):
            continue
        for name, node in source.torch_uses():
            is_collective = name.rpartition(".")[2] in COLLECTIVES
            if (name.startswith("torch.distributed.") and is_collective) or (
                "_functional_collectives" in name
            ):
                found.append(source.at(node, name))
        found += [
            source.at(node, f".{node.func.attr}()")
            for node in source.nodes
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in GROUP_METHODS
        ]
    return found


def test_only_the_communicators_call_collectives():
    assert stray_collectives(SOURCES) == []


def test_planted_collectives_are_found():
    text = "import torch.distributed as dist\ndist.all_reduce(x)\npg.allreduce(x)\n"
    assert stray_collectives([Source("_comm/all_gather.py", text)]) == [
        "_comm/all_gather.py:2: torch.distributed.all_reduce",
        "_comm/all_gather.py:3: .allreduce()",
    ]
    assert stray_collectives([Source("_comm/cpu.py", text)]) == []
