"""Training of a GPT over several ranks: ``python examples/train_gpt.py``.

It starts two ranks on this machine; ``torchrun --nproc-per-node 8 examples/train_gpt.py`` starts
them elsewhere. Look for "sharding": those lines are all that one rank would not need.
"""

from __future__ import annotations

import math
import os
import time
from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist
from byte_gpt import GPT, GPTConfig, generate, loss_per_window
from byte_text import Corpus
from command_line import count, make_parser, new_file, new_folder, old_file, parse
from extras import tqdm
from launch import device_type, launch
from run_report import History, Summary, peak_bytes, write_json
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import AdamW, Optimizer

from meshard import (
    CommLedger,
    FSDPModule,
    GradientSync,
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard,
)
from meshard.checkpoint import Checkpointer


def train(args: Namespace, device: torch.device) -> None:
    """Train, report and save. Every rank runs this."""
    corpus = Corpus.load(args.data, args.context)
    held_out = corpus.held_out_windows(args.context).to(device)
    torch.manual_seed(args.seed)  # every rank builds the same model
    model = shard(GPT(config_of(args)).to(device), args, device)
    # One fused kernel over all shards: a loop over DTensors costs more than the arithmetic.
    # Clipping and this eps keep rounding errors from growing: without them two runs that add in
    # another order, as with another number of threads or ranks, part ways within 50 steps.
    optimizer = AdamW(model.parameters(), betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1, fused=True)
    checkpointer = Checkpointer(args.save) if args.save else None
    first_step = resume(checkpointer, model, optimizer)
    last_step = min(args.steps, args.stop_at or args.steps)

    ledger = CommLedger()  # stays empty if there is no step left
    history = History(held_out=[(first_step, held_out_loss(model, held_out))])
    train_seconds = 0.0
    progress = tqdm(range(first_step, last_step), unit="step", disable=dist.get_rank() > 0 or None)
    for step in progress:
        started = time.perf_counter()
        windows = corpus.batch(
            step, num_windows=args.batch, context=args.context, seed=args.seed
        ).to(device)
        set_learning_rate(optimizer, step, args)
        ledger = CommLedger()  # a fresh one each time: the last step speaks for all
        with ledger:
            loss = train_step(model, optimizer, microbatches(windows, args.microbatches))
        history.train.append((step + 1, loss))
        train_seconds += time.perf_counter() - started

        tokens_per_s = (step + 1 - first_step) * args.batch * args.context / train_seconds
        memory = f"{peak_bytes(device) / 2**20:.0f}MiB"
        progress.set_postfix(
            {"loss": f"{loss:.3f}", "tokens/s": f"{tokens_per_s:.0f}", "memory/rank": memory}
        )
        if is_evaluated(step + 1, args.eval_every) and step + 1 < last_step:
            history.held_out.append((step + 1, held_out_loss(model, held_out)))
        if checkpointer and ((step + 1) % args.save_every == 0 or step + 1 == last_step):
            checkpointer.async_save(step + 1, model, optimizer)  # it is written beside the steps

    history.held_out.append((last_step, held_out_loss(model, held_out)))
    if checkpointer:
        checkpointer.wait()
    summary = Summary(
        held_out_loss=history.held_out[-1][1],
        tokens_per_s=len(history.train) * args.batch * args.context / max(train_seconds, 1e-9),
        bytes_per_step=ledger.wire_bytes,
        peak_bytes_per_rank=int(over_ranks(peak_bytes(device), dist.ReduceOp.MAX, device)),
        steps=last_step,
    )
    model.set_reshard_after_forward(False)  # sharding: gather once for the whole sample
    sample = generate(model, b"The ", args.sample, temperature=0.6, seed=args.seed)
    if dist.get_rank() == 0:
        report(args, summary, history, ledger, sample)


