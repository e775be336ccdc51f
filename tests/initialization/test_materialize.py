"""``materialize``: sharded models get the values of an unsharded initialization."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import meshard
from meshard import CommLedger, fully_shard, fully_shard_units, materialize
from tests.support.parity import assert_same, full_state

SEED = 7


class Scale(nn.Module):
    """A module of one's own: a parameter, a frozen one, and buffers of two kinds."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.fixed = nn.Parameter(torch.empty(3, 2), requires_grad=False)
        self.register_buffer("noise", torch.empty(dim))
        self.register_buffer("places", torch.empty(dim, dtype=torch.int64), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        self.weight.data.uniform_(0.5, 1.5)
        nn.init.normal_(self.fixed)
        self.noise.normal_()
        torch.arange(len(self.places), out=self.places)

    def forward(self, x):
        return x * self.weight + self.noise + self.fixed.sum() + self.places


class Attending(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.scale = Scale(dim)

    def forward(self, x):
        return self.scale(self.attention(x, x, x, need_weights=False)[0])


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8, padding_idx=0)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList(Attending(8) for _ in range(3))
        self.recurrent = nn.GRU(8, 5, batch_first=True)
        self.out = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 7, dtype=torch.bfloat16))
        self.out[1].requires_grad_(False)

    def forward(self, tokens):
        x = self.norm(self.conv(self.embedding(tokens).transpose(1, 2))).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        normed = self.out[0](self.recurrent(x)[0])
        return self.out[1](normed.bfloat16()).float()


def on_one_process(build, seed=SEED):
    torch.manual_seed(seed)
    model = build()
    return model, torch.rand(3)  # where the generator is afterwards


def meta(build):
    with torch.device("meta"):
        return build()


def materialised(mesh_shape, build, to_empty_first=False, seeds=(SEED,) * 4, **kwargs):
    model = meta(build)
    fully_shard_units(model, init_device_mesh("cpu", mesh_shape), **kwargs)
    if to_empty_first:
        model.to_empty(device="cpu")
    torch.manual_seed(seeds[dist.get_rank()])
    with CommLedger() as ledger:
        assert materialize(model) is model
    after = torch.rand(3)
    owned = {name: type(param) for name, param in model.named_parameters()}
    assert set(owned.values()) == {DTensor} or set(owned.values()) == {nn.Parameter}
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    flags = [param.requires_grad for param in model.parameters()]
    local = [param.to_local() for param in model.parameters()]
    return full_state(model), after, flags, ledger.counts, local


@pytest.mark.parametrize(
    ("mesh_shape", "to_empty_first"), [((2,), False), ((3,), True), ((2, 2), False)]
)
def test_values_are_bit_for_bit_those_of_one_process(run_ranks, mesh_shape, to_empty_first):
    num_ranks = 4 if mesh_shape == (2, 2) else mesh_shape[0]
    plain, expected_after = on_one_process(Everything)
    expected = full_state(plain)
    runs = run_ranks(materialised, num_ranks, mesh_shape, Everything, to_empty_first)
    for state, after, flags, counts, _ in runs:
        assert_same(state, expected, bitwise=True)
        assert_same(after, expected_after, bitwise=True)  # the generator went on like there
        assert flags == [param.requires_grad for param in plain.parameters()]
        if not to_empty_first:  # nothing is gathered: one broadcast per axis of the mesh
            assert counts == {"broadcast": len(mesh_shape)}
    if mesh_shape == (2, 2):  # replicas hold the same bits
        for one, other in zip(runs[0][-1], runs[2][-1], strict=True):
            assert torch.equal(one, other)


def test_any_units_and_shard_dims_give_the_same(run_ranks):
    expected = full_state(on_one_process(Everything)[0])
    for kwargs in ({"units": (nn.Linear, nn.Conv1d, Scale)}, {"shard_placement_fn": last_dim}):
        for state, *_ in run_ranks(materialised, 2, (2,), Everything, **kwargs):
            assert_same(state, expected, bitwise=True)


def last_dim(param):
    return Shard(param.dim() - 1)


def test_the_generator_of_the_first_rank_counts_and_the_others_keep_theirs(run_ranks):
    plain, first_after = on_one_process(Everything, seed=1)
    runs = run_ranks(materialised, 2, (2,), Everything, seeds=(1, 2))
    for state, *_ in runs:
        assert_same(state, full_state(plain), bitwise=True)
    torch.manual_seed(2)
    assert_same(runs[0][1], first_after, bitwise=True)
    assert_same(runs[1][1], torch.rand(3), bitwise=True)


