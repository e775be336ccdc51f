"""What does a group need of the tensors that stand for its parameters?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from meshard._comm.all_gather import GatherInFlight
from meshard._comm.communicator import Communicator, Rows
from meshard._comm.host_link import HostLink
from meshard._geometry.layout import FlatLayout
from meshard._params.home import Home
from meshard._params.sharded_param import ShardedParam
from meshard._runtime.group_tensors import GradientHook, Place


class Faces(Protocol):
    """The two faces of a group's parameters: ``GroupTensors`` or ``ExtendedTensors``."""

    params: list[ShardedParam]
    place: Place
    label: str

    @property
    def link(self) -> HostLink | None:
        """How shards travel that live in host memory."""

    @property
    def compute_dtypes(self) -> list[torch.dtype]:
        """Of the whole parameters, and of their gradients."""

    @property
    def is_one_dtype(self) -> bool:
        """Whether these are all the same."""

    @property
    def layout(self) -> FlatLayout:
        """How the shards would lie, or do lie, in one buffer."""

    @property
    def version(self) -> int:
        """Grows with every edit of a shard."""

    def version_unless_replaced(self) -> int | None:
        """Return ``version``; None if there may be something to ``take_replacements``."""

    @property
    def is_partly_meta(self) -> bool:
        """Whether some shards have memory and others have none."""

    @property
    def is_away(self) -> bool:
        """Whether the shards are not where they are gathered from."""

    def start_gather(self, comm: Communicator) -> GatherInFlight:
        """Start gathering the shards.

        **Collective:** the shard group. **Stream:** the gather lane.
        **Lifetime:** the shards must not be edited until the gather is waited for.
        """

    def fill_whole(self, gathered: Rows, *, comes_again: bool) -> None:
        """Have the whole parameters in memory of their own.

        Args:
            gathered: ``[shard_count, ...]``, as a tensor or as a list of rows.
            comes_again: The same may be gathered again without ``start_gather``.
        """

    def free_whole(self) -> None:
        """Give that memory back."""

    @property
    def can_leave(self) -> bool:
        """Whether ``leave_whole`` is possible."""

    def leave_whole(self, joining_hook: Callable[[int], GradientHook], *, stays: bool) -> None:
        """Let the whole parameters belong to those who hold them, and have others from now on.

        Args:
            joining_hook: Makes the hook for the gradients that the old ones of index ``i`` get.
            stays: The others have memory and values, as the old ones do.
        """

    def take_replacements(self) -> bool:
        """Note what stands in the place of our tensors; whether that calls for ``rebuild``.

        Raises:
            RuntimeError: A parameter was replaced by something that is not its shard.
        """

    def rebuild(self) -> None:
        """Take over what ``take_replacements`` found. Nothing may be whole."""

    def for_copy(
        self, params: list[ShardedParam], gradient_hook: Callable[[int], GradientHook]
    ) -> Faces:
        """Return tensors of their own for ``params``, whose sharded faces have been copied."""

    def move(self, home: Home | None) -> torch.Tensor:
        """Start moving the shards; None: back to where they are gathered from."""

    def check_materialised(self) -> None:
        """Raise if a shard has no memory yet, or not where it is gathered from."""
