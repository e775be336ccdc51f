"""``owner_optimizer``: each matrix is stepped on one rank, with the numbers of one process.

The oracle has the whole parameters in one process, and steps them by the ordinary optimizer, with
the gradients of the sharded model. All numbers must agree bit for bit.
"""

import copy
import importlib
import math
import os
import warnings
from collections import defaultdict
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import meshard
from meshard import owner_optimizer
from meshard.checkpoint import Checkpointer
from tests.optim.stand_in_optimizers import StandIn
from tests.support.live_memory import live_tensor_bytes, settled_tensor_bytes
from tests.support.models import Made, seeded
from tests.support.parity import assert_same, whole
from tests.support.ranks import on_ranks, on_threads
from tests.support.spread import slow, spread

ADAMW, MUON = torch.optim.AdamW, torch.optim.Muon
OPTIMIZERS = {
    "Muon": ("torch.optim", {"lr": 0.02, "weight_decay": 0.1}),
    "Adafactor": ("torch.optim", {"lr": 0.02}),
    "AdamW": ("torch.optim", {"lr": 0.02}),
    "Shampoo": ("pytorch_optimizer", {"lr": 0.02}),
    "SOAP": ("pytorch_optimizer", {"lr": 0.02, "precondition_frequency": 2}),
    "Lamb": ("pytorch_optimizer", {"lr": 0.02, "weight_decay": 0.1, "foreach": False}),
}
NAMES = [
    pytest.param(name, marks=[pytest.mark.extras] if package == "pytorch_optimizer" else [])
    for name, (package, _) in OPTIMIZERS.items()
]


def times_inputs(model, inputs):
    """Return the sum of each input times its parameter, whose gradient is that input."""
    named = model.named_parameters()
    return sum((param * inputs[name]).sum() for name, param in named if name in inputs)


def make(shapes, *, mesh=None, shard_dims=(), frozen=(), **kwargs):
    """Return a model of one unit with parameters ``w0``, ``w1``, ... of these shapes."""
    warnings.filterwarnings("ignore", "no optimizer has stepped")  # most tests step a part of it
    params = {f"w{number}": nn.Parameter(torch.empty(shape)) for number, shape in enumerate(shapes)}
    model = seeded(Made(times_inputs, **params))
    for number in frozen:
        params[f"w{number}"].requires_grad_(False)
    dims = {params[f"w{number}"]: Shard(dim) for number, dim in enumerate(shard_dims)}
    return meshard.fully_shard(model, mesh, shard_placement_fn=dims.get, **kwargs)


def backward(model, step, *, unused=()):
    """Run a backward whose gradients depend on the step."""
    generator = torch.Generator().manual_seed(step)
    named = model.named_parameters()
    inputs = {name: torch.randn(param.shape, generator=generator) for name, param in named}
    model({name: each for name, each in inputs.items() if name not in unused}).backward()


class Ordinary:
    """The ordinary optimizer of the selected parameters in one process."""

    def __init__(self, model, ours, cls, options):
        warnings.filterwarnings("ignore", "no optimizer has stepped")  # the other parameters
        self.params = {name: nn.Parameter(whole(param)) for name, param in model.named_parameters()}
        self.optimizer = cls([self.params[name] for name in ours.owners], **options)

    def step(self, model):
        for name, param in model.named_parameters():
            self.params[name].grad = None if param.grad is None else whole(param.grad)
        self.optimizer.step()


def step_both(model, ours, ordinary):
    """Step by both, and compare all parameters."""
    ordinary.step(model)
    ours.step()
    for name, param in model.named_parameters():
        assert_same(whole(param), ordinary.params[name].detach(), bitwise=True, what=name)


def check_steps(model, ours, ordinary, steps, run=backward, **kwargs):
    """Take steps with both, and compare all parameters after each."""
    for step in steps:
        model.zero_grad()
        run(model, step, **kwargs)
        step_both(model, ours, ordinary)


def both(model, name, **kwargs):
    """Return our optimizer and the ordinary one."""
    package, options = OPTIMIZERS[name]
    cls = getattr(importlib.import_module(package), name)
    ours = owner_optimizer(model, cls, **options, **kwargs)
    return ours, Ordinary(model, ours, cls, options)


SHAPES = [(6, 4), (3, 8), (1, 5), (4, 4), (7,), (2, 9), (5, 1)]  # uneven, and fewer rows than ranks


