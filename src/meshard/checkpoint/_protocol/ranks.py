"""What the ranks of a save or a load tell one another."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from meshard._comm.blocking import broadcast_object, gather_objects_to_first
from meshard._comm.stalls import Waiting
from meshard.checkpoint._protocol.storage import CheckpointError

_LABEL = "(checkpoint)"
_SHOWN = 20  # texts of one error
Result = TypeVar("Result")


class Ranks:
    """The ranks that save and load together. Methods are collective."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """``group`` is for CPU tensors, and used for nothing else. None: there is one rank."""
        self._group = group
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Ranks:
        """Return the ranks of ``group`` (None: the default group, if any), with a gloo group.

        **Collective:** all ranks of ``group``.
        """
        if not dist.is_available() or not dist.is_initialized():
            return cls(None)
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        if len(ranks) == 1:
            return cls(None)
        # A new group, because a save in the background communicates while training does.
        with Waiting("process group of a checkpoint", group or dist.group.WORLD):
            is_part = len(ranks) < dist.get_world_size()
            own = dist.new_group(ranks, backend="gloo", use_local_synchronization=is_part)
        return cls(own)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def together(
        self,
        what: str,
        own: Callable[[], Any],
        first: Callable[[list[Any]], Any],
        undo: Callable[[], object] = lambda: None,
    ) -> Any:
        """Call ``own`` on each rank, and ``first``, with what all returned, on the first one.

        If anything is raised, the first rank calls ``undo`` before the others hear of it.

        Returns:
            What ``first`` returned, on all ranks.

        Raises:
            CheckpointError: On all ranks, if anything was raised on one. It begins with ``what``.
        """
        value, texts = self._tried(own)
        gathered = [(value, texts)]
        if self._group is not None:
            gathered = gather_objects_to_first((value, texts), self._group, label=_LABEL)
        said = (None, list(dict.fromkeys(text for _, each in gathered for text in each)))
        if self.is_first and not said[1]:
            said = self._tried(lambda: first([value for value, _ in gathered]))
        if self.is_first and said[1]:
            self._tried(undo)
        if self._group is not None:
            said = broadcast_object(said, self._group, label=_LABEL)
        found, texts = said
        if texts:
            more = [f"and {len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else []
            raise CheckpointError("\n  ".join([f"{what}:", *texts[:_SHOWN], *more]))
        return found

    def each(self, what: str, call: Callable[[], Result]) -> Result:
        """Return what ``call`` returns on this rank, or raise on all ranks if it raises on one."""
        found = list[Result]()
        self.together(what, lambda: found.append(call()), lambda _: None)
        return found[0]

    def _tried(self, call: Callable[[], Any]) -> tuple[Any, list[str]]:
        """Return what a call returns, and texts of what it raises: the other ranks must know."""
        who = f"rank {self.rank}: "
        try:
            return call(), []
        except CheckpointError as error:
            return None, [str(each) for each in error.args]
        except FileNotFoundError as error:
            if self.size == 1:
                return None, [f"{who}{error}"]
            text = "All ranks must see one folder: use a file system that they share, or an object"
            return None, [f"{who}{error.filename} is not there. {text} store."]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                return None, [f"{who}{type(error).__name__}: {error}"]
            return None, [f"{who}no space is left; remove other checkpoints, or use keep=."]
        except Exception as error:
            return None, [f"{who}{type(error).__name__}: {error}"]
