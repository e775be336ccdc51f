"""What differs between the versions of torch that tests run with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Changed:
    """A result that some version of torch changed: ``Changed("wrong", {"2.15": "right"})``."""

    first: Any  # of the oldest version that is supported
    since: Mapping[str, Any]  # from each of these versions on, oldest first


def on_torch(result: Any, version: str = torch.__version__) -> Any:
    """Return the result of a version of torch; one that is not ``Changed`` is that of all."""
    if not isinstance(result, Changed):
        return result
    newer = [each for since, each in result.since.items() if _minor(version) >= _minor(since)]
    return [result.first, *newer][-1]


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split(".")[:2])