@pytest.mark.parametrize("name", NAMES)
@on_threads(4)
def test_steps_are_those_of_one_process(name):
    model = make(SHAPES, mesh=init_device_mesh("cpu", (2, 2)), frozen=[3])
    check_steps(model, *both(model, name, bucket_mb=1e-4), range(6))


@given(data=st.data())
def test_any_shapes_on_any_mesh(data):
    mesh_shape = data.draw(st.sampled_from([(2,), (3,), (4,), (2, 2), (1, 2), (2, 1)]), "mesh")
    shapes = data.draw(st.lists(st.tuples(*[st.integers(1, 7)] * 2), min_size=1, max_size=6))
    dims = data.draw(st.tuples(*[st.integers(0, 1)] * len(shapes)), "shard dims")
    unused = {f"w{number}" for number in data.draw(st.sets(st.integers(1, 5)), "unused")}
    name = data.draw(st.sampled_from(["Muon", "Adafactor", "AdamW"]), "optimizer")
    bucket_mb = data.draw(st.sampled_from([1e-5, 1e-4, 25]), "bucket_mb")

    @on_threads(math.prod(mesh_shape))
    def body():
        model = make(shapes, mesh=init_device_mesh("cpu", mesh_shape), shard_dims=dims)
        ours, ordinary = both(model, name, bucket_mb=bucket_mb)
        check_steps(model, ours, ordinary, range(2))
        check_steps(model, ours, ordinary, range(2, 4), unused=unused)
        check_steps(model, ours, ordinary, range(4, 6))

    body()


# --- states --------------------------------------------------------------------------------


def unsharded_state(ours):
    """Return the state dict with unsharded tensors, as it would be after any checkpoint."""
    packed = ours.state_dict()
    return {**packed, "state": {n: unsharded(state) for n, state in packed["state"].items()}}


