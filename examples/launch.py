"""Start of the ranks of an example, by torchrun or on this machine."""

from __future__ import annotations

import os
import socket
from argparse import Namespace
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Train = Callable[[Namespace, torch.device], None]

LOOPBACK = "127.0.0.1"


def torchrun_ranks() -> int | None:
    """Return how many ranks torchrun has started; None if torchrun is not used."""
    return int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else None


def device_type(local_ranks: int) -> str:
    """Return where ranks compute: on GPUs if this machine has one for each, else on the CPU."""
    has_enough = torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks
    return "cuda" if has_enough else "cpu"


def launch(train: Train, args: Namespace) -> None:
    """Run ``train(args, device)`` on every rank and return when all are done.

    Under torchrun this process is one of the ranks. Otherwise ``args.ranks`` processes start
    here, on this machine.
    """
    if dist.is_torchelastic_launched():
        _run_rank(train, args, store=None, local_rank=int(os.environ["LOCAL_RANK"]))
        return
    # The store's own port, chosen by the system, so that it cannot be taken in between.
    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    mp.spawn(_run_spawned, (train, args, store.port), nprocs=args.ranks)


def _run_spawned(local_rank: int, train: Train, args: Namespace, port: int) -> None:
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)  # the host's name need not resolve
    store = dist.TCPStore(LOOPBACK, port, is_master=False)
    _run_rank(train, args, store=store, local_rank=local_rank)


def _run_rank(train: Train, args: Namespace, *, store: dist.Store | None, local_rank: int) -> None:
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", args.ranks))
    if device_type(local_ranks) == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_ranks))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if store is None:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=store, rank=local_rank, world_size=args.ranks)
    try:
        train(args, device)
        dist.barrier()  # no rank leaves while another still talks to it
    finally:
        dist.destroy_process_group()
