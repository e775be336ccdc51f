"""Pickles of replicated modules, and of sharded ones inside ``unsharded_params``."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshard
from tests.support.models import seeded
from tests.support.ranks import on_fake_ranks, on_ranks
from tests.support.spread import spread


class Scaled(nn.Linear):
    """A class with a method of its own, and with its own way to pickle."""

    def __init__(self):
        super().__init__(3, 3)
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.scratch = object  # not to be pickled

    def forward(self, x):
        return self.scale * super().forward(x)

    def scores(self, x):
        return x @ self.weight.t()

    def __getstate__(self):
        return {**self.__dict__, "scratch": None}


def doubled(module, args, output):
    return 2 * output


def squared(x):
    return x.square()


def ignore_missing(module, keys):
    keys.missing_keys.clear()


def net():
    """Shared modules and parameters, buffers, hooks of the user, and a module in an attribute."""
    model = nn.Sequential(nn.Linear(3, 3), Scaled(), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[3].weight = model[0].weight
    model[1].register_forward_hook(doubled)
    model.register_forward_hook(doubled)
    model.register_load_state_dict_post_hook(ignore_missing)
    model.first = [model[0]]
    return seeded(model, 0)


def replicated(model):
    meshard.replicate(model)
    meshard.register_fsdp_forward_method(model[1], "scores")
    return model


def sharded(model):
    for inner in (model[1], model[2], model):
        meshard.fully_shard(inner, unshard_on_access=inner is model[1])
    meshard.register_fsdp_forward_method(model[1], "scores")
    return model


def mixed(model):
    """Sharded units inside a replicated module."""
    meshard.fully_shard(model[1])
    return meshard.replicate(model)


class WithoutMeshard(pickle.Unpickler):
    """Fails where a pickle names anything of meshard."""

    def find_class(self, module, name):
        assert not module.startswith("meshard"), f"{module}.{name}"
        return super().find_class(module, name)


def by_pickle(model):
    return WithoutMeshard(io.BytesIO(pickle.dumps(model))).load()


def by_torch(model):
    file = io.BytesIO()
    torch.save({"model": model, "inner": model[1]}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded["inner"] is loaded["model"][1]
    return loaded["model"]


@spread(
    apply=[replicated, sharded, meshard.fully_shard, mixed], way=[by_pickle, by_torch, by_torch]
)
@on_ranks(2)
def test_a_pickled_module_is_a_plain_one(apply, way):
    plain, model = net(), apply(net())
    x = torch.randn(6, 3)
    with meshard.unsharded_params(model):
        loaded = way(model)
    assert [type(each) for each in loaded.modules()] == [type(each) for each in plain.modules()]
    assert all(type(param) is nn.Parameter for param in loaded.parameters())
    assert not any("meshard" in name for each in loaded.modules() for name in vars(each))
    assert loaded.state_dict().keys() == plain.state_dict().keys()
    assert loaded[3].weight is loaded[0].weight and loaded.first[0] is loaded[0]
    assert loaded[1].scratch is None
    for each, wanted in zip(loaded.modules(), plain.modules(), strict=True):
        assert len(each._forward_hooks) == len(wanted._forward_hooks)
        assert not each._forward_pre_hooks and not each._state_dict_hooks
        assert not each._forward_hooks_with_kwargs and not each._forward_hooks_always_called
    assert torch.equal(loaded(x), plain(x))
    loaded(x).sum().backward()  # not reduced by anything
    plain(x).sum().backward()
    assert torch.equal(loaded[0].weight.grad, plain[0].weight.grad)
    missing = {name: value for name, value in plain.state_dict().items() if name != "3.bias"}
    loaded.load_state_dict(missing)  # by the user's hook
    assert torch.equal(loaded[1].weight, plain[1].weight)
    apply(loaded)  # and on with it
    loaded(x).sum().backward()


@on_fake_ranks(2)
def test_units_without_parameters_are_pickled_with_the_others():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    for module in (*model, model):
        meshard.fully_shard(module)
    with meshard.unsharded_params(model):
        loaded = by_pickle(model)
    assert [type(each) for each in loaded.modules()] == [nn.Sequential, nn.Linear, nn.ReLU]
    assert type(by_pickle(model[1])) is nn.ReLU  # also where shards are at rest


@on_fake_ranks(2)
def test_a_forward_method_that_was_set_on_a_module_is_pickled_as_it_was():
    model = nn.Sequential(nn.Linear(3, 3))
    model.squared = squared
    meshard.fully_shard(model)
    meshard.register_fsdp_forward_method(model, "squared")
    with meshard.unsharded_params(model):
        loaded = by_pickle(model)
    assert loaded.squared is squared


LOAD = """
import sys
sys.modules["meshard"] = None  # as if it was not installed
import torch
model = torch.load(sys.argv[1], weights_only=False)
model(torch.ones(1, 3)).sum().backward()
model.load_state_dict(model.state_dict())
print(type(model).__name__, [type(layer).__name__ for layer in model], float(model[0].bias[0]))
"""


@pytest.mark.slow
@on_ranks(2)
def test_it_loads_where_meshard_is_not_installed(tmp_path):
    """Saved as a user does it, on rank 0 only; the others hold shards."""
    path = tmp_path / "model.pt"
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    for module in (model[0], model):
        meshard.fully_shard(module)
    bias = model[0].bias.detach().full_tensor()
    with meshard.unsharded_params(model, rank0_only=True, writeback=False):
        if dist.get_rank() != 0:
            with pytest.raises(TypeError, match=r"unit '\(root\)' cannot be pickled here"):
                torch.save(model, io.BytesIO())
            return
        torch.save(model, path)
    done = subprocess.run([sys.executable, "-c", LOAD, path], capture_output=True, text=True)
    assert done.stdout == f"Sequential ['Linear', 'Linear'] {float(bias[0])}\n", done.stderr


@on_ranks(2)
def test_what_would_be_a_part_of_a_model_is_refused():
    for apply in (replicated, sharded, mixed):
        model = apply(net())
        for each in (model, model[1]):
            if hasattr(each, "reset_iter_state"):
                with pytest.raises(TypeError, match=r"needs copy\.deepcopy, not copy\.copy"):
                    copy.copy(each)
    model = meshard.fully_shard(net())
    for each in (model, model[0], nn.Sequential(model)):  # shards at rest
        with pytest.raises(TypeError, match=r"inside meshard\.unsharded_params\(module\)"):
            pickle.dumps(each)
    model.unshard()
    with pytest.raises(TypeError, match=r"inside meshard\.unsharded_params\(module\)"):
        pickle.dumps(model)
    model.reshard()
    with pytest.raises(TypeError, match=r"unit '1' cannot be pickled here"):
        pickle.dumps(mixed(net()))
    model = replicated(net())
    with meshard.no_sync(model):
        model(torch.randn(6, 3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"holds gradients that are not reduced yet"):
        pickle.dumps(model)
    model.zero_grad()
    model[2].register_forward_hook(lambda *_: pickle.dumps(model))
    with pytest.raises(RuntimeError, match="inside the forward or backward"):
        model(torch.randn(6, 3))
