"""The same numbers as one process without sharding, on one NCCL rank and on gloo ranks.

Where nothing else is said, gradients are integers, and every bit must be the same.
"""

import copy
import warnings
from functools import partial

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, seed, settings

import meshard
from meshard import MixedPrecisionPolicy
from tests.cuda.device import on_ranks
from tests.support.cases import CASES
from tests.support.integer_model import LEARNING_RATE, IntegerModel, integer_batch, integer_loss
from tests.support.models import MlpStack, Transformer, seeded
from tests.support.parity import assert_same, full_grads, full_state, train
from tests.support.programs import play, programs
from tests.support.replicated import Pair
from tests.support.sharding import shard_blocks
from tests.support.strategies import MODES

ADAMW = torch.optim.AdamW


def drawn(num_ranks, count):
    """Return random programs of users, always the same ones."""
    found = []

    @seed(0)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=HealthCheck,
    )
    @given(programs(num_ranks))
    def keep(program):
        found.append(program)

    keep()
    return found


def play_all(device, given_programs):
    """Units, HSDP, offload, windows, clipping, optimizers, copies, state dicts, failed steps."""
    for program in given_programs:
        try:
            play(program, device.kind)
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}; in {program}") from error


def replicated(device):
    """A window of microbatches, and compressed gradients."""
    pair = Pair(device=device.kind, mesh=device.mesh())
    pair.steps(range(3))
    with pair.ours.no_sync():
        pair.backward(3)
    pair.step(4)
    pair.assert_views()
    meshard.register_reduce_hook(pair.ours, wire_dtype=torch.bfloat16)
    pair.step(5)


def floats(device, name, dtype, optimizer_class):
    """To rounding."""

    def make(params):
        return optimizer_class(params, lr=1e-2)

    case, num_ranks = CASES[name], dist.get_world_size()
    whole = [each.to(device.kind) for each in case.whole_batches(4, num_ranks)]
    plain = case.build().to(device.kind, dtype)
    expected = train(plain, whole, make, loss_fn=case.loss)
    model = case.build().to(dtype)
    for unit in case.units(model):
        meshard.fully_shard(unit, device.mesh())
    batches = [each.to(device.kind) for each in case.batches(4, dist.get_rank())]
    found = train(model, batches, make, loss_fn=case.loss, reduce_loss="mean")
    assert_same(found, expected, dtype or case.dtype)


