"""How is a DTensor opened and closed without a dispatch?

The only file that touches DTensor's private attributes. ``DTensor.from_local`` costs 24 us and
``to_local`` enters autograd; a step wraps every sharded gradient once, so both are avoided:
``DTensor(local, spec, requires_grad=False)`` costs 2.5 us. ``tests/architecture`` notices when
one of these names goes.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement


def make_dtensor(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: torch.Size,
) -> DTensor:
    """Return a DTensor of global ``shape`` (contiguous) over this rank's ``local`` shard."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=shape, stride=tuple(stride)
    )


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor object itself: no copy, no autograd."""
    return tensor._local_tensor  # type: ignore[attr-defined, no-any-return]


def set_local(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Put ``local`` under an existing DTensor, whose identity an optimizer may hold."""
    tensor._local_tensor = local  # type: ignore[attr-defined]


def wrap_like(tensor: torch.Tensor, local: torch.Tensor) -> DTensor:
    """Return ``local`` as a DTensor placed like ``tensor``, with its shape, without autograd."""
    spec = tensor._spec  # type: ignore[attr-defined]
    return DTensor(local, spec, requires_grad=False)
