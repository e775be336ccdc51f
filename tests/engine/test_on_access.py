"""Units with ``unshard_on_access``, whose weights their parent reads."""

import copy
import functools
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import meshard
from tests.support import insides
from tests.support.against_plain import check_gradients, check_training, inputs_of
from tests.support.integer_model import IntegerModel, integer_batch, integer_loss, ternary
from tests.support.models import Made, seeded
from tests.support.parity import assert_same, full_grads, own_grads
from tests.support.ranks import on_fake_ranks, on_ranks, on_threads
from tests.support.threads import run_threads


def attend(block, x):
    """``nn.MultiheadAttention`` reads ``out_proj`` and never calls it."""
    y = block.norm(x)
    return x + block.attention(y, y, y, need_weights=False)[0]


def attention_stack():
    def forward(model, x):
        x = x * model.scale
        for block in model.blocks:
            if model.checkpointing is None:
                x = block(x)
            else:
                x = checkpoint(block, x, **model.checkpointing)
        return x

    blocks = [
        Made(attend, norm=nn.LayerNorm(8), attention=nn.MultiheadAttention(8, 2, batch_first=True))
        for _ in range(2)
    ]
    scale = nn.Parameter(torch.empty(8))
    return seeded(Made(forward, blocks=blocks, scale=scale, checkpointing=None))


def sharded_attention(plain, mesh_shape=(2,), mha_too=False, **options):
    """Return a sharded copy, each ``out_proj`` of which is a unit that its parent reads."""
    model, mesh = copy.deepcopy(plain), init_device_mesh("cpu", mesh_shape)
    for block in model.blocks:
        meshard.fully_shard(block.attention.out_proj, mesh, unshard_on_access=True, **options)
        if mha_too:
            meshard.fully_shard(block.attention, mesh, **options)
        meshard.fully_shard(block, mesh, **options)
    return meshard.fully_shard(model, mesh, **options)


def loss_of(model, rank):
    return model(inputs_of(rank, shape=(2, 3, 8))).square().mean()


def save_everything(context, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE


SELECTIVE = {
    "use_reentrant": False,
    "context_fn": functools.partial(create_selective_checkpoint_contexts, save_everything),
}


@pytest.mark.parametrize(
    ("mesh_shape", "checkpointing", "options", "gathers"),
    [
        # As many as if every unit had a forward of its own.
        pytest.param((2,), None, {}, 9, id="default"),
        pytest.param((2,), None, {"mha_too": True}, 13, id="also the attention"),
        pytest.param((2, 2), None, {}, 9, id="hsdp", marks=pytest.mark.slow),
        pytest.param(
            (2,), {"use_reentrant": False}, {}, 9, id="checkpointed", marks=pytest.mark.slow
        ),
        pytest.param((2,), {"use_reentrant": True}, {}, 9, id="reentrant"),
        pytest.param((2,), SELECTIVE, {}, 9, id="selective", marks=pytest.mark.slow),
        pytest.param((2,), SELECTIVE, {"reshard_after_forward": False}, 5, id="selective, kept"),
        pytest.param((4,), None, {"reshard_after_forward": 2}, 10, id="neighbours"),
    ],
)
def test_an_attention_whose_out_proj_is_a_unit_trains(mesh_shape, checkpointing, options, gathers):
    def run():
        plain = attention_stack()
        model = sharded_attention(plain, mesh_shape, **options)
        model.checkpointing = checkpointing
        counts = check_training(model, plain, loss_of).counts
        reshards = options.get("reshard_after_forward", True)
        assert insides.unsharded_bytes(model) == 0 or not reshards
        assert all(isinstance(param, DTensor) for param in model.parameters())
        model.checkpointing = None
        model.eval()  # torch's fast path reads the weights too
        plain.eval()
        with torch.no_grad():
            assert_same(loss_of(model, 0), loss_of(plain, 0))
        assert insides.unsharded_bytes(model) == 0 or not reshards
        return counts

    num_reduced = 7 if options.get("mha_too") else 5
    expected = {"all_gather": gathers, "reduce_scatter": num_reduced}
    expected |= {"all_reduce": num_reduced} if len(mesh_shape) == 2 else {}
    num_ranks = torch.Size(mesh_shape).numel()
    assert run_threads(run, num_ranks) == [expected] * num_ranks


def reading():
    """Return a model that runs the blocks of an integer model by reading their weights."""

    def forward(model, x):
        first, second, third = model.inner.blocks
        x = ternary(functional.linear(x, first.linear.weight, first.linear.bias))
        x = second(x)  # called, and read below
        x = ternary(functional.linear(x, third.linear.weight, third.linear.bias))
        penalty = second.linear.weight.sum() + first.linear.bias.sum()
        return ternary(x + model.inner.shift + ternary(penalty))

    return Made(forward, inner=IntegerModel())


@pytest.mark.parametrize(
    ("mesh_shape", "mode"),
    [((2,), meshard.GradientSync.NONE)] + [((2, 2), mode) for mode in meshard.GradientSync],
)
def test_units_that_are_read_and_called_agree_with_one_process(mesh_shape, mode):
    def window(module, rank):
        numbers = range(3)
        if isinstance(module, meshard.FSDPModule):
            numbers = meshard.microbatches(module, numbers, until_last=mode)
        for number in numbers:
            integer_loss(module(integer_batch(number, rank))).backward()

    @on_threads(torch.Size(mesh_shape).numel())
    def run():
        mesh, plain, model = init_device_mesh("cpu", mesh_shape), reading(), reading()
        for block in model.inner.blocks:
            meshard.fully_shard(block, mesh, unshard_on_access=True)
        check_training(meshard.fully_shard(model, mesh), plain, window)

    run()


@on_threads(2)
def test_what_was_read_is_given_back_with_the_parent():
    plain = attention_stack()
    model, seen, ahead = sharded_attention(plain), [], []
    read = [block.attention.out_proj for block in model.blocks]

    def look(*args):
        seen.append([insides.unsharded_bytes(each) > 0 for each in read])
        ahead.append([bool(insides.unsharded_units(each)) for each in read])

    for block in model.blocks:
        block.norm.register_forward_hook(look)
        block.attention.register_forward_hook(look)
    for _ in range(2):
        seen.clear(), ahead.clear()
        loss_of(model, 0).backward()
        assert seen == [[True, False], [True, False], [False, True], [False, True]]
    assert isinstance(model.blocks[0].attention.out_proj.weight, DTensor)  # no forward runs
    handle = model.blocks[0].attention.register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, 0)
    handle.remove()
    assert insides.unsharded_bytes(model) == 0
    check_gradients(model, plain, loss_of)


