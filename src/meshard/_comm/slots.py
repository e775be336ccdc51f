"""Which part of a rank's slot is which part of the whole parameter?"""

from __future__ import annotations

import torch

from meshard._geometry.layout import ParamLayout


def matching_parts(
    slots: torch.Tensor, whole: torch.Tensor, layout: ParamLayout
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs of views, of the slots and of the whole parameter, that hold the same elements.

    At most two pairs: all full chunks at once, and the one rank that owns fewer rows.

    Args:
        slots: ``[shard_count, slot_numel]``, rank by rank.
        whole: The whole parameter, or a whole gradient; any strides.
        layout: How it is cut.
    """
    parts = []
    chunk, full = layout.chunk_rows, layout.full_chunks
    # reshape is a view for contiguous tensors, which whole parameters are by construction.
    rows = whole.reshape(layout.prefix, layout.rows, layout.suffix)
    if full and layout.slot_numel:
        ours = slots[:full].view(full, layout.prefix, chunk, layout.suffix)
        theirs = rows[:, : full * chunk].unflatten(1, (full, chunk))
        parts.append((ours.transpose(0, 1), theirs))
    rest = layout.rows - full * chunk
    if rest and layout.slot_numel:
        owned = slots[full, : layout.prefix * rest * layout.suffix]
        parts.append((owned.view(layout.prefix, rest, layout.suffix), rows[:, full * chunk :]))
    return parts


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source into its target, which have the same shapes, in one call of torch."""
    if len(targets) == 1:
        targets[0].copy_(sources[0])  # half the time
    else:
        torch._foreach_copy_(targets, sources)
