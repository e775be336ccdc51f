"""Programs of the kind that torch tests its own fully_shard with.

Each runs with both libraries: see ``tests.peers.both``. Each program compares with the plain
model on the whole batch; some also count the gathers of each forward and backward.
"""

import contextlib
import copy
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.distributed._composable import replicate
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import implicit_replication
from torch.testing._internal.two_tensor import TwoTensor

import meshard
from tests.peers.both import CountOps, mesh_of
from tests.support.extensions import Int8ForThePeer, with_matrices_as
from tests.support.models import MlpBlock, MlpStack, seeded
from tests.support.parity import assert_same, full_state, whole

DIM = 6


def batch(number):
    """Return the inputs of all ranks."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(dist.get_world_size(), 3, DIM, generator=generator)


def of_all_ranks(run, *batches):
    """Return the mean of what ``run`` gives for the batch of each rank."""
    return sum(run(*each) for each in zip(*batches, strict=True)) / dist.get_world_size()


class Pair:
    """A model beside the plain one, and what the optimizers of both hold.

    Sharded parameters are remembered: the peer does not show them while a unit is unsharded.
    """

    def __init__(self, plain, shard):
        self.plain, self.model = seeded(plain), copy.deepcopy(plain)
        self.model.load_state_dict(self.plain.state_dict())
        shard(self.model)
        self.params = dict(self.model.named_parameters())
        self.optimizers = [
            torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.model, self.plain)
        ]

    def backward(self, number):
        inputs = batch(number)
        self.model(inputs[dist.get_rank()]).square().mean().backward()
        of_all_ranks(lambda x: self.plain(x).square().mean(), inputs).backward()

    def update(self):
        """Compare gradients, and step both."""
        for name, param in self.plain.named_parameters():
            ours = self.params[name].grad
            assert_same(None if ours is None else whole(ours), param.grad, what=name)
        for optimizer in self.optimizers:
            with implicit_replication():
                optimizer.step()
            optimizer.zero_grad()

    def train(self, numbers=range(3)):
        for number in numbers:
            self.backward(number)
            self.update()
        ours = {name: whole(param) for name, param in self.params.items()}
        assert_same(ours, dict(full_state(self.plain)))
        return "right"


@contextlib.contextmanager
def counting_gathers(lib, model, into):
    """Append to ``into`` how many gathers the block makes, with either library."""
    if lib is meshard:
        with meshard.CommLedger(model) as ledger:
            yield
        into.append(ledger.counts.get("all_gather", 0))
    else:
        with CountOps("allgather") as ops:
            yield
        into.append(ops.count)


def gathers(lib, pair, number, between=lambda: None):
    """Return how many gathers a forward and its backward make."""
    inputs, found = batch(number), []
    with counting_gathers(lib, pair.model, found):
        loss = pair.model(inputs[dist.get_rank()]).square().mean()
    between()
    with counting_gathers(lib, pair.model, found):
        loss.backward()
    of_all_ranks(lambda x: pair.plain(x).square().mean(), inputs).backward()
    return found


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(MlpBlock(DIM, 10) for _ in range(3))

    def forward(self, inputs):
        return sum(block(x) for block, x in zip(self.blocks, inputs, strict=True))


class UnshardsAhead(nn.Module):
    """Unshards each branch while the layer before it computes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.branches = Branches()

    def forward(self, x):
        inputs = []
        for layer, block in zip(self.layers, self.branches.blocks, strict=True):
            inputs.append(torch.tanh(layer(x)))
            if hasattr(block, "unshard"):
                block.unshard(async_op=True)
        return self.branches(inputs)


def units_inside_torchs_replicate(lib):
    """Its parameters are not in units, and those of units are not its."""

    def shard(model):
        for block in model.branches.blocks:
            lib.fully_shard(block, mesh=mesh_of(), reshard_after_forward=False)
        replicate(lib.fully_shard(model.branches, mesh=mesh_of()) and model)

    pair = Pair(UnshardsAhead(), shard)
    with warnings.catch_warnings():
        # We cannot see that torch's replicate reduces them.
        warnings.filterwarnings("ignore", ".* are in no unit")
        result = pair.train()
    weights = pair.model.branches.blocks[0].up.weight, pair.model.layers[0].weight
    return result, [isinstance(each, DTensor) for each in weights]


def torchs_replicate_of_a_unit(lib):
    replicate(lib.fully_shard(nn.Linear(DIM, DIM), mesh=mesh_of()))


class SharesUnit(nn.Module):
    """Unshards two blocks of one unit at once."""

    def __init__(self):
        super().__init__()
        self.inlet, self.one, self.other = nn.Linear(DIM, DIM), MlpBlock(DIM, 9), MlpBlock(DIM, 7)

    def forward(self, x):
        for block in (self.one, self.other):
            if hasattr(block, "unshard"):
                block.unshard(async_op=True)
        return self.other(self.one(torch.tanh(self.inlet(x))))


