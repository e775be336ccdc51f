"""Gradients of gradients, with default resharding."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as peer_fully_shard

import meshard
from meshard import CommLedger, MixedPrecisionPolicy
from tests.support.models import MlpStack, Transformer, seeded
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.rank_pool import RankError
from tests.support.ranks import on_ranks


def shard(model, fully_shard=meshard.fully_shard, **kwargs):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **kwargs)
    return fully_shard(model, mesh=mesh, **kwargs)


def whole_units(model):
    """Return the labels of units that are whole."""
    units = (vars(module).get("_meshard_unit") for module in model.modules())
    return [unit.label for unit in units if unit is not None and unit.group.state.name != "SHARDED"]


def inputs_of(rank, step=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, 6, generator=generator, dtype=dtype).requires_grad_()


def penalty_of(critic, x):
    """Return how far the norm of the gradient by the input is from 1, as WGAN-GP does."""
    (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return (gradient.norm(dim=-1) - 1).square().mean()


def simple(critic, x):
    penalty_of(critic, x).backward()


def with_loss(critic, x):
    (critic(x).square().mean() + 10 * penalty_of(critic, x)).backward()


def forwards_between(critic, x):
    """Other forwards between the two backwards, as where real and fake samples follow."""
    penalty = penalty_of(critic, x)
    real, fake = critic(x.detach() + 1), critic(x.detach() - 1)
    (real.square().mean() - fake.square().mean() + 10 * penalty).backward()


def backward_between(critic, x):
    """A backward between the two that has nothing to do with the penalty."""
    penalty = penalty_of(critic, x)
    critic(x.detach() + 1).square().mean().backward()
    penalty.backward()


def two_penalties(critic, x):
    first, second = penalty_of(critic, x), penalty_of(critic, x + 1)
    second.backward()
    first.backward()


def kept_graph(critic, x):
    penalty = penalty_of(critic, x)
    penalty.backward(retain_graph=True)
    (2 * penalty).backward()


def third_order(critic, x):
    (gradient,) = torch.autograd.grad(critic(x).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), x, create_graph=True)
    second.square().mean().backward()


def by_backward(critic, x):
    """``backward(create_graph=True)``: the parameters get a gradient each time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, about reference cycles
        critic(x).square().mean().backward(create_graph=True)
    gradient, x.grad = x.grad, None
    gradient.square().mean().backward()


def as_value_only(critic, x):
    """The gradient is used without a backward through it."""
    penalty = penalty_of(critic, x).detach()
    (critic(x.detach()).square().mean() * (1 + penalty)).backward()


WAYS = [
    simple,
    with_loss,
    forwards_between,
    backward_between,
    two_penalties,
    kept_graph,
    third_order,
    by_backward,
    as_value_only,
]


