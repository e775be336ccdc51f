"""How does code that imports torch's ``fully_shard`` get ours?"""

from __future__ import annotations

import sys
from types import ModuleType, TracebackType
from typing import Any

import meshard

# Where code finds these names: the public module, and the name it had before torch 2.6.
_MODULES = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp")
_NAMES = ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx", "UnshardHandle")


class TorchPatch:
    """What ``patch_torch`` has done. A context manager: the end of the block undoes it."""

    def __init__(self) -> None:
        self._before: list[tuple[ModuleType, str, Any]] = []
        for position in _MODULES:
            module = sys.modules.get(position)
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
        What was done, with ``undo()``; as a context manager it is undone at the end of the block.

    >>> import torch, meshard.compat
    >>> with meshard.compat.patch_torch():
    ...     layer = torch.distributed.fsdp.fully_shard(torch.nn.Linear(2, 2))
    >>> isinstance(layer, meshard.FSDPModule)
    True
    """
    return TorchPatch()
