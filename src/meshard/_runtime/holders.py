"""Does anybody but us hold some tensors of ours, or has put something on them?"""

from __future__ import annotations

from operator import attrgetter
from sys import getrefcount
from weakref import getweakrefcount

import torch

from meshard._params.private_torch import num_tensors_on, references_in_torch, unasked

_REQUIRES_GRAD = attrgetter("requires_grad")
_ATTRIBUTES = attrgetter("__dict__")


class Holders:
    """Knows whether tensors are as they were when nobody else had seen them.

    Counted are Python's references, weak ones too, those inside torch (a graph that has saved a
    tensor holds it without Python), and the tensors on the storage (views, and what ``detach`` and
    numpy make). What a user has put on a tensor (an attribute, a graph) would outlive it as well.

    Args:
        tensors: All on the storage of the first, or over tensors that are; they are held.
        shown: Those of them that users are given.
    """

    def __init__(self, tensors: list[torch.Tensor], shown: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._storage = tensors[0].untyped_storage()
        self._shown = shown
        self._alone: list[int] = []

    def begin(self) -> None:
        """Nobody else has seen the tensors: whoever comes now is another one."""
        self._alone = self._count()

    @property
    def are_alone(self) -> bool:
        """Whether nobody else holds or has marked any of them, or holds a tensor on the storage."""
        return self._count() == self._alone

    def _count(self) -> list[int]:
        tensors, shown = self._tensors, self._shown
        with unasked():
            return [
                num_tensors_on(self._storage),
                *map(getrefcount, tensors),
                *map(references_in_torch, tensors),
                *map(getweakrefcount, tensors),
                *map(_REQUIRES_GRAD, shown),
                *map(len, map(_ATTRIBUTES, shown)),
            ]