def unsharded(value):
    if isinstance(value, dict):
        return {key: unsharded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [unsharded(each) for each in value]
    return whole(value) if isinstance(value, torch.Tensor) else value


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_state_goes_on_with_other_owners_on_another_mesh_and_in_one_process(name):
    saved = {}

    @on_threads(2)
    def save():
        model = make(SHAPES, mesh=init_device_mesh("cpu", (2,)))
        ours, ordinary = both(model, name)
        check_steps(model, ours, ordinary, range(3))
        packed, weights = unsharded_state(ours), unsharded(dict(model.named_parameters()))
        check_steps(model, ours, ordinary, range(3, 6))
        last = unsharded(dict(model.named_parameters()))
        if dist.get_rank() == 0:
            saved.update(optimizer=packed, weights=weights, owners=ours.owners, last=last)

    @on_threads(4)
    def go_on():
        model = make(SHAPES, mesh=init_device_mesh("cpu", (2, 2)))
        with torch.no_grad():
            for fqn, param in model.named_parameters():
                place = param.device_mesh, param.placements
                param.copy_(distribute_tensor(saved["weights"][fqn], *place, src_data_rank=None))
        ours, ordinary = both(model, name, bucket_mb=1e-4)
        assert ours.owners != saved["owners"]
        ours.load_state_dict(copy.deepcopy(saved["optimizer"]))
        ordinary.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        check_steps(model, ours, ordinary, range(3, 6))
        if name != "SOAP":  # its matrices are in columns until they are saved: see below
            assert_same(unsharded(dict(model.named_parameters())), saved["last"], bitwise=True)

    save()
    go_on()


@pytest.mark.parametrize("kind", [slow("dcp"), "checkpointer"])
@pytest.mark.parametrize("name", [slow("Shampoo"), "SOAP"])
@pytest.mark.extras
@on_ranks(4)
def test_checkpoints_take_it_to_another_mesh(kind, name, tmp_path):
    """Four ranks save, two by two go on; neither knows the other's owners."""
    model = make(SHAPES, mesh=init_device_mesh("cpu", (4,)))
    ours, ordinary = both(model, name)
    check_steps(model, ours, ordinary, range(3))
    other = make(SHAPES, mesh=init_device_mesh("cpu", (2, 2)))
    theirs, _ = both(other, name, bucket_mb=1e-4)
    # SOAP keeps matrices in columns, and a checkpoint in rows, whose products round otherwise.
    ordinary.optimizer.load_state_dict(copy.deepcopy(unsharded_state(ours)))
    if kind == "checkpointer":
        Checkpointer(tmp_path).save(3, model, ours)
        Checkpointer(tmp_path).load(other, theirs)
    else:
        dcp.save(
            dict(zip(("model", "optim"), get_state_dict(model, ours), strict=True)),
            checkpoint_id=tmp_path,
        )
        states = dict(zip(("model", "optim"), get_state_dict(other, theirs), strict=True))
        dcp.load(states, checkpoint_id=tmp_path)
        set_state_dict(
            other, theirs, model_state_dict=states["model"], optim_state_dict=states["optim"]
        )
    check_steps(other, theirs, ordinary, range(3, 6))


@on_threads(2)
def test_of_a_state_with_a_second_group_the_first_is_loaded():
    """As earlier versions saved it, for parameters that were not selected."""
    model = make(SHAPES)
    ours, ordinary = both(model, "AdamW")
    check_steps(model, ours, ordinary, range(3))
    saved = unsharded_state(ours)
    count = len(saved["param_groups"][0]["params"])
    saved["param_groups"].append({"params": [count], "lr": 0.5})
    saved["state"][count] = {"step": torch.tensor(9.0), "exp_avg": torch.ones(7)}
    ours, _ = both(model, "AdamW")
    ours.load_state_dict(saved)
    check_steps(model, ours, ordinary, range(3, 5))


@on_ranks(2)
def test_optimizers_load_their_groups_of_a_checkpoint_that_has_both(tmp_path):
    """As earlier versions saved it."""
    model = make(SHAPES)
    ours, ordinary = both(model, "Muon")
    named = model.named_parameters()
    vectors = ADAMW([param for name, param in named if name not in ours.owners], lr=0.01)
    check_steps(model, ours, ordinary, range(2))
    vectors.step()
    ordinary.params["w4"].data.copy_(whole(model.w4))
    saved = [ours.state_dict(), vectors.state_dict()]
    numbers = [len(ours.owners)]
    groups = [saved[0]["param_groups"][0], {**saved[1]["param_groups"][0], "params": numbers}]
    states = {**saved[0]["state"], numbers[0]: saved[1]["state"][0]}
    together = ADAMW([*ours.param_groups[0]["params"], *vectors.param_groups[0]["params"]])
    together.param_groups = [*ours.param_groups, *vectors.param_groups]
    together.state_dict = lambda: {"param_groups": groups, "state": states}
    Checkpointer(tmp_path).save(1, model, together)
    (theirs, _), other = both(model, "Muon"), ADAMW(vectors.param_groups[0]["params"])
    for each in (theirs, other):
        Checkpointer(tmp_path).load(model, each, strict=False)
    assert other.param_groups[0]["lr"] == 0.01 and other.state_dict()["state"][0]["step"] == 1
    check_steps(model, theirs, ordinary, range(2, 4))


# --- what it composes with -------------------------------------------------------------------


@on_threads(4)
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
def test_windows_clipping_and_a_scheduler_beside_an_optimizer_of_the_rest(mesh_shape):
    model = make(SHAPES, mesh=init_device_mesh("cpu", mesh_shape))
    ours, ordinary = both(model, "Muon")
    named = model.named_parameters()
    rest = {name: param for name, param in named if name not in ours.owners}
    pairs = {
        ours: ordinary.optimizer,
        ADAMW(rest.values(), lr=0.01): ADAMW([ordinary.params[name] for name in rest], lr=0.01),
    }
    optimizers = [*pairs, *pairs.values()]
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1 / (step + 1)) for each in optimizers
    ]
    for step in range(4):
        for each in optimizers:
            each.zero_grad()
        for microbatch in meshard.microbatches(model, range(3)):
            backward(model, 10 * step + microbatch)
        meshard.clip_grad_norm_(model, 1.0)
        for name, param in model.named_parameters():
            ordinary.params[name].grad = whole(param.grad)
        for each in optimizers:
            each.step()
        for name, param in model.named_parameters():
            assert_same(whole(param), ordinary.params[name].detach(), bitwise=True, what=name)
        for each in schedulers:
            each.step()
    assert ours.param_groups[0]["lr"] == 0.02 / 5


@on_threads(4)
def test_replicated_parameters_are_stepped_on_one_rank_too():
    params = {f"w{n}": nn.Parameter(torch.empty(shape)) for n, shape in enumerate(SHAPES)}
    mesh = init_device_mesh("cpu", (2, 2))
    model = meshard.replicate(seeded(Made(times_inputs, **params)), mesh)
    ours, ordinary = both(model, "Muon")
    assert len(set(ours.owners.values())) == 4
    check_steps(model, ours, ordinary, range(3))


