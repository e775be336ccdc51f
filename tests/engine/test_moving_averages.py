"""Moving averages of a sharded model."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.support.against_plain import inputs_of, sharded_and_plain
from tests.support.models import MlpBlock
from tests.support.parity import assert_same, full_state
from tests.support.ranks import on_threads
from tests.support.sharding import sharded_case


@on_threads(2)
@pytest.mark.parametrize(
    ("use_buffers", "multi", "reshard_after_forward"),
    [(False, True, None), (True, False, None), (False, False, False), (False, True, False)],
)
def test_a_moving_average_follows_and_is_evaluated(use_buffers, multi, reshard_after_forward):
    plain = nn.Sequential(MlpBlock(6, 8), MlpBlock(6, 8), nn.BatchNorm1d(6, momentum=0.5))
    model, _ = sharded_and_plain(plain, ("0", "1"), reshard_after_forward=reshard_after_forward)
    average_fn = {"multi_avg_fn": get_ema_multi_avg_fn(0.5)} if multi else {}
    averages = [
        AveragedModel(each, use_buffers=use_buffers, **average_fn) for each in (model, plain)
    ]
    optimizers = [
        torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, plain)
    ]
    for step in range(4):
        x = inputs_of(0, step)  # of both ranks: BatchNorm sees a whole batch
        for each, optimizer, averaged in zip((model, plain), optimizers, averages, strict=True):
            each(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            averaged.update_parameters(each)
        if multi and reshard_after_forward is False:
            for unit in (*averages[0].module[:2], averages[0].module):
                unit.reshard()  # foreach kernels raise no version
        assert_same(full_state(averages[0]), full_state(averages[1]))
        for averaged in averages:
            averaged.eval()
        with torch.no_grad():
            assert_same(averages[0](x), averages[1](x))
            for averaged in averages:
                averaged.train()
        assert_same(full_state(model), full_state(plain))


@on_threads(2)
def test_averages_may_be_swapped_in_for_an_evaluation():
    """Evaluate with averaged values in the model itself, put the old ones back, go on."""
    case, model, plain = sharded_case("mlp_stack")
    rank = dist.get_rank()
    for step in range(3):
        for each, batch in ((model, case.batch(step, rank)), (plain, case.whole_batch(step, 2))):
            each.saved = [param.detach().clone() for param in each.parameters()]
            with torch.no_grad():
                each(case.batch(9, 0))  # leaves a whole root, of the wrong values
                for param in each.parameters():
                    param.mul_(0.5)
                each.seen = each(case.batch(9, 0))
                for param, saved in zip(each.parameters(), each.saved, strict=True):
                    param.copy_(saved)
            case.loss(each(batch)).backward()
            with torch.no_grad():
                for param in each.parameters():
                    param.sub_(param.grad, alpha=0.1)
                    param.grad = None
        assert_same(model.seen, plain.seen)
        assert_same(full_state(model), full_state(plain))