def resume(checkpointer: Checkpointer | None, model: FSDPModule, optimizer: Optimizer) -> int:
    """Load the newest checkpoint, if there is one, saved on any number of ranks."""
    if checkpointer is None or checkpointer.latest_step() is None:
        return 0
    step = checkpointer.load(model, optimizer).step
    if dist.get_rank() == 0:
        print(f"going on from step {step}", flush=True)
    return step or 0


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
    if args.replicas == 1:
        return init_device_mesh(device.type, (args.ranks,), mesh_dim_names=("shard",))
    shape = (args.replicas, args.ranks // args.replicas)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def microbatches(windows: Tensor, count: int) -> list[Tensor]:
    """Return this rank's part of each microbatch of ``windows``, the batch of all ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return [microbatch.chunk(ranks)[rank] for microbatch in windows.chunk(count)]


def train_step(model: FSDPModule, optimizer: Optimizer, batches: list[Tensor]) -> float:
    """Take one step on the mean over all microbatches and ranks, and return that loss."""
    total = torch.zeros((), device=batches[0].device)
    for index, windows in enumerate(batches):
        # sharding: the replicas need to agree only once, after the last microbatch.
        is_last = index == len(batches) - 1
        model.set_gradient_sync(GradientSync.FULL if is_last else GradientSync.REDUCE_SCATTER)
        loss = loss_per_window(model, windows).mean() / len(batches)
        loss.backward()  # sharding: gradients are averaged over the ranks on the way
        total += loss.detach()
    clip_grad_norm_(model, 1.0)  # sharding: the norm is that of all shards
    optimizer.step()
    optimizer.zero_grad()
    return over_ranks(total.item(), dist.ReduceOp.SUM, total.device) / dist.get_world_size()


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


def is_evaluated(step: int, every: int) -> bool:
    """Return whether the held-out loss is due: more often at first, where it falls fastest."""
    return step % every == 0 or step in (every // 8, every // 4, every // 2)


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


def report(
    args: Namespace, summary: Summary, history: History, ledger: CommLedger, sample: str
) -> None:
    """Print and write what the run has found; the picture last, for it can fail."""
    if args.json:
        write_json(args.json, summary, history)
    sent = ", ".join(
        f"{count} {op} of {ledger.bytes[op] / 2**20:.1f} MiB in all"
        for op, count in ledger.counts.items()
    )
    print(f"\nheld-out loss   {summary.held_out_loss:.4f} nats per byte")
    print(f"speed           {summary.tokens_per_s:.0f} tokens/s")
    print(f"memory          {summary.peak_bytes_per_rank / 2**20:.0f} MiB at most on a rank")
    print(f"sent per step   {summary.bytes_per_step / 2**20:.1f} MiB by each rank ({sent or '-'})")
    print(f"sample          {sample!r}")
    history.plot(args.plot, f"A GPT over bytes: {args.title}")
    print(f"loss curve      {args.plot}")


def config_of(args: Namespace) -> GPTConfig:
    """Return the shape of the model."""
    return GPTConfig(width=args.width, depth=args.depth, heads=args.heads, context=args.context)


def parse_arguments() -> Namespace:
    """Read the command line, refuse what cannot work, and say what is about to run."""
    shape = GPTConfig()
    parser = make_parser("Train a GPT on bytes.", ranks=2)
    add = parser.add_argument
    add("--replicas", type=count, default=1, help="groups of ranks with the whole model (HSDP)")
    add("--microbatches", type=count, default=1, help="backward passes per step")
    add("--batch", type=count, default=16, help="windows per step, of all ranks and microbatches")
    add("--steps", type=count, default=700, help="of the whole run, for the learning rate too")
    add("--stop-at", type=count, help="end after this step, as if interrupted")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the arithmetic")
    add("--save", type=new_folder, metavar="DIR", help="write checkpoints, and go on from them")
    add("--save-every", type=count, default=100, help="steps between checkpoints")
    add("--data", type=old_file, help="any text file; None: Python's own language reference")
    add("--json", type=new_file, help="write the numbers of the run here")
    add("--plot", type=new_file, default=Path("loss.png"), help="draw the losses here")
    add("--sample", type=count, default=300, help="bytes of text to generate at the end")
    add("--eval-every", type=count, default=70, help="steps between looks at held-out text")
    add("--lr", type=float, default=3e-3, help="highest learning rate")
    add("--warmup", type=count, default=40, help="steps until the learning rate is highest")
    add("--width", type=count, default=shape.width, help="of the model")
    add("--depth", type=count, default=shape.depth, help="blocks of the model")
    add("--heads", type=count, default=shape.heads, help="attention heads of a block")
    add("--context", type=count, default=shape.context, help="bytes that the model looks back")
    add("--seed", type=int, default=0, help="of the model, the data order and the sample")
    args = parse(parser)
    if args.batch % (args.ranks * args.microbatches):
        parts = f"{args.ranks} ranks times {args.microbatches} microbatches"
        parser.error(f"--batch {args.batch} cannot be divided over {parts}")
    try:
        corpus = Corpus.load(args.data, args.context)
        with torch.device("meta"):  # shapes, without memory
            model = GPT(config_of(args))
    except ValueError as error:
        parser.error(str(error))
    millions = sum(param.numel() for param in model.parameters()) / 1e6
    layout = f"{args.ranks} {device_type(args.ranks).upper()} ranks"
    if args.replicas > 1:
        layout += f" in {args.replicas} replicas"
    args.title = f"{layout}, {millions:.1f} million parameters"
    if os.environ.get("RANK", "0") == "0":
        text = f"{len(corpus.train) / 1e6:.2f} million bytes of text"
        print(f"{args.title}, {text}, {args.steps} steps", flush=True)
    return args


def main() -> None:
    """Read the command line and start the ranks."""
    launch(train, parse_arguments())


if __name__ == "__main__":
    main()
