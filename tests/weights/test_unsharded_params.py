"""``unsharded_params``: unsharded weights to read and edit, of which nothing is left behind."""

import copy
import gc
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import meshard
from meshard import MixedPrecisionPolicy, unsharded_params
from tests.support.live_memory import live_tensor_bytes, settled_tensor_bytes
from tests.support.models import Made, seeded
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.ranks import on_fake_ranks, on_ranks, on_threads
from tests.support.sharding import edit, sharded_case
from tests.support.spread import spread


def flags(module):
    return {name: param.requires_grad for name, param in module.named_parameters()}


@spread(
    name=["mlp_stack", "transformer_tied", "uneven", "frozen_beside", "mixed_dtype"],
    rank0_only=[False, True],
    mesh_shape=[(4,), (2, 2)],
    offload_to_cpu=[False, False, True],
)
@on_threads(4)
def test_edits_reach_shards_replicas_forwards_and_optimizers(
    name, rank0_only, mesh_shape, offload_to_cpu
):
    case, model, plain = sharded_case(name, mesh_shape)
    batch, dtype, rank = case.batch(0, 0), case.dtype, dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model(batch)
    ids = [id(param) for param in model.parameters()]
    here = rank == 0 or not rank0_only
    with unsharded_params(model, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu):
        if here:
            assert not any(isinstance(param, DTensor) for param in model.parameters())
            assert_same(full_state(model), full_state(plain), bitwise=True)
            assert flags(model) == flags(plain)
            edit(model)
            state = model.state_dict()
        else:
            assert all(isinstance(param, DTensor) for param in model.parameters())
    edit(plain)
    assert [id(param) for param in model.parameters()] == ids
    assert_same(full_state(model), full_state(plain), bitwise=True)  # in each replica
    if here:
        assert_same(dict(state), dict(plain.state_dict()), bitwise=True)
    assert_same(model(batch), plain(batch), dtype)
    case.loss(model(case.batch(0, rank))).backward()
    case.loss(plain(case.whole_batch(0, 4))).backward()
    assert_same(full_grads(model), full_grads(plain), dtype)
    optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_same(full_state(model), full_state(plain), dtype)


@on_ranks(2)
def test_masters_are_not_rounded_to_the_compute_dtype():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    placement = {"shard_placement_fn": lambda p: Shard(p.dim() - 1), "mp_policy": policy}
    table = nn.Parameter(torch.arange(6).view(2, 3), requires_grad=False)
    forward = lambda m, x: m.wide(x) + m.table[0].to(x.dtype)  # noqa: E731
    plain = seeded(Made(forward, wide=nn.Linear(5, 3), table=table))
    model = meshard.fully_shard(copy.deepcopy(plain), **placement)
    with unsharded_params(model):
        assert [p.dtype for p in model.parameters()] == [p.dtype for p in plain.parameters()]
        assert_same(full_state(model), full_state(plain), bitwise=True)
        assert model(torch.ones(1, 5)).dtype == torch.float32  # no casts: a plain module
        with torch.no_grad():
            model.wide.bias.add_(2.0**-20)
    with torch.no_grad():
        plain.wide.bias.add_(2.0**-20)
    assert_same(full_state(model), full_state(plain), bitwise=True)
    assert model(torch.ones(1, 5)).dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize(("rank0_only", "fails"), [(False, True), (True, False)])
@on_ranks(2)
def test_not_a_byte_is_left_behind(rank0_only, fails):
    case, model, plain = sharded_case("transformer_tied", reshard_after_forward=True)
    case.loss(model(case.batch(0, 0))).backward()
    model.zero_grad()
    edit_outside, first = copy.deepcopy(plain), dist.get_rank() == 0
    for turn in range(2):  # what is made once is made in the first
        before = settled_tensor_bytes()
        try:
            with unsharded_params(model, rank0_only=rank0_only):
                inside = settled_tensor_bytes() - before
                if first or not rank0_only:
                    edit(model)
                if fails and turn:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        else:
            edit(edit_outside)
        after = settled_tensor_bytes()
        assert turn == 0 or after == before
    whole = sum(param.nbytes for param in plain.parameters())
    assert inside == (whole if first or not rank0_only else 0)
    assert_same(full_state(model), full_state(edit_outside), bitwise=True)


