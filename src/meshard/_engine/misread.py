"""Explanations of torch's error about shards beside ordinary tensors.

torch raises "got mixed torch.Tensor and DTensor" where no Python runs, and a tensor class that saw
it coming would slow down every operator on shards. So the error is explained when it leaves the
forward of a unit, by what the frames of its traceback hold.
"""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from meshard._engine.outputs import tensors_in
from meshard._engine.param_group import sharded_params
from meshard._engine.unit import Unit, units_in
from meshard._params.sharded_param import UnitParam
from meshard._torch.dtensor import local_of

_TEXT_OF_TORCH = "got mixed torch.Tensor and DTensor"
_EXPLAINED = "_meshard_is_explained"
_Sharded = dict[int, tuple[Unit, UnitParam]]  # by id of the sharded parameter
_REMEDIES = (
    "Parameters are unsharded inside their unit's own forward and backward. What helps:\n"
    "* If the forward of a parent reads it, as that of nn.MultiheadAttention reads out_proj: "
    "apply fully_shard to the parent instead of this module, or pass unshard_on_access=True "
    "for this module.\n"
    "* If another method of a sharded module reads it: "
    "meshard.register_fsdp_forward_method(module, name).\n"
    "* Anywhere else, as in a loss function: with meshard.unsharded_params(module): around "
    "the read."
)


def explain_mixed_tensors(
    error: BaseException | None, unit: Unit, module: nn.Module, inputs: Any
) -> None:
    """Add to the message of ``error`` what was read, or given, and what helps.

    Args:
        error: What left the forward of ``module``; left alone unless it is torch's.
        unit: Whose forward that was.
        module: A module of the unit.
        inputs: The arguments of the forward.
    """
    if not isinstance(error, RuntimeError) or _TEXT_OF_TORCH not in str(error):
        return
    if hasattr(error, _EXPLAINED):
        return  # by a unit inside
    text = ""
    with contextlib.suppress(Exception):  # which would hide the error that is being explained
        text = _explanation(error, unit, module, inputs)
    if text:
        # The message and not a note: notes came with Python 3.11, and logs of str() drop them.
        error.args = (f"{error}\n\n{text}", *error.args[1:])
        setattr(error, _EXPLAINED, True)


def _explanation(error: RuntimeError, unit: Unit, module: nn.Module, inputs: Any) -> str:
    sharded = {
        id(param.sharded): (each, param)
        for each in units_in(_outermost(module, unit))
        if each.group is not None
        for param in each.group.params
    }
    local_variables = _local_variables(error.__traceback__)
    found = _first_known(sharded, local_variables)
    if not found and _takes_ordinary_tensors(unit):
        given = next((each for each in tensors_in(inputs) if isinstance(each, DTensor)), None)
        if given is not None:
            return (
                f"unit {unit.label!r} was called with a DTensor of shape {tuple(given.shape)} and "
                f"placements {given.placements}, but its parameters are ordinary tensors inside "
                "its forward. Pass the input as an ordinary tensor, by to_local() or "
                "full_tensor(), or place the parameters over the same mesh before fully_shard."
            )
    found = found or _first_known(sharded, [_parameters_of(frame) for frame in local_variables])
    if found:
        of_unit, param = found[0]
        prefix = f"{of_unit.fqn}." if of_unit.fqn else ""
        names = [repr(f"{prefix}{other.fqn}") for each, other in found if each is of_unit]
        return (
            f"parameter {' or '.join(names)} of unit {of_unit.label!r} was read while that unit is "
            f"not running; its modules hold this rank's shard, "
            f"{tuple(local_of(param.sharded).shape)} of {tuple(param.sharded.shape)}. {_REMEDIES}"
        )
    labels = [repr(each.label) for each in units_in(module) if _holds_shards(each)]
    if not labels:
        return ""
    more = f" and {len(labels) - 3} more" if len(labels) > 3 else ""
    return (
        f"a parameter of a unit inside {unit.label!r} was probably read while that unit is not "
        f"running, when its modules hold shards. Units inside that are sharded now: "
        f"{', '.join(labels[:3])}{more}. {_REMEDIES}"
    )


def _outermost(module: nn.Module, unit: Unit) -> nn.Module:
    """Return the module of the outermost unit around ``module``."""
    while unit.parent is not None and (parent := unit.parent()) is not None:
        unit = parent
    outermost = unit.modules[0]()
    return module if outermost is None else outermost


def _local_variables(trace: TracebackType | None) -> list[list[Any]]:
    """Return the local variables of each frame that an error came through, innermost first."""
    frames: list[list[Any]] = []
    while trace is not None:
        frames.insert(0, list(trace.tb_frame.f_locals.values()))
        trace = trace.tb_next
    return frames


def _parameters_of(local_variables: list[Any]) -> list[Any]:
    modules = [value for value in local_variables if isinstance(value, nn.Module)]
    return [param for module in modules for param in module._parameters.values()]


def _first_known(sharded: _Sharded, frames: list[list[Any]]) -> list[tuple[Unit, UnitParam]]:
    """Return the sharded parameters among the values of the first frame that has any."""
    for values in frames:
        found = {id(each): sharded[id(each)] for each in values if id(each) in sharded}
        if found:
            return list(found.values())
    return []


def _takes_ordinary_tensors(unit: Unit) -> bool:
    """Whether no parameter of a unit is placed by another parallelism."""
    return unit.group is None or all(
        param.dtensor_placement is None for param in sharded_params(unit.group)
    )


def _holds_shards(unit: Unit) -> bool:
    return unit.group is not None and any(
        param.sharded is installed for param in unit.group.params for installed in param.installed()
    )
