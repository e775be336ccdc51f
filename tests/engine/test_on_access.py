"""Units with ``unshard_on_access``, whose weights their parent reads."""

import copy
import functools
import warnings

import pytest
import torch
import torch.distributed as dist
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
from meshard import CommLedger
from tests.support.integer_model import (
    LEARNING_RATE,
    IntegerModel,
    integer_batch,
    integer_loss,
    ternary,
)
from tests.support.models import seeded
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.ranks import on_ranks


class AttentionBlock(nn.Module):
    """nn.MultiheadAttention reads ``out_proj`` and never calls it."""

    def __init__(self, dim=8):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)

    def forward(self, x):
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0]


class AttentionStack(nn.Module):
    def __init__(self, depth=2, checkpointing=None):
        super().__init__()
        self.blocks = nn.ModuleList(AttentionBlock() for _ in range(depth))
        self.scale = nn.Parameter(torch.empty(8))
        self.checkpointing = checkpointing

    def forward(self, x):
        x = x * self.scale
        for block in self.blocks:
            if self.checkpointing is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing)
        return x


def shard_attention(model, mesh, mha_too=False, **kwargs):
    for block in model.blocks:
        meshard.fully_shard(block.attention.out_proj, mesh, unshard_on_access=True, **kwargs)
        if mha_too:
            meshard.fully_shard(block.attention, mesh, **kwargs)
        meshard.fully_shard(block, mesh, **kwargs)
    return meshard.fully_shard(model, mesh, **kwargs)


def whole_bytes(model):
    units = [vars(module).get("_meshard_unit") for module in model.modules()]
    storages = [u.group.unit_params.unsharded._storages for u in units if u is not None]
    return sum(storage.nbytes() for each in storages for storage, _ in each)


def train_attention(mesh_shape, how=None, **kwargs):
    mesh = init_device_mesh("cpu", mesh_shape)
    plain = seeded(AttentionStack())
    model = copy.deepcopy(plain)
    model.checkpointing = how
    shard_attention(model, mesh, **kwargs)
    num_ranks = dist.get_world_size()
    xs = torch.randn(num_ranks, 2, 3, 8, generator=torch.Generator().manual_seed(0))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for _ in range(3):
        with CommLedger(model) as ledger:
            model(xs[dist.get_rank()]).square().mean().backward()
        plain(xs.flatten(0, 1)).square().mean().backward()
        assert_same(full_grads(model), full_grads(plain))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if kwargs.get("reshard_after_forward", True):
        assert whole_bytes(model) == 0
    assert all(isinstance(param, DTensor) for param in model.parameters())
    model.checkpointing = None
    model.eval()  # torch's fast path reads the weights too
    plain.eval()
    with torch.no_grad():
        assert_same(model(xs[0]), plain(xs[0]))
    assert whole_bytes(model) == 0 or not kwargs.get("reshard_after_forward", True)
    return ledger.counts


@pytest.mark.parametrize("mha_too", [False, True])
def test_an_attention_whose_out_proj_is_a_unit_trains(run_ranks, mha_too):
    num_units = 7 if mha_too else 5
    counts = run_ranks(train_attention, 2, (2,), mha_too=mha_too)
    # As many as if every unit had a forward of its own.
    assert counts == [{"all_gather": 2 * num_units - 1, "reduce_scatter": num_units}] * 2


def test_an_attention_whose_out_proj_is_a_unit_trains_under_hsdp(run_ranks):
    counts = run_ranks(train_attention, 4, (2, 2))
    assert counts == [{"all_gather": 9, "reduce_scatter": 5, "all_reduce": 5}] * 4


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_is_read_in_a_recomputation_is_whole_too(run_ranks, use_reentrant):
    counts = run_ranks(train_attention, 2, (2,), use_reentrant)
    assert counts == [{"all_gather": 9, "reduce_scatter": 5}] * 2


def save_everything(context, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE


class SelectiveStack(AttentionStack):
    def forward(self, x):
        contexts = functools.partial(create_selective_checkpoint_contexts, save_everything)
        for block in self.blocks:
            x = checkpoint(block, x * self.scale, use_reentrant=False, context_fn=contexts)
        return x


@on_ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
def test_selective_checkpoints_do_not_see_gathers_of_what_is_read(reshard):
    plain, model = seeded(SelectiveStack()), seeded(SelectiveStack())
    shard_attention(model, init_device_mesh("cpu", (2,)), reshard_after_forward=reshard)
    for number in range(2):
        x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(number))
        for each in (model, plain):
            each(x).square().mean().backward()
    assert_same(full_grads(model), full_grads(plain))


@pytest.mark.parametrize("reshard", [False, 2])
def test_what_was_read_may_be_kept_for_backward(run_ranks, reshard):
    counts = run_ranks(train_attention, 4, (4,), reshard_after_forward=reshard)
    assert counts[0]["all_gather"] == (5 if reshard is False else 10)


class Reading(nn.Module):
    """Runs the blocks of an integer model by reading their weights."""

    def __init__(self):
        super().__init__()
        self.inner = IntegerModel()

    def forward(self, x):
        for place, block in enumerate(self.inner.blocks):
            if place == 1:
                x = block(x)  # called, and read below
            x = functional.linear(x, block.linear.weight, block.linear.bias) if place != 1 else x
            x = ternary(x)
        penalty = self.inner.blocks[1].linear.weight.sum() + self.inner.blocks[0].linear.bias.sum()
        return ternary(x + self.inner.shift + ternary(penalty))