@on_ranks(2)
def test_no_cycle_keeps_unsharded_parameters():
    case, model, _ = sharded_case("mlp_stack")

    def train_inside():
        with unsharded_params(model):
            case.loss(model(case.batch(0, 0))).backward()
            edit(model)
        assert all(param.grad is not None for param in model.parameters())
        model.zero_grad()
        with torch.no_grad():
            model(case.batch(0, 0))

    train_inside()  # whatever is made once is made now
    before = settled_tensor_bytes()
    gc.disable()
    try:
        train_inside()
        dist.barrier()
        time.sleep(0.2)  # for gloo's threads to let go of works that are over
        assert live_tensor_bytes() == before
    finally:
        gc.enable()


@on_ranks(2)
def test_parameters_may_be_replaced_and_frozen_inside():
    case, model, plain = sharded_case("transformer_tied")
    ids = [id(param) for param in model.parameters()]
    for module in (model, plain):
        with unsharded_params(model) if module is model else torch.no_grad():
            new = nn.Parameter(torch.full((11, 8), 0.25))
            module.embedding.weight = module.head.weight = new
            module.norm.weight = nn.Parameter(torch.ones(8).double(), requires_grad=False)
            module.norm.bias.data = torch.arange(8.0)
            module.blocks[0].attention.out.weight.requires_grad_(False)
            state = {name: v * 2 for name, v in module.blocks[1].state_dict().items()}
            module.blocks[1].load_state_dict(state, assign=True)
            torch.manual_seed(1)
            module.blocks[0].mlp[0].reset_parameters()
    assert [id(param) for param in model.parameters()] == ids
    expected = {name: value.float() for name, value in full_state(plain).items()}
    assert_same(full_state(model), expected, bitwise=True)
    assert flags(model) == flags(plain)
    plain.float()
    case.loss(model(case.batch(0, dist.get_rank()))).backward()
    case.loss(plain(case.whole_batch(0, 2))).backward()
    assert_same(full_grads(model), full_grads(plain))


@on_ranks(2)
def test_what_cannot_be_written_back_is_named_and_nothing_is_written():
    _, model, _ = sharded_case("transformer_tied")
    before = full_state(model)

    def put(module, name, value):
        return lambda: setattr(module, name, nn.Parameter(value()))

    norm, head, sharded = model.norm, model.head, model.norm.bias
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for spoil, text in [
        (put(norm, "weight", lambda: torch.ones(3)),
         r"'norm\.weight' of unit '\(root\)' was replaced .* shape \(3,\)"),
        (put(head, "weight", lambda: torch.ones(11, 8)),
         r"'embedding\.weight' of unit '\(root\)' .* by a Parameter .* and a Parameter"),
        (lambda: delattr(norm, "bias"),
         r"'norm\.bias' of unit '\(root\)' was replaced .* by nothing"),
        (put(norm, "bias", lambda: sharded), r"replaced inside unsharded_params by a DTensor"),
        (optimizer.step, r"shards of unit '.*' were edited inside unsharded_params"),
    ]:  # fmt: skip
        sharded.grad = sharded.detach().clone()

        def edit_and_spoil(spoil=spoil):
            with unsharded_params(model):
                with torch.no_grad():
                    model.blocks[0].mlp[0].weight.add_(1)
                spoil()

        with pytest.raises(RuntimeError, match=text):
            edit_and_spoil()
        sharded.grad = None
        assert_same(full_state(model), before, bitwise=True)
        with torch.no_grad():
            model(torch.zeros(1, 2, dtype=torch.long))


@pytest.mark.parametrize("is_assigned", [False, True])
@on_ranks(2)
def test_an_optimizer_that_was_built_inside_is_refused_outside(is_assigned):
    case, model, _ = sharded_case("mlp_stack")
    with unsharded_params(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()  # inside it trains what the modules hold
        for module in model.modules() if is_assigned else ():
            for name, param in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(param.detach().clone()))
    case.loss(model(case.batch(0, 0))).backward()
    with pytest.raises(RuntimeError, match=r"never train .* inside unsharded_params"):
        optimizer.step()


@on_threads(2)
def test_what_was_kept_from_inside_may_be_assigned_later():
    """It has memory of its own, unlike the unsharded parameter of a forward."""
    model, plain = meshard.fully_shard(seeded(nn.Linear(2, 2))), nn.Linear(2, 2)
    with unsharded_params(model):
        kept = model.weight
    plain.weight = kept
    with torch.no_grad():
        kept.fill_(3.0)
    with unsharded_params(model):
        model.weight = kept
    assert model.weight.full_tensor().tolist() == [[3.0, 3.0], [3.0, 3.0]]


@on_ranks(1)
def test_what_is_replaced_inside_is_freed_at_once():
    """Otherwise a model whose parameters are replaced one by one would be there twice."""
    model = meshard.fully_shard(nn.Linear(8, 8))
    with unsharded_params(model):
        before = settled_tensor_bytes()
        model.weight = nn.Parameter(model.weight.detach().clone())
        assert settled_tensor_bytes() == before