@pytest.mark.slow
@on_ranks(2, timeout=240)
def test_a_compiled_parent_reads():
    plain = attention_stack()
    model = sharded_attention(plain)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo looks at .grad of what is no leaf
        check_gradients(model, plain, loss_of, times=3)
    assert insides.unsharded_bytes(model) == 0


@pytest.mark.filterwarnings("ignore:unit .* returned a NoneType")
@on_threads(2)
def test_a_parent_that_returns_nothing_leaves_what_it_read_whole_for_backward():
    def step(model, rank):
        results = []
        model(inputs_of(rank).requires_grad_(), results)
        return results[0].square().mean()

    plain = Made(
        lambda m, x, results: results.append(functional.linear(torch.tanh(x), m.layer.weight)),
        layer=nn.Linear(6, 6),
    )
    model = copy.deepcopy(seeded(plain))
    meshard.fully_shard(model.layer, unshard_on_access=True)
    check_gradients(meshard.fully_shard(model), plain, step)


@on_threads(2)
def test_a_unit_that_an_interrupted_forward_has_read_may_be_a_reader_in_the_next_one():
    def forward(model, x, is_interrupted=False):
        if is_interrupted:
            functional.linear(x, model.inner.scale.diag())
            raise KeyboardInterrupt
        return model.inner(x)

    inner = Made(
        lambda m, x: functional.linear(x, m.held.weight) * m.scale,
        held=nn.Linear(4, 4, bias=False),
        scale=nn.Parameter(torch.ones(4)),
    )
    plain = seeded(Made(forward, inner=inner))
    model = copy.deepcopy(plain)
    meshard.fully_shard(model.inner.held, unshard_on_access=True)
    meshard.fully_shard(model.inner, unshard_on_access=True)
    meshard.fully_shard(model)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(1, 4), is_interrupted=True)
    ledger = check_gradients(
        model, plain, lambda m, rank: m(inputs_of(rank, shape=(1, 4))).square().mean()
    )
    assert ledger.counts["reduce_scatter"] == 2


@on_threads(2)
def test_a_copy_is_read_like_the_original():
    model = sharded_attention(attention_stack())
    models = (copy.deepcopy(model), model)
    for each in models:
        loss_of(each, 0).backward()
        assert insides.unsharded_bytes(each) == 0
    assert_same(*map(own_grads, models), bitwise=True)


@on_threads(2)
def test_frozen_and_cast_weights_are_read():
    policy = meshard.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    plain = attention_stack()
    plain.blocks[0].attention.out_proj.requires_grad_(False)
    plain.blocks[1].attention.out_proj.bias.requires_grad_(False)
    model = sharded_attention(plain, mp_policy=policy)
    plain.bfloat16()
    x = inputs_of(0, shape=(2, 3, 8))
    for each, given in ((model, x), (plain, x.bfloat16())):
        each(given).float().square().mean().backward()
    expected = {name: None if g is None else g.float() for name, g in full_grads(plain).items()}
    assert_same(full_grads(model), expected, torch.bfloat16)


