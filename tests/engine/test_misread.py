"""The error about a weight that is read outside the forward of its unit."""

import contextlib
import io
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.nn import functional

import meshard
from tests.house.sources import ROOT
from tests.support.models import Transformer, seeded
from tests.support.parity import assert_same, full_grads

REMEDIES = [
    "apply fully_shard to the parent instead of this module",
    "meshard.register_fsdp_forward_method(module, name)",
    "with meshard.unsharded_params(module):",
    "unshard_on_access=True",
]
TORCH_SAYS = r"got mixed torch\.Tensor and DTensor"


def text_of(call, *args):
    with pytest.raises(RuntimeError, match=TORCH_SAYS) as caught:
        call(*args)
    return str(caught.value)


def assert_explained(text, *names, unit, state="sharded"):
    assert "got mixed torch.Tensor and DTensor" in text.splitlines()[0]
    for part in (*(repr(name) for name in names), f"of unit {unit!r}", f"unit is {state}"):
        assert part in text, f"{part!r} is not in {text!r}"
    for remedy in REMEDIES:
        assert text.count(remedy) == 1


def attention_of_two_units():
    mesh = init_device_mesh("cpu", (2,))
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2, batch_first=True)})
    meshard.fully_shard(model["attention"].out_proj, mesh)
    root = nn.Sequential(model["attention"])
    meshard.fully_shard(root[0], mesh)
    names = ("out_proj.weight", "out_proj.bias")
    x = torch.ones(1, 3, 8)
    for mode in (True, False):  # torch's fast path, and the other one
        root[0].train(mode)
        with torch.set_grad_enabled(mode):
            text = text_of(root[0], x, x, x)
            assert_explained(text, *names, unit="out_proj")
            assert "this rank's shard, (4, 8) of (8, 8)" in text
    return text


def test_an_attention_whose_out_proj_is_a_unit_says_what_helps(run_ranks):
    run_ranks(attention_of_two_units, 2)


def peer_says_nothing():
    mesh = init_device_mesh("cpu", (2,))
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    for unit in (attention.out_proj, attention):
        torch_fsdp.fully_shard(unit, mesh=mesh)
    x = torch.ones(1, 3, 8)
    assert "out_proj" not in text_of(attention, x, x, x)


def test_the_peer_names_no_parameter(run_ranks):
    run_ranks(peer_says_nothing, 2)


class Root(nn.Module):
    """Its forward does ``how`` with the weight of a layer that is a unit of its own."""

    def __init__(self, how):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4, bias=False)])
        self.how = how

    def forward(self, x):
        return self.how(self, x)


def by_index(model, x):
    return x @ model.layers[0].weight.t()


def by_local_name(model, x):
    last = model.layers[1].weight
    for _ in range(2):
        x = torch.tanh(x)
    return functional.linear(x, last)


def by_cast(model, x):
    weight = model.layers[1].weight.to(torch.float64)
    return x.double() @ weight


def by_list(model, x):
    for param in model.layers[1].parameters():
        x = x * param.detach()
    return x


def in_another_line(model, x):
    return functional.linear(
        torch.tanh(x) + 1,
        model.layers[1].weight,
    )


def in_a_call(model, x):
    def inner(given):
        return torch.cat([x, given])

    return inner(model.layers[1].weight)


@pytest.fixture
def one_rank():
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("how", [by_local_name, by_cast, by_list, in_another_line, in_a_call])
def test_what_was_read_is_found_however_it_was_read(how):
    model = Root(how)
    for layer in model.layers:
        meshard.fully_shard(layer)
    meshard.fully_shard(model)
    assert_explained(text_of(model, torch.ones(4, 4)), "layers.1.weight", unit="layers.1")


@pytest.mark.usefixtures("one_rank")
def test_a_read_by_index_and_its_state_are_named():
    model = Root(by_index)
    meshard.fully_shard(model.layers[0], reshard_after_forward=False)
    meshard.fully_shard(model)
    x = torch.ones(1, 4)
    assert_explained(text_of(model, x), "layers.0.weight", unit="layers.0")
    model.how = lambda model, x: by_index(model, model.layers[0](x))
    text = text_of(model, x)
    assert_explained(text, "layers.0.weight", unit="layers.0", state="whole, but kept for its own")
    root = meshard.fully_shard(nn.Linear(4, 4))
    root.score = lambda x: x @ root.weight
    assert_explained(
        text_of(meshard.fully_shard(nn.Sequential(Root(lambda _, x: root.score(x)))), x),
        "weight",
        unit="(root)",
    )


@pytest.mark.usefixtures("one_rank")
def test_other_errors_are_left_alone():
    model = Root(lambda model, x: x @ torch.ones(3, 3))
    meshard.fully_shard(model)
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(1, 4))
    assert "meshard" not in str(caught.value)
    mesh = model.layers[0].weight.device_mesh
    stranger = distribute_tensor(torch.ones(4, 4), mesh, model.layers[0].weight.placements)
    model.how = lambda model, x: x @ stranger
    assert "meshard" not in text_of(model, torch.ones(1, 4))


SCRIPT = """
import torch, meshard
head = meshard.fully_shard(torch.nn.Linear(4, 4, bias=False))
def loss(hidden):
    return torch.nn.functional.linear(hidden, head.weight).sum()
loss(torch.ones(1, 4))
"""


def test_a_loss_function_outside_of_any_forward_ends_the_program_with_the_explanation(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "parameter 'weight' of unit '(root)' was read while" in done.stderr
    for remedy in REMEDIES:
        assert remedy in done.stderr


def loss_reads_the_head():
    """The three ways out train like the plain model."""
    mesh = init_device_mesh("cpu", (2,))
    tokens = torch.randint(0, 11, (2, 2, 5), generator=torch.Generator().manual_seed(0))

    def loss_of(model, tokens):
        hidden = model.norm(model.embedding(tokens))
        return functional.cross_entropy(
            functional.linear(hidden, model.head.weight).flatten(0, 1), tokens.flatten()
        )

    plain = seeded(Transformer())
    loss_of(plain, tokens.flatten(0, 1)).backward()
    model = seeded(Transformer())
    for unit in (model.embedding, model.norm, model.head):
        meshard.fully_shard(unit, mesh)
    rank = dist.get_rank()
    assert_explained(
        text_of(lambda: _explained(loss_of, model, tokens[rank])), "weight", unit="(root)"
    )
    with meshard.unsharded_params(model.head):
        loss = loss_of(model, tokens[rank])
    loss.backward()
    used = {name: g for name, g in full_grads(plain).items() if g is not None}
    ours = {name: g for name, g in full_grads(model).items() if g is not None}
    assert_same(ours, used)


def _explained(call, *args):
    """What the program's last report does."""
    try:
        call(*args)
    except RuntimeError as error:
        with contextlib.redirect_stderr(io.StringIO()):
            sys.excepthook(type(error), error, error.__traceback__)
        raise


def test_a_loss_that_reads_the_head_trains_inside_unsharded_params(run_ranks):
    run_ranks(loss_reads_the_head, 2)
