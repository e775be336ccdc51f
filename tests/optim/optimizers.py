"""Optimizers, and training with them: against the ordinary ones, in backward or after it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import meshard
from meshard import GradientSync, MixedPrecisionPolicy, overlap_optimizer
from tests.support.models import seeded
from tests.support.parity import assert_same, own_part, own_state

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


class SignDescent(torch.optim.Optimizer):
    """Not one of torch's: it looks at each parameter as a whole."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["count"] = state.get("count", 0) + 1
                    param.sub_(param.grad.sign(), alpha=group["lr"] * (param.dim() + 1))


def trainable(model):
    return [param for param in model.parameters() if param.requires_grad]


def groups_of(model):
    named = dict(model.named_parameters())
    biases = [param for name, param in named.items() if "bias" in name]
    others = [param for name, param in named.items() if "bias" not in name]
    return [{"params": others}, {"params": biases, "lr": 0.02, "weight_decay": 0.0}]


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


# --- in backward ---------------------------------------------------------------------------

WINDOWS = 5
SYNC = {"N": GradientSync.NONE, "R": GradientSync.REDUCE_SCATTER, "F": GradientSync.FULL}
SCHEDULES = ("F", "RF", "NRF", "FFF")  # of FFF, only the last F is the last backward
DTYPES = {
    "float32": MixedPrecisionPolicy(),
    "bfloat16": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
}
MAX_NORM = 0.5
DEFERRED = {"clip": "deferred", "max_norm": MAX_NORM}


class Block(nn.Module):
    """An uneven block, with a parameter smaller than the number of ranks."""

    def __init__(self, dim=7, hidden=5):
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.tiny = nn.Parameter(torch.empty(1))
        self.down = nn.Linear(hidden, dim)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)) * self.tiny)


class Net(nn.Module):
    """A plain block, a checkpointed one, one used twice, tied, frozen and unused weights."""

    def __init__(self, use_reentrant=False):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(7, 7, bias=False)
        self.last.weight = self.first.weight
        self.blocks[1].frozen = nn.Parameter(torch.empty(3))
        self.blocks[1].frozen.requires_grad_(False)
        self.blocks[2].unused = nn.Parameter(torch.empty(4))

    def forward(self, x, rest=None):
        plain, recomputed, twice, sometimes = self.blocks
        x = plain(self.first(x))
        x = checkpoint(recomputed, x, use_reentrant=self.use_reentrant)
        x = twice(torch.tanh(twice(x)))
        x = x if rest else sometimes(x)
        return self.last(x)


def make(shape, policy=DTYPES["float32"], model=None, **kwargs):
    mesh = init_device_mesh("cpu", shape)
    model = seeded(Net() if model is None else model)
    for block in model.blocks:
        meshard.fully_shard(block, mesh, mp_policy=policy, **kwargs)
    return meshard.fully_shard(model, mesh, mp_policy=policy, **kwargs)


def batch(number):
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return torch.randn(3, 7, generator=generator)


def window(model, number, schedule="F", *, rest=None, is_last=None):
    """Run one window; every microbatch is the last one unless the schedule has several F."""
    for place, letter in enumerate(schedule):
        is_final = place == len(schedule) - 1
        model.set_is_last_backward(is_final or (letter != "F" if is_last is None else is_last))
        model.set_gradient_sync(SYNC[letter])
        model(batch(10 * number + place), rest).float().square().sum().backward()


def grads(model):
    return [param.grad for param in model.parameters() if param.grad is not None]


def train_both(make_model, cls, options, windows=range(WINDOWS), *, schedule="F", **kwargs):
    """Train one model with each of the two; return both with their optimizers."""
    ours, theirs = make_model(), make_model()
    trainable = [param for param in theirs.parameters() if param.requires_grad]
    overlapped, plain = overlap_optimizer(ours, cls, **options), cls(trainable, **options)
    for number in windows:
        for model, optimizer in ((ours, overlapped), (theirs, plain)):
            window(model, number, schedule, **kwargs)
            if optimizer is overlapped:
                assert grads(model) == []
            optimizer.step()
            optimizer.zero_grad()
    assert_same(own_state(ours), own_state(theirs), bitwise=True)
    assert_same_state(plain_state(overlapped), plain_state(plain))
    return (ours, overlapped), (theirs, plain)


def train(model, optimizer, windows, **kwargs):
    for number in windows:
        window(model, number, **kwargs)
        optimizer.step()
        optimizer.zero_grad()


def clipped(model, optimizer, windows, **kwargs):
    """Train in the ordinary way; return the norms."""
    norms = []
    for number in windows:
        window(model, number, **kwargs)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        norms.append(meshard.clip_grad_norm_(params, MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def deferred(model, optimizer, windows, **kwargs):
    norms = []
    for number in windows:
        window(model, number, **kwargs)
        optimizer.step()
        assert grads(model) == []
        optimizer.zero_grad()
        norms.append(optimizer.total_norm)
    return norms