@on_threads(4)
def test_parameters_of_several_meshes_and_dtypes():
    """Experts lie on meshes of their own, and a layer in bfloat16 beside the others."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pairs", "inside"))
    experts = make([(5, 4), (4, 6)], mesh=mesh["inside"])
    half = seeded(nn.Linear(6, 4, bias=False)).bfloat16()
    meshard.fully_shard(half, mesh["pairs"])
    model = Made(None, experts=experts, half=half, dense=make(SHAPES, mesh=mesh))
    ours, ordinary = both(model, "Muon")
    pair = mesh.get_local_rank("pairs")

    def run(model, step):
        backward(model.experts, 10 * step + pair)
        backward(model.dense, step)
        half(torch.full((2, 6), 0.1 + step, dtype=torch.bfloat16)).square().sum().backward()

    check_steps(model, ours, ordinary, range(3), run)


@on_threads(2)
def test_ranks_may_have_other_experts_beside_common_layers():
    """Each rank has one expert, on a mesh of its own, with a name and a shape of its own."""
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ranks", "alone"))["alone"]
    expert, dense = make([(4 + rank, 3)], mesh=alone), make([(4, 4), (3, 5)], mesh=mesh)
    model = Made(None, dense=dense, **{f"expert{rank}": expert})
    ours, ordinary = both(model, "Muon")

    def run(model, step):
        backward(dense, step)
        backward(expert, step)

    check_steps(model, ours, ordinary, range(3), run)


@on_threads(2)
def test_a_part_of_a_model_with_parameters_of_an_outer_unit():
    inner = Made(None, unit=nn.Linear(4, 4), loose=nn.Parameter(torch.empty(4, 4)))
    model = Made(lambda m, x: m.inner.unit(x) @ m.inner.loose, inner=inner)
    meshard.fully_shard(seeded(model).inner.unit)
    meshard.fully_shard(model)
    ours = owner_optimizer(model.inner, MUON, lr=0.02)
    assert list(ours.owners) == ["loose", "unit.weight"]
    before = whole(model.inner.loose)
    model(torch.ones(2, 4)).sum().backward()
    ours.step()
    assert not torch.equal(whole(model.inner.loose), before)


@on_threads(4)
def test_gradients_of_tensor_parallel_matrices():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = seeded(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5, bias=False)))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    meshard.fully_shard(parallelize_module(model, mesh["tp"], plan), mesh["dp"])
    ours, ordinary = both(model, "Muon")
    assert sorted(ours.owners) == ["0.weight", "1.weight"]

    def run(model, step):
        model(torch.full((3, 6), 0.1 * step + 0.1)).square().sum().backward()

    check_steps(model, ours, ordinary, range(3), run)


def replace(optimizer, param):
    own = optimizer.state[param]
    if own:  # on the owner
        own["exp_avg"] = torch.ones_like(own["exp_avg"])


def take_another(optimizer, param):
    own = optimizer.state[param]
    if own:
        optimizer.state[param] = {key: each.clone() * 2 for key, each in own.items()}


EDITS_OF_STATES = {
    "clear": lambda optimizer, _: optimizer.state.clear(),
    "assign": lambda optimizer, _: setattr(optimizer, "state", defaultdict(dict)),
    "drop": lambda optimizer, param: optimizer.state.pop(param, None),
    "replace": replace,
    "take another": take_another,
}


@pytest.mark.parametrize("edit", EDITS_OF_STATES)
@on_threads(4)
def test_the_next_step_and_a_checkpoint_use_what_is_changed_in_the_state(edit):
    model = make(SHAPES)
    ours, ordinary = both(model, "AdamW", bucket_mb=1e-4)
    check_steps(model, ours, ordinary, range(3))
    EDITS_OF_STATES[edit](ours, model.w1)
    EDITS_OF_STATES[edit](ordinary.optimizer, ordinary.params["w1"])
    state, expected = ours.state_dict()["state"], ordinary.optimizer.state_dict()["state"]
    assert [*state] == [*expected]
    for number, own in expected.items():
        assert_same({key: whole(each) for key, each in state[number].items()}, own, bitwise=True)
    check_steps(model, ours, ordinary, range(3, 6))


@on_threads(2)
def test_a_state_may_be_set_before_the_first_step():
    model = make([(4, 4), (3, 4)])
    ours, ordinary = both(model, "AdamW")
    given = {"step": torch.tensor(7.0), "exp_avg": torch.ones(4, 4), "exp_avg_sq": torch.ones(4, 4)}
    if ours.owners["w0"] == dist.get_rank():
        ours.state[model.w0] = copy.deepcopy(given)
    ordinary.optimizer.state[ordinary.params["w0"]] = copy.deepcopy(given)
    check_steps(model, ours, ordinary, range(2))


@on_threads(2)
def test_a_state_from_before_the_first_step_takes_back_what_was_stepped():
    model = make(SHAPES)
    ours, ordinary = both(model, "Muon")
    first, other = (copy.deepcopy(each.state_dict()) for each in (ours, ordinary.optimizer))
    check_steps(model, ours, ordinary, range(2))
    ours.load_state_dict(first)
    ordinary.optimizer.load_state_dict(other)
    check_steps(model, ours, ordinary, range(2, 4))


class MakesStateAtOnce(StandIn):
    """Sums up gradients in a state that it makes when it is made."""

    def __init__(self, params, **defaults):
        super().__init__(params, **defaults)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["sum"] = torch.zeros_like(param)

    def step_one(self, group, param, grad, state):
        param.sub_(state["sum"].add_(grad), alpha=0.5)


@on_threads(2)
def test_an_optimizer_that_makes_its_state_at_once_goes_back_to_before_its_first_step():
    model = make([(4, 4), (3, 5)])
    ours = owner_optimizer(model, MakesStateAtOnce)
    first, before = copy.deepcopy(ours.state_dict()), model.state_dict()
    before = {name: value.clone() for name, value in before.items()}
    ends = []
    for _ in range(2):
        backward(model, 0)
        ours.step()
        ends.append(model.w0.full_tensor().clone())
        model.zero_grad()
        model.load_state_dict(before)
        ours.load_state_dict(first)
    assert torch.equal(*ends)


@on_threads(1)
def test_a_state_dict_of_one_rank_is_a_copy():
    model = make([(4, 4)])
    ours, _ = both(model, "AdamW")
    backward(model, 0)
    ours.step()
    state = ours.state_dict()["state"][0]
    step, average = state["step"].item(), state["exp_avg"].full_tensor().clone()
    ours.step()
    assert state["step"].item() == step and torch.equal(state["exp_avg"].full_tensor(), average)


@on_threads(2)
def test_a_closure_is_called_once():
    model = make(SHAPES)
    ours, ordinary = both(model, "AdamW")
    losses = []

    def closure():
        backward(model, len(losses))
        losses.append(len(losses))
        ordinary.step(model)
        return losses[-1]

    assert ours.step(closure) == 0 and losses == [0]
    assert_same(whole(model.w0), ordinary.params["w0"].detach(), bitwise=True)


# --- what is selected, sent and kept ---------------------------------------------------------


@on_threads(2)
def test_the_default_leaves_out_embeddings_and_heads():
    members = {"embed": nn.Embedding(5, 4), "layers": [nn.Linear(4, 4)], "lm_head": nn.Linear(4, 5)}
    model = Made(None, position=nn.Parameter(torch.empty(3, 4)), **members)
    meshard.fully_shard(seeded(model))
    ours = owner_optimizer(model, MUON)
    assert list(ours.owners) == ["layers.0.weight"]
    assert len(ours.param_groups) == 1


@on_threads(4)
def test_the_costliest_are_dealt_out_first_and_describe_says_so():
    model = make([(8, 8), (2, 2), (8, 8), (8, 8), (2, 2), (8, 8), (4, 4), (4, 4)])
    ours = owner_optimizer(model, MUON)
    owners = [ours.owners[f"w{number}"] for number in range(8)]
    assert sorted(owners[n] for n in (0, 2, 3, 5)) == [0, 1, 2, 3]
    assert len({owners[n] for n in (1, 4, 6, 7)}) == 4
    line = "Muon steps 8 parameters, each on one of 4 ranks (4 own some); the busiest has 1.0"
    assert line in meshard.describe(model)
    del ours
    assert "Muon" not in meshard.describe(model)


def edit_on_one_rank(model, _):
    """On one that owns none of the edited parameters."""
    if dist.get_rank() == 1:
        model.w0.to_local().mul_(0.5)


EDITS_OF_VALUES = {
    "in place": lambda model, _: model.w0.clamp_(-0.1, 0.1),
    "through .data": lambda model, _: model.w0.data.mul_(0.5),
    "on one rank": edit_on_one_rank,
    "by another optimizer": lambda model, _: torch.optim.SGD([model.w0], lr=0.1).step(),
    "load_state_dict": lambda model, saved: model.load_state_dict(saved),
    "offloaded and back": lambda model, _: meshard.offload(model).close(),
}


@spread(sending=[torch.float32, torch.bfloat16], edit=[*EDITS_OF_VALUES])
@on_threads(2)
def test_edits_reach_owners(edit, sending):
    model = make([(6, 4), (4, 6), (5, 3)], mesh=init_device_mesh("cpu", (2,)))
    ours, ordinary = both(model, "Muon", bucket_mb=1e-5, gradient_dtype=sending)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(6):
        if step % 2:
            with torch.no_grad():
                EDITS_OF_VALUES[edit](model, saved)
        for name, param in model.named_parameters():
            ordinary.params[name].data.copy_(whole(param))
        ours.zero_grad()
        backward(model, step)
        for param in model.parameters():
            param.grad = param.grad.to(sending).to(torch.float32)
        step_both(model, ours, ordinary)


class Looks(torch.optim.SGD):
    """Looks at the memory that is alive in its step."""

    def step(self, closure=None):
        seen.append(live_tensor_bytes())
        return super().step(closure)


seen = []


@pytest.mark.slow
@on_ranks(4)
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
def test_memory_of_a_step_is_that_of_three_batches(mesh_shape):
    model = make([(64, 64)] * 16, mesh=init_device_mesh("cpu", mesh_shape))
    ours = owner_optimizer(model, Looks, lr=0.1, bucket_mb=0.01)
    backward(model, 0)
    before = settled_tensor_bytes()
    seen.clear()
    ours.step()
    one, num_replicas = 64 * 64 * 4, 4 // mesh_shape[-1]
    # Value and gradient of the batch that is stepped; sent and received, the two of the next one,
    # and the new values of the one before.
    assert max(seen) - before <= (2 + 2 * 2 + 2 * num_replicas) * one + 1000
    assert settled_tensor_bytes() - before < 200


# --- what is refused -------------------------------------------------------------------------


class Together(torch.optim.SGD):
    """Keeps a number for all its parameters, as Prodigy does."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["d"] = max(
                [group.get("d", 0.0), *(p.grad.norm().item() for p in group["params"])]
            )
        return super().step(closure)