@pytest.mark.parametrize("swaps", [False, True])
@on_threads(1)
def test_weights_are_loaded_inside(swaps):
    model = meshard.fully_shard(nn.Linear(2, 2))
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    try:
        with unsharded_params(model):
            model.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.ones(2)})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert model.weight.full_tensor().tolist() == [[1.0, 1.0], [1.0, 1.0]]


@on_ranks(2)
def test_a_module_that_is_replaced_inside_is_named():
    _, model, _ = sharded_case("transformer_tied")
    text = r"the module of parameter 'mlp\.0\.weight' of unit 'blocks\.0' was replaced inside"
    with pytest.raises(RuntimeError, match=text), unsharded_params(model):
        model.blocks[0].mlp = nn.Identity()


@on_ranks(2)
def test_a_tie_that_is_made_inside_is_refused():
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    meshard.fully_shard(model[0])
    meshard.fully_shard(model)
    before = full_state(model)
    text = r"'1\.weight' was tied to '0\.weight' inside|'0\.weight' was tied to '1\.weight' inside"
    with pytest.raises(RuntimeError, match=text), unsharded_params(model):
        model[1].weight = model[0].weight
    assert_same(full_state(model), before, bitwise=True)
    model[1].weight = model[0].weight  # outside, where both have the same shard from now on
    with unsharded_params(model, rank0_only=True):
        pass


@on_fake_ranks(1)
def test_a_tie_between_nested_blocks_is_refused():
    model = nn.Sequential(*(meshard.fully_shard(nn.Linear(4, 4)) for _ in range(2)))
    meshard.fully_shard(model)
    text = r"'1\.weight' was tied to '0\.weight' inside"
    for inner in (model, model[1]):
        raises = pytest.raises(RuntimeError, match=text)
        with unsharded_params(model[0]), raises, unsharded_params(inner):
            model[1].weight = model[0].weight


@on_threads(2)
def test_a_block_without_edits_leaves_graphs_of_replicated_modules_valid():
    model, x = meshard.replicate(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))), torch.ones(2, 4)
    loss = model(x).sum()
    with unsharded_params(model, writeback=False):
        inside = model(x).sum()
    (loss + inside).backward()
    assert all(param.grad is not None for param in model.parameters())


@on_threads(2)
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_replicated_parameters_are_restored(param_dtype):
    policy = MixedPrecisionPolicy(param_dtype=param_dtype)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    meshard.fully_shard(model[0], mp_policy=policy)
    meshard.replicate(model[1], mp_policy=policy)
    held, before, x = list(model[1].parameters()), full_state(model), torch.ones(2, 4)
    with torch.no_grad():
        output = model(x)

    def edit_and_run(*, fails=False):
        edit(model)
        model[1].bias = nn.Parameter(torch.ones(4))
        assert not torch.equal(model(x), output)
        if fails:
            raise ZeroDivisionError

    with unsharded_params(model, writeback=False):
        edit_and_run()
    assert_same(full_state(model), before, bitwise=True)
    fails = dist.get_rank() == 1
    error, text = (ZeroDivisionError, None) if fails else (RuntimeError, "another rank raised")
    with pytest.raises(error, match=text), unsharded_params(model):
        edit_and_run(fails=fails)
    assert_same(full_state(model), before, bitwise=True)
    assert model[1].weight is held[0]
    assert torch.equal(model(x), output)
    with unsharded_params(model):
        edit_and_run()
    assert not torch.equal(model(x), output)


@spread(rank0_only=[False, True], error=[ZeroDivisionError, KeyboardInterrupt])
@on_ranks(4)
def test_what_one_rank_raises_writes_nothing_on_any(rank0_only, error):
    """Also where the user catches an interrupt: ranks issue the same collectives afterwards."""
    for mesh_shape, failing in (((4,), 1), ((2, 2), 0)):
        _, model, _ = sharded_case("mlp_stack", mesh_shape)
        before = full_state(model)
        mine = dist.get_rank() == failing

        def edit_or_fail(model=model, mine=mine):
            with unsharded_params(model, rank0_only=rank0_only):
                if not rank0_only or dist.get_rank() == 0:
                    edit(model)
                if mine:
                    raise error

        text = None if mine else "another rank raised inside unsharded_params"
        with pytest.raises(error if mine else RuntimeError, match=text):
            edit_or_fail()
        assert_same(full_state(model), before, bitwise=True)
