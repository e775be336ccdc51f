"""What torch asks of a process group that is made in Python, beside collectives."""

import torch.distributed as dist


class LocalGroup(dist.ProcessGroup):
    """A process group without a network.

    Args:
        name: As torch names it.
        group_rank: This rank.
        size: Ranks.
    """

    backend = ""

    def __init__(self, name: str, group_rank: int, size: int) -> None:
        super().__init__(group_rank, size)
        self._name, self._group_rank, self._size = name, group_rank, size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._group_rank

    def getBackendName(self) -> str:
        return self.backend

    @property
    def pg_name(self) -> str:
        return self._name

    @property
    def group_name(self) -> str:
        return self._name

    def shutdown(self) -> None:
        """Nothing to give back."""

    def abort(self) -> None:
        """Nothing to give back."""