@on_threads(2)
def test_what_cannot_be_stepped_so_is_refused():
    model = make([(4, 4), (4,)])
    own = partial(owner_optimizer, model)
    refused = [
        (TypeError, "builds the optimizer itself", lambda: own(ADAMW(model.parameters()))),
        (TypeError, "needs a closure", lambda: own(torch.optim.LBFGS)),
        (TypeError, "sparse gradients", lambda: own(torch.optim.SparseAdam)),
        (TypeError, "must be a class of optimizers", lambda: own(lambda _: 3)),
        (ValueError, "selects no parameter", lambda: own(MUON, select=lambda *_: False)),
        (ValueError, "Muon only supports 2D", lambda: own(MUON, select=lambda *_: True)),
        (ValueError, "does not hold", lambda: own(lambda _: ADAMW(model.parameters()))),
        (ValueError, "gradient_dtype must be", lambda: own(MUON, gradient_dtype=torch.int8)),
    ]
    for error, text, call in refused:
        with pytest.raises(error, match=text):
            call()
    stray = Made(None, inside=model, outside=nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"'outside.weight' is in no unit"):
        owner_optimizer(stray, MUON, select=lambda name, param: param.dim() == 2)
    with pytest.raises(TypeError, match="OwnerOptimizer exchanges matrices of several units"):
        meshard.overlap_optimizer(model, lambda _: owner_optimizer(model, MUON))
    meshard.overlap_optimizer(model, ADAMW)
    with pytest.raises(ValueError, match="'w0' is stepped by overlap_optimizer already"):
        owner_optimizer(model, MUON)