def train_both(way, model_class=MlpStack, **kwargs):
    """Train sharded over ranks and plain on all their batches, and compare after each step."""
    dtype = torch.float64  # penalties make large numbers, and rounding is not the question
    plain = seeded(model_class().to(dtype))
    model = shard(copy.deepcopy(plain), **kwargs)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, plain)]
    size = dist.get_world_size()
    for step in range(4):
        way(model, inputs_of(dist.get_rank(), step, dtype))
        for rank in range(size):
            way(plain, inputs_of(rank, step, dtype))
        for param in plain.parameters():
            if param.grad is not None:
                param.grad = param.grad.detach() / size
        assert_same(full_grads(model), full_grads(plain), dtype, what=f"step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same(full_state(model), full_state(plain), dtype, what=f"step {step}")
    with torch.no_grad():  # a forward gives back what was held for a graph that is gone
        model(inputs_of(0, dtype=dtype))
    return whole_units(model)


@pytest.mark.default_rows(4)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_gradients_agree_with_one_process(run_ranks, way):
    assert run_ranks(train_both, 2, way) == [[], []]


@pytest.mark.default_rows(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reshard", [True, False])
def test_gradients_of_gradients_whenever_units_reshard(run_ranks, way, reshard):
    left = run_ranks(train_both, 2, way, reshard_after_forward=reshard)
    assert left == ([[], []] if reshard else left)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("way", [with_loss, forwards_between])
def test_gradients_of_gradients_where_neighbours_keep_parts(run_ranks, way):
    run_ranks(train_both, 4, way, reshard_after_forward=2)


class OneUnit(nn.Module):
    """No unit inside: the gradient by its output is a constant."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_gradients_of_a_single_unit(run_ranks, way):
    left = run_ranks(train_both, 2, way, model_class=OneUnit, reshard_after_forward=True)
    assert left == [[], []]


def when_given_back():
    """Return which units are whole at the moments of a step with a penalty."""
    model, x = shard(seeded(MlpStack())), inputs_of(dist.get_rank())
    found = []
    with CommLedger(model) as ledger:
        penalty = penalty_of(model, x)
        found.append(whole_units(model))
    counts = [dict(ledger.counts)]
    with CommLedger(model) as ledger:
        (model(x.detach()).sum() + penalty).backward()
        found.append(whole_units(model))
    counts.append(dict(ledger.counts))
    return found, counts


def test_units_stay_whole_between_the_two_backwards_only(run_ranks):
    for found, counts in run_ranks(when_given_back, 2):
        assert found == [["(root)", "blocks.0", "blocks.1", "blocks.2"], []]
        # Forward gathers 4 and the first backward 3. Everything is unsharded then.
        assert counts[0] == {"all_gather": 7}
        assert counts[1] == {"reduce_scatter": 4}


@on_ranks(2)
def test_a_root_around_it_reshards_what_a_graph_has_kept():
    model, x = shard(seeded(MlpStack())), inputs_of(dist.get_rank())
    penalty = penalty_of(model, x)
    outer = meshard.fully_shard(nn.Sequential(model, nn.Linear(6, 2)))
    assert len(whole_units(model)) == 4
    del penalty
    for _ in range(2):
        outer(x.detach()).sum().backward()
    assert whole_units(model) == []


def drop_the_graph():
    """A graph that is gone holds nothing: at the latest the next forward gives the units back."""
    model, x = shard(seeded(MlpStack())), inputs_of(dist.get_rank())
    penalty = penalty_of(model, x)
    held = whole_units(model)
    del penalty
    with torch.no_grad():
        model(x)
    return held, whole_units(model)


def test_a_dropped_graph_holds_no_memory(run_ranks):
    for held, left in run_ranks(drop_the_graph, 2):
        assert len(held) == 4 and not left


@on_ranks(2)
def test_penalties_under_mixed_precision():
    """Gradient by an embedding, through attention, in bfloat16 compute."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain = seeded(Transformer())
    model = shard(copy.deepcopy(plain), mp_policy=policy)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        tokens = torch.arange(10).view(2, 5)
        losses = []
        for each in (model, plain):
            noise = torch.zeros(2, 5, 8, requires_grad=True)
            handle = each.embedding.register_forward_hook(lambda m, i, o, noise=noise: o + noise)
            out = each(tokens).float().square().sum()
            handle.remove()
            (gradient,) = torch.autograd.grad(out, noise, create_graph=True)
            loss = gradient.square().mean()
            loss.backward()
            losses.append(loss.detach())
    assert_same(losses[0], losses[1], torch.bfloat16)
    ours, theirs = full_grads(model), full_grads(plain)
    for name, gradient in theirs.items():
        error = (ours[name] - gradient).norm() / gradient.norm().clamp(min=1e-3)
        assert error < 0.1, f"{name}: {error}"


def penalise():
    simple(shard(seeded(MlpStack()), peer_fully_shard), inputs_of(dist.get_rank()))


def test_the_peer_has_freed_what_the_second_backward_reads(run_ranks):
    with pytest.raises(RankError, match=r"process died|storage"):
        run_ranks(penalise, 2)


@on_ranks(2)
@pytest.mark.slow
def test_transforms_of_torch_func_need_open_parameters():
    plain = seeded(MlpStack())
    model = shard(seeded(MlpStack()), meshard.fully_shard)
    x = inputs_of(dist.get_rank())
    wanted = torch.func.jacrev(lambda x: plain(x).sum(0))(x)
    with pytest.raises(RuntimeError, match=r"torch\.func .* unit '\(root\)'.*unsharded_params"):
        torch.func.jacrev(lambda x: model(x).sum(0))(x)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script`")  # torch's own, at its first use
        assert_same(torch.func.jacfwd(lambda x: model(x).sum(0))(x).detach(), wanted.detach())
    with meshard.unsharded_params(model):
        assert_same(torch.func.jacrev(lambda x: model(x).sum(0))(x), wanted)


@on_ranks(2)
def test_units_inside_vmap():
    plain = seeded(MlpStack())
    model = shard(seeded(MlpStack()), meshard.fully_shard)
    batches = torch.stack([inputs_of(number) for number in range(3)])
    for each in (model, plain):
        torch.vmap(torch.vmap(each))(batches).square().mean().backward()
    assert_same(full_grads(model), full_grads(plain))


@on_ranks(2)
def test_gradients_of_inputs_open_no_window():
    """Under no_sync too, where a backward would accumulate."""
    model = meshard.fully_shard(seeded(nn.Linear(3, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    x = torch.ones(1, 3, requires_grad=True)
    with meshard.no_sync(model):
        torch.autograd.grad(model(x).sum(), x)
    assert not meshard.pending_gradients(model)
    optimizer.step()
    assert torch.equal(model.bias.grad.full_tensor(), torch.ones(1))
