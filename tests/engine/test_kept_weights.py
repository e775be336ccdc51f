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
from meshard import CommLedger, GradientSync
from tests.support.against_plain import check_gradients, inputs_of, sharded_and_plain
from tests.support.insides import unsharded_units
from tests.support.models import Made, MlpStack, seeded
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.ranks import fake_group, on_fake_ranks, on_ranks, on_threads
from tests.support.spread import spread


def hidden_of(model, tokens):
    x = model.embedding(tokens)
    for block in model.blocks:
        x = x + block(x).tanh()
    return model.norm(x)


def decoder(forward=hidden_of):
    """Return an embedding, blocks, a norm and a head that the loss may read instead of calling."""
    return seeded(
        Made(
            forward,
            embedding=nn.Embedding(11, 6),
            blocks=[nn.Linear(6, 6), nn.Linear(6, 6)],
            norm=nn.LayerNorm(6),
            head=nn.Linear(6, 11, bias=False),
        )
    )


def tokens_of(rank, number=0):
    return torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(10 * rank + number))


def shard(plain, mesh_shape=(2,), *, tail=None):
    """Return a sharded copy; with ``tail`` the norm and the head are one unit."""
    model, mesh = copy.deepcopy(plain), init_device_mesh("cpu", mesh_shape)
    for block in model.blocks:
        meshard.fully_shard(block, mesh)
    if tail is not None:
        meshard.fully_shard([model.norm, model.head], mesh, reshard_after_forward=tail)
    return meshard.fully_shard(model, mesh)


def cross_entropy(logits, tokens):
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def loss_of_weight(model, rank, number=0):
    """Read the weight of the head instead of calling it, as fused cross-entropy does."""
    tokens = tokens_of(rank, number)
    return cross_entropy(F.linear(model(tokens), model.head.weight), tokens)


@spread(mesh_shape=[(4,), (2, 2), (4,)], reshard=[None, None, False], sync=list(GradientSync))
@on_threads(4)
def test_a_penalty_on_all_weights_after_the_forward(mesh_shape, reshard, sync):
    """Weights of resharded units are DTensors then, and the others are not."""

    def penalised(model, rank):
        out = model(inputs_of(rank))
        squares = [param.square().sum() for param in model.parameters()]
        whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in squares]
        return out.square().mean() + 0.1 * sum(whole)

    def window(model, rank):
        if isinstance(model, meshard.FSDPModule):
            model.set_gradient_sync(sync)
        penalised(model, rank).backward()
        if isinstance(model, meshard.FSDPModule):
            model.set_gradient_sync(GradientSync.FULL)
        penalised(model, rank).backward()

    model, plain = sharded_and_plain(
        MlpStack(), mesh_shape=mesh_shape, reshard_after_forward=reshard
    )
    check_gradients(model, plain, window, times=1)


FULL = GradientSync.FULL


@pytest.mark.parametrize(
    ("tail", "mesh_shape", "sync"),
    [
        (None, (2,), FULL),
        (None, (2, 1), FULL),
        (False, (2,), FULL),
        (False, (2, 1), GradientSync.NONE),
        (False, (2, 1), GradientSync.REDUCE_SCATTER),
    ],
)
@on_threads(2)
def test_a_loss_reads_the_weight_of_the_head(tail, mesh_shape, sync):
    def window(module, rank):
        numbers = range(3)
        if module is model:
            numbers = meshard.microbatches(model, numbers, until_last=sync)
        for number in numbers:
            loss_of_weight(module, rank, number).backward()

    plain = decoder()
    model = shard(plain, mesh_shape, tail=tail)
    check_gradients(model, plain, window)
    assert all(isinstance(param, DTensor) for param in model.parameters())


@on_threads(2)
def test_an_optimizer_in_backward_steps_a_weight_that_the_loss_reads():
    plain = decoder()
    model = shard(plain, tail=False)
    meshard.overlap_optimizer(model, torch.optim.SGD, lr=0.5)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for number in range(2):
        loss_of_weight(model, dist.get_rank(), number).backward()
        for rank in range(2):
            (loss_of_weight(plain, rank, number) / 2).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    assert_same(full_state(model), full_state(plain))


