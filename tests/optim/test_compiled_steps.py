"""Optimizer steps under ``torch.compile``, and optimizers that compile inside their own step."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import SGD, AdamW

import meshard
from tests.optim.stand_in_optimizers import StandIn
from tests.peers.both import batch
from tests.support.models import Made, MlpStack, seeded
from tests.support.parity import assert_same, full_state
from tests.support.ranks import on_ranks
from tests.support.sharding import shard_blocks

NUM_STEPS = 3


class CompilesInside(StandIn):
    """Momentum whose arithmetic is compiled, parameter by parameter, as torchao's optimizers do."""

    backend: str

    def step_one(self, group, param, grad, state):
        update = torch.compile(_update, fullgraph=True, dynamic=False, backend=self.backend)
        momentum = state.setdefault("momentum", torch.zeros_like(param))
        update(param.detach(), grad, momentum, group["lr"])


def _update(param, gradient, momentum, lr):
    momentum.mul_(0.5).add_(gradient)
    param.sub_(lr * momentum)


def train(model, batches, optimizer, step):
    """Return the parameters; after each step, gradients must be what backward made them."""
    for number in range(NUM_STEPS):
        sum(model(batch + number).sum() for batch in batches).backward()
        before = [(param.grad, param.grad.clone()) for param in model.parameters()]
        step()
        for param, (gradient, value) in zip(model.parameters(), before, strict=True):
            assert param.grad is gradient
            assert torch.equal(gradient, value)
        optimizer.zero_grad()
        if number == 1:
            torch._dynamo.reset()  # forgets compiled code, and what was to be done before
    return full_state(model)


@pytest.mark.slow
@on_ranks(2, timeout=240)
@pytest.mark.parametrize(
    ("backend", "optimizer_class"),
    [("aot_eager", CompilesInside), ("aot_eager", AdamW), ("inductor", SGD)],
)
def test_a_compiled_step_is_the_ordinary_step(optimizer_class, backend):
    warnings.simplefilter("default")  # torch's own, about what it compiles with
    torch._dynamo.reset()
    CompilesInside.backend = backend
    plain = seeded(MlpStack(depth=1))
    model = copy.deepcopy(plain)
    for unit in (*model.blocks, model):
        meshard.fully_shard(unit).set_gradient_divide_factor(1.0)
    optimizer = optimizer_class(plain.parameters(), lr=0.01)
    expected = train(plain, batch(), optimizer, optimizer.step)
    optimizer = optimizer_class(model.parameters(), lr=0.01)
    step = optimizer.step
    if optimizer_class is not CompilesInside:
        step = torch.compile(step, backend=backend)
    assert_same(train(model, [batch()[dist.get_rank()]], optimizer, step), expected)
    torch._dynamo.reset()


def test_torch_compile_can_make_fakes_of_gradients():
    """It does so for each tensor that it reads, once it has called who asked to be called."""
    try:
        layer = meshard.fully_shard(torch.nn.Linear(2, 2))
        optimizer = SGD(layer.parameters(), lr=0.5)
        layer(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        torch._dynamo.callback_handler.run_start_callbacks(None)
        for param in layer.parameters():
            assert FakeTensorMode().from_tensor(param).grad.shape == param.shape
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()


@pytest.mark.slow
@on_ranks(2, timeout=240)
def test_a_compiled_step_and_then_a_compiled_loop():
    """What is called before dynamo compiles must not be compiled itself: that waited for ever."""

    def forward(module, x):
        x = module.embed(x)
        for block in module.blocks:
            x = block(x)
        return module.head(x)

    def losses(*, compiles):
        kept = []
        for part in ("step", "all"):
            members = {"embed": nn.Linear(6, 8), "head": nn.Linear(8, 5)}
            model = Made(forward, blocks=[nn.Linear(8, 8) for _ in range(2)], **members)
            shard_blocks(seeded(model))
            optimizer = AdamW(model.parameters(), lr=0.01)
            take_step = optimizer.step
            if compiles and part == "step":
                take_step = torch.compile(take_step, backend="aot_eager")

            def train(model=model, optimizer=optimizer, take_step=take_step):
                loss = F.cross_entropy(model(torch.ones(2, 6)), torch.tensor([1, 3]))
                loss.backward()
                take_step()
                optimizer.zero_grad()
                return loss

            if compiles and part == "all":
                train = torch.compile(train, backend="aot_eager")
            kept += [train().item() for _ in range(3)]
        return kept

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about itself
        compiled = losses(compiles=True)
    assert compiled == pytest.approx(losses(compiles=False), rel=1e-4)
