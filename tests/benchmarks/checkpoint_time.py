"""How long do a save, a load and the stop of a background save last; what do steps beside it cost?

Two ranks save and load a sharded model with the state of AdamW, in turns with
``torch.distributed.checkpoint``, and with ``torch_checkpointing`` if it is installed. All files are
synced: those of the latter here, as it syncs none; it compares no checksums either. Then they train
a small model while a large one is saved in the background. Times are medians of the slowest rank.
The values that were loaded are compared.
"""

import itertools
import os
import shutil
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import meshard
from meshard.checkpoint import Checkpointer
from tests.benchmarks.rounds import in_turns, medians, on_ranks, show, show_ratios, slowest

try:
    import torch_checkpointing
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
except ImportError:  # it is in no environment of the project
    torch_checkpointing = None

WIDTH = 1024


def built(millions):
    """Return a sharded model of so many million parameters, and AdamW that has stepped."""
    depth = max(1, round(millions * 1e6 / (WIDTH * WIDTH + WIDTH)))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))
    for module in (*model, model):
        meshard.fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


class TorchCheckpointing:
    """The package of that name, as it runs on CPUs: without direct I/O, which ext4 refuses here."""

    def __init__(self, folder):
        self._folder, self._number = folder, 0
        config = torch_checkpointing.CheckpointManager.Config.with_sync_save()
        config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = config.build()

    @property
    def _path(self):
        return self._folder / str(self._number)

    def save(self, states):
        self._number += 1
        self._manager.save(str(self._path), states)
        dist.barrier()  # rank 0 renames the folder
        for path in [*self._path.glob(f"*_{dist.get_rank()}.pt"), self._path]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    def load(self, states):
        self._manager.load(str(self._path), into=states)

    def tidy(self):
        dist.barrier()
        if dist.get_rank() == 0:
            for path in self._folder.glob("*"):
                if path != self._path:
                    shutil.rmtree(path)


def measure(given):
    """Return seconds by what was done. All ranks call it."""
    folder, millions, rounds = Path(given[0]), *given[1:]
    pair = model, optimizer = built(millions)
    checkpointer, number = Checkpointer(folder / "meshard", keep=1), itertools.count()
    save_dcp, load_dcp = (
        partial(each, checkpoint_id=folder / "dcp") for each in (dcp.save, dcp.load)
    )
    others = {"dcp": SimpleNamespace(save=save_dcp, load=load_dcp, tidy=lambda: None)}
    if torch_checkpointing is not None:
        others["torch_checkpointing"] = TorchCheckpointing(folder / "other")

    def states():
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    def save():
        checkpointer.save(next(number), *pair)

    def load_by(other):
        found = states()
        other.load(found)
        set_state_dict(*pair, model_state_dict=found["model"], optim_state_dict=found["optimizer"])

    def tidy():  # not timed, so that it does not disturb the next contender either
        checkpointer.wait()
        for other in others.values():
            other.tidy()

    def timed(steps):
        how = {"warm_up": 1, "before": dist.barrier, "after": tidy}
        return medians(slowest(in_turns(steps, rounds=rounds, **how)[0]))

    saves = {f"save, {name}": lambda o=other: o.save(states()) for name, other in others.items()}
    figures = timed({"save, meshard": save, **saves})
    before = [param.detach().to_local().clone() for param in model.parameters()]
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    loads = {f"load, {name}": lambda o=other: load_by(o) for name, other in others.items()}
    figures |= timed({"load, meshard": lambda: checkpointer.load(*pair), **loads})
    for param, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.detach().to_local(), value)

    # Of a save in the background: until it returns, beside a copy of the same bytes.
    tensors = [param.detach().to_local() for param in model.parameters()]
    for state in optimizer.state.values():
        tensors += [each.to_local() for each in state.values() if hasattr(each, "to_local")]
    buffers = [torch.empty_like(each) for each in tensors]

    def copy():
        for buffer, each in zip(buffers, tensors, strict=True):
            buffer.copy_(each)

    def begin():
        checkpointer.async_save(next(number), *pair)

    figures |= timed({"async_save": begin, "a copy of the bytes": copy})
    return figures


def measure_beside(given):
    """Return seconds of steps without a save and while one is written. All ranks call it."""
    folder, millions, rounds = given
    pair, (trained, trainer) = built(millions), built(2)
    checkpointer, batch = Checkpointer(Path(folder) / "beside", keep=1), torch.randn(16, WIDTH)

    def step():
        trained(batch).square().mean().backward()
        trainer.step()
        trainer.zero_grad()

    def steps_while(is_done):
        """Return the seconds of steps until all ranks are done."""
        found = []
        while True:
            over = torch.tensor(float(is_done()))
            dist.all_reduce(over, dist.ReduceOp.MIN)
            if over:
                return found
            found += slowest(in_turns({"step": step}, rounds=1)[0])["step"]

    seconds = {"step": [], "step beside async_save": []}
    for turn in range(rounds + 1):
        alone = steps_while(iter([False] * 10 + [True]).__next__)
        beside = steps_while(checkpointer.async_save(turn, *pair).done)
        checkpointer.wait()
        if turn:  # the first is to warm up
            seconds["step"] += alone
            seconds["step beside async_save"] += beside
    return medians(seconds)


def run(millions=200, millions_beside=50, rounds=7):
    with tempfile.TemporaryDirectory() as folder:
        seconds = on_ranks(measure, (folder, millions, rounds), 2)
    with tempfile.TemporaryDirectory() as folder:
        seconds |= on_ranks(measure_beside, (folder, millions_beside, rounds), 2)
    figures = {name: 1e3 * each for name, each in seconds.items()}
    title = f"{millions} M parameters with AdamW ({millions_beside} M beside steps), 2 ranks"
    show(title, ("ms",), {name: [f"{value:.0f}"] for name, value in figures.items()})
    others = ("dcp", "torch_checkpointing")
    pairs = [(f"{what}, meshard", f"{what}, {x}") for what in ("save", "load") for x in others]
    pairs.append(("async_save", "a copy of the bytes"))
    show_ratios(figures, [*pairs, ("step beside async_save", "step")])
