"""Checkpoints of one torch, read by another.

    python -m tests.checkpoint.exchange FOLDER

Writes a checkpoint named after this torch, if there is none, then loads all that are in the
folder, by ``Checkpointer`` and of plain ``dcp.save`` alike, and compares every number.
``tests/versions.py`` runs it in each environment.
"""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import meshard
from meshard.checkpoint import Checkpointer


def built(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a sharded model of several dtypes and AdamW after a step, full of known numbers."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3).bfloat16())
    for layer in model:
        meshard.fully_shard(layer)
    meshard.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=seed / 8)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.fill_(seed + number)
            optimizer.state[param]["exp_avg"].fill_(seed - number)
    return model, optimizer


def check(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    for number, param in enumerate(model.parameters()):
        assert param.full_tensor().unique().tolist() == [seed + number]
        assert optimizer.state[param]["exp_avg"].full_tensor().unique().tolist() == [seed - number]
        assert optimizer.state[param]["step"] == 1
    assert optimizer.param_groups[0]["lr"] == seed / 8


def main(folder: Path) -> None:
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    own = folder / torch.__version__.partition("+")[0]
    if not own.exists():
        model, optimizer = built(3)
        Checkpointer(own / "meshard").save(7, model, optimizer, note=(1, "x"))
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save({**states, "step": 7}, checkpoint_id=own / "dcp")
    found = sorted(path.name for path in folder.iterdir())
    for name in found:
        for kind in ("meshard", "dcp"):
            model, optimizer = built(1)
            loaded = Checkpointer(folder / name / kind).load(model, optimizer)
            check(model, optimizer, 3)
            assert loaded.step == 7
    print(f"torch {torch.__version__} reads the checkpoints of {', '.join(found)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
