"""What if the transforms of torch.func see a unit being gathered?

They follow every operation, also those that only move shards, and refuse some of them.
"""

from __future__ import annotations

import torch


def refuse_transforms(label: str, error: RuntimeError) -> None:
    """Raise what to do instead, if ``error`` came inside of a transform around unit ``label``."""
    try:
        torch.empty(0).requires_grad_()
    except RuntimeError:
        raise RuntimeError(
            f"torch.func (grad, vjp, jacrev, hessian) cannot go through unit {label!r}, whose "
            "parameters are gathered and given back; call it inside "
            "meshard.unsharded_params(module), where the module is an ordinary one."
        ) from error
