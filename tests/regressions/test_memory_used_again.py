"""Memory of collectives that was used again too early, and handles that outlived their gather."""

import signal
import time

import torch
import torch.distributed as dist
from torch import nn

import meshard
from tests.support.ranks import on_ranks


class _Stop(Exception):
    pass


def _stop(*_):
    raise _Stop


class _Tower(nn.Module):
    """A layer with a parameter that no forward uses, beside one that only a hook reads."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)
        self.unused = nn.Parameter(torch.zeros(4))
        self.aux = nn.Linear(16, 16, bias=False)
        nn.init.ones_(self.layer.weight)
        nn.init.constant_(self.aux.weight, 7.0)

    def forward(self, x):
        return self.layer(x)


@on_ranks(2)
def test_a_reduce_hook_may_gather_another_unit():
    model, rank = _Tower(), dist.get_rank()
    for module in (model.aux, model):
        meshard.fully_shard(module)
    read = []

    class Hook:
        def before(self, rows):
            model.aux.unshard()
            time.sleep(0.2 * rank)  # so that the other rank goes on meanwhile
            read.append(model.aux.weight.detach().clone())
            model.aux.reshard()

    meshard.register_reduce_hook(model, Hook(), recurse=False)
    for _ in range(2):
        model(torch.ones(1, 4) * (1 + rank)).sum().backward()
    assert all((each == 7.0).all() for each in read) and len(read) == 2
    assert model.unused.grad is None
    assert (model.layer.weight.grad.full_tensor() == 3.0).all()


@on_ranks(2)
def test_an_interrupted_unshard_may_be_called_again():
    layers = [nn.Linear(64, 64, bias=False) for _ in range(6)]
    model, rank = nn.Sequential(*layers), dist.get_rank()
    for number, layer in enumerate(layers):
        nn.init.constant_(layer.weight, number + 1.0)
        meshard.fully_shard(layer)
    meshard.fully_shard(model)
    with torch.no_grad():
        model(torch.zeros(1, 64))
    before = signal.signal(signal.SIGALRM, _stop)
    handles = []
    try:
        for number, layer in enumerate(layers):
            if rank == 1 and number == 3:
                time.sleep(1.0)
            signal.setitimer(signal.ITIMER_REAL, 0.3 if rank == 0 else 0.0)
            try:
                handle = layer.unshard(async_op=True)
                signal.setitimer(signal.ITIMER_REAL, 0.0)
            except _Stop:
                handle = layer.unshard(async_op=True)
            handles.append(handle)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    for number, (layer, handle) in enumerate(zip(layers, handles, strict=True)):
        handle.wait()
        assert layer.weight.unique().tolist() == [number + 1.0]


@on_ranks(2)
def test_a_handle_gathers_nothing_once_its_unit_was_resharded():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in (*model, model):
        meshard.fully_shard(layer)
    for between in (meshard.unsharded_params, meshard.offload):
        handle = model[0].unshard(async_op=True)
        with between(model):
            """Reshards all units."""
        if dist.get_rank() == 0:
            handle.wait()
            model[1].unshard()
        else:
            model[1].unshard()
            handle.wait()
        model[1].reshard()
        assert model[0].weight.to_local().shape == (2, 4)
