"""How are the rows of several ranks added up, so that all communicators give the same bits?"""

from __future__ import annotations

import torch


def wider(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Return the dtype that holds both; torch is asked only where they differ."""
    return one if one is other else torch.promote_types(one, other)


def sum_two(output: torch.Tensor, received: torch.Tensor, own: torch.Tensor) -> None:
    """Add two rows up in the dtype of ``output``, which may be ``received`` itself."""
    if received is not output and received.dtype == output.dtype:
        torch.add(received, own, out=output)
        return
    if received is not output:
        output.copy_(received)
    output.add_(own)


_SMALL = 2**19  # elements: up to here one kernel is faster than one for each halving (measured)


def sum_rows(output: torch.Tensor, rows: torch.Tensor, *, keep_signs: bool = True) -> None:
    """Add the rows up in the wider of the two dtypes; ``rows`` is used as scratch.

    Args:
        output: ``[n]``.
        rows: ``[ranks, n]``.
        keep_signs: Make a sum of negative zeros a negative zero. It changes no other bit.
    """
    count = rows.size(0)
    wide = wider(rows.dtype, output.dtype)
    if count > 2 and rows.numel() <= _SMALL:
        if output.dtype == wide:
            total = torch.sum(rows, 0, dtype=wide, out=output)
        else:
            total = torch.sum(rows, 0, dtype=wide)
        if keep_signs:  # it starts from +0.0
            total.masked_fill_(torch.signbit(rows).all(0) & (total == 0), -0.0)
        if total is not output:
            output.copy_(total)
        return
    if rows.dtype != wide and (count > 2 or output.dtype != wide):
        rows = rows.to(wide)
    while count > 2:
        half = (count + 1) // 2
        rows[: count - half].add_(rows[half:count])
        count = half
    if output.dtype == wide:
        sum_two(output, rows[0], rows[1])
    else:
        output.copy_(rows[0].add_(rows[1]))
