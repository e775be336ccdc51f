"""Steps on unsharded parameters, for optimizers whose arithmetic DTensors do not support."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from meshard._comm.blocking import full_tensor
from meshard.optim.flat import MakeOptimizer, cut_like

_EMPTY = torch.empty(0, device="cpu")  # a placeholder between steps


class UnshardedStep(Optimizer):
    """Gathers parameters and gradients, steps them on every rank, and keeps this rank's shards.

    The numbers are those of one process, bit for bit. The states are unsharded and the same on
    every rank, so this is for optimizers whose states are small.
    """

    def __init__(self, param_groups: list[dict[str, Any]], cls: MakeOptimizer) -> None:
        super().__init__(param_groups, {})
        self._inner = cls(
            [
                {**group, "params": [nn.Parameter(_EMPTY) for _ in group["params"]]}
                for group in self.param_groups
            ]
        )

    @override
    def step(self, closure: Any = None) -> Any:
        """Step all parameters that have a gradient. **Collective:** all ranks of their meshes."""
        stepped: list[tuple[torch.Tensor, torch.Tensor]] = []
        for group, own in zip(self.param_groups, self._inner.param_groups, strict=True):
            own.update((key, value) for key, value in group.items() if key != "params")
            pairs = zip(group["params"], own["params"], strict=True)
            stepped += [(param, unsharded) for param, unsharded in pairs if param.grad is not None]
        try:
            for param, unsharded in stepped:
                unsharded.grad_dtype = None  # None: a .grad of any dtype is accepted
                unsharded.data, unsharded.grad = _gathered(param), _gathered(param.grad)
                self._inner.state.pop(unsharded, None)  # the user may have dropped it
                if self.state[param]:
                    # State is unsharded, but load_state_dict shards what has the shape of the
                    # parameter (``cut_like``). So gather it again.
                    state = {key: _gathered(each) for key, each in self.state[param].items()}
                    self._inner.state[unsharded] = state
            self._inner.step()
            for param, unsharded in stepped:
                self.state[param] = self._inner.state[unsharded]
                param.copy_(cut_like(param, unsharded.data))
        finally:
            for _, unsharded in stepped:
                unsharded.data, unsharded.grad = _EMPTY, None


def _gathered(value: Any) -> Any:
    return full_tensor(value, label="(optimizer)") if isinstance(value, DTensor) else value