def two_modules_of_a_unit_unsharded_ahead(lib):
    """And whether both hold unsharded weights: after both waits, and after one reshard."""
    found = []
    for keeps in (True, False):

        def shard(model, keeps=keeps):
            pair = [model.one, model.other]
            lib.fully_shard(pair, mesh=mesh_of(), reshard_after_forward=not keeps)
            lib.fully_shard(model, mesh=mesh_of())

        pair = Pair(SharesUnit(), shard)
        blocks = [pair.model.one, pair.model.other]
        for handle in [block.unshard(async_op=True) for block in blocks]:
            handle.wait()
            found.append([isinstance(block.up.weight, DTensor) for block in blocks])
        blocks[0].reshard()
        found.append([isinstance(block.up.weight, DTensor) for block in blocks])
        pair.train()
    return found


def stack(lib, **kwargs):
    def shard(model):
        for unit in (*model.blocks, model):
            lib.fully_shard(unit, mesh=mesh_of(), **kwargs)

    return Pair(MlpStack(), shard)


def units_resharded_by_hand(lib):
    """Gathers of each forward and backward: of four units, one or all are resharded between."""
    pair, found = stack(lib, reshard_after_forward=False), []
    blocks = pair.model.blocks
    for number, units in enumerate(([], [blocks[1]], [pair.model], [*blocks, pair.model])):
        found.append(gathers(lib, pair, number, lambda units=units: [x.reshard() for x in units]))
        pair.update()
    pair.train()
    return found


def resharding_after_forward_toggled_for_some(lib):
    pair, found = stack(lib), []
    model = pair.model

    def step(number):
        found.append(gathers(lib, pair, number))
        pair.update()

    step(0)
    model.blocks[1].set_reshard_after_forward(False)
    step(1)
    model.set_reshard_after_forward(True, recurse=False)
    step(2)
    model.set_reshard_after_forward(False)
    step(3)
    model.blocks[0].set_reshard_after_forward(True)
    model.blocks[2].set_reshard_after_forward(True)
    step(4)
    model.set_reshard_after_forward(True)
    step(5)
    pair.train()
    return found


def resharding_after_backward_toggled_for_some(lib):
    """Windows of three microbatches, some units of which stay unsharded until the last."""
    pair, found = stack(lib), []
    model = pair.model
    for window, units in enumerate(
        ([model.blocks[0]], [model.blocks[2]], [model], [*model.blocks])
    ):
        for microbatch in range(3):
            is_last = microbatch == 2
            for unit in units:
                unit.set_reshard_after_backward(is_last, recurse=False)
            model.set_is_last_backward(is_last)
            model.set_requires_gradient_sync(is_last)
            found.append(gathers(lib, pair, 10 * window + microbatch))
        pair.update()
    pair.train()
    return found


class HasUnused(nn.Module):
    def __init__(self):
        super().__init__()
        self.unused, self.layer = nn.Linear(1, 1), nn.Linear(DIM, DIM)

    def forward(self, x):
        return torch.tanh(self.layer(x))


def a_module_of_a_unit_is_not_used(lib):
    found = []
    for reshards in (True, False):

        def shard(model, reshards=reshards):
            for each in model[:2]:
                modules = [each.unused, each.layer]
                lib.fully_shard(modules, mesh=mesh_of(), reshard_after_forward=reshards)
            lib.fully_shard(model, mesh=mesh_of())

        pair = Pair(nn.Sequential(HasUnused(), HasUnused(), nn.Linear(DIM, DIM)), shard)
        for number in range(3):
            found.append(gathers(lib, pair, number))
            pair.update()
        pair.train()
    return found


