"""The main job: train a GPT over bytes on several ranks, with checkpoints and a report.

python examples/train_gpt.py                         # one process
torchrun --nproc-per-node 2 examples/train_gpt.py    # the same losses, up to rounding

Look for "sharding": those lines are all that one process would not need.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pydoc_data.topics
import resource
import sys
import time
import zlib
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import AdamW, Optimizer

from meshard import (
    CommLedger,
    FSDPModule,
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard,
    microbatches,
)
from meshard.checkpoint import Checkpointer

# --- the model and its data, written as for one device -------------------------------------------

VOCABULARY = 256  # every byte is a token
CHUNK = 4096  # bytes that go to the same side of the split together


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """The shape of a model; the defaults give 0.9 million parameters."""

    width: int = 128
    depth: int = 4
    heads: int = 4
    context: int = 128  # in bytes
    shifts_tokens: bool = True  # attention sees half of the channels of the byte before

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by {self.heads} heads.")


class Block(nn.Module):
    """Causal attention, then a two-layer MLP, each added to its input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.shifts_tokens = config.shifts_tokens
        self.norm_attention = nn.LayerNorm(width, bias=False)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.mix_heads = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.LayerNorm(width, bias=False)
        self.widen = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``hidden`` [batch, time, width] to the same shape."""
        normed = self.norm_attention(hidden)
        hidden = hidden + self.attend(shift_half(normed) if self.shifts_tokens else normed)
        return hidden + self.narrow(F.gelu(self.widen(self.norm_mlp(hidden))))

    def attend(self, hidden: Tensor) -> Tensor:
        batch, time, width = hidden.shape
        heads = self.query_key_value(hidden).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [batch, head, time, width / heads]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.mix_heads(mixed.transpose(1, 2).reshape(batch, time, width))


def shift_half(hidden: Tensor) -> Tensor:
    """Give each byte half of the channels of the one before it: pairs need not be learned."""
    own, previous = hidden.chunk(2, dim=-1)
    return torch.cat([own, F.pad(previous[:, :-1], (0, 0, 1, 0))], dim=-1)


class GPT(nn.Module):
    """Predicts each next byte from those before it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.context = config.context
        self.embed_byte = nn.Embedding(VOCABULARY, config.width)
        self.embed_position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self._initialise(config)

    def _initialise(self, config: GPTConfig) -> None:
        for name, weight in self.named_parameters():
            if name.endswith(("mix_heads.weight", "narrow.weight", "head.weight")):
                nn.init.zeros_(weight)  # each block starts as the identity, each byte as likely
            elif name.startswith("embed_"):
                nn.init.normal_(weight, std=0.5 if name.startswith("embed_byte") else 0.05)
            elif weight.dim() == 2:
                nn.init.normal_(weight, std=0.8 * config.width**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map ``tokens`` [batch, time] to logits [batch, time, 256] of the byte after each."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.embed_byte(tokens) + self.embed_position(positions)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden)).float()


def loss_per_window(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean loss, in nats per byte, of each of ``windows`` [batch, context + 1]."""
    logits = model(windows[:, :-1])
    losses = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="none")
    return losses.view(len(windows), -1).mean(dim=1)


@torch.no_grad()
def generate(model: GPT, prompt: bytes, num_bytes: int, *, temperature: float, seed: int) -> str:
    """Continue ``prompt``, byte by byte.

    Every rank calls this and draws the same bytes, since every forward gathers the model.
    """
    device = next(model.parameters()).device
    tokens = torch.tensor([list(prompt)], device=device)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_bytes):
        logits = model(tokens[:, -model.context :])[0, -1].cpu()
        probabilities = torch.softmax(logits / temperature, dim=-1)
        drawn = torch.multinomial(probabilities, 1, generator=generator).to(device)
        tokens = torch.cat([tokens, drawn[None]], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text as two tensors of tokens."""

    train: Tensor
    held_out: Tensor

    @staticmethod
    def load(path: Path | None, context: int) -> Corpus:
        """Read ``path``, or the language reference that comes with Python, and split it.

        About a tenth is held out: the chunks whose checksum says so, whoever asks.
        """
        text = path.read_bytes() if path else _language_reference()
        chunks = [text[start : start + CHUNK] for start in range(0, len(text), CHUNK)]
        is_held_out = [zlib.crc32(chunk) % 10 == 0 for chunk in chunks]
        if not any(is_held_out):  # a short text
            is_held_out[-1] = True
        train = [c for c, held_out in zip(chunks, is_held_out, strict=True) if not held_out]
        held_out = [c for c, held_out in zip(chunks, is_held_out, strict=True) if held_out]
        corpus = Corpus(_tokens(train), _tokens(held_out))
        if min(len(corpus.train), len(corpus.held_out)) <= context:
            raise ValueError(
                f"a text of {len(text)} bytes is too short for a context of {context}; "
                f"give --data a text of at least {10 * CHUNK} bytes."
            )
        return corpus

    def batch(self, step: int, *, num_windows: int, context: int, seed: int) -> Tensor:
        """Return the windows [num_windows, context + 1] of one step, of all ranks together.

        They depend on ``seed`` and ``step`` alone: not on the ranks, nor on the steps before, so
        a resumed run goes on where the other one would have.
        """
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self.train) - context, (num_windows,), generator=generator)
        return self.train[starts[:, None] + torch.arange(context + 1)]

    def held_out_windows(self, context: int) -> Tensor:
        """Return all of the held-out text, as windows [count, context + 1] side by side."""
        return self.held_out.unfold(0, context + 1, context)


