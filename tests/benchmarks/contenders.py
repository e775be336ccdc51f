"""What is compared: one model, sharded or replicated by everybody who can."""

import os
from contextlib import nullcontext
from dataclasses import dataclass
from unittest import mock

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

from examples.train_gpt import GPT, VOCABULARY, GPTConfig
from meshard import describe, fully_shard, local_optimizer, replicate

OURS, OURS_WHOLE = "meshard", "meshard, not resharding"
PEER, PEER_WHOLE = "fully_shard", "fully_shard, not resharding"
# Likewise, but through sockets, as between hosts.
SENT, SENT_WHOLE = f"{OURS}, sockets", f"{OURS_WHOLE}, sockets"
# And with torch's optimizer on the DTensors, as the peer has it, instead of local_optimizer.
PLAIN = f"{OURS}, plain AdamW"
DDP, COMPUTE = "DDP, bucket views", "compute only"
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

    def make_model(self, device=None):
        """Return the model, the same on every rank; None: on the CPU."""
        torch.manual_seed(0)
        shape = {"width": self.width, "depth": self.depth, "context": self.context}
        with device or nullcontext():  # large models take minutes to initialise on the CPU
            return GPT(GPTConfig(**shape, heads=self.width // 64, shifts_tokens=False))

    def make_batch(self, rank, device="cpu"):
        """Return the tokens of a rank, and what follows each."""
        generator = torch.Generator().manual_seed(rank)
        shape = (self.batch, self.context + 1)
        tokens = torch.randint(VOCABULARY, shape, generator=generator).to(device)
        return tokens[:, :-1], tokens[:, 1:]


WIDTH_256 = Configuration("width 256, batch 4 x 128", 256, 4)
WIDTH_512 = Configuration("width 512, batch 1 x 128", 512, 1)
NARROW = Configuration("width 512, batch 1 x 128, bfloat16", 512, 1, narrow=True)


def make(name, configuration, mesh, device=None):
    """Return the model of a configuration as one contender trains it, with its best settings."""
    model, narrow = configuration.make_model(device), configuration.narrow
    if name == COMPUTE:
        return model.bfloat16() if narrow else model
    if name == DDP:
        return DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    if name in (REPLICATED, REPLICATED_SENT):
        return _with_transport(name, lambda: replicate(model, mesh))
    return shard_by_units(name, model, mesh, narrow=narrow)


def shard_by_units(name, model, mesh, *, narrow=False):
    """Return ``model`` with one unit per block, by one of the two ``fully_shard``."""
    policy = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32) if narrow else MixedPrecisionPolicy()
    )
    is_peer, reshards = name in (PEER, PEER_WHOLE), "not resharding" not in name

    def shard():
        for unit in (*model.blocks, model):
            (torch_fully_shard if is_peer else fully_shard)(
                unit, mesh=mesh, reshard_after_forward=reshards, mp_policy=policy
            )
        return model

    return shard() if is_peer else _with_transport(name, shard)


def _with_transport(name, shard):
    """Shard, and choose the transport now, as ``describe`` uses the model."""
    is_shared = "sockets" not in name
    with mock.patch.dict(os.environ, MESHARD_SHARED_MEMORY=str(int(is_shared))):
        model = shard()
        if ("MESHARD_SHARED_MEMORY=0" in describe(model)) is is_shared:
            raise RuntimeError(f"The environment did not choose the transport of {name}.")
    return model


def make_optimizer(model, name=PLAIN):
    """Return AdamW, in the way in which the documentation of ``name`` recommends to run it."""
    if name in (OURS, OURS_WHOLE, SENT, SENT_WHOLE):
        return local_optimizer(model, torch.optim.AdamW, lr=1e-4, foreach=True)
    return torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)


def trainer(model, batch, optimizer=None, read=torch.Tensor.item):
    """Return what runs one step of training, and returns its loss, as ``read`` reads it."""
    optimizer = optimizer or make_optimizer(model)
    tokens, following = batch

    def step():
        logits = model(tokens).float()
        loss = F.cross_entropy(logits.flatten(0, 1), following.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return read(loss)

    return step