def jvp_by_transform(model, x, tangent):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script`")  # torch's own, at its first use
        return torch.func.jvp(model, (x,), (tangent,))


def jvp_by_dual_numbers(model, x, tangent):
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.filterwarnings("ignore", "`torch.jit.script`")  # torch's own, at its first use
        dual = forward_ad.unpack_dual(model(forward_ad.make_dual(x, tangent)))
        return dual.primal, dual.tangent


def differentiate_forward(lib, jvp, reshards):
    """Losses of outputs, of their derivatives and of both, with steps between."""
    pair = stack(lib, reshard_after_forward=reshards)
    losses = [
        lambda model, *at: jvp(model, *at)[0].square().mean(),
        lambda model, *at: jvp(model, *at)[1].square().mean(),
        lambda model, *at: sum(each.square().mean() for each in jvp(model, *at)),
        lambda model, x, tangent: (model(x) - jvp(model, x, tangent)[1].detach()).square().mean(),
    ]
    for number, loss in enumerate(losses):
        inputs, tangents = batch(number), batch(100 + number)
        rank = dist.get_rank()
        with torch.no_grad():
            ours = jvp(pair.model, inputs[rank], tangents[rank])
            theirs = jvp(pair.plain, inputs[rank], tangents[rank])
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
        loss(pair.model, inputs[rank], tangents[rank]).backward()
        of_all_ranks(lambda *at: loss(pair.plain, *at), inputs, tangents).backward()  # noqa: B023
        pair.update()
    return pair.train()


def forward_derivatives_of_kept_units(lib):
    return differentiate_forward(lib, jvp_by_transform, reshards=False)


def forward_derivatives_of_resharded_units(lib):
    return differentiate_forward(lib, jvp_by_transform, reshards=True)


def dual_numbers_through_kept_units(lib):
    return differentiate_forward(lib, jvp_by_dual_numbers, reshards=False)


def dual_numbers_through_resharded_units(lib):
    return differentiate_forward(lib, jvp_by_dual_numbers, reshards=True)


seen_by_subclass = []


class RecordsMesh(Int8ForThePeer):
    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        seen_by_subclass.append(mesh)
        return super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)


def about(seen, mesh):
    """Return what is known of the mesh that was seen last."""
    shard = mesh["shard"]
    is_same = seen[-1] == shard and seen[-1].get_group() is shard.get_group()
    return seen[-1].ndim, seen[-1].size(), seen[-1].mesh_dim_names, is_same


def the_mesh_that_subclasses_are_given(lib):
    mesh, model = mesh_of(1, 2), with_matrices_as(nn.Linear(4, 4), RecordsMesh)
    lib.fully_shard(model, mesh=mesh)
    model(torch.ones(1, 4)).sum().backward()
    return about(seen_by_subclass, mesh)


def the_mesh_that_methods_of_shards_are_given(lib):
    """The weights are of a tensor class without such methods; its shards get them one by one."""
    mesh, layer, seen = mesh_of(1, 2), nn.Linear(DIM, DIM, bias=False), []
    layer.weight = nn.Parameter(TwoTensor(layer.weight.detach(), layer.weight.detach().clone()))
    model = lib.fully_shard(nn.Sequential(lib.fully_shard(layer, mesh=mesh)), mesh=mesh)

    def pre(self, mesh, outer_size, outer_stride, module, mp_policy):
        seen.append(mesh)
        return (self,), None

    def post(self, outputs, metadata, param_dtype, *, out=None):
        return None if out is not None else (outputs[0], outputs)

    local = layer.weight._local_tensor
    local.fsdp_pre_all_gather = pre.__get__(local)
    local.fsdp_post_all_gather = post.__get__(local)
    with torch.no_grad():
        model(torch.ones(1, DIM))
    return about(seen, mesh)


def largest_dim(param):
    return Shard(max(range(param.dim()), key=lambda dim: param.shape[dim]))


def widths(lib, *sizes):
    def shard(model):
        for unit in (*model[::2], model):
            lib.fully_shard(unit, mesh=mesh_of(), shard_placement_fn=largest_dim)

    first, second = sizes
    return Pair(nn.Sequential(nn.Linear(DIM, first), nn.Tanh(), nn.Linear(first, second)), shard)


def even_shards_of_the_largest_dim(lib):
    return widths(lib, 10, 4).train()


def uneven_shards_of_the_largest_dim(lib):
    return widths(lib, 9, 5).train()


NUM_RANKS = 2
# What is done with a library, and what every rank has then with ours: of an exception, its class.
BY_HAND = [[4, 0], [4, 1], [4, 1], [4, 4]]
AFTER_FORWARD = [[4, 3], [4, 2], [4, 3], [4, 0], [4, 2], [4, 4]]
AFTER_BACKWARD = [*[[4, 3], [3, 3], [3, 3]] * 3, [4, 3], [1, 3], [1, 3]]
UNUSED = [*[[3, 2]] * 3, *[[3, 0]] * 3]
ARE_SHARDED = [*[[False, False]] * 2, [True, True]] * 2
SHARD_MESH = (1, 2, ("shard",), True)
SITUATIONS = [
    (units_inside_torchs_replicate, ("right", [True, False])),
    (torchs_replicate_of_a_unit, "RuntimeError"),
    (two_modules_of_a_unit_unsharded_ahead, ARE_SHARDED),
    (units_resharded_by_hand, BY_HAND),
    (resharding_after_forward_toggled_for_some, AFTER_FORWARD),
    (resharding_after_backward_toggled_for_some, AFTER_BACKWARD),
    (a_module_of_a_unit_is_not_used, UNUSED),
    (forward_derivatives_of_kept_units, "right"),
    (forward_derivatives_of_resharded_units, "right"),
    (dual_numbers_through_kept_units, "right"),
    (dual_numbers_through_resharded_units, "right"),
    (the_mesh_that_subclasses_are_given, SHARD_MESH),
    (the_mesh_that_methods_of_shards_are_given, SHARD_MESH),
    (even_shards_of_the_largest_dim, "right"),
    (uneven_shards_of_the_largest_dim, "right"),
]