class Failing(torch.optim.SGD):
    def step(self, closure=None):
        raise ZeroDivisionError("not today")


@on_ranks(4)
@pytest.mark.parametrize(
    ("cls", "error", "text"),
    [
        (Together, RuntimeError, "writes 'd' into"),
        (Failing, ZeroDivisionError, "not today"),
    ],
)
def test_what_the_first_step_raises_is_raised_on_ranks_that_own_nothing_too(cls, error, text):
    model = make([(4, 4), (4, 4)])
    ours = owner_optimizer(model, cls, lr=0.1)
    backward(model, 0)
    owns = dist.get_rank() in ours.owners.values()
    expected = (error, text) if owns else (RuntimeError, f"{cls.__name__} has raised an exception")
    with pytest.raises(expected[0], match=expected[1]):
        ours.step()


class Compiled(StandIn):
    def step_one(self, group, param, grad, state):
        update(param, grad)


@torch.compile(backend="eager")
def update(param, grad):
    param.sub_(grad)


@on_ranks(2)
def test_what_an_optimizer_compiles_is_compiled():
    model = make([(4, 4), (4, 4)])
    ours = owner_optimizer(model, Compiled)
    torch._dynamo.reset()
    frames = torch._dynamo.utils.counters["frames"]
    frames.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about itself
        for step in range(2):
            ours.zero_grad()
            backward(model, step)
            ours.step()
    assert frames["ok"] >= 1


