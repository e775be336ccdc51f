"""What meshard replaces in torch: its ``fully_shard`` on request, and ``zero_grad``."""

from __future__ import annotations

import sys
from types import ModuleType, TracebackType
from typing import Any

import meshard
from meshard._torch.patches import unpatch_zero_grad

# Where code finds these names: the public module, and the name it had before torch 2.6.
_MODULES = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp")
_NAMES = ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx", "UnshardHandle")


class TorchPatch:
    """Names of torch that ``patch_torch`` replaced. A context manager that puts them back."""

    def __init__(self) -> None:
        self._before: list[tuple[ModuleType, str, Any]] = []
        for path in _MODULES:
            module = sys.modules.get(path)
            for name in _NAMES:
                if module is not None and hasattr(module, name) and hasattr(meshard, name):
                    self._before.append((module, name, getattr(module, name)))
                    setattr(module, name, getattr(meshard, name))

    def undo(self) -> None:
        """Put torch's own functions back. Modules that are sharded already stay as they are."""
        while self._before:
            module, name, value = self._before.pop()
            setattr(module, name, value)

    def __enter__(self) -> TorchPatch:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.undo()


def patch_torch() -> TorchPatch:
    """Point ``torch.distributed.fsdp.fully_shard`` and its friends at meshard.

    For trainers that import torch's functions themselves. Call it before they do: a name that was
    imported with ``from torch.distributed.fsdp import fully_shard`` stays what it was. The classes
    need no patch, because ours are subclasses: ``isinstance`` checks and torch's own policy objects
    work as they are.

    Returns:
        The replaced names: ``undo()`` puts them back, and so does the end of a ``with`` block.

    >>> import torch, meshard.compat
    >>> with meshard.compat.patch_torch():
    ...     layer = torch.distributed.fsdp.fully_shard(torch.nn.Linear(2, 2))
    >>> isinstance(layer, meshard.FSDPModule)
    True
    """
    return TorchPatch()


def unpatch_torch() -> None:
    """Put back ``torch.optim.Optimizer.zero_grad`` and ``torch.nn.Module.zero_grad``.

    ``fully_shard`` and ``replicate`` replace them, so that they also clear gradients that are not
    reduced yet; call this after the last of those. From then on ``FSDPModule.reset_iter_state``
    drops such gradients. A later ``fully_shard`` or ``replicate`` replaces them again.
    ``patch_torch`` is undone by its own ``undo()``.

    >>> import torch, meshard.compat
    >>> layer = meshard.fully_shard(torch.nn.Linear(2, 2))
    >>> meshard.compat.unpatch_torch()
    >>> torch.nn.Module.zero_grad.__module__
    'torch.nn.modules.module'
    >>> _ = meshard.fully_shard(torch.nn.Linear(2, 2))  # replaces them again
    """
    unpatch_zero_grad()