@pytest.mark.parametrize("read", ["embedding", "head"])
@on_threads(2)
def test_a_forward_reads_a_weight_that_stays_unsharded(read):
    """Of a unit that has run, and of a module of its tail that is never called."""

    def forward(model, tokens):
        logits = F.linear(hidden_of(model, tokens), getattr(model, read).weight)
        return cross_entropy(logits, tokens)

    plain = decoder(forward)
    if read == "head":
        model = shard(plain, tail=False)
    else:
        plain.head = None
        model, _ = sharded_and_plain(plain, ("embedding",), reshard_after_forward=False)
    with torch.no_grad():
        assert_same(model(tokens_of(0)), plain(tokens_of(0)))
    check_gradients(model, plain, lambda model, rank: model(tokens_of(rank)))


def loss_in_chunks(model, rank):
    """Run the head again on parts of the output, with a backward in each, and then the trunk."""
    hidden, tokens = model(tokens_of(rank)), tokens_of(rank)
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
        (cross_entropy(model.head(part), targets) / 3).backward()
    if is_sharded:
        model.head.reshard()
        model.head.set_reshard_after_backward(True, recurse=False)
    hidden.backward(torch.cat([part.grad for part in parts]))


@pytest.mark.parametrize("tail", [True, False])
@on_threads(2)
def test_a_loss_runs_the_head_again_in_chunks(tail):
    plain = decoder()
    check_gradients(shard(plain, tail=tail), plain, loss_in_chunks)


@on_threads(2)
def test_chunks_of_a_last_microbatch_leave_what_the_trunk_has_accumulated():
    """The backward of the trunk, which comes last, reduces it together with the new gradients."""

    def window(module, rank):
        numbers = range(2)
        if module is model:
            numbers = meshard.microbatches(model, numbers, until_last=GradientSync.NONE)
        for _ in numbers:
            loss_in_chunks(module, rank)

    plain = decoder()
    model = shard(plain, tail=True)
    check_gradients(model, plain, window)


def with_logits(model, tokens):
    return model.head(hidden_of(model, tokens))


@pytest.fixture
def kept():
    """A model whose root stays unsharded between a forward and its backward, and its loss."""
    with fake_group(1):
        model = shard(decoder(with_logits), (1,))
        yield model, model(tokens_of(0)).sum()


def test_state_dicts_and_copies_between_forward_and_backward_have_shards(kept):
    model, loss = kept
    assert not isinstance(model.norm.weight, DTensor)
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    before = full_state(decoder(with_logits))
    assert_same(full_state(copy.deepcopy(model)), before)
    with meshard.unsharded_params(model):
        assert_same(model.norm.weight, before["norm.weight"])
    loss.backward()
    assert all(param.grad is not None for param in model.parameters())


def test_clearing_gradients_clears_those_of_the_shards(kept):
    model, loss = kept
    loss.backward()
    once = full_grads(model)
    loss = model(tokens_of(0)).sum()
    model.zero_grad()
    loss.backward()
    assert_same(full_grads(model), once)


