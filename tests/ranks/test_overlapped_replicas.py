"""What if every rank keeps whole parameters?"""

import pytest
import torch
from torch import nn

import meshard


def refused():
    model = meshard.replicate(nn.Linear(2, 2))
    with pytest.raises(NotImplementedError, match="modules of replicate yet"):
        meshard.overlap_optimizer(model, torch.optim.SGD, lr=0.1)


def test_replicas_are_refused(run_ranks):
    run_ranks(refused, 2)
