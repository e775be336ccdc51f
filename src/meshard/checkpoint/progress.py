"""A progress bar in bytes, and a line that sums up, on one rank."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

try:
    import tqdm as _tqdm
except ImportError:  # the extra is not installed
    _tqdm = None
tqdm: Any = _tqdm

_logger = logging.getLogger("meshard")


@contextlib.contextmanager
def progress_bar(
    title: str, num_bytes: int, *, wanted: bool | None, is_first_rank: bool
) -> Iterator[Callable[[int], None]]:
    """Yield what to call with the bytes that are done. None: a bar if stderr is a terminal."""
    if wanted and tqdm is None:
        raise ImportError(
            "progress=True draws with tqdm, which is not installed; run "
            'pip install "meshard[checkpoint]".'
        )
    is_shown = sys.stderr.isatty() if wanted is None else wanted
    if tqdm is None or not is_shown or not is_first_rank:
        yield lambda num_bytes: None
        return
    with tqdm.tqdm(total=num_bytes, desc=title, unit="B", unit_scale=True) as bar:
        yield bar.update


def log_summary(what: str, num_bytes: int, num_files: int, began: float) -> None:
    """Log what was done since ``began``, of ``time.perf_counter``, and how fast."""
    seconds, gigabytes = time.perf_counter() - began, num_bytes / 1e9
    rate = gigabytes / seconds
    _logger.info(
        "%s: %.3f GB in %.1f s, %.2f GB/s, files: %d", what, gigabytes, seconds, rate, num_files
    )