@on_threads(2)
def test_a_registered_method_reads():
    def run(layer, x):
        return functional.linear(x * layer.scale, layer.held.weight).tanh()

    def forward(model, x):
        return model.reader.encode(x)

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.held = nn.Linear(4, 4, bias=False)
            self.scale = nn.Parameter(torch.ones(4))

        forward = encode = run

    plain = seeded(Made(forward, reader=Reader()))
    model = copy.deepcopy(plain)
    meshard.fully_shard(model.reader.held, unshard_on_access=True)
    meshard.fully_shard(model.reader)
    meshard.register_fsdp_forward_method(model.reader, "encode")
    model = meshard.fully_shard(model)
    check_gradients(model, plain, lambda m, rank: m(inputs_of(rank, shape=(3, 4))).square().mean())


@on_threads(2)
def test_a_backward_in_the_forward_that_recomputes_a_unit_after_another_was_read():
    """As for forces, which are the gradient of an energy."""

    def forward(model, x):
        x = functional.linear(x, model.held.weight).requires_grad_()
        energy = checkpoint(model.block, x, use_reentrant=False).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force

    plain = seeded(Made(forward, held=nn.Linear(4, 4, bias=False), block=nn.Linear(4, 4)))
    model = copy.deepcopy(plain)
    meshard.fully_shard(model.held, unshard_on_access=True)
    meshard.fully_shard(model.block)
    meshard.fully_shard(model)
    expected = plain(torch.ones(1, 4))
    assert_same(model(torch.ones(1, 4)), expected)


@on_fake_ranks(1)
@pytest.mark.parametrize("on_access", ["head", ""])
def test_a_module_may_hold_parameters_of_two_units(on_access):
    model = Made(lambda m, x: m.head(m.emb(x)), emb=nn.Embedding(8, 4), head=nn.Linear(4, 8))
    model.head.weight = model.emb.weight
    chosen = {"unshard_on_access": True}
    meshard.fully_shard_units(
        model, units=nn.Linear, overrides=lambda fqn, _: chosen if fqn == on_access else None
    )
    for each in (model, copy.deepcopy(model)):
        each(torch.arange(4)).sum().backward()
        assert all(param.grad is not None for param in each.parameters())


@on_fake_ranks(1)
def test_a_parameter_of_a_class_with_its_own_setattr_may_be_assigned():
    """torch looks for the attribute before it assigns, which is no read of the parameter."""
    model = Made(lambda m, x: m.lstm(x)[0], lstm=nn.LSTM(4, 4))
    meshard.fully_shard(model.lstm, unshard_on_access=True)
    meshard.fully_shard(model)
    model.lstm.weight_hh_l0 = nn.Parameter(torch.zeros(16, 4))
    model(torch.ones(2, 3, 4)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def around_a_read(order):
    """Return a model that reads ``read`` first, and uses it and ``called`` in some order."""

    def forward(model, x, left_out):
        weight, bias = model.read.weight, model.read.bias
        x = model.first(x).tanh()
        for name in order:
            y = functional.linear(x, weight, bias) if name == "read" else model.called(x)
            x = x if name == left_out else x + y.tanh()
        return x

    return Made(forward, **{name: nn.Linear(6, 6) for name in ("read", "first", "called")})


@pytest.mark.parametrize("left_out", ["read", "called"])
@pytest.mark.parametrize("order", [("read", "called"), ("called", "read")])
def test_one_rank_leaves_out_what_is_read_or_what_runs_until_the_reader_ends(order, left_out):
    def step(model, rank):
        return model(inputs_of(rank), left_out if rank else "").square().mean()

    def run():
        plain = seeded(around_a_read(order))
        model = copy.deepcopy(plain)
        meshard.fully_shard(model.read, unshard_on_access=True)
        for unit in (model.first, model.called, model):
            meshard.fully_shard(unit)
        ledger = check_gradients(model, plain, step)
        return [(event.op, event.unit) for event in ledger.events]

    one, other = run_threads(run, 2)
    assert one == other


@on_threads(2)
def test_what_a_call_or_an_earlier_forward_has_left_unsharded_is_read():
    def forward(model, x):
        x = model.both(x).tanh()
        return functional.linear(x, model.both.weight, model.both.bias).tanh()

    plain = seeded(Made(forward, both=nn.Linear(6, 6)))
    model = copy.deepcopy(plain)
    meshard.fully_shard(model.both, unshard_on_access=True, reshard_after_forward=False)
    meshard.fully_shard(model)
    # The backward of the second forward reshards the unit before that of the first begins.
    check_gradients(
        model, plain, lambda each, rank: sum(each(inputs_of(rank, n)).sum() for n in range(2))
    )
