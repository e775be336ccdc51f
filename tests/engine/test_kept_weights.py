"""Weights that stay unsharded after a forward, and are read outside of their module's forward."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import meshard
from meshard import GradientSync
from tests.support.models import seeded
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.ranks import on_fake_ranks, on_ranks

MESHES = {"sharded": (2,), "replicas": (2, 1)}


class Decoder(nn.Module):
    """An embedding, blocks, a norm and a head that the loss may read instead of calling it."""

    def __init__(self, *, calls_head):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 11, bias=False)
        self.calls_head = calls_head

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x).tanh()
        x = self.norm(x)
        return self.head(x) if self.calls_head else x


def tokens_of(rank, number=0):
    return torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(10 * rank + number))


def shard(model, mesh_shape, *, tail=None, **options):
    mesh = init_device_mesh("cpu", mesh_shape)
    for block in model.blocks:
        meshard.fully_shard(block, mesh, **options)
    if tail is not None:
        meshard.fully_shard([model.norm, model.head], mesh, reshard_after_forward=tail, **options)
    return meshard.fully_shard(model, mesh, **options)


def plain_gradients(model, loss_of, num_windows=1):
    """Train on all ranks' batches on one process; each rank's loss is a mean."""
    world = dist.get_world_size()
    for number in range(num_windows):
        for rank in range(world):
            (loss_of(model, tokens_of(rank, number)) / world).backward()
    return {name: param.grad for name, param in model.named_parameters()}


def loss_of_weight(model, tokens):
    """Read the weight of the head instead of calling it, as fused cross-entropy does."""
    logits = F.linear(model(tokens), model.head.weight)
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("mesh_shape", MESHES.values(), ids=list(MESHES))
@pytest.mark.parametrize("tail", [None, False])
@on_ranks(2)
def test_a_loss_reads_the_weight_of_the_head(mesh_shape, tail):
    plain = seeded(Decoder(calls_head=False))
    model = shard(copy.deepcopy(plain), mesh_shape, tail=tail)
    loss_of_weight(model, tokens_of(dist.get_rank())).backward()
    assert_same(full_grads(model), plain_gradients(plain, loss_of_weight))
    assert all(isinstance(param, DTensor) for param in model.parameters())


@pytest.mark.parametrize("sync", [GradientSync.NONE, GradientSync.REDUCE_SCATTER])
@on_ranks(2)
def test_a_loss_reads_a_weight_in_every_microbatch_of_a_window(sync):
    plain = seeded(Decoder(calls_head=False))
    model = shard(copy.deepcopy(plain), (2, 1), tail=False)
    for number, _ in enumerate(meshard.microbatches(model, [0, 1, 2], until_last=sync)):
        loss_of_weight(model, tokens_of(dist.get_rank(), number)).backward()
    assert_same(full_grads(model), plain_gradients(plain, loss_of_weight, num_windows=3))


@on_ranks(2)
def test_an_optimizer_in_backward_steps_a_weight_that_the_loss_reads():
    plain = seeded(Decoder(calls_head=False))
    model = shard(copy.deepcopy(plain), (2,), tail=False)
    meshard.overlap_optimizer(model, torch.optim.SGD, lr=0.5)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for number in range(2):
        loss_of_weight(model, tokens_of(dist.get_rank(), number)).backward()
        for rank in range(2):
            (loss_of_weight(plain, tokens_of(rank, number)) / 2).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    assert_same(full_state(model), full_state(plain))


class Tied(Decoder):
    """The parent's forward reads the weight of the embedding for its logits."""

    def forward(self, tokens):
        return F.linear(super().forward(tokens), self.embedding.weight)


@pytest.mark.parametrize("grad", [True, False])
@on_ranks(2)
def test_a_parent_reads_the_weight_of_a_unit_that_stays_unsharded(grad):
    plain = seeded(Tied(calls_head=False))
    plain.head = None
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (2,))
    meshard.fully_shard(model.embedding, mesh, reshard_after_forward=False)
    meshard.fully_shard(model, mesh)

    def loss_of(model, tokens):
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    if grad:
        loss_of(model, tokens_of(dist.get_rank())).backward()
        assert_same(full_grads(model), plain_gradients(plain, loss_of))
    else:
        with torch.no_grad():
            assert_same(model(tokens_of(0)), plain(tokens_of(0)))


class ReadsInForward(Decoder):
    """A loss inside of the forward reads ``head.weight``; the head is never called."""

    def forward(self, tokens):
        logits = F.linear(super().forward(tokens), self.head.weight)
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


@on_ranks(2)
def test_a_forward_reads_the_weight_of_a_module_of_its_tail_that_it_does_not_call():
    plain = seeded(ReadsInForward(calls_head=False))
    model = shard(copy.deepcopy(plain), (2,), tail=False)
    for _ in range(2):
        model(tokens_of(dist.get_rank())).backward()
        plain_gradients(plain, lambda module, tokens: module(tokens))
    expected = {name: param.grad for name, param in plain.named_parameters()}
    assert_same(full_grads(model), expected)


