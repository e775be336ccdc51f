"""How are the rows of several ranks added up, so that all communicators give the same bits?"""

from __future__ import annotations

import torch


def sum_two(output: torch.Tensor, received: torch.Tensor, own: torch.Tensor) -> None:
    """Add two rows up in the dtype of ``output``, which may be ``received`` itself."""
    if received is not output and received.dtype == output.dtype:
        torch.add(received, own, out=output)
        return
    if received is not output:
        output.copy_(received)
    output.add_(own)


def sum_rows(output: torch.Tensor, rows: torch.Tensor) -> None:
    """Add the rows up pairwise, in the wider of the two dtypes; ``rows`` is used as scratch."""
    # Not torch.sum: it starts from +0.0 and would turn a sum of negative zeros positive.
    count = rows.size(0)
    wide = torch.promote_types(rows.dtype, output.dtype)
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
