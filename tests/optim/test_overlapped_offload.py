"""Optimizers in backward over shards in host memory."""

import threading
import time

import pytest
import torch

import meshard
from meshard import overlap_optimizer
from meshard._comm.host_copies import HostCopies
from tests.optim.optimizers import ADAMW, LAYOUTS, OPTIONS, grads, window
from tests.support.parity import full_state
from tests.support.ranks import on_ranks

make_offloaded = LAYOUTS["offloaded"]


@on_ranks(2)
@pytest.mark.parametrize("wait", ["step", "gather"])
def test_backward_does_not_wait_for_a_step(wait):
    model = make_offloaded()
    optimizer = overlap_optimizer(model, ADAMW, wait=wait, **OPTIONS)
    window(model, 0)
    optimizer.wait()
    before = full_state(model)
    gate, links, names = threading.Event(), [], []
    wait_for_copies, run = HostCopies.wait, meshard.optim.local_step.LocalStep.run

    def note_wait(self):
        if threading.current_thread().name.startswith("meshard optimizer"):
            links.append(self)
        wait_for_copies(self)

    def gated_run(self, *args):
        assert gate.wait(30)
        names.append(threading.current_thread().name)
        run(self, *args)

    HostCopies.wait, meshard.optim.local_step.LocalStep.run = note_wait, gated_run
    try:
        window(model, 1)
        assert grads(model) == []
        if wait == "gather":
            optimizer.step()
            optimizer.zero_grad()
            model.zero_grad()
        assert names == []
        time.sleep(0.1)
        assert len(links) == 1  # of the first unit that was reduced; its step is held up
        threading.Timer(0.1, gate.set).start()
        (optimizer.step if wait == "step" else optimizer.wait)()
        after = full_state(model)
        assert len(names) == 5 == len(set(links))
        assert all(name.startswith("meshard optimizer") for name in names)
        assert not torch.equal(after["first.weight"], before["first.weight"])
    finally:
        gate.set()
        HostCopies.wait, meshard.optim.local_step.LocalStep.run = wait_for_copies, run


@on_ranks(2)
@pytest.mark.parametrize("wait", ["step", "gather"])
def test_an_error_of_the_worker_is_raised_once_where_its_result_is_needed(wait):
    model = make_offloaded()
    optimizer = overlap_optimizer(model, torch.optim.SGD, lr=0.1, wait=wait)
    window(model, 0)
    optimizer.wait()
    optimizer.param_groups[0]["lr"] = "fast"
    window(model, 1)
    with pytest.raises(TypeError):
        optimizer.step() if wait == "step" else optimizer.wait()
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.wait()
    window(model, 2)
    optimizer.step()
