"""Programs of the kind that torch tests its own fully_shard with.

Each program compares with the plain model on the whole batch; some also count the gathers of each
forward and backward.
"""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.distributed._composable import replicate
from torch.distributed.tensor import DTensor, Shard

from tests.peers.both import Both, batch, shard, situation
from tests.support.models import Made, MlpBlock
from tests.support.parity import assert_same

DIM = 6


def unshard_ahead(block):
    if hasattr(block, "unshard"):  # not that of the plain model
        block.unshard(async_op=True)


@situation(("right", [True, False]))
def units_inside_torchs_replicate(lib):
    """Each branch is unsharded while the layer before it computes.

    The parameters of torch's replicate are not in units, and those of units are not its.
    """

    def all_branches(branches, inputs):
        return sum(block(x) for block, x in zip(branches.blocks, inputs, strict=True))

    def forward(model, x):
        inputs = []
        for layer, block in zip(model.layers, model.branches.blocks, strict=True):
            inputs.append(torch.tanh(layer(x)))
            unshard_ahead(block)
        return model.branches(inputs)

    def shard_branches(model):
        shard(lib, *model.branches.blocks, reshard_after_forward=False)
        shard(lib, model.branches)
        replicate(model)

    branches = Made(all_branches, blocks=[MlpBlock(DIM, 10) for _ in range(3)])
    layers = [nn.Linear(DIM, DIM) for _ in range(3)]
    both = Both(lib, Made(forward, layers=layers, branches=branches), shard_branches)
    with warnings.catch_warnings():
        # We cannot see that torch's replicate reduces them.
        warnings.filterwarnings("ignore", ".* are in no unit")
        result = both.train()
    weights = both.model.branches.blocks[0].up.weight, both.model.layers[0].weight
    return result, [isinstance(each, DTensor) for each in weights]


@situation("RuntimeError")
def torchs_replicate_of_a_unit(lib):
    replicate(shard(lib, nn.Linear(DIM, DIM)))


@situation([*[[False, False]] * 2, [True, True]] * 2)
def two_modules_of_a_unit_unsharded_ahead(lib):
    """And whether both hold sharded weights: after both waits, and after one reshard."""

    def forward(model, x):
        for block in (model.one, model.other):
            unshard_ahead(block)
        return model.other(model.one(torch.tanh(model.inlet(x))))

    found = []
    for reshards in (False, True):

        def shard_as_one(model, reshards=reshards):
            shard(lib, [model.one, model.other], reshard_after_forward=reshards)
            shard(lib, model)

        members = {"inlet": nn.Linear(DIM, DIM), "one": MlpBlock(DIM, 9), "other": MlpBlock(DIM, 7)}
        both = Both(lib, Made(forward, **members), shard_as_one)
        blocks = [both.model.one, both.model.other]
        for handle in [block.unshard(async_op=True) for block in blocks]:
            handle.wait()
            found.append([isinstance(block.up.weight, DTensor) for block in blocks])
        blocks[0].reshard()
        found.append([isinstance(block.up.weight, DTensor) for block in blocks])
        both.train()
    return found


@situation([[4, 0], [4, 1], [4, 1], [4, 4]])
def units_resharded_by_hand(lib):
    """Gathers of each forward and backward: of four units, one or all are resharded between."""
    both, found = Both(lib, reshard_after_forward=False), []
    blocks = both.model.blocks
    for number, units in enumerate(([], [blocks[1]], [both.model], [*blocks, both.model])):
        found.append(both.backward(number, lambda units=units: [x.reshard() for x in units]))
        both.update()
    both.train()
    return found


@situation([[4, 3], [4, 2], [4, 3], [4, 0], [4, 2], [4, 4]])
def resharding_after_forward_toggled_for_some(lib):
    both, found = Both(lib), []
    model, blocks = both.model, both.model.blocks
    for number, settings in enumerate(
        [
            [],
            [(blocks[1], False)],
            [(model, True, False)],  # not recursively
            [(model, False)],
            [(blocks[0], True), (blocks[2], True)],
            [(model, True)],
        ]
    ):
        for unit, *setting in settings:
            unit.set_reshard_after_forward(*setting)
        found.append(both.backward(number))
        both.update()
    both.train()
    return found


@situation([*[[4, 3], [3, 3], [3, 3]] * 3, [4, 3], [1, 3], [1, 3]])
def resharding_after_backward_toggled_for_some(lib):
    """Windows of three microbatches, some units of which stay unsharded until the last."""
    both, found = Both(lib), []
    model, blocks = both.model, both.model.blocks
    for window, units in enumerate(([blocks[0]], [blocks[2]], [model], [*blocks])):
        for microbatch in range(3):
            is_last = microbatch == 2
            for unit in units:
                unit.set_reshard_after_backward(is_last, recurse=False)
            model.set_is_last_backward(is_last)
            model.set_requires_gradient_sync(is_last)
            found.append(both.backward(10 * window + microbatch))
        both.update()
    both.train()
    return found


@situation([*[[3, 2]] * 3, *[[3, 0]] * 3])
def a_module_of_a_unit_is_not_used(lib):
    found = []
    for reshards in (True, False):

        def shard_both(model, reshards=reshards):
            units = [[each.unused, each.layer] for each in model[:2]]
            shard(lib, *units, reshard_after_forward=reshards)
            shard(lib, model)

        def block():
            members = {"unused": nn.Linear(1, 1), "layer": nn.Linear(DIM, DIM)}
            return Made(lambda module, x: torch.tanh(module.layer(x)), **members)

        both = Both(lib, nn.Sequential(block(), block(), nn.Linear(DIM, DIM)), shard_both)
        for number in range(3):
            found.append(both.backward(number))
            both.update()
        both.train()
    return found


def jvp(model, x, tangent):
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(model(forward_ad.make_dual(x, tangent)))
        return dual.primal, dual.tangent


def differentiate_forward(lib, reshards):
    """Losses of outputs, of their derivatives and of both, with steps between."""
    both = Both(lib, reshard_after_forward=reshards)
    losses = [
        lambda model, *at: jvp(model, *at)[0].square().mean(),
        lambda model, *at: jvp(model, *at)[1].square().mean(),
        lambda model, *at: sum(each.square().mean() for each in jvp(model, *at)),
        lambda model, x, tangent: (model(x) - jvp(model, x, tangent)[1].detach()).square().mean(),
    ]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script`")  # torch's own, at its first use
        for number, loss in enumerate(losses):
            inputs, tangents = batch(number), batch(100 + number)
            mine = inputs[dist.get_rank()], tangents[dist.get_rank()]
            with torch.no_grad():
                for ours, theirs in zip(*(jvp(model, *mine) for model in both.pair), strict=True):
                    assert_same(ours, theirs)
            loss(both.model, *mine).backward()
            loss(both.plain, inputs.flatten(0, 1), tangents.flatten(0, 1)).backward()
            both.update()
    return both.train()


@situation("right")
def dual_numbers_through_kept_units(lib):
    return differentiate_forward(lib, reshards=False)


@situation("right")
def dual_numbers_through_resharded_units(lib):
    return differentiate_forward(lib, reshards=True)


def largest_dim(param):
    return Shard(max(range(param.dim()), key=lambda dim: param.shape[dim]))


def widths(lib, first, second):
    def shard_layers(model):
        shard(lib, *model[::2], model, shard_placement_fn=largest_dim)

    plain = nn.Sequential(nn.Linear(DIM, first), nn.Tanh(), nn.Linear(first, second))
    return Both(lib, plain, shard_layers)


@situation("right")
def even_shards_of_the_largest_dim(lib):
    return widths(lib, 10, 4).train()