def _language_reference() -> bytes:
    topics = pydoc_data.topics.topics
    paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    # Topics repeat paragraphs of each other; one that is held out must not be trained on.
    return "\n\n".join(dict.fromkeys(paragraphs)).encode()


def _tokens(chunks: list[bytes]) -> Tensor:
    return torch.tensor(list(b"".join(chunks)), dtype=torch.long)


# --- the job -------------------------------------------------------------------------------------


def train(args: Namespace, device: torch.device) -> None:
    """Train, report and save. Every rank runs this."""
    corpus = Corpus.load(args.data, args.context)
    held_out = corpus.held_out_windows(args.context).to(device)
    torch.manual_seed(args.seed)  # every rank builds the same model
    model = shard(GPT(config_of(args)).to(device), args, device)
    # Clipping and this eps keep rounding errors from growing: without them two runs that add in
    # another order, as with another number of threads or ranks, part ways within 50 steps.
    optimizer = AdamW(model.parameters(), betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1, fused=True)
    checkpointer = Checkpointer(args.save) if args.save else None
    first_step = resume(checkpointer, model, optimizer)
    last_step = min(args.steps, args.stop_at or args.steps)

    ledger = CommLedger()  # stays empty if there is no step left
    losses: list[tuple[int, float]] = []
    held_out_losses = [(first_step, held_out_loss(model, held_out))]
    started = time.perf_counter()
    for step in range(first_step, last_step):
        windows = corpus.batch(step, num_windows=args.batch, context=args.context, seed=args.seed)
        set_learning_rate(optimizer, step, args)
        ledger = CommLedger()  # a fresh one each time: the last step speaks for all
        with ledger:
            loss = train_step(model, optimizer, windows.to(device), args.microbatches)
        losses.append((step + 1, loss))
        if (step + 1) % args.eval_every == 0 and step + 1 < last_step:
            held_out_losses.append((step + 1, held_out_loss(model, held_out)))
            if dist.get_rank() == 0:
                speed = len(losses) * args.batch * args.context / (time.perf_counter() - started)
                print(f"step {step + 1}: loss {loss:.3f}, held out {held_out_losses[-1][1]:.3f}, "
                      f"{speed:.0f} bytes/s", flush=True)  # fmt: skip
        if checkpointer and ((step + 1) % args.save_every == 0 or step + 1 == last_step):
            checkpointer.async_save(step + 1, model, optimizer)  # it is written beside the steps
    seconds = time.perf_counter() - started
    held_out_losses.append((last_step, held_out_loss(model, held_out)))
    if checkpointer:
        checkpointer.wait()
    summary = {
        "held_out_loss": held_out_losses[-1][1],  # nats per byte
        "tokens_per_s": len(losses) * args.batch * args.context / seconds,  # of all ranks
        "bytes_per_step": ledger.wire_bytes,  # that one rank sends
        "peak_bytes_per_rank": over_ranks(peak_bytes(device), dist.ReduceOp.MAX, device),
        "steps": last_step,
        "train": losses,
        "held_out": held_out_losses,
    }
    model.set_reshard_after_forward(False)  # sharding: gather once for the whole sample
    sample = generate(model, b"The ", args.sample, temperature=0.6, seed=args.seed)
    if dist.get_rank() == 0:
        report(args, summary, ledger, sample)


