"""Gathers received in the memory of an unsharded parameter."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import meshard
from tests.support import insides
from tests.support.models import Made, seeded
from tests.support.parity import assert_same, full_grads, full_state
from tests.support.ranks import on_ranks
from tests.support.strategies import MODES


def chain(rows, *, bias):
    """Layers of one parameter each, without bias; 8 rows are cut evenly among 2 ranks and 4."""

    def forward(m, ids):
        x = m.layers[0](m.table(ids))
        return m.layers[1](x.bfloat16()).float()

    layers = [nn.Linear(6, rows, bias=bias), nn.Linear(rows, 6, bias=bias).bfloat16()]
    return seeded(Made(forward, table=nn.Embedding(8, 6), layers=layers))


def sent_between(mesh, rows=8, *, reshard=None, bias=False):
    """Return a model whose units send through sockets, and the plain one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHARD_SHARED_MEMORY", "0")
        model, plain = (chain(rows, bias=bias) for _ in range(2))
        for layer in (model.table, *model.layers):
            meshard.fully_shard(layer, mesh, reshard_after_forward=reshard)
        meshard.fully_shard(model, mesh, reshard_after_forward=reshard)
        meshard.describe(model)  # a first use, which reads the variable
        return model, plain


class Copies(TorchDispatchMode):
    """Counts the kernels that copy."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        self.count += "copy" in name and "to_copy" not in name
        return func(*args, **(kwargs or {}))


@on_ranks(2)
@pytest.mark.parametrize(
    ("rows", "bias", "expected"),
    [
        (8, False, [0]),
        # With a second parameter, or padding, there is something to take apart; not of the table.
        (8, True, [2]),
        (7, False, range(1, 99)),
    ],
)
def test_nothing_is_copied_out_of_a_unit_of_one_even_parameter(rows, bias, expected):
    model, _ = sent_between(init_device_mesh("cpu", (2,)), rows, bias=bias)
    ids = torch.arange(4)
    with torch.no_grad():
        model(ids)
        with Copies() as copies:
            model(ids)
    assert copies.count in expected


def train(mesh_shape, reshard):
    """Compare integers, so that the order of sums does not matter."""
    model, plain = sent_between(init_device_mesh("cpu", mesh_shape), reshard=reshard)
    model.set_gradient_divide_factor(1.0)
    with torch.no_grad():
        for param in (*model.parameters(), *plain.parameters()):
            param.copy_(param.mul(4).round())
    optimizers = [torch.optim.SGD(each.parameters(), lr=1.0) for each in (model, plain)]
    for step in range(3):
        of_ranks = [(torch.arange(3) + step * rank) % 8 for rank in range(dist.get_world_size())]
        for mode in "NF":
            model.set_is_last_backward(mode == "F")
            model.set_gradient_sync(MODES[mode])
            model(of_ranks[dist.get_rank()]).sum().backward()
            for ids in of_ranks:
                plain(ids).sum().backward()
        assert_same(full_grads(model), full_grads(plain), bitwise=True)
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            # Small integers stay so.
            for param in each.parameters():
                param.grad.sign_()
            optimizer.step()
            optimizer.zero_grad()
        assert_same(full_state(model), full_state(plain), bitwise=True)


@pytest.mark.parametrize(
    ("mesh_shape", "reshard"),
    [((2,), None), ((2,), False), ((4,), True), ((4,), 2), ((2, 2), True)],
)
def test_training_is_that_of_one_process(run_ranks, mesh_shape, reshard):
    run_ranks(train, torch.Size(mesh_shape).numel(), mesh_shape, reshard)


@on_ranks(2)
def test_a_gather_that_is_given_up_leaves_no_memory_and_the_next_one_is_right():
    model, plain = sent_between(init_device_mesh("cpu", (2,)))
    ids = torch.arange(4)
    expected = plain(ids)
    for layer in (model.table, *model.layers):
        layer.unshard(async_op=True)
    assert all(each.nbytes() for each in insides.unsharded_storages(model))
    for layer in (model.table, *model.layers):
        layer.reshard()
    assert not any(each.nbytes() for each in insides.unsharded_storages(model))
    assert torch.equal(model(ids), expected)
    # The next unit is on its way when this one raises.
    handle = model.layers[0].register_forward_pre_hook(lambda *_: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            model(ids)
        model.reset_iter_state()
        assert not any(each.nbytes() for each in insides.unsharded_storages(model))
    handle.remove()
    assert torch.equal(model(ids), expected)


@pytest.mark.parametrize("rows", [4, 3], ids=["even", "uneven"])
@pytest.mark.parametrize("name", ["int16", "uint16", "bool", "float8_e4m3fn"])
@on_ranks(2)
def test_a_unit_of_a_dtype_that_gloo_does_not_send_is_gathered(rows, name):
    values = torch.tensor([[0, 1], [1, 0], [1, 1], [0, 0]])[:rows].to(getattr(torch, name))
    weight = nn.Parameter(values, requires_grad=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHARD_SHARED_MEMORY", "0")
        model = Made(lambda m, x: x + m.weight.float(), weight=weight)
        meshard.fully_shard(model, init_device_mesh("cpu", (2,)))
        for _ in range(2):  # the second gather uses the memory of the first
            assert torch.equal(model(torch.zeros(rows, 2)), values.float())