@pytest.mark.parametrize("is_local", [False, True])
@on_threads(2)
def test_weights_kept_by_the_closure_of_a_step_are_gathered_anew(is_local):
    """By optimizers that raise no version of what they step."""
    model, plain = sharded_and_plain(MlpStack(), reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    if is_local:
        ours = meshard.local_optimizer(model, torch.optim.SGD, lr=0.1)
    else:
        ours = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    ours.step(lambda: check_gradients(model, plain))
    theirs.step()
    check_gradients(model, plain)


def test_edits_of_the_copy_are_warned_of(kept):
    model, _ = kept
    with torch.no_grad():
        model.norm.weight.mul_(2)
    with pytest.warns(UserWarning, match=r"'norm\.weight' of unit '\(root\)' were edited"):
        model(tokens_of(0))


@pytest.mark.parametrize("when", ["at rest", "in a forward"])
@on_threads(2)
def test_what_is_loaded_into_a_state_dict_reaches_the_next_evaluation(when):
    """In place, as torch.distributed.checkpoint.load does, with a copy kept by the last one."""
    model = meshard.fully_shard(seeded(nn.Linear(4, 4)), reshard_after_forward=False)
    found = []
    if when == "in a forward":
        model.register_forward_hook(lambda *_: found.append(model.state_dict()))
    with torch.no_grad():
        before = model(torch.ones(1, 4))
        state = found[0] if found else model.state_dict()
        for value in state.values():
            value.to_local().mul_(2)
        assert_same(model(torch.ones(1, 4)), 2 * before)


@on_threads(2)
def test_plain_shards_that_a_hook_puts_into_a_state_dict_get_no_attributes():
    layer = nn.Linear(4, 4)

    def to_plain(module, state_dict, prefix, metadata):
        state_dict.update({name: value.to_local() for name, value in state_dict.items()})

    layer.register_state_dict_post_hook(to_plain)
    state = meshard.fully_shard(nn.Sequential(layer)).state_dict()
    assert [vars(value) for value in state.values()] == [{}, {}]


@on_ranks(2)
def test_edits_between_two_forwards_on_one_copy_are_lost_and_warned_of():
    model = meshard.fully_shard(seeded(nn.Linear(2, 2)), reshard_after_forward=False)
    x = torch.ones(1, 2)
    expected = model(x)
    with torch.no_grad():
        model.weight.zero_()
    assert not torch.equal(model(x), expected)  # the second forward reads what is there
    with pytest.warns(UserWarning, match="'weight' of unit .* were edited while unsharded"):
        model.reshard()
    assert torch.equal(model(x), expected)


def test_a_flag_set_on_the_copy_reaches_the_shard_and_a_step_shards_modules_again(kept):
    model, loss = kept
    model.norm.weight.requires_grad_(False)
    loss.backward()
    assert not model.norm.weight.requires_grad and model.norm.weight.grad is None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(tokens_of(0))
    optimizer.step()
    assert isinstance(model.norm.weight, DTensor)


@on_ranks(2)
@pytest.mark.parametrize("how", ["kept", "unshard"])
@pytest.mark.parametrize("thaws", [True, False])
def test_flags_set_after_a_forward_without_backward_count(thaws, how):
    """As when a layer is thawed after an evaluation that has forgotten no_grad."""
    plain = MlpStack()
    plain.blocks[1].requires_grad_(not thaws)
    model, plain = sharded_and_plain(plain, reshard_after_forward=how == "unshard")
    x = torch.ones(2, 6)
    if how == "kept":
        model(x)
    else:
        model.blocks[1].unshard()
    for each in (plain, model):
        each.blocks[1].requires_grad_(thaws)
        each(x).sum().backward()
    assert_same(full_grads(model), full_grads(plain))
    assert model.blocks[1].up.weight.requires_grad is thaws


@on_threads(4)
def test_what_is_kept_between_forward_and_backward_is_not_used_in_the_next_forward():
    """An edit of ``.data`` raises no version that would tell that it is old."""
    model, plain = sharded_and_plain(MlpStack(), reshard_after_forward=2)
    x = torch.ones(3, 6)
    for _ in range(2):  # the second forward prefetches
        with CommLedger(model) as ledger:
            assert_same(model(x), plain(x))
        assert {event.group_size for event in ledger.events} == {4}
        for each in (model, plain):
            for param in each.parameters():
                param.data.mul_(2)


@on_fake_ranks(2)
def test_a_unit_that_ran_in_an_evaluation_only_is_resharded_after_the_next_backward():
    model = Made(lambda m, x: m.body(x), body=nn.Linear(6, 6), head=nn.Linear(6, 6))
    for each in (model.body, model.head):
        meshard.fully_shard(each, reshard_after_forward=False)
    meshard.fully_shard(model)
    with torch.no_grad():
        model.head(torch.ones(3, 6))
    model(torch.ones(3, 6)).sum().backward()
    assert unsharded_units(model) == []
