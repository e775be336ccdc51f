"""``materialize``: sharded models get the values of an unsharded initialization."""

import copy
import functools
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import meshard
from meshard import fully_shard, fully_shard_units, materialize, unsharded_params
from tests.support.models import Made
from tests.support.parity import assert_same, full_state
from tests.support.ranks import on_fake_ranks, on_ranks

SEED = 7


class Scale(nn.Module):
    """A module of one's own: a parameter, a frozen transposed one, and buffers of two kinds."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.fixed = nn.Parameter(torch.empty(2, 3).t(), requires_grad=False)
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


def attending(dim):
    def forward(m, x):
        return m.scale(m.attention(x, x, x, need_weights=False)[0])

    attention = nn.MultiheadAttention(dim, 2, batch_first=True)
    return Made(forward, attention=attention, scale=Scale(dim))


def everything():
    def forward(m, tokens):
        x = m.norm(m.conv(m.embedding(tokens).transpose(1, 2))).transpose(1, 2)
        for block in m.blocks:
            x = block(x)
        normed = m.out[0](m.recurrent(x)[0])
        return m.out[1](normed.bfloat16()).float()

    return Made(
        forward,
        embedding=nn.Embedding(11, 8, padding_idx=0),
        conv=nn.Conv1d(8, 8, 3, padding=1),
        norm=nn.BatchNorm1d(8),
        blocks=[attending(8) for _ in range(3)],
        recurrent=nn.GRU(8, 5, batch_first=True),
        out=nn.Sequential(
            nn.LayerNorm(5), nn.Linear(5, 7, dtype=torch.bfloat16).requires_grad_(False)
        ),
    )


def seeded(build, seed=SEED):
    torch.manual_seed(seed)
    return build()


def meta(build):
    with torch.device("meta"):
        return build()


def check_materialised(build, expected=None, mesh=None, seed=SEED, **kwargs):
    """Compare with ``expected``, or with what ``build`` draws, bit for bit; return the model."""
    model = meta(build)
    fully_shard_units(model, mesh, **kwargs)
    torch.manual_seed(seed)
    assert materialize(model) is model
    after = torch.rand(3)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    plain = expected or seeded(build)
    assert_same(full_state(model), full_state(plain), bitwise=True)
    flags = [param.requires_grad for param in plain.parameters()]
    assert [param.requires_grad for param in model.parameters()] == flags
    return model, after


@pytest.mark.parametrize(("mesh_shape", "to_empty_first"), [((4,), True), ((2, 2), False)])
@on_ranks(4)
def test_values_are_bit_for_bit_those_of_one_process(mesh_shape, to_empty_first):
    model = meta(everything)
    fully_shard_units(model, init_device_mesh("cpu", mesh_shape))
    if to_empty_first:
        model.to_empty(device="cpu")
    torch.manual_seed(SEED)
    materialize(model)
    after = torch.rand(3)
    plain = seeded(everything)
    assert_same(after, torch.rand(3), bitwise=True)  # the generator went on like there
    assert_same(full_state(model), full_state(plain), bitwise=True)  # in each replica


@on_ranks(2)
def test_any_units_and_shard_dims_give_the_same():
    check_materialised(everything, units=(nn.Linear, nn.Conv1d, Scale))
    check_materialised(everything, shard_placement_fn=lambda param: Shard(param.dim() - 1))


@on_ranks(2)
def test_the_generator_of_the_first_rank_counts_and_the_others_keep_theirs():
    rank = dist.get_rank()
    plain = seeded(everything, seed=0)
    expected_after = torch.rand(3)
    _, after = check_materialised(everything, plain, seed=rank)
    if rank:
        torch.manual_seed(rank)
        expected_after = torch.rand(3)
    assert_same(after, expected_after, bitwise=True)


@on_ranks(2)
def test_a_module_that_initialises_what_is_inside_has_it_unsharded():
    def build():
        return nn.Transformer(8, 2, 2, 2, 16, batch_first=True)

    plain = build()  # which copies its layers, instead of drawing for each
    torch.manual_seed(SEED)

    def reset(module):
        for child in module.children():
            reset(child)
        for name in ("reset_parameters", "_reset_parameters"):
            getattr(module, name, lambda: None)()

    reset(plain)
    check_materialised(build, plain)


@on_ranks(2)
def test_one_unit_is_unsharded_at_a_time_beside_the_root():
    model = meta(lambda: nn.Sequential(*[nn.Linear(6, 6, bias=False) for _ in range(5)]))
    fully_shard_units(model, units=lambda fqn, _: fqn in ("0", "1", "2", "3"))
    seen = []

    def reset(layer):
        nn.Linear.reset_parameters(layer)
        seen.append(sum(p.numel() for p in model.parameters() if not isinstance(p, DTensor)))

    for layer in model:
        layer.reset_parameters = functools.partial(reset, layer)
    materialize(model)
    assert seen == [72, 72, 72, 72, 36]  # "4" belongs to the root


@on_ranks(2)
def test_a_model_that_has_values_is_drawn_anew():
    tokens = torch.ones(1, 4, dtype=torch.int64)
    model = seeded(everything, seed=0)
    fully_shard_units(model)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(3)
    model.eval()(tokens)  # leaves a whole copy behind
    torch.manual_seed(SEED)
    materialize(model)
    model(tokens)
    assert_same(full_state(model), full_state(seeded(everything)), bitwise=True)


def three_layers():
    return nn.Sequential(*[nn.Linear(5, 5) for _ in range(3)])


@on_ranks(2)
def test_a_unit_of_several_modules_is_initialised_in_module_order():
    model = meta(three_layers)
    fully_shard([model[0], model[2]])
    fully_shard(model)
    torch.manual_seed(SEED)
    materialize(model)
    assert_same(full_state(model), full_state(seeded(three_layers)), bitwise=True)


@on_ranks(2)
def test_a_tied_parameter_has_what_its_last_owner_draws():
    def build():
        embedding, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        embedding.weight = head.weight
        blocks = [nn.Linear(4, 4) for _ in range(2)]
        return Made(None, embedding=embedding, blocks=blocks, head=head)

    plain = build()
    torch.manual_seed(SEED)
    for layer in (plain.embedding, *plain.blocks, plain.head):
        layer.reset_parameters()
    for units in ("auto", (nn.Linear, nn.Embedding)):
        check_materialised(build, plain, units=units)


@on_ranks(2)
def test_init_does_what_apply_does_on_one_process():
    """In the way of Hugging Face: it also writes to a child of what it is given."""

    def normal(module):
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(std=0.02)
        if hasattr(module, "attention"):
            for name, param in module.named_parameters():
                if name.endswith("out_proj.weight"):
                    param.data.normal_(std=0.001)

    model, plain = (seeded(everything, seed=0) for _ in range(2))
    fully_shard_units(model)
    torch.manual_seed(SEED)
    materialize(model, init=normal)
    torch.manual_seed(SEED)
    plain.apply(normal)
    assert_same(full_state(model), full_state(plain), bitwise=True)


def partly():
    """Return a layer beside a parameter that nothing resets."""
    return Made(None, drawn=nn.Linear(4, 4), gain=nn.Parameter(torch.full((4,), 2.0)))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@on_ranks(2)
def test_what_nothing_resets_keeps_its_values(device):
    model = partly()
    model.drawn.to(device)
    fully_shard(model)
    torch.manual_seed(SEED)
    materialize(model)
    assert_same(full_state(model), full_state(seeded(partly)), bitwise=True)


@on_ranks(2)
def test_a_module_may_run_while_it_is_initialised():  # as data-dependent schemes do
    model, x, seen = fully_shard(meta(lambda: nn.Linear(4, 4))), torch.ones(1, 4), []
    model.reset_parameters = lambda: seen.extend(
        [nn.Linear.reset_parameters(model), model(x).detach()]
    )
    materialize(model)
    assert_same(seen[1], model(x).detach(), bitwise=True)


@on_ranks(2)
def test_replicated_parameters_are_drawn_and_edited_as_they_are():
    model, plain = (seeded(three_layers, seed) for seed in (0, SEED))
    meshard.replicate(model)
    torch.manual_seed(SEED)
    materialize(model)
    with unsharded_params(model), torch.no_grad():
        model[0].weight.mul_(2), plain[0].weight.mul_(2)
    with pytest.raises(ValueError, match="is replicated: every rank has ordinary parameters"):
        unsharded_params(model, rank0_only=True).__enter__()
    assert_same(full_state(model), full_state(plain), bitwise=True)


def refused(model, error, match, **kwargs):
    with pytest.raises(error, match=match):
        materialize(model, **kwargs)


@on_ranks(2)
def test_a_model_that_has_values_on_some_ranks_is_refused_on_all():
    """The others would wait for them."""
    layer = nn.Linear(2, 2, device="meta" if dist.get_rank() else "cpu")
    with pytest.raises(ValueError, match=r"on the meta device \(by rank: \{0: 0, 1: 2\}\)"):
        materialize(fully_shard(layer))


@on_ranks(2)
def test_values_on_some_ranks_are_noticed_in_every_unit_of_equal_meshes():
    model = nn.Sequential(nn.Linear(2, 2, device="meta" if dist.get_rank() else "cpu"))
    model.append(nn.Linear(2, 2))
    for layer in model:
        fully_shard(layer, init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match=r"on the meta device \(by rank: \{0: 0, 1: 2\}\)"):
        materialize(model)


@on_ranks(2)
def test_what_would_not_be_initialised_is_named():
    model = meta(lambda: nn.Sequential(partly(), partly()))
    fully_shard(model)
    refused(model, ValueError, r"no reset_parameters: 0 \(Made: gain\); 1 \(Made: gain\)\.")
    assert all(param.is_meta for param in model.parameters())
    model = meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(4, 4)))
    model[1].reset_parameters = lambda: nn.init.zeros_(model[1].weight)
    fully_shard(model[1])
    fully_shard(model)
    refused(model, RuntimeError, r"1 parameters or buffers were .* first is '1\.bias'")
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    fully_shard(model)
    refused(model[0], ValueError, r"'0\.weight' is a DTensor of no unit inside")
    model = meta(lambda: nn.Sequential(nn.Linear(2, 2)))
    model[0].register_buffer("mask", torch.empty(2, dtype=torch.int32, device="meta"))
    fully_shard(model)
    refused(model, RuntimeError, r"first is '0\.mask'")
    materialize(meta(lambda: nn.Linear(2, 2)))  # not sharded at all
    model = fully_shard(nn.Linear(2, 2))
    with unsharded_params(model):
        refused(model, RuntimeError, "inside unsharded_params, so it cannot be materialized")
    model.reset_parameters = lambda: setattr(model, "weight", nn.Parameter(torch.ones(3)))
    refused(model, RuntimeError, r"'weight' .* was replaced inside materialize .* shape \(2, 2\)")
    assert model.weight.shape == (2, 2)
    model = three_layers()
    fully_shard_units(model)

    def write_to_shards(module):
        if module is model:
            nn.init.ones_(model[0].weight)

    text = r"init\(\(root\)\) wrote to parameters of a unit"
    refused(model, RuntimeError, text, init=write_to_shards)


def to_empty(model):
    model.to_empty(device="cpu")


def to_empty_by_part(model):
    for part in model:
        part.to_empty(device="cpu")


def copied(model):
    to_empty(model)
    return copy.deepcopy(model)


def assigned(model):
    to_empty(model)
    values = {name: torch.zeros_like(each) for name, each in model.state_dict().items()}
    model.load_state_dict(values, assign=True)


def stepped(model):
    for param in model[1].parameters():
        param.grad = torch.ones_like(param)
    torch.optim.SGD(model.parameters()).step()  # a warning is an error
    return ""


@pytest.mark.parametrize("told", [stepped, meshard.describe])
@pytest.mark.parametrize("shard", [fully_shard, meshard.replicate])
@pytest.mark.parametrize("change", [materialize, to_empty, to_empty_by_part, copied, assigned])
@on_fake_ranks(2)
def test_ignored_params_stay_ignored_when_others_take_their_place(change, shard, told):
    model = meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    if shard is fully_shard:
        shard(model[0])  # so that the root has no parameters
    else:
        model[0].to_empty(device="cpu")
    shard(model, ignored_params=set(model[1].parameters()))
    before = model[1].bias
    model = change(model) or model
    assert model[1].bias is not before
    assert "in no unit" not in told(model)


@on_fake_ranks(1)
def test_an_init_that_raises_leaves_no_uninitialised_memory():
    def fails(_):
        raise ZeroDivisionError

    layer = fully_shard(meta(lambda: nn.Linear(64, 64)))
    refused(layer, ZeroDivisionError, None, init=fails)
    assert all(bool(param.to_local().isnan().all()) for param in layer.parameters())


@on_fake_ranks(1)
def test_a_materialized_model_is_freed_without_the_garbage_collector():
    model = materialize(fully_shard(meta(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()))))
    gc.collect()
    gc.disable()
    try:
        materialize(model)
        ref = weakref.ref(model)
        del model
        assert ref() is None
    finally:
        gc.enable()
