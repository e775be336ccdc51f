"""ShardedGradScaler: ranks agree on the scale and on which steps are skipped."""

import math

import torch
import torch.distributed as dist

import meshard
from meshard import CPUOffloadPolicy, OffloadPolicy
from tests.support.parity import assert_same, full_state
from tests.support.ranks import on_threads
from tests.support.sharding import sharded_case
from tests.support.spread import spread


@on_threads(4)
@spread(infinite_on=[0, 3], policy=[OffloadPolicy(), CPUOffloadPolicy(pin_memory=False)])
def test_an_inf_on_one_rank_skips_the_step_everywhere_and_backs_off_once(infinite_on, policy):
    case, model, _ = sharded_case("mlp_stack", (4,), offload_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = meshard.ShardedGradScaler("cpu", init_scale=2.0**10)
    before = full_state(model)
    scaler.scale(case.loss(model(case.batch(0, 0)))).backward()
    if dist.get_rank() == infinite_on:
        model.blocks[0].up.weight.grad.to_local()[0, 0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    assert_same(full_state(model), before, bitwise=True)
    assert scaler.get_scale() == 2.0**9
    assert all(param.grad is None for param in model.parameters())
    scaler.scale(case.loss(model(case.batch(0, 0)))).backward()
    scaler.step(optimizer)
    assert not torch.equal(full_state(model)["scale"], before["scale"])


@on_threads(4)
def test_a_power_of_two_as_scale_changes_no_bit():
    (case, scaled, _), (_, plain, _) = (sharded_case("mlp_stack", (2, 2)) for _ in range(2))
    for model in (scaled, plain):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scaler = meshard.ShardedGradScaler("cpu", init_scale=2.0**10, enabled=model is scaled)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(case.loss(model(case.batch(step, dist.get_rank())))).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert_same(full_state(scaled), full_state(plain), bitwise=True)


@on_threads(2)
def test_sparse_gradients_of_plain_parameters_are_unscaled():
    table, row = torch.nn.Embedding(4, 2, sparse=True), torch.tensor([1, 1])
    scaler = meshard.ShardedGradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    scaler.scale(table(row).sum()).backward()
    scaler.unscale_(optimizer)
    assert table.weight.grad.to_dense()[1].tolist() == [2.0, 2.0]
