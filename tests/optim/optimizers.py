"""Optimizers, and training with them: against the ordinary ones, in backward or after it."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import meshard
from meshard import CPUOffloadPolicy, MixedPrecisionPolicy, overlap_optimizer
from tests.optim.stand_in_optimizers import StandIn
from tests.support.against_plain import sharded_and_plain
from tests.support.models import Made, UnevenMlp, seeded
from tests.support.parity import assert_same, own_part
from tests.support.sharding import shard_blocks
from tests.support.strategies import MODES

ADAMW = torch.optim.AdamW
OPTIONS = {"lr": 0.01}
MANY = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "adamw foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01}),
    "radam": (torch.optim.RAdam, {"lr": 0.1}),
    "asgd": (torch.optim.ASGD, {"lr": 0.1, "t0": 2}),
}
BFLOAT16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class SignDescent(StandIn):
    """Not one of torch's: it looks at each parameter as a whole."""

    def step_one(self, group, param, grad, state):
        state["count"] = state.get("count", 0) + 1
        param.sub_(grad.sign(), alpha=group["lr"] * (param.dim() + 1))


# --- what is compared ----------------------------------------------------------------------


def plain_state(optimizer):
    """Return the state per parameter number: this rank's part, and how it was cut."""
    found = {}
    for number, each in optimizer.state_dict()["state"].items():
        found[number] = {
            key: own_part(value) if isinstance(value, torch.Tensor) else value
            for key, value in each.items()
        }
        found[number]["placements"] = {
            key: value.placements for key, value in each.items() if isinstance(value, DTensor)
        }
    return found


def assert_same_state(ours, theirs):
    assert ours.keys() == theirs.keys()
    for number, each in theirs.items():
        assert ours[number].keys() == each.keys()
        for key, value in each.items():
            if isinstance(value, torch.Tensor):
                assert_same(ours[number][key], value, bitwise=True, what=f"{key} of {number}")
            else:
                assert ours[number][key] == value


def trainable(model):
    return [param for param in model.parameters() if param.requires_grad]


def groups_of(model):
    named = dict(model.named_parameters())
    biases = [param for name, param in named.items() if "bias" in name]
    others = [param for name, param in named.items() if "bias" not in name]
    return [{"params": others}, {"params": biases, "lr": 0.02, "weight_decay": 0.0}]


def grads(model):
    return [param.grad for param in model.parameters() if param.grad is not None]


# --- the model, and its training -----------------------------------------------------------


def _block():
    """Return an uneven block, with a parameter smaller than the number of ranks."""
    return Made(
        lambda m, x: x + m.down(torch.tanh(m.up(x)) * m.tiny),
        up=nn.Linear(7, 5),
        tiny=nn.Parameter(torch.empty(1)),
        down=nn.Linear(5, 7),
    )


def net(*, use_reentrant=False, rests=None):
    """Return a plain block, a checkpointed one, one used twice, tied, frozen and unused weights.

    The last block rests where the call says so, or in each call whose number ``rests`` divides.
    """
    calls = []

    def forward(model, x, rest=False):
        calls.append(rest)
        plain, recomputed, twice, sometimes = model.blocks
        x = plain(model.first(x))
        x = checkpoint(recomputed, x, use_reentrant=use_reentrant)
        x = twice(torch.tanh(twice(x)))
        rest = rest or (rests is not None and len(calls) % rests == 0)
        return model.last(x if rest else sometimes(x))

    first, last = nn.Linear(7, 7), nn.Linear(7, 7, bias=False)
    model = Made(forward, first=first, blocks=[_block() for _ in range(4)], last=last)
    model.last.weight = model.first.weight
    model.blocks[1].frozen = nn.Parameter(torch.empty(3), requires_grad=False)
    model.blocks[2].unused = nn.Parameter(torch.empty(4))
    return seeded(model)


def make(shape=(2,), model=None, **kwargs):
    mesh = init_device_mesh("cpu", shape)
    return shard_blocks(net() if model is None else model, mesh, **kwargs)


def uneven():
    """Return a sharded model of sizes that no number of ranks divides."""
    return sharded_and_plain(UnevenMlp(), ["layers"])[0]


def replicated(**kwargs):
    mesh = init_device_mesh("cpu", (2,))
    return meshard.replicate(net(), mesh, bucket_cap_mb=0.0002, **kwargs)


def kept_in_backward():
    model = make()
    model.set_reshard_after_backward(False)
    return model


LAYOUTS = {
    "one axis": make,
    "two axes": functools.partial(make, (2, 2)),
    "three ranks": functools.partial(make, (3,)),
    "one unit": lambda: meshard.fully_shard(net(), init_device_mesh("cpu", (2,))),
    "offloaded": functools.partial(make, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "replicated": replicated,
    "replicated, no views": functools.partial(replicated, gradient_as_bucket_view=False),
    "bfloat16": functools.partial(make, mp_policy=BFLOAT16),
    "kept in forward": functools.partial(make, reshard_after_forward=False),
    "resharded in forward": functools.partial(make, reshard_after_forward=True),
    "kept in backward": kept_in_backward,
    "reentrant": lambda: make(model=net(use_reentrant=True)),
    "rests in the last microbatch": lambda: make(model=net(rests=3)),
}
RANKS = {"two axes": 4, "three ranks": 3}


def batch(number):
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return torch.randn(3, 7, generator=generator)


def window(model, number, schedule="F", *, rest=False):
    """Run one window. Of several F, only the last one is the last backward."""
    for place, letter in enumerate(schedule):
        model.set_is_last_backward(place == len(schedule) - 1 or letter != "F")
        model.set_gradient_sync(MODES[letter])
        model(batch(10 * number + place), rest).float().square().sum().backward()


def train(model, optimizer, windows, **kwargs):
    for number in windows:
        window(model, number, **kwargs)
        optimizer.step()
        optimizer.zero_grad()


def overlapped_and_plain(cls=ADAMW, *, make=make, options=OPTIONS, **kwargs):
    """Return two models, each with its optimizer: one in backward, and the ordinary one."""
    ours, theirs = make(), make()
    overlapped = overlap_optimizer(ours, cls, **options, **kwargs)
    return (ours, overlapped), (theirs, cls(trainable(theirs), **options))
