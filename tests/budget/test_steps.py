"""What one step gathers and reduces, and in which order."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import meshard
from meshard import CommLedger, GradientSync
from tests.engine.test_activation_checkpointing import in_pairs
from tests.engine.test_hoisted_params import BOTH
from tests.engine.test_hoisted_params import sharded as hoisted
from tests.engine.test_kept_weights import decoder, loss_in_chunks
from tests.engine.test_kept_weights import shard as shard_decoder
from tests.engine.test_outputs import WRAPS, blocks_through
from tests.engine.test_skipped_backwards import layer
from tests.mesh.expert_meshes import batch_of, build, shard
from tests.params.test_subclass_params_tools import one_backward, sharded
from tests.support.against_plain import check_gradients, inputs_of, sharded_and_plain
from tests.support.extensions import Int8OnWire
from tests.support.integer_model import integer_batch, integer_loss
from tests.support.models import ChosenBlocks, Made, MlpBlock, MlpStack, seeded
from tests.support.parity import assert_same
from tests.support.ranks import on_ranks, on_threads
from tests.support.sharding import padded, shard_blocks


@on_threads(2)
def test_a_prefetched_unit_that_the_user_unshards_stays_unsharded():
    """The forward that has prefetched it does not run it, and would drop the gather."""
    model = shard_blocks(seeded(ChosenBlocks()))
    model(inputs_of(0))
    handles = []

    def unshard_the_last(*_):
        handles.append(model.blocks[2].unshard(async_op=True))

    removable = model.blocks[1].register_forward_hook(unshard_the_last)
    with CommLedger(model) as ledger:
        model(inputs_of(0), (0, 1))
        handles[0].wait()
    removable.remove()
    assert ledger.counts == {"all_gather": 3}
    assert not isinstance(model.blocks[2].up.weight, DTensor)
    model.blocks[2].reshard()
    assert all(isinstance(param, DTensor) for param in model.parameters())


@pytest.mark.parametrize("keeps", [False, True])
@on_threads(2)
def test_a_unit_that_passes_an_earlier_tensor_on_runs_one_backward(keeps):
    """The gradient of the first tensor comes last, when the backwards of the units are over."""

    def forward(m, x):
        first = m.own(x)
        state = {"x": m.before(first), "first": first}
        for block in m.blocks:
            state = block(state)
        return state["x"]

    def block(m, state):
        changed = {"x": m.linear(state["x"]) + state["first"]}
        return {**state, **changed} if keeps else {**changed, "first": state["first"] * 1}

    layers = [nn.Linear(6, 6) for _ in range(4)]
    blocks = nn.ModuleList(Made(block, linear=layer) for layer in layers[2:])
    plain = Made(forward, own=layers[0], before=layers[1], blocks=blocks)
    ledger = check_gradients(*sharded_and_plain(plain, ("before", "blocks")))
    reduced = [event.unit for event in ledger.events if event.op == "reduce_scatter"]
    assert len(reduced) == len(set(reduced)) == 4, reduced


@on_threads(2)
def test_a_unit_used_twice_is_reduced_once():
    plain = Made(
        lambda m, x: m.block(m.between(m.block(x))),
        block=MlpBlock(6, 7),
        between=nn.Linear(6, 6),
    )
    ledger = check_gradients(*sharded_and_plain(plain, ("block", "between")), times=3)
    assert ledger.counts["reduce_scatter"] == 2


@on_threads(2)
def test_a_unit_of_several_modules_is_gathered_once_for_each_time_that_they_run():
    def forward(model, x, times):
        for _ in range(times):
            x = model.second(model.first(x))
        return x

    plain = seeded(Made(forward, first=nn.Linear(3, 3), second=nn.Linear(3, 3)))
    model, x = copy.deepcopy(plain), torch.ones(1, 3)
    meshard.fully_shard([model.first, model.second])
    meshard.fully_shard(model)
    for times in (1, 2, 3):
        with meshard.CommLedger(model) as ledger, torch.no_grad():
            model(x, times)
        assert [event.op for event in ledger.events] == ["all_gather"] * times
        check_gradients(model, plain, lambda model, rank, times=times: model(x, times).sum())


@pytest.mark.parametrize("overlapped", [False, True])
@on_threads(2)
def test_a_unit_whose_view_of_its_input_is_not_used(overlapped):
    """No output of the second layer, one of which is a view of its input, reaches the loss."""
    second = Made(lambda m, x: (m.linear(x), x[:, 0]), linear=layer())
    plain = Made(lambda m, x: (x := m.first(x), m.second(x))[0], first=layer(), second=second)
    model, _ = sharded_and_plain(plain, ("first", "second"))
    if overlapped:
        meshard.overlap_optimizer(model, torch.optim.SGD, lr=0.1)
    for _ in range(2):
        with meshard.CommLedger(model) as ledger:
            model(torch.ones(2, 4)).square().sum().backward()
    reduced = [event.unit for event in ledger.events if event.op == "reduce_scatter"]
    assert sorted(reduced) == ["first", "second"]


@on_threads(2)
def test_a_view_of_an_input_does_not_make_its_unit_part_of_what_follows_the_input():
    def forward(model, x):
        x = model.first(x)
        model.second(x)
        return x

    second = Made(lambda m, x: (x.view(-1), m.inner(x)), inner=nn.Linear(6, 6))
    model, plain = sharded_and_plain(
        Made(forward, first=nn.Linear(6, 6), second=second), ("first", "second")
    )
    with meshard.CommLedger(model) as ledger:
        x = inputs_of(0).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x)
    assert_same(gradient, torch.ones(3, 6) @ plain.first.weight)
    assert [event.unit for event in ledger.events] == ["first", "second", "first"]


@on_ranks(4, timeout=200)
def test_every_mesh_has_a_unit_and_the_inner_one_is_reduced_first():
    model = shard(build(), "flat")
    dense, expert = model.blocks[0].dense.weight, model.blocks[0].expert.weight
    assert (dense.placements, dense.device_mesh) == ((Shard(0),), model.scale.device_mesh)
    assert (expert.placements, expert.device_mesh.mesh_dim_names) == ((Shard(1),), ("edp",))
    units = [
        label for name in ("(root)", "blocks.0", "blocks.1") for label in (name, f"{name} on edp=2")
    ]
    events = []
    for _ in range(2):
        with CommLedger(model) as ledger:
            model(batch_of(0)).sum().backward()
        events.append(
            {
                op: [event for event in ledger.events if event.op == op]
                for op in ("all_gather", "reduce_scatter")
            }
        )
    for event in events[0]["all_gather"]:
        assert event.group_size == (2 if "edp" in event.unit else 4), event.unit
    assert [event.unit for event in events[0]["reduce_scatter"]] == units[::-1]
    assert [line.split("  ")[0] for line in meshard.describe(model).splitlines()[1:7]] == units
    # The root, both of it, stays unsharded for backward; the second time, the order is known.
    gathered = [[event.unit for event in each["all_gather"]] for each in events]
    assert sorted(gathered[0]) == sorted([*units, *units[2:]])
    assert gathered[1] == [*units, *units[4:], *units[2:4]]


@on_threads(2)
def test_a_unit_with_a_custom_gather_sends_no_more_often():
    rows, columns = 7, 5  # of each of two ranks, with one row of padding
    model = sharded(Int8OnWire)
    one_backward(model)
    model.zero_grad()
    with meshard.CommLedger(model) as ledger:
        one_backward(model)
    # Gathered in forward and in backward, and reduced: the weight together with the bias.
    events = [
        (event.op, event.payload_bytes)
        for event in ledger.events
        if event.unit.startswith("blocks.1")
    ]
    assert sorted(events) == [
        ("all_gather", 2 * padded(rows * (4 + columns + 4), 16)),  # a byte each, and a scale
        ("all_gather", 2 * padded(rows * (4 + columns + 4), 16)),
        ("reduce_scatter", 2 * padded(rows * (1 + columns) + 2, 8) * 4),
    ]


@pytest.mark.parametrize(
    ("use_reentrant", "early_stop"), [(True, True), (False, True), (False, False)]
)
@on_threads(2)
def test_a_checkpoint_around_several_units_gathers_them_once_more(use_reentrant, early_stop):
    with set_checkpoint_early_stop(early_stop):
        ledger = check_gradients(*sharded_and_plain(in_pairs(use_reentrant)), times=3)
    assert ledger.counts == {"all_gather": 9, "reduce_scatter": 5}


@on_threads(2)
def test_a_unit_that_begins_with_the_recomputed_node_is_gathered_once_in_backward():
    """The first node of the last unit recomputes all three, whose first is still to be gathered."""

    def forward(model, x):
        return checkpoint(nn.Sequential(*model.blocks), x, use_reentrant=False)

    blocks = [Made(lambda m, x: x * m.scale, scale=nn.Parameter(torch.empty(6))) for _ in range(3)]
    ledger = check_gradients(*sharded_and_plain(Made(forward, blocks=blocks)))
    assert ledger.counts == {"all_gather": 6, "reduce_scatter": 3}


# Each backward gathers and reduces; what a forward kept stays until the graph is not kept any more.
@pytest.mark.parametrize(("reshard", "gathers"), [(None, 13), (False, 4)])
@on_threads(2)
def test_each_backward_over_one_graph_gathers_and_reduces(reshard, gathers):
    def step(model, rank):
        out = model(inputs_of(rank))
        out.square().mean().backward(retain_graph=True)
        (out * 0.25).sum().div(out.numel()).backward(retain_graph=True)
        return out.square().mean()

    pair = sharded_and_plain(MlpStack(), reshard_after_forward=reshard)
    ledger = check_gradients(*pair, step)
    assert ledger.counts == {"all_gather": gathers, "reduce_scatter": 12}


@pytest.mark.parametrize("first", list(GradientSync))
@on_threads(4)
def test_hoisted_parameters_add_no_collective(first):
    model = hoisted((2, 2), BOTH)
    for number, sync in enumerate([first, GradientSync.FULL]):
        model.set_gradient_sync(sync)
        with meshard.CommLedger(model) as ledger:
            integer_loss(model(integer_batch(number, dist.get_rank()))).backward()
    units = sorted({event.unit for event in ledger.events})
    assert units[0] == "(root)" and "trunks.0" in units and len(units) == 10
    assert ledger.counts == {"all_gather": 19, "reduce_scatter": 10, "all_reduce": 10}


@pytest.mark.parametrize("tail", [True, False])
@on_threads(2)
def test_a_loss_that_runs_the_head_again_in_chunks_reduces_it_with_them(tail):
    plain = decoder()
    ledger = check_gradients(shard_decoder(plain, tail=tail), plain, loss_in_chunks)
    # The tail is reduced by the chunks, and with the trunk; each other unit once.
    assert ledger.counts["reduce_scatter"] == 5


@on_threads(2)
def test_chunks_of_a_last_microbatch_are_reduced_before_the_trunk():
    """The backward of the trunk, which comes last, reduces it together with the new gradients."""

    def window(module, rank):
        numbers = range(2)
        if module is model:
            numbers = meshard.microbatches(model, numbers, until_last=GradientSync.NONE)
        for _ in numbers:
            loss_in_chunks(module, rank)

    plain = decoder()
    model = shard_decoder(plain, tail=True)
    ledger = check_gradients(model, plain, window)
    reduced = [event.unit for event in ledger.events if event.op == "reduce_scatter"]
    assert reduced == ["norm"] * 4 + ["blocks.1", "blocks.0", "(root)"]


@pytest.mark.parametrize("form", WRAPS)
@on_threads(2)
def test_units_that_return_any_container_are_gathered_and_reduced_once_a_pass(form):
    ledger = check_gradients(*sharded_and_plain(blocks_through(*WRAPS[form])))
    assert ledger.counts == {"all_gather": 7, "reduce_scatter": 4}