def loss_in_chunks(model, tokens):
    """Run the head again on parts of the output, with a backward in each, and then the trunk."""
    hidden = model(tokens)
    parts = [part.detach().requires_grad_() for part in hidden.chunk(3)]
    is_sharded = isinstance(model.head, meshard.FSDPModule)
    if is_sharded:
        model.head.set_reshard_after_forward(False, recurse=False)
        model.head.set_reshard_after_backward(False, recurse=False)
        model.head.set_requires_gradient_sync(False, recurse=False)
        model.head.unshard()
    for number, (part, targets) in enumerate(zip(parts, tokens.chunk(3), strict=True)):
        if is_sharded and number == len(parts) - 1:
            model.head.set_requires_gradient_sync(True, recurse=False)
        logits = model.head(part)
        (F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / 3).backward()
    if is_sharded:
        model.head.reshard()
        model.head.set_reshard_after_backward(True, recurse=False)
    hidden.backward(torch.cat([part.grad for part in parts]))
    return torch.zeros((), requires_grad=True)


@pytest.mark.parametrize("tail", [True, False])
@on_ranks(2)
def test_a_loss_runs_the_head_again_in_chunks(tail):
    plain = seeded(Decoder(calls_head=False))
    model = shard(copy.deepcopy(plain), (2,), tail=tail)
    for _ in range(2):
        with meshard.CommLedger(model) as ledger:
            loss_in_chunks(model, tokens_of(dist.get_rank()))
    for rank in range(2):
        loss_in_chunks(plain, tokens_of(rank))
    expected = {name: param.grad for name, param in plain.named_parameters()}  # a sum of ranks
    assert_same(full_grads(model), expected)
    # The tail is reduced by the chunks, and with the trunk; each other unit once.
    assert ledger.counts["reduce_scatter"] == 5


# --- what users do between a forward and its backward -----------------------------------------


@on_fake_ranks(1)
def test_the_state_dict_has_shards():
    model = shard(seeded(Decoder(calls_head=True)), (1,))
    loss = model(tokens_of(0)).sum()
    assert not isinstance(model.norm.weight, DTensor)
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    loss.backward()
    assert all(param.grad is not None for param in model.parameters())


@on_fake_ranks(1)
def test_an_optimizer_built_between_forward_and_backward_is_refused_by_name():
    model = shard(seeded(Decoder(calls_head=True)), (1,))
    loss = model(tokens_of(0)).sum()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss.backward()
    with pytest.raises(RuntimeError, match=r"would never train the model.*unsharded copy"):
        optimizer.step()


@on_fake_ranks(1)
def test_clearing_gradients_clears_those_of_the_shards():
    model = shard(seeded(Decoder(calls_head=True)), (1,))
    model(tokens_of(0)).sum().backward()
    loss = model(tokens_of(0)).sum()
    model.zero_grad()
    loss.backward()
    once = full_grads(model)
    model.zero_grad()
    model(tokens_of(0)).sum().backward()
    assert_same(full_grads(model), once)


@on_fake_ranks(1)
def test_edits_of_the_copy_are_warned_of():
    model = shard(seeded(Decoder(calls_head=True)), (1,))
    model(tokens_of(0))
    with torch.no_grad():
        model.norm.weight.mul_(2)
    with pytest.warns(UserWarning, match=r"'norm\.weight' of unit '\(root\)' were edited"):
        model(tokens_of(0))


@on_ranks(2)
def test_other_data_for_the_copy_are_lost_and_warned_of():
    model, tokens = shard(seeded(Decoder(calls_head=True)), (2,)), tokens_of(0)
    expected = model(tokens)
    model.head.weight.data = torch.zeros(11, 6)
    with pytest.warns(UserWarning, match="'head.weight' of unit '.root.' .* these edits are lost"):
        expected.sum().backward()
    assert torch.equal(model(tokens), expected)


@on_fake_ranks(1)
def test_a_flag_set_on_the_copy_reaches_the_shard():
    model = shard(seeded(Decoder(calls_head=True)), (1,))
    loss = model(tokens_of(0)).sum()
    model.norm.requires_grad_(False)
    loss.backward()
    assert not model.norm.weight.requires_grad and model.norm.weight.grad is None


@on_fake_ranks(1)
def test_a_step_makes_modules_hold_shards_again():
    model = shard(seeded(Decoder(calls_head=True)), (1,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(tokens_of(0)).sum().backward()
    model(tokens_of(0))
    optimizer.step()
    assert isinstance(model.norm.weight, DTensor)


@on_fake_ranks(1)
def test_unsharded_params_and_copies_between_forward_and_backward():
    model = shard(seeded(Decoder(calls_head=True)), (1,))
    before = full_state(model)
    loss = model(tokens_of(0)).sum()
    copied = copy.deepcopy(model)
    assert_same(full_state(copied), before)
    with meshard.unsharded_params(model):
        assert_same(model.norm.weight, before["norm.weight"])
    loss.backward()
    assert all(param.grad is not None for param in model.parameters())
