"""What does a parameter look like whole that says itself what is gathered of it?

The first gather makes its whole face out of what ``fsdp_post_all_gather`` returns; later ones have
it filled again. In between, the memory that it names is given back by resizing it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from meshard._params.dtensors import local_of
from meshard._params.extension import (
    POST,
    Surroundings,
    as_whole,
    ask_for_inputs,
    takes_mesh_only,
)
from meshard._params.marks import Mark, mark_as
from meshard._params.private_torch import keeping_version
from meshard._params.sharded_param import ShardedParam


class ExtendedFace:
    """The whole face of one parameter, and the memory under it.

    Args:
        param: Its sharded face is there.
        shard: The local tensor.
        around: What ``fsdp_pre_all_gather`` is told.
        param_dtype: What ``fsdp_post_all_gather`` is told to compute in.
    """

    def __init__(
        self,
        param: ShardedParam,
        shard: torch.Tensor,
        around: Surroundings,
        param_dtype: torch.dtype,
    ) -> None:
        self.dtype = param_dtype  # of the whole parameter, and of its gradient
        self.num_inputs = 0  # tensors that are gathered
        self._param = param
        self._shard = shard
        self._around = around
        self._param_dtype = param_dtype
        self._mesh_only = takes_mesh_only(shard)
        self._metadata: Any = None
        self._is_made = False
        self._inner: list[tuple[torch.UntypedStorage, int]] = []
        self._has_own_memory = False
        placeholder = torch.empty(0, dtype=param_dtype, device=shard.device)
        flag = param.sharded.requires_grad
        param.unsharded = nn.Parameter(placeholder, requires_grad=flag)

    def make_inputs(self, unit: str) -> tuple[torch.Tensor, ...]:
        """Return what is to be gathered, anew."""
        inputs, self._metadata = ask_for_inputs(
            self._name(unit),
            self._shard,
            self._around,
            module=self._param.owners[0][0](),
            mesh_only=self._mesh_only,
        )
        device = self._shard.device
        if any(tensor.device != device for tensor in inputs):
            raise RuntimeError(
                f"fsdp_pre_all_gather of {self._name(unit)} returned tensors on "
                f"{[str(tensor.device) for tensor in inputs]}; all must be on {device}."
            )
        self.num_inputs = len(inputs)
        return inputs

    def fill(self, outputs: Sequence[torch.Tensor], unit: str) -> bool:
        """Have the whole parameter in ``param.unsharded``.

        Args:
            outputs: What was gathered.
            unit: Its name, for errors.

        Returns:
            Whether the face was made anew.

        Raises:
            RuntimeError: ``fsdp_post_all_gather`` returned, or left, a tensor of another shape.
            TypeError: It returned something else than a tensor and its memory.
        """
        post: Any = self._shard.fsdp_post_all_gather  # type: ignore[attr-defined]
        if not self._is_made:
            returned = post(tuple(outputs), self._metadata, self._param_dtype)
            self._make(*as_whole(self._name(unit), returned), outputs, unit)
            return True
        for storage, num_bytes in self._inner:
            if storage.nbytes() != num_bytes:
                storage.resize_(num_bytes)
        face = self._param.unsharded
        is_placed = self._param.placed is not None
        with keeping_version(face, *([local_of(face)] if is_placed else [])):
            post(tuple(outputs), self._metadata, self._param_dtype, out=face)
        if face.shape != self._param.sharded.shape:
            raise self._wrong_shape("left out", face.shape, unit)
        return False

    def _make(
        self,
        whole: torch.Tensor,
        inner: tuple[torch.Tensor, ...],
        outputs: Sequence[torch.Tensor],
        unit: str,
    ) -> None:
        self._inner = _memory_of(inner)
        layout, flag = self._param.layout, self._param.sharded.requires_grad
        if whole.shape != layout.shape:
            rows = layout.chunk_rows * layout.shard_count
            if whole.shape != (rows, *layout.shape[1:]):
                raise self._wrong_shape("returned a tensor", whole.shape, unit)
            # Padding is behind the rows of the last rank that owns any. Not narrow: this is what
            # torch's fully_shard asks of tensor subclasses.
            whole = whole.as_strided(layout.shape, self._around.outer_stride, 0)
        if type(whole) is torch.Tensor:
            taken = {storage.data_ptr() for storage, _ in (*self._inner, *_memory_of([whole]))}
            self._has_own_memory = all(
                storage.data_ptr() not in taken for storage, _ in _memory_of(outputs)
            )
        face = self._param.as_used(nn.Parameter(whole, requires_grad=flag))
        mark_as(face, Mark.WHOLE_FACE, self._param.fqn)
        self._param.unsharded = face
        self.dtype = face.dtype
        self._is_made = True

    @property
    def leaves_outputs(self) -> bool:
        """Whether nothing refers to what was gathered once the face is filled."""
        return self._has_own_memory

    def free(self) -> None:
        """Give the memory under the face back."""
        for storage, _ in self._inner:
            storage.resize_(0)

    def forget_metadata(self) -> None:
        """Drop what belongs to one gather."""
        self._metadata = None

    def _name(self, unit: str) -> str:
        return f"parameter {self._param.fqn!r} of unit {unit!r}"

    def _wrong_shape(self, did: str, shape: torch.Size, unit: str) -> RuntimeError:
        return RuntimeError(
            f"{POST} of {self._name(unit)}, a {type(self._shard).__name__}, {did} of shape "
            f"{tuple(shape)}; it must be {tuple(self._param.layout.shape)}, which may be followed "
            "by the rows of padding."
        )


def _memory_of(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.UntypedStorage, int]]:
    """Return the storages of plain tensors, with their bytes."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return [(storage, storage.nbytes()) for storage in storages.values()]
