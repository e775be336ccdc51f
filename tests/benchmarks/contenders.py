"""What is compared: one model, sharded or replicated by everybody who can."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
)
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.train_gpt import GPT, VOCABULARY, Block, GPTConfig
from meshard import describe, flat_optimizer, fully_shard, replicate

OURS, OURS_WHOLE = "meshard", "meshard, not resharding"
PEER, PEER_WHOLE = "fully_shard", "fully_shard, not resharding"
# Likewise, but through sockets, as between hosts.
SENT, SENT_WHOLE = f"{OURS}, sockets", f"{OURS_WHOLE}, sockets"
# And with torch's optimizer on the DTensors, as the peer has it, instead of flat_optimizer.
PLAIN, PLAIN_WHOLE = f"{OURS}, plain AdamW", f"{OURS_WHOLE}, plain AdamW"
DDP, FSDP1, COMPUTE = "DDP, bucket views", "FSDP1", "compute only"
REPLICATED, REPLICATED_SENT = "replicate", "replicate, sockets"


@dataclass(frozen=True)
class Configuration:
    """A model and what it is fed."""

    name: str
    width: int
    batch: int  # per rank
    context: int = 128
    depth: int = 8
    narrow: bool = False  # compute in bfloat16, reduce in float32

    def make_model(self, device: torch.device | None = None) -> GPT:
        """Return the model, the same on every rank; None: on the CPU."""
        torch.manual_seed(0)
        heads = self.width // 64
        shape = {"width": self.width, "depth": self.depth, "context": self.context}
        with device or nullcontext():  # large models take minutes to initialise on the CPU
            return GPT(GPTConfig(**shape, heads=heads, shifts_tokens=False))  # a plain transformer

    def make_batch(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens of a rank, and what follows each."""
        generator = torch.Generator().manual_seed(rank)
        shape = (self.batch, self.context + 1)
        tokens = torch.randint(VOCABULARY, shape, generator=generator)
        return tokens[:, :-1], tokens[:, 1:]


WIDTH_256 = Configuration("width 256, batch 4 x 128", 256, 4)
WIDTH_512 = Configuration("width 512, batch 1 x 128", 512, 1)
NARROW = Configuration("width 512, batch 1 x 128, bfloat16", 512, 1, narrow=True)


def _unit_by_unit(
    shard: Callable[..., nn.Module], model: GPT, mesh: DeviceMesh, reshard: bool, narrow: bool
) -> nn.Module:
    policy = MixedPrecisionPolicy()
    if narrow:
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    return shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)


def _fsdp1(model: GPT, mesh: DeviceMesh, narrow: bool) -> nn.Module:
    precision = MixedPrecision(torch.bfloat16, torch.float32) if narrow else None
    return FullyShardedDataParallel(
        model,
        device_mesh=mesh,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
        mixed_precision=precision,
        device_id=torch.device("cpu"),
    )


def make(
    name: str, configuration: Configuration, mesh: DeviceMesh, device: torch.device | None = None
) -> nn.Module:
    """Return the model of a configuration as one contender trains it.

    Peers have their best documented settings: one unit per block and one for the root; DDP with
    gradients as views of its buckets and a static graph; FSDP1 with the original parameters. So has
    ours: see ``make_own_optimizer``.
    """
    model, narrow = configuration.make_model(device), configuration.narrow
    if name == COMPUTE:
        return model.bfloat16() if narrow else model
    if name == DDP:
        return DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    if name == FSDP1:
        return _fsdp1(model, mesh, narrow)
    if name in (REPLICATED, REPLICATED_SENT):
        with _transport_of(name):
            return _with_transport(replicate(model, mesh))
    return shard_by_units(name, model, mesh, narrow=narrow)


def _transport_of(name: str) -> AbstractContextManager[object]:
    wanted = str(int("sockets" not in name))
    return mock.patch.dict(os.environ, MESHARD_SHARED_MEMORY=wanted)


def _with_transport(model: nn.Module) -> nn.Module:
    """Choose the transport now, as ``describe`` uses the model: later the variable is another."""
    wanted = os.environ["MESHARD_SHARED_MEMORY"]
    if ("MESHARD_SHARED_MEMORY=0" in describe(model)) != (wanted == "0"):
        raise RuntimeError(f"MESHARD_SHARED_MEMORY={wanted} did not choose the transport.")
    return model


def shard_by_units(name: str, model: GPT, mesh: DeviceMesh, *, narrow: bool = False) -> nn.Module:
    """Return ``model`` with one unit per block, by one of the two ``fully_shard``."""
    shard = torch_fully_shard if name in (PEER, PEER_WHOLE) else fully_shard
    if shard is torch_fully_shard:
        return _unit_by_unit(shard, model, mesh, "not resharding" not in name, narrow)
    with _transport_of(name):
        sharded = _unit_by_unit(shard, model, mesh, "not resharding" not in name, narrow)
        return _with_transport(sharded)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that everybody uses."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)


def make_own_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return the same, in the way in which the documentation of ``name`` recommends to run it."""
    if name in (OURS, OURS_WHOLE, SENT, SENT_WHOLE):
        return flat_optimizer(model, torch.optim.AdamW, lr=1e-4, foreach=True)
    return make_optimizer(model)


def trainer(
    model: nn.Module,
    batch: tuple[torch.Tensor, torch.Tensor],
    make: Callable[[nn.Module], torch.optim.Optimizer] = make_optimizer,
    read: Callable[[torch.Tensor], float] = torch.Tensor.item,
) -> Callable[[], float]:
    """Return what runs one step of training, and returns its loss, as ``read`` reads it."""
    optimizer = make(model)
    tokens, following = batch

    def step() -> float:
        logits = model(tokens).float()
        loss = F.cross_entropy(logits.flatten(0, 1), following.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return read(loss)

    return step
