"""Models on the meta device, before weights are loaded: memory, and buffers that no file has.

Files hold parameters and persistent buffers. A non-persistent buffer, such as the frequencies of
rotary embeddings, is computed by a constructor. If that ran on the meta device, the buffer has no
values, and no file has any.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary

from meshard._engine.param_group import sharded_params
from meshard._engine.unit import joined, own_class, units_in
from meshard._torch.user_line import listed
from meshard.checkpoint.weights_layout import fqn_without_wrappers
from meshard.initialization import leave_meta


@contextlib.contextmanager
def meta_parameters() -> Iterator[None]:
    """Build models whose parameters are on the meta device and whose buffers have values.

    ``torch.device("meta")`` leaves buffers without values too, and no file has those that are not
    persistent. Inside this block each parameter moves to the meta device when its module gets it:
    one has memory at a time, and its initialisation costs nothing.

    >>> import torch
    >>> from meshard.checkpoint import meta_parameters
    >>> with meta_parameters():
    ...     norm = torch.nn.BatchNorm1d(2)
    >>> norm.weight.device.type, norm.running_var.tolist()
    ('meta', [1.0, 1.0])
    """
    # By parameter, so that modules which get one parameter stay tied.
    moved = WeakTensorKeyDictionary()

    def move(module: nn.Module, name: str, param: nn.Parameter | None) -> Any:
        if param is None or param.is_meta:  # None keeps it
            return None
        if param not in moved:
            moved[param] = nn.Parameter(
                param.detach().to("meta"), requires_grad=param.requires_grad
            )
        return moved[param]

    hook = register_module_parameter_registration_hook(move)
    try:
        yield
    finally:
        hook.remove()


# --- buffers that are in no file -------------------------------------------------------------


@torch.inference_mode(False)
@torch.no_grad()
def computed_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return values for the non-persistent buffers that are on the meta device, by name.

    Models of Hugging Face have a constructor that takes their ``config``. A second model is built
    by it, with parameters on the meta device, and has the buffers. A ValueError names those that it
    lacks.
    """
    # By identity, because hooks of state_dict may change names.
    persistent = {id(value) for value in module.state_dict(keep_vars=True).values()}
    lacking = {
        fqn: buffer
        for fqn, buffer in module.named_buffers(remove_duplicate=False)
        if buffer.is_meta and id(buffer) not in persistent
    }
    clean = {fqn_without_wrappers(fqn): fqn for fqn in lacking}
    found: dict[str, torch.Tensor] = {}
    causes = ""
    for prefix, inner in module.named_modules():
        build: Any = own_class(inner)
        start = joined(prefix, "")
        is_needed = any(fqn.startswith(start) for fqn in lacking.keys() - found.keys())
        if not (is_needed and hasattr(build, "from_pretrained") and hasattr(inner, "config")):
            continue
        try:
            with torch.random.fork_rng(devices=[]), torch.device("cpu"), meta_parameters():
                beside = build(inner.config)
        except Exception as error:  # a constructor may raise anything
            causes += f" ({build.__name__}(config) raised {error!r}.)"
            continue
        for name, buffer in beside.named_buffers(remove_duplicate=False):
            fqn = clean.get(fqn_without_wrappers(joined(prefix, name)), "")
            if fqn in lacking and lacking[fqn].shape == buffer.shape and not buffer.is_meta:
                found[fqn] = buffer.to(lacking[fqn].dtype)
    left = [fqn for fqn in lacking if fqn not in found]
    if left:
        raise ValueError(
            f"buffers are on the meta device and in no file, because they are not persistent: "
            f"{listed(left)}. Build the model inside meshard.checkpoint.meta_parameters() instead "
            f'of torch.device("meta"), or call meshard.materialize(module) before.{causes}'
        )
    return found


# --- memory ----------------------------------------------------------------------------------


@torch.inference_mode(False)  # the module may train, so it must hold no inference tensors
@torch.no_grad()
def leave_meta_device(
    module: nn.Module, device: torch.device, buffers: dict[str, torch.Tensor]
) -> None:
    """Give memory to what is on the meta device, and to non-persistent buffers their values.

    Sharded parameters stay the same objects. Each other parameter is replaced by one new one, under
    all of its names.
    """
    for unit in units_in(module):
        if sharded_params(unit.group):
            leave_meta(unit.group)
    given: dict[torch.Tensor, torch.Tensor] = {}
    for fqn, inner in module.named_modules():
        held: Any
        for held in (inner._parameters, inner._buffers):
            for name, tensor in held.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if tensor not in given:
                    given[tensor] = _with_memory(tensor, device, buffers.get(joined(fqn, name)))
                held[name] = given[tensor]
        # A plain attribute may be a second name of a buffer.
        for name, value in list(vars(inner).items()):
            if isinstance(value, torch.Tensor) and value in given:
                setattr(inner, name, given[value])


def _with_memory(
    tensor: torch.Tensor, device: torch.device, values: torch.Tensor | None
) -> torch.Tensor:
    if isinstance(tensor, nn.Parameter):
        empty = torch.empty_like(tensor.detach(), device=device)
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return torch.empty_like(tensor, device=device) if values is None else values.to(device)
