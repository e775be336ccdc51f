"""Checkpoints of a run. A save that is killed leaves the one before it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

LATEST, BEFORE, UNFINISHED = "latest", "before", "unfinished"


def save(folder: Path, model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Save a checkpoint to ``folder``, which all ranks share: each writes what it holds.

    torch.distributed.checkpoint overwrites in place. Killed on the way, it would leave files of two
    steps, which load in silence. So a new checkpoint is written aside, and takes the place of the
    old one when all ranks have written theirs.
    """
    latest, before, unfinished = folder / LATEST, folder / BEFORE, folder / UNFINISHED
    is_first = dist.get_rank() == 0
    if is_first and unfinished.exists():  # a save was killed
        shutil.rmtree(unfinished)
    dist.barrier()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": step}
    dcp.save(state, checkpoint_id=unfinished)
    dist.barrier()
    if is_first:
        if latest.exists():
            if before.exists():  # a save was killed while it removed this one
                shutil.rmtree(before)
            latest.rename(before)
        unfinished.rename(latest)
        if before.exists():
            shutil.rmtree(before)
    dist.barrier()  # all may rely on it


def find(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in ``folder``; None if there is none."""
    # A save that is killed between its two renames leaves no latest one.
    found = (folder / name for name in (LATEST, BEFORE))
    return next((path for path in found if (path / ".metadata").exists()), None)


def load(folder: Path, model: nn.Module, optimizer: Optimizer) -> int:
    """Load the checkpoint in ``folder``, saved on any number of ranks, and return its step."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    dcp.load(state, checkpoint_id=find(folder))
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return state["step"]


def mismatch(folder: Path, model: nn.Module) -> str | None:
    """Return how the checkpoint in ``folder`` differs from ``model``, before anything is loaded."""
    found = find(folder)
    if found is None:
        return f"there is no checkpoint in {folder}"
    saved = dcp.FileSystemReader(found).read_metadata().state_dict_metadata
    shapes = {f"model.{name}": list(param.shape) for name, param in model.named_parameters()}
    for name in sorted(shapes.keys() | {name for name in saved if name.startswith("model.")}):
        there, here = list(getattr(saved.get(name), "size", [])), shapes.get(name)
        if there != here:
            return f"{name} is {there or 'not'} in {folder}, and {here or 'not'} in this model"
    return None
