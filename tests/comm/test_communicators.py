import pytest
import torch
from torch import nn

import meshard
from meshard._comm.cpu import WorkCommunicator
from meshard._communicators import communicators_from, make_communicator
from tests.support.ranks import on_fake_ranks


class Counting(WorkCommunicator):
    num_gathers = 0

    def all_gather(self, *args, **kwargs):
        Counting.num_gathers += 1
        return super().all_gather(*args, **kwargs)


@on_fake_ranks(2)
def test_roots_that_begin_inside_get_the_communicators_of_the_block():
    Counting.num_gathers = 0
    layer = meshard.fully_shard(nn.Linear(2, 2))
    with communicators_from(lambda device: Counting()):
        layer(torch.ones(1, 2))
    assert Counting.num_gathers == 1
    meshard.fully_shard(nn.Linear(2, 2))(torch.ones(1, 2))
    assert Counting.num_gathers == 1


def test_an_error_in_the_block_ends_it_too():
    with pytest.raises(ArithmeticError), communicators_from(lambda device: Counting()):
        raise ArithmeticError
    assert not isinstance(make_communicator(torch.device("cpu")), Counting)
