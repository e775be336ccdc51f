"""What a newer torch adds is refused by its name, instead of failing inside torch."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import meshard
import meshard.api
from meshard.fsdp_module import refuse_new_methods
from tests.support.ranks import on_fake_ranks


class NewerModule(torch.distributed.fsdp.FSDPModule):
    """Has a method that no torch has, and a private one."""

    def set_warp(self, speed):
        raise AssertionError("inside torch")

    def _inside(self):
        return "torch's"


class Module(meshard.FSDPModule, NewerModule):
    pass


def test_a_new_public_method_is_not_built():
    before = {name: getattr(Module, name) for name in dir(meshard.FSDPModule)}
    refuse_new_methods(Module, NewerModule)
    module = object.__new__(Module)
    with pytest.raises(NotImplementedError, match=rf"set_warp, .* torch {torch.__version__[:4]}"):
        module.set_warp(9)
    assert module._inside() == "torch's"
    after = {name: getattr(Module, name) for name in before}
    assert after == before


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