@on_ranks(2)
def test_ranks_that_choose_differently_are_refused():
    model, rank = make([(4, 4)] * 4), dist.get_rank()
    ours = owner_optimizer(model, MUON, select=lambda name, _: rank == 0 or name == "w0")
    backward(model, 0)
    with pytest.raises(RuntimeError, match="ranks 1 have selected other parameters than rank 0"):
        ours.step()


@on_threads(2)
def test_a_part_that_was_converted_is_refused():
    model = Made(None, parts=[make([(4, 4)]), make([(4, 4)])])
    ours = owner_optimizer(model, MUON)
    for part in model.parts:
        backward(part, 0)
    ours.step()
    model.parts[1].to(torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"now are of 'torch.bfloat16', 'torch.float32'"):
        ours.step()


class Remembers(StandIn):
    """Keeps the values that parameters have when it is made, as lookahead optimizers do."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["first"] = param.detach().clone()

    def step_one(self, group, param, grad, state):
        param.lerp_(state["first"], 0.5).sub_(grad)


@on_threads(2)
def test_an_optimizer_may_keep_the_first_values():
    model = make([(4, 4), (3, 5)])
    ours = owner_optimizer(model, Remembers, lr=0.1)
    check_steps(model, ours, Ordinary(model, ours, Remembers, {"lr": 0.1}), range(3))


@on_ranks(2)
def test_ranks_that_load_states_of_different_forms_are_refused():
    model = make([(4, 4), (4, 4)])
    ours = owner_optimizer(model, MUON)
    backward(model, 0)
    ours.step()
    state = ours.state_dict()
    if dist.get_rank() == 0:
        state["state"][0] = {}
    with pytest.raises(ValueError, match="ranks load states of different forms"):
        ours.load_state_dict(state)


class Objects(torch.optim.SGD):
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            self.state[param]["object"] = object()


@on_ranks(4)
def test_states_that_cannot_be_cut_are_refused_on_all_ranks():
    model = make([(4, 4), (4, 4)])
    ours = owner_optimizer(model, Objects)
    backward(model, 0)
    ours.step()
    with pytest.raises(NotImplementedError, match="'object' of parameter 'w0' has a object in it"):
        ours.state_dict()


@on_ranks(2)
def test_gradients_for_different_parameters_are_found_out_under_debug():
    with mock.patch.dict(os.environ, MESHARD_DEBUG="1"):
        model = make([(4, 4)] * 4)
        ours = owner_optimizer(model, MUON, lr=0.1)
        backward(model, 0)
        ours.step()
        ours.zero_grad()
        backward(model, 1)
        owned = [name for name, owner in ours.owners.items() if owner == 0]
        model.get_parameter(owned[dist.get_rank()]).grad = None
        with pytest.raises(RuntimeError, match="all_to_all"):
            ours.step()


@on_threads(2)
def test_changed_parameters_are_refused():
    model = make([(4, 4), (4, 4)])
    ours = owner_optimizer(model, MUON)
    with pytest.raises(NotImplementedError, match="make it anew"):
        ours.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
    with pytest.raises(TypeError, match="neither pickled nor copied"):
        copy.deepcopy(ours)
    ours.param_groups[0]["params"].pop()
    with pytest.raises(RuntimeError, match="param_groups has other parameters"):
        ours.step()
