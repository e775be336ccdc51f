"""What meshard replaces in torch: its ``fully_shard`` on request, and ``zero_grad``."""

from __future__ import annotations

import contextlib
import importlib
from types import ModuleType

import meshard
from meshard._torch.patches import unpatch_zero_grad

_FUNCTIONS = ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx")
_NAMES = (*_FUNCTIONS, "GradientReductionHandle", "UnshardHandle")
# The keys are modules of torch: the public one, two that were public before torch 2.6, and two
# private ones. The values are the names that are replaced in that module. In the last one the
# handle classes stay torch's, because torch's own code there makes handles.
_MODULES = {
    "torch.distributed.fsdp": _NAMES,
    "torch.distributed._composable.fsdp": _NAMES,
    "torch.distributed._composable.fsdp.fully_shard": _NAMES,
    "torch.distributed.fsdp._fully_shard": _NAMES,
    "torch.distributed.fsdp._fully_shard._fully_shard": _FUNCTIONS,
}


class TorchPatch(contextlib.ExitStack):
    """Names of torch that ``patch_torch`` replaced. A context manager that puts them back."""

    def undo(self) -> None:
        """Put back what the names were before. Modules that are sharded already stay so."""
        self.close()


def patch_torch() -> TorchPatch:
    """Replace ``torch.distributed.fsdp.fully_shard`` and related names of torch by meshard's.

    For trainers that import torch's functions themselves, also from the private modules in which
    torch defines them. Call it before they do: a name that was imported already stays what it was.
    ``undo()`` of what is returned puts back what they were, and so does the end of a ``with``
    block.

    The two ``replicate`` of ``torch.distributed._composable`` stay torch's. One takes arguments of
    DDP, the other makes parameters DTensors and modules torch's ``FSDPModule``;
    ``meshard.replicate`` does neither, so trainers have to call it by name.

    >>> import torch, meshard.compat
    >>> with meshard.compat.patch_torch():
    ...     layer = torch.distributed.fsdp.fully_shard(torch.nn.Linear(2, 2))
    >>> isinstance(layer, meshard.FSDPModule)
    True
    """
    patch = TorchPatch()
    # Import all modules before any name is replaced. Some of them import names from another: if
    # that happened later, they would get ours, and undo() would not know what to put back.
    modules = [(_import(path), names) for path, names in _MODULES.items()]
    for module, names in modules:
        for name in names:
            ours, theirs = getattr(meshard, name, None), getattr(module, name, None)
            if ours is None or theirs is None or theirs is ours:  # the last after an earlier patch
                continue
            patch.callback(setattr, module, name, theirs)
            setattr(module, name, ours)
    return patch


def _import(path: str) -> ModuleType | None:
    """Return a module of torch; None if this version of torch has none of this name."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        return None


def unpatch_torch() -> None:
    """Put back ``torch.optim.Optimizer.zero_grad`` and ``torch.nn.Module.zero_grad``.

    Each call of ``fully_shard`` and ``replicate`` replaces the two methods, so that they also clear
    gradients that are not reduced yet. Without that, ``FSDPModule.reset_iter_state`` drops such
    gradients.

    >>> import torch, meshard.compat
    >>> layer = meshard.fully_shard(torch.nn.Linear(2, 2))
    >>> meshard.compat.unpatch_torch()
    >>> torch.nn.Module.zero_grad.__module__
    'torch.nn.modules.module'
    """
    unpatch_zero_grad()