def scaled(device):
    """A scale changes no bit, and an inf on one rank skips the step on all."""
    models = [shard_blocks(seeded(MlpStack()), device.mesh()) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    scaler = meshard.ShardedGradScaler(device.kind, init_scale=8.0)
    for number in range(4):
        x = CASES["mlp_stack"].batch(number, dist.get_rank()).to(device.kind)
        is_bad = number == 2
        factor = float("inf") if is_bad and dist.get_rank() == 0 else 1.0
        scaler.scale(models[0](x).square().mean() * factor).backward()
        scaler.step(optimizers[0])
        scaler.update()
        if not is_bad:
            models[1](x).square().mean().backward()
            optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        assert_same(full_state(models[0]), full_state(models[1]), bitwise=True)
    assert scaler.get_scale() == 4.0


def compiled(device):
    """Compiled blocks beside eager ones, to rounding."""
    warnings.simplefilter("ignore")  # of the compiler
    models = [shard_blocks(seeded(Transformer(dim=32)), device.mesh()) for _ in range(2)]
    for block in models[0].blocks:
        block.compile(backend="inductor" if device.is_real else "aot_eager")
    for number in range(3):
        tokens = CASES["transformer"].batch(number, dist.get_rank()).to(device.kind)
        for model in models:
            model.zero_grad()
            model(tokens).square().mean().backward()
        assert_same(full_grads(models[0]), full_grads(models[1]), torch.float16)


def in_host_memory(device):
    """Models, inputs and loaded values that users leave there; they train as on the device."""
    plain = seeded(MlpStack()).to(device.kind)
    x = CASES["mlp_stack"].batch(0, 0)
    x.requires_grad_()
    plain(x.to(device.kind)).square().mean().backward()
    expected = {name: param.grad for name, param in plain.named_parameters()}
    for shard in (shard_blocks, meshard.replicate):
        x.grad, model = None, seeded(MlpStack())
        shard(model, device.mesh())
        model(x).square().mean().backward()
        assert_same(full_grads(model), expected)
        assert x.grad.device == x.device
        with torch.no_grad():
            assert model(x).device == device.torch_device
    model = shard_blocks(seeded(MlpStack(), seed=1), device.mesh())
    model.load_state_dict(seeded(MlpStack()).state_dict(), assign=True)
    assert_same(full_state(model), plain.state_dict())
    model(x).square().mean().backward()
    assert_same(full_grads(model), expected)


def trained(model, device, make=torch.optim.SGD):
    """Train five steps; return the parameters."""
    optimizer = make(model.parameters(), lr=LEARNING_RATE)
    for number in range(5):
        integer_loss(model(integer_batch(number, dist.get_rank()).to(device.kind))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_state(model)


def on_another_stream(device):
    """Another stream than that on which the model was built."""
    sharded = shard_blocks(IntegerModel(), device.mesh())
    for model in (sharded, meshard.replicate(IntegerModel().to(device.kind), device.mesh())):
        expected = trained(copy.deepcopy(model), device)
        stream = device.streams.Stream()
        stream.wait_event(device.streams.current_stream().record_event())
        with device.streams.stream(stream):
            found = trained(model, device)
        device.synchronize()
        assert_same(found, expected, bitwise=True)


def without_host_waits(device):
    """Once ranks have compared what they brought, the host waits for nothing in a step."""
    tokens = CASES["transformer"].batch(0, 0).to(device.kind)
    narrow = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

    def sharded(*shape, **kwargs):
        return shard_blocks(Transformer(), device.mesh(*shape), **kwargs)

    def adamw(model):
        return ADAMW(model.parameters(), foreach=True)

    for model, make in (
        (sharded(), adamw),
        (sharded(1, 1, mp_policy=narrow), adamw),
        (sharded(reshard_after_forward=False), partial(meshard.local_optimizer, optimizer=ADAMW)),
        (sharded(), partial(meshard.overlap_optimizer, optimizer=ADAMW, wait="gather")),
        (meshard.replicate(Transformer().to(device.kind), device.mesh()), adamw),
    ):
        optimizer = make(model)

        def step(model=model, optimizer=optimizer):
            for mode in "NF":
                model.set_gradient_sync(MODES[mode])
                model(tokens).float().square().mean().backward()
            if not isinstance(optimizer, meshard.OverlappedOptimizer):
                meshard.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(3):
            step()
        with device.refused_waits():
            step()


EVERYWHERE = {
    "replicate": (replicated,),
    "a transformer in float64": (floats, "transformer_tied", torch.float64, ADAMW),
    "mixed dtypes": (floats, "mixed_dtype", None, torch.optim.SGD),
    "loss scaling": (scaled,),
    "models and data in host memory": (in_host_memory,),
}
ON_ONE = {
    "compiled blocks": (compiled,),
    "another stream": (on_another_stream,),
    "no waits of the host": (without_host_waits,),
}


def one_rank(device):
    """On one NCCL rank. Collectives are issued, though they move nothing."""

    def on_one(function, *args):
        with device.group_of_one():
            function(device, *args)

    count = 40 if device.is_real else 3
    checks = {f"{count} random programs": (play_all, drawn(1, count)), **EVERYWHERE, **ON_ONE}
    return {name: lambda call=call: on_one(*call) for name, call in checks.items()}


def gloo_ranks(device):
    """On gloo ranks that share the device and use different parameters."""
    count, found = 15 if device.is_real else 2, {}
    for ranks in (2, 4):
        checks = {f"{count} random programs": (play_all, drawn(ranks, count)), **EVERYWHERE}
        for name, (function, *args) in checks.items():
            found[f"{name}, {ranks} ranks"] = lambda n=ranks, f=function, a=args: (
                on_ranks(device, f, n, *a) and None
            )
    return found