def train_integers(mesh_shape, until_last):
    mesh = init_device_mesh("cpu", mesh_shape)
    plain, model = Reading(), Reading()
    for block in model.inner.blocks:
        meshard.fully_shard(block, mesh, unshard_on_access=True)
    meshard.fully_shard(model, mesh)
    model.set_gradient_divide_factor(1.0)
    num_ranks = dist.get_world_size()
    optimizers = [torch.optim.SGD(m.parameters(), lr=LEARNING_RATE) for m in (model, plain)]
    for step in range(3):
        for k in meshard.microbatches(model, range(3), until_last=until_last):
            integer_loss(model(integer_batch(3 * step + k, dist.get_rank()))).backward()
        for k in range(3):
            for rank in range(num_ranks):
                integer_loss(plain(integer_batch(3 * step + k, rank))).backward()
        assert_same(full_grads(model), full_grads(plain), bitwise=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same(full_state(model), full_state(plain), bitwise=True)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("mode", list(meshard.GradientSync))
def test_units_that_are_read_and_called_agree_bit_for_bit(run_ranks, mode):
    run_ranks(train_integers, 2, (2,), mode)
    run_ranks(train_integers, 4, (2, 2), mode)


@on_ranks(2)
def test_what_was_read_is_given_back_with_the_parent():
    mesh = init_device_mesh("cpu", (2,))
    model = shard_attention(seeded(AttentionStack()), mesh)
    units = [vars(block.attention.out_proj)["_meshard_unit"] for block in model.blocks]
    seen = []

    def look(*args):
        seen.append([unit.group.state.name for unit in units])

    for block in model.blocks:
        block.norm.register_forward_hook(look)
        block.attention.register_forward_hook(look)
    x = torch.randn(2, 3, 8)
    for _ in range(2):  # the second time, what is read is gathered ahead
        seen.clear()
        model(x).sum().backward()
        whole = [[name in ("UNSHARDED", "INSTALLED") for name in each] for each in seen]
        assert whole == [[False, False], [True, False], [False, False], [False, True]]
    assert seen[2] == ["SHARDED", "GATHERING"]
    assert isinstance(model.blocks[0].attention.out_proj.weight, DTensor)  # no forward runs
    handle = model.blocks[0].attention.register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x)
    handle.remove()
    assert whole_bytes(model) == 0
    model.zero_grad()
    model(x).sum().backward()
    ours = full_grads(model)
    plain = seeded(AttentionStack())
    plain(x).sum().backward()
    assert_same(ours, full_grads(plain))


@on_ranks(2, timeout=240)
@pytest.mark.slow
def test_a_compiled_parent_reads():
    mesh = init_device_mesh("cpu", (2,))
    plain = seeded(AttentionStack())
    model = shard_attention(copy.deepcopy(plain), mesh)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    xs = torch.randn(2, 2, 3, 8, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # dynamo looks at .grad of what is no leaf
            model(xs[dist.get_rank()]).square().mean().backward()
        plain(xs.flatten(0, 1)).square().mean().backward()
        assert_same(full_grads(model), full_grads(plain))
    assert whole_bytes(model) == 0


class Silent(nn.Module):
    """Reads a weight, and hands the result on without returning it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x, results):
        results.append(functional.linear(torch.tanh(x), self.layer.weight))


@on_ranks(2)
def test_a_parent_that_returns_nothing_leaves_what_it_read_whole_for_backward():
    mesh = init_device_mesh("cpu", (2,))
    plain, model = seeded(Silent()), seeded(Silent())
    meshard.fully_shard(model.layer, mesh, unshard_on_access=True)
    meshard.fully_shard(model, mesh)
    xs = torch.randn(2, 2, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for each, x in ((model, xs[dist.get_rank()]), (plain, xs.flatten(0, 1))):
        results = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no output was found
            each(x, results)
        results[0].square().mean().backward()
    assert_same(full_grads(model), full_grads(plain))


@on_ranks(2)
def test_a_copy_is_read_like_the_original():
    mesh = init_device_mesh("cpu", (2,))
    model = shard_attention(seeded(AttentionStack()), mesh)
    copied = copy.deepcopy(model)
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    for each in (copied, model, copied):
        each.zero_grad()
        each(x).square().mean().backward()
        assert whole_bytes(each) == 0
    assert_same(full_grads(copied), full_grads(model), bitwise=True)
    assert copied.blocks[0].attention.out_proj.weight.grad is not None


@on_ranks(2)
def test_frozen_and_cast_weights_are_read():
    mesh = init_device_mesh("cpu", (2,))
    policy = meshard.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    model = seeded(AttentionStack())
    plain = copy.deepcopy(model).bfloat16()
    for each in (model, plain):
        each.blocks[0].attention.out_proj.requires_grad_(False)
        each.blocks[1].attention.out_proj.bias.requires_grad_(False)
    shard_attention(model, mesh, mp_policy=policy)
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    for each, given in ((model, x), (plain, x.bfloat16())):
        each(given).float().square().mean().backward()
    expected = {name: None if g is None else g.float() for name, g in full_grads(plain).items()}
    assert_same(full_grads(model), expected, torch.bfloat16)


def test_nothing_but_a_flag_is_accepted():
    with pytest.raises(TypeError, match="unshard_on_access must be a bool"):
        meshard.fully_shard(nn.Linear(2, 2), unshard_on_access="weight")