class Whole(nn.Module):
    """Initialises what is inside it, like nn.Transformer, which has to be whole for that."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.reset_parameters()

    def reset_parameters(self):
        for param in self.parameters():
            if param.dim() > 1:
                nn.init.xavier_uniform_(param)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def small_transformer():
    return nn.Transformer(8, 2, 2, 2, 16, batch_first=True)


def reset_in_turn(module):
    for child in module.children():
        reset_in_turn(child)
    for name in ("reset_parameters", "_reset_parameters"):
        getattr(module, name, lambda: None)()


@pytest.mark.parametrize("build", [Whole, small_transformer])
def test_a_module_that_initialises_what_is_inside_has_it_whole(run_ranks, build):
    plain = build()
    torch.manual_seed(SEED)
    reset_in_turn(plain)
    if build is Whole:  # nn.Transformer copies its layers instead of drawing for each
        assert_same(full_state(on_one_process(build)[0]), full_state(plain), bitwise=True)
    for state, *_ in run_ranks(materialised, 2, (2,), build):
        assert_same(state, full_state(plain), bitwise=True)


class Watching(nn.Linear):
    """Notes how much of the model is whole while it is initialised."""

    root = None
    seen = ()

    def reset_parameters(self):
        super().reset_parameters()
        if Watching.root is not None:
            params = Watching.root.parameters()
            whole = sum(p.numel() for p in params if not isinstance(p, DTensor))
            Watching.seen = (*Watching.seen, whole)


def watched():
    model = meta(lambda: nn.Sequential(*[Watching(6, 6, bias=False) for _ in range(5)]))
    fully_shard_units(model, units=lambda fqn, _: fqn in ("0", "1", "2", "3"))
    Watching.root, Watching.seen = model, ()
    try:
        materialize(model)
    finally:
        Watching.root = None
    return Watching.seen


def test_one_unit_is_whole_at_a_time_beside_the_root(run_ranks):
    for seen in run_ranks(watched, 2):
        assert seen == (72, 72, 72, 72, 36)  # "4" belongs to the root


def trained_then_again():
    torch.manual_seed(0)
    model = Everything()
    fully_shard_units(model)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(3)
    model.eval()(torch.ones(1, 4, dtype=torch.int64))  # leaves a whole copy behind
    torch.manual_seed(SEED)
    materialize(model)
    model(torch.ones(1, 4, dtype=torch.int64))
    return full_state(model)


def test_a_model_that_has_values_is_drawn_anew(run_ranks):
    expected = full_state(on_one_process(Everything)[0])
    for state in run_ranks(trained_then_again, 2):
        assert_same(state, expected, bitwise=True)


def three_layers():
    return nn.Sequential(*[nn.Linear(5, 5) for _ in range(3)])


def of_a_list():
    model = meta(three_layers)
    fully_shard([model[0], model[2]])
    fully_shard(model)
    torch.manual_seed(SEED)
    materialize(model)
    return full_state(model)


def test_a_unit_of_several_modules_is_initialised_in_module_order(run_ranks):
    expected = full_state(on_one_process(three_layers)[0])
    for state in run_ranks(of_a_list, 2):
        assert_same(state, expected, bitwise=True)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 7, bias=False)
        self.embedding.weight = self.head.weight


def test_a_tied_parameter_has_what_its_last_owner_draws(run_ranks):
    expected = full_state(on_one_process(Tied)[0])
    for units in ("auto", (nn.Linear, nn.Embedding)):
        for state, *_ in run_ranks(materialised, 2, (2,), Tied, units=units):
            assert_same(state, expected, bitwise=True)


def normal(module):
    """An init in the way of Hugging Face: it also writes to a child of what it is given."""
    if isinstance(module, nn.Linear):
        module.weight.data.normal_(std=0.02)
    if isinstance(module, Attending):
        for name, param in module.named_parameters():
            if name.endswith("out_proj.weight"):
                param.data.normal_(std=0.001)


def with_init():
    torch.manual_seed(0)
    model = Everything()
    fully_shard_units(model)
    torch.manual_seed(SEED)
    materialize(model, init=normal)
    return full_state(model)


def test_init_does_what_apply_does_on_one_process(run_ranks):
    torch.manual_seed(0)
    plain = Everything()
    torch.manual_seed(SEED)
    plain.apply(normal)
    for state in run_ranks(with_init, 2):
        assert_same(state, full_state(plain), bitwise=True)


# --- the peer ---------------------------------------------------------------------------------


def drawn_by(lib):
    layer = meta(lambda: nn.Linear(4, 4))
    lib.fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    torch.manual_seed(SEED)
    if lib is meshard:
        materialize(layer)
    else:
        layer.to_empty(device="cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "DTensor random operators may not have complete..."
            layer.reset_parameters()
    return layer.weight.full_tensor().detach()


def both():
    return drawn_by(meshard), drawn_by(torch_fsdp)


def test_the_peer_draws_the_same_shard_on_every_rank(run_ranks):
    torch.manual_seed(SEED)
    plain = nn.Linear(4, 4).weight.detach()
    for ours, peer in run_ranks(both, 2):
        assert_same(ours, plain, bitwise=True)
        assert not torch.equal(peer, plain)
        assert torch.equal(peer[:2], peer[2:])


def test_the_oracle_draws_everywhere():
    one, other = (full_state(on_one_process(Everything, seed)[0]) for seed in (1, 2))
    same = [name for name in one if torch.equal(one[name], other[name])]
    constant = ("norm", "bias", "places", "out.0")
    assert all(any(part in name for part in constant) for name in same), same
    assert len(one) - len(same) > 20