def resume(checkpointer: Checkpointer | None, model: FSDPModule, optimizer: Optimizer) -> int:
    """Load the newest checkpoint, if there is one, saved on any number of ranks."""
    if checkpointer is None or checkpointer.latest_step() is None:
        return 0
    step = checkpointer.load(model, optimizer).step
    if dist.get_rank() == 0:
        print(f"going on from step {step}", flush=True)
    return step or 0


def start() -> torch.device:
    """Join the ranks that torchrun has started; plain ``python`` is one rank."""
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def shard(model: GPT, args: Namespace, device: torch.device) -> FSDPModule:
    """Spread the parameters of ``model`` over all ranks. This is all of the sharding."""
    mesh = make_mesh(args, device)
    bfloat16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mp_policy = bfloat16 if args.dtype == "bfloat16" else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh, mp_policy=mp_policy)
    return fully_shard(model, mesh, mp_policy=mp_policy)  # the embeddings and the head


def make_mesh(args: Namespace, device: torch.device) -> DeviceMesh:
    """Return the mesh: all ranks shard (FSDP), or each of some replicas does (HSDP)."""
    ranks = dist.get_world_size()
    if args.replicas == 1:
        return init_device_mesh(device.type, (ranks,), mesh_dim_names=("shard",))
    shape = (args.replicas, ranks // args.replicas)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def train_step(
    model: FSDPModule, optimizer: Optimizer, windows: Tensor, num_microbatches: int
) -> float:
    """Take one step on ``windows``, the batch of all ranks, and return its mean loss."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    total = torch.zeros((), device=windows.device)
    # sharding: replicas need to agree only once, after the last microbatch.
    for batch in microbatches(model, windows.chunk(num_microbatches)):
        own = batch.chunk(ranks)[rank]  # sharding: the rows of this rank
        loss = loss_per_window(model, own).mean() / num_microbatches
        loss.backward()  # sharding: gradients are averaged over the ranks on the way
        total += loss.detach()
    clip_grad_norm_(model, 1.0)  # sharding: the norm is that of all shards
    optimizer.step()
    optimizer.zero_grad()
    return over_ranks(total.item(), dist.ReduceOp.SUM, total.device) / ranks


@torch.no_grad()
def held_out_loss(model: GPT, windows: Tensor, batch: int = 16) -> float:
    """Return the mean loss over ``windows``, the same for any number of ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # sharding: each forward is a collective, so all ranks look at equally many windows. Those
    # that do not exist are read as the last one and not counted.
    indices = torch.arange(rank, math.ceil(len(windows) / ranks) * ranks, ranks)
    total = 0.0
    for part in indices.split(batch):
        losses = loss_per_window(model, windows[part.clamp(max=len(windows) - 1)])
        total += losses.cpu()[part < len(windows)].double().sum().item()
    return over_ranks(total, dist.ReduceOp.SUM, windows.device) / len(windows)


def over_ranks(value: float, op: dist.ReduceOp.RedOpType, device: torch.device) -> float:
    """Return the sum, or whatever ``op`` is, of ``value`` over all ranks."""
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op)
    return tensor.item()


def set_learning_rate(optimizer: Optimizer, step: int, args: Namespace) -> None:
    """Set the learning rate of ``step``: up in a straight line, then down in half a cosine."""
    if step < args.warmup:
        factor = (step + 1) / args.warmup
    else:
        done = (step - args.warmup) / max(1, args.steps - args.warmup)
        factor = 0.5 * (1 + math.cos(math.pi * done))
    for group in optimizer.param_groups:
        group["lr"] = args.lr * factor


