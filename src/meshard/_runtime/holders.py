"""Does anybody but us hold some tensors of ours?"""

from __future__ import annotations

from sys import getrefcount

import torch

from meshard._runtime.private_torch import num_users, references_in_torch


class Holders:
    """Knows whether tensors are held by as many as when nobody else had seen them.

    Counted are Python's references, those inside torch (a graph that has saved a tensor holds it
    without Python), and the tensors on the storage (views, and what ``detach`` and numpy make).

    Args:
        tensors: All on the storage of the first, or over tensors that are; they are held.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._alone: list[int] = []

    def begin(self) -> None:
        """Nobody else has seen the tensors: whoever comes now is another one."""
        self._alone = self._count()

    @property
    def are_alone(self) -> bool:
        """Whether nobody else holds any of the tensors, or anything on their storage."""
        return self._count() == self._alone

    def _count(self) -> list[int]:
        tensors = self._tensors
        counts = [num_users(tensors[0]), *map(getrefcount, tensors)]
        counts.extend(map(references_in_torch, tensors))
        return counts
