"""Loops of ``docs/how-to/loops.md``: on 1, 2 and 4 ranks the numbers of one process."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.clients.scripts import PAGES, Server, script
from tests.support.parity import assert_same

pytestmark = [pytest.mark.slow, pytest.mark.extras, pytest.mark.timeout(600)]

# What each loop has found, taken where its block ends.
TAKEN = {
    "## Weight": "losses = [evaluate_now()]",
    "## Ranks": "losses.append(evaluate_now())",
    "## Log": "losses.append(evaluate_now())",
    "## Evaluate": "losses += [*logged, evaluate_now()]",
    "## Keep": "losses.append(found)",
    "## Stop": "losses += [found_by_average, evaluate_now()]",
    "## Resume": "losses += [num_steps, best, evaluate_now()]",
    "\nEND": "losses.append(found_after_resume)",
}


def program():
    """Return the page's program in float64, with ``losses`` taken after each loop."""
    page = (PAGES / "loops.md").read_text() + "\nEND"
    # With this loop what is trained depends on the number of ranks.
    uneven = re.search(r"```python\nfrom meshard import uneven_batches.*?```\n", page, re.DOTALL)[0]
    page = page.replace(uneven, "")
    evaluate = re.search(r"@torch\.no_grad\(\)\ndef evaluate.*?\n\n\n", page, re.DOTALL)[0]
    now = "def evaluate_now():\n    return evaluate(model, data[:20][rank::num_ranks])\n"
    for heading, code in TAKEN.items():
        assert page.count(heading) == 1, heading
        page = page.replace(heading, f"```python\n{code}\n```\n{heading}")
    begin = "import torch\ntorch.set_default_dtype(torch.float64)\n"
    return page, begin, evaluate + now


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.close()


def one_process():
    """Return what the loops find, by plain torch and whole batches."""
    torch.set_default_dtype(torch.float64)
    try:
        return _one_process()
    finally:
        torch.set_default_dtype(torch.float32)


def _one_process():
    def make(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_of(model, inputs):
        return F.mse_loss(model(inputs), inputs.flip(1))

    def step(loss, clip=None):
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()

    def now(model, rows):
        with torch.no_grad():
            return loss_of(model, rows).item()

    model, optimizer = make(0)
    data = torch.randn(72, 16, generator=torch.Generator().manual_seed(1))
    held_out = torch.randn(21, 16, generator=torch.Generator().manual_seed(2))
    parts = [slice(0, 32), slice(32, 64), slice(64, 72)]
    for part in parts:
        step(loss_of(model, data[part]), clip=1.0)
    found = [now(model, data[:20])]

    masks = torch.arange(16) < (torch.arange(72) % 11 + 1)[:, None]
    for part in parts:
        errors = (model(data[part]) - data[part].flip(1)).square() * masks[part]
        step(errors.sum() / masks[part].sum())
    found.append(now(model, data[:20]))

    step(loss_of(model, data[:17]))
    found.append(now(model, data[:20]))

    losses = []
    for inputs in data.split(8):
        loss = loss_of(model, inputs)
        losses.append(loss.item())
        step(loss)
    found += [sum(losses[first : first + 3]) / 3 for first in (0, 3, 6)]
    found += [now(model, data[:20]), now(model, held_out)]

    average = copy.deepcopy(model)
    for number, inputs in enumerate(data.split(8)):
        step(loss_of(model, inputs))
        with torch.no_grad():
            for mean, param in zip(average.parameters(), model.parameters(), strict=True):
                mean.copy_(0.9 * mean + 0.1 * param if number else param)
    found += [now(average, held_out), now(model, data[:20])]

    best, num_steps = float("inf"), 0
    while True:
        step(loss_of(model, data.split(8)[num_steps % 9]))
        num_steps += 1
        if num_steps == 14:
            break
        if num_steps % 5 == 0:
            if now(model, held_out) > best:
                break
            best = now(model, held_out)
    found += [num_steps, best, now(model, data[:20])]

    model, optimizer = make(3)
    for epoch in range(2):
        order = torch.randperm(72, generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(8):
            step(loss_of(model, data[rows]))
    return [*found, now(model, held_out)]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_loops_find_what_one_process_does(server, num_ranks, tmp_path):
    page, begin, functions = program()
    (tmp_path / "loops.md").write_text(page)
    code = script(tmp_path / "loops.md").replace("losses = [", f"{functions}\nlosses = [", 1)
    found = server.run(begin + code, num_ranks).losses
    expected = torch.tensor(one_process(), dtype=torch.float64)
    assert len(found) == num_ranks
    for of_rank in found:
        assert_same(torch.tensor(of_rank, dtype=torch.float64), expected, torch.float64)
