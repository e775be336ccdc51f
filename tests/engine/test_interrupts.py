"""Ctrl-C at any line of a step: afterwards numbers are right, or an error says what is missing."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import meshard
from tests import ROOT
from tests.engine.interrupts import KINDS
from tests.support import insides
from tests.support.ranks import on_fake_ranks


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_at_a_line_leaves_no_wrong_number(kind):
    """Many lines of the first kind, and others of each other kind, which do mostly the same.

    With ``HYPOTHESIS_PROFILE=night`` every line of the first kind, which takes minutes.
    """
    first = KINDS.index(kind)
    every = 1 if os.environ.get("HYPOTHESIS_PROFILE") == "night" else 2
    stride = 19 if first else every
    command = [sys.executable, "-W", "ignore", "-m", "tests.engine.interrupts"]
    done = subprocess.run(  # it may crash
        [*command, kind, str(first), str(stride)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    lines = done.stdout.splitlines()
    wrong = [line for line in lines if line.startswith("WRONG")]
    last = lines[-1] if lines else "nothing was tried"
    assert not wrong, "\n".join(wrong)
    assert done.returncode == 0, f"ended by {done.returncode} at: {last}\n{done.stderr[-2000:]}"
    assert int(last.split()[0]) > 0


class Interrupted:
    """A storage whose next ``resize_`` is the last thing before an interrupt."""

    def __init__(self, storage):
        self._storage = storage
        self.nbytes = storage.nbytes

    def resize_(self, num_bytes):
        self._storage.resize_(num_bytes)
        raise KeyboardInterrupt


@on_fake_ranks(1)
def test_memory_whose_allocation_or_release_was_interrupted_is_allocated_again():
    layer = meshard.fully_shard(nn.Linear(3, 3))
    weight = layer.weight.full_tensor().clone()
    pool = insides.units(layer)[0].group.unit_params.unsharded
    storages = list(pool._storages)

    def gather_and_free():
        layer.unshard()
        assert pool._storages[0][0].nbytes() and torch.equal(layer.weight, weight)
        layer.reshard()
        assert isinstance(layer.weight, DTensor) and not pool._storages[0][0].nbytes()

    for act in (layer.unshard, layer.reshard):
        if act == layer.reshard:
            layer.unshard()
        pool._storages = [(Interrupted(storage), size) for storage, size in storages]
        with pytest.raises(KeyboardInterrupt):
            act()
        pool._storages = storages
        gather_and_free()
