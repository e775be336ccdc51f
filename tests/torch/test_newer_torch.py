"""What a newer torch adds is refused by its name, instead of failing inside torch."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import meshard
import meshard.api
from tests.support.ranks import on_fake_ranks


@on_fake_ranks(1)
def test_a_new_method_stops_at_the_private_state_that_it_reads(monkeypatch):
    def set_warp(self, speed):
        for group in self._get_fsdp_state()._fsdp_param_groups:
            group.warp = speed

    monkeypatch.setattr(torch.distributed.fsdp.FSDPModule, "set_warp", set_warp, raising=False)
    with pytest.raises(AttributeError, match="meshard has no 'warp'"):
        meshard.fully_shard(nn.Linear(2, 2)).set_warp(9)


@dataclass(frozen=True)
class NewerPolicy(torch.distributed.fsdp.MixedPrecisionPolicy):
    warp: float = 1.0
    names: list = field(default_factory=list)


@on_fake_ranks(1)
def test_a_new_field_of_a_policy_is_not_built_unless_it_has_its_default(monkeypatch):
    monkeypatch.setattr(meshard.api, "TorchMixedPrecisionPolicy", NewerPolicy)
    layer = nn.Linear(2, 2)
    for apply in (meshard.fully_shard, meshard.replicate):
        for name, value in (("warp", 2.0), ("names", [1])):
            with pytest.raises(NotImplementedError, match=f"^{name} of MixedPrecisionPolicy"):
                apply(layer, mp_policy=NewerPolicy(**{name: value}))
    assert type(layer) is nn.Linear
    meshard.fully_shard(layer, mp_policy=NewerPolicy(param_dtype=torch.bfloat16))
    assert layer(torch.ones(1, 2)).dtype == torch.bfloat16