def peak_bytes(device: torch.device) -> int:
    """Return the most memory this rank has used: of its GPU, or the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # elsewhere in KiB


def report(args: Namespace, summary: dict[str, Any], ledger: CommLedger, sample: str) -> None:
    """Print and write what the run has found; the picture last, for it can fail."""
    if args.json:
        args.json.write_text(json.dumps(summary, indent=2) + "\n")
    calls = ", ".join(f"{count} {op}" for op, count in ledger.counts.items())
    print(f"\nheld-out loss   {summary['held_out_loss']:.4f} nats per byte")
    print(f"speed           {summary['tokens_per_s']:.0f} bytes of text/s, with evaluation")
    print(f"memory          {summary['peak_bytes_per_rank'] / 2**20:.0f} MiB at most on a rank")
    print(
        f"sent per step   {ledger.wire_bytes / 2**20:.1f} MiB by each rank ({calls or 'nothing'})"
    )
    print(f"sample          {sample!r}")
    if args.plot:
        plot(args.plot, summary)
        print(f"loss curve      {args.plot}")


def plot(path: Path, summary: dict[str, Any]) -> None:
    """Draw both losses over the steps."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(8, 4.5), layout="constrained")).add_subplot()
    if summary["train"]:
        axes.plot(*zip(*summary["train"], strict=True), lw=0.8, alpha=0.5, label="train")
    axes.plot(*zip(*summary["held_out"], strict=True), "o--", lw=1, label="held out")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="A GPT over bytes")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def config_of(args: Namespace) -> GPTConfig:
    """Return the shape of the model."""
    return GPTConfig(width=args.width, depth=args.depth, heads=args.heads, context=args.context)


def parse_arguments() -> Namespace:
    """Read the command line, and refuse what cannot work."""
    shape, ranks = GPTConfig(), int(os.environ.get("WORLD_SIZE", "1"))
    parser = argparse.ArgumentParser(
        description="Train a GPT on bytes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--replicas", type=int, default=1, help="groups of ranks with the whole model (HSDP)")
    add("--microbatches", type=int, default=1, help="backward passes per step")
    add("--batch", type=int, default=16, help="windows per step, of all ranks and microbatches")
    add("--steps", type=int, default=700, help="of the whole run, for the learning rate too")
    add("--stop-at", type=int, help="end after this step, as if interrupted")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the arithmetic")
    add("--save", type=Path, metavar="DIR", help="write checkpoints, and go on from them")
    add("--save-every", type=int, default=100, help="steps between checkpoints")
    add("--data", type=Path, help="any text file; None: Python's own language reference")
    add("--json", type=Path, help="write the numbers of the run here")
    add("--plot", type=Path, help="draw the losses here")
    add("--sample", type=int, default=300, help="bytes of text to generate at the end")
    add("--eval-every", type=int, default=70, help="steps between looks at held-out text")
    add("--lr", type=float, default=3e-3, help="highest learning rate")
    add("--warmup", type=int, default=40, help="steps until the learning rate is highest")
    add("--width", type=int, default=shape.width, help="of the model")
    add("--depth", type=int, default=shape.depth, help="blocks of the model")
    add("--heads", type=int, default=shape.heads, help="attention heads of a block")
    add("--context", type=int, default=shape.context, help="bytes that the model looks back")
    add("--seed", type=int, default=0, help="of the model, the data order and the sample")
    args = parser.parse_args()
    if ranks % args.replicas:
        parser.error(f"{ranks} ranks cannot be divided over --replicas {args.replicas}")
    if args.batch % (ranks * args.microbatches):
        parts = f"{ranks} ranks times {args.microbatches} microbatches"
        parser.error(f"--batch {args.batch} cannot be divided over {parts}")
    try:
        corpus = Corpus.load(args.data, args.context)
        with torch.device("meta"):  # shapes, without memory
            model = GPT(config_of(args))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    millions = sum(param.numel() for param in model.parameters()) / 1e6
    layout = f"{ranks} ranks" + (f" in {args.replicas} replicas" if args.replicas > 1 else "")
    if os.environ.get("RANK", "0") == "0":
        print(f"{layout}, {millions:.1f} million parameters, {len(corpus.train) / 1e6:.2f} million "
              f"bytes of text, {args.steps} steps", flush=True)  # fmt: skip
    return args


def main() -> None:
    args = parse_arguments()
    train(args, start())
    dist.barrier()  # no rank leaves while another still talks to it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
