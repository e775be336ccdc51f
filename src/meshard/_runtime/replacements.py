"""What if the user replaced parameters, or has not given them memory yet?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from meshard._params.dtensors import is_placed_like, local_of
from meshard._params.marks import Mark, mark_as
from meshard._params.sharded_param import ShardedParam


def take_replacements(
    params: Sequence[ShardedParam],
    locals_: Sequence[torch.Tensor],
    unit: str,
    whole_type: type[torch.Tensor] | None,
) -> bool:
    """Make what owners hold instead of a parameter its shard.

    Args:
        params: Of one group.
        locals_: The local tensor that each was made over.
        unit: Its name, for errors.
        whole_type: Of which class a whole parameter must be to be cut into shards; None: that
            of its shard.

    Returns:
        Whether there was anything, or a local tensor is another one.

    Raises:
        RuntimeError: A parameter was replaced by something that is not its shard.
    """
    replaced = False
    for param, own in zip(params, locals_, strict=True):
        strangers = param.strangers()
        if strangers:
            # Of a tied parameter each owner may hold another one: the first stands for all.
            new = _as_shard(param, strangers[0], unit, whole_type or type(own))
            for old in (param.sharded, *strangers):
                if old is not new:
                    mark_as(old, Mark.REPLACED_LATER, param.fqn)
            param.sharded = new
            replaced = True
        elif local_of(param.sharded) is not own:
            replaced = True
    return replaced


def _as_shard(
    param: ShardedParam, new: nn.Parameter, unit: str, whole_type: type[torch.Tensor]
) -> nn.Parameter:
    """Return ``new`` itself, or its shard if it is a whole tensor."""
    expected = param.sharded
    if not isinstance(new, nn.Parameter):
        raise RuntimeError(
            f"parameter {param.fqn!r} of unit {unit!r} was replaced by a "
            f"{type(new).__name__} that is no nn.Parameter, as torch.func.functional_call does "
            "for one call; a sharded module would not compute with it. Make that call inside "
            "meshard.unsharded_params(module), where the module is an ordinary one."
        )
    if new.shape == expected.shape:
        if type(new) is whole_type:
            shard = param.shard_of(new).clone()
            return nn.Parameter(shard, requires_grad=new.requires_grad)
        if is_placed_like(new, expected):
            return new
    raise RuntimeError(
        f"parameter {param.fqn!r} of unit {unit!r} was replaced after fully_shard by a "
        f"{type(new).__name__} of shape {tuple(new.shape)}; assign an nn.Parameter of shape "
        f"{tuple(expected.shape)} with the same values on every rank, or a DTensor with its "
        "mesh and placements, or replace it before fully_shard."
    )


def check_not_meta(params: Sequence[ShardedParam], unit: str, home: torch.device) -> None:
    """Raise if a shard has no memory yet. Shards of this group live on ``home``."""
    for param in params:
        if local_of(param.sharded).device.type == "meta":
            raise RuntimeError(
                f"parameter {param.fqn!r} of unit {unit!r} is still on the meta device; "
                f"call to_empty(device={home.type!r}) on the root module (shards "
                f"live on {home.type!r}) and initialise its parameters "
                "(reset_parameters, or load_state_dict) before the first forward."
            )
