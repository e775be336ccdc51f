"""Where do the gradients of runs lie in what the reduction of a unit yields?

As a rule as the shards do, in one piece for each run. Then an optimizer can step by them without a
gradient for every single parameter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshard._runtime.held_grads import Held
from meshard._runtime.param_group import ParamGroup
from meshard.flat_run import Run


class Places:
    """Where each of some runs finds its gradient, for one layout and one set of used parameters.

    Args:
        runs: Which.
        held: Gradients in that layout.
        group: Of the unit that they are of.
    """

    def __init__(self, runs: Sequence[Run], held: Held, group: ParamGroup) -> None:
        self._layout, self._used = held.layout, held.used
        self._runs = runs
        self._shards = group.tensors.layout
        self._starts = _find(runs, held, group)
        self._is_all = len(runs) == 1 and runs[0].flat.shape == held.flat.shape
        pairs = zip(runs, self._starts or (), strict=False)
        self.num_bytes = sum(run.flat.nbytes for run, start in pairs if start is not None)

    def are_of(self, runs: Sequence[Run], held: Held, group: ParamGroup) -> bool:
        """Whether this was made for these: no shard has moved since, or was replaced."""
        return (
            self._layout is held.layout
            and self._runs is runs
            and self._shards is group.tensors.layout
            and self._used == held.used
        )

    def give(self, flat: torch.Tensor) -> bool:
        """Give every run its gradient, if it has one; False if there are others than of runs.

        Args:
            flat: ``[shard_numel]``, all gradients.
        """
        if self._starts is None:
            return False
        for run, start in zip(self._runs, self._starts, strict=True):
            if start is None:
                run.flat.grad = None
            else:
                run.flat.grad = flat if self._is_all else flat.narrow(0, start, run.flat.numel())
        return True


def _find(runs: Sequence[Run], held: Held, group: ParamGroup) -> list[int | None] | None:
    """Return where each run begins, None if it has no gradient; None if one does not lie there."""
    slots = held.layout.slots
    offsets = {id(group.params[index].sharded): slots[index].offset for index in held.used}
    starts: list[int | None] = []
    for run in runs:
        found = [offsets.pop(id(member.param), None) for member in run.members]
        first = found[0]
        if first is None:
            if any(offset is not None for offset in found):
                return None
        elif found != [member.offset - run.members[0].offset + first for member in run.members]:
            return None
        starts.append(first)
    return None if offsets else starts
