"""How the gradients of a unit are reduced."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from meshard._comm.gradient_buffer import FlatGradients, GradientLayout
from meshard._mesh.layout import FlatLayout
from meshard._params.unit_params import UnitParams

_MAX_LAYOUTS = 64

TensorHook = Callable[[torch.Tensor], None]
DivideFactor = float | torch.Tensor | Callable[[], "float | torch.Tensor"]


def check_divide_factor(factor: object) -> float:
    """Return a divide factor as a number. Reads a 0-d tensor, and waits for its device."""
    if isinstance(factor, torch.Tensor) and factor.dim() == 0:
        factor = factor.item()
    if isinstance(factor, bool) or not isinstance(factor, numbers.Real):
        raise TypeError(
            f"factor must be a number, a callable or a 0-d tensor, got {type(factor).__name__}."
        )
    value = float(factor)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"factor must be positive and finite, got {factor}.")
    return value


@dataclass(frozen=True, slots=True, eq=False)
class ReduceHook:
    """One registration of a hook on gradients: ``meshard.register_reduce_hook``."""

    arrived: TensorHook | None = None  # sees the unsharded gradients of one backward
    before: TensorHook | None = None  # sees the unsharded gradients that are about to be reduced
    after: TensorHook | None = None  # sees the shard that is about to be added to .grad
    wire_dtype: torch.dtype | None = None  # None: as the policy says
    is_all_reduce: bool = False  # set by set_all_reduce_hook, which replaces it


@dataclass(slots=True)
class ReduceSettings:
    """The settings of a unit that its reductions read. They may change between steps."""

    divide_factor: DivideFactor | None = None  # None: the number of ranks
    zero_unused: bool = False  # publish a gradient of zero for parameters that no rank used
    max_input_buffers: int = 3  # units whose unsharded gradients may be in flight, the new one too
    scatter_group: dist.ProcessGroup | None = None  # None: the one that gathers
    reduce_hooks: list[ReduceHook] = field(default_factory=list)


class GradientRules:
    """Layouts and dtypes of the gradients of one unit."""

    def __init__(
        self,
        storage: UnitParams,
        reduce_dtype: torch.dtype | None,  # None: the widest dtype of the unsharded gradients
        accumulate_dtype: torch.dtype | None,  # None: the wider of float32 and the parameters'
    ) -> None:
        self._storage = storage
        self.reduce_dtype = reduce_dtype
        self.chosen_dtype = accumulate_dtype
        self._layouts: dict[tuple[int, ...], GradientLayout] = {}
        self._all = tuple(range(len(storage.params)))
        self.everything = frozenset(self._all)
        self._widest_of: FlatLayout | None = None
        self._widest = torch.float32

    def layout_for(
        self, used: frozenset[int], accumulated: Iterable[FlatGradients | None]
    ) -> GradientLayout:
        """Return the layout of all parameters that may have a gradient on some rank.

        ``used`` are those of this rank; ``accumulated``, those of earlier backwards of the window.
        """
        indices = self._all
        if used is not self.everything:
            present = used.union(*(grads.layout.indices for grads in accumulated if grads))
            indices = tuple(
                index
                for index, param in enumerate(self._storage.params)
                if param.sharded.requires_grad
                or param.unsharded.requires_grad  # in the last forward: frozen since, on all ranks
                or index in present
            )
        if indices not in self._layouts:
            if len(self._layouts) >= _MAX_LAYOUTS:  # the user freezes parameters at random
                self._layouts.clear()
            layouts = [param.layout for param in self._storage.params]
            self._layouts[indices] = GradientLayout(layouts, indices, self._storage.spec.device)
        return self._layouts[indices]

    @property
    def accumulate_dtype(self) -> torch.dtype:
        if self.chosen_dtype is not None:
            return self.chosen_dtype
        # Of the parameters as they are now: Module.double may have been called since.
        layout = self._storage.layout
        if layout is not self._widest_of:
            dtypes = [each.dtype for each in layout.segments if each.dtype.is_floating_point]
            self._widest = functools.reduce(torch.promote_types, dtypes, torch.float32)
            self._widest_of = layout
        return self._widest

    def wire_dtype(self, layout: GradientLayout) -> torch.dtype:
        if self.reduce_dtype is not None:
            return self.reduce_dtype
        dtypes = self._storage.compute_dtypes
        if self._storage.is_one_dtype:
            return dtypes[0]
        return functools.reduce(torch.promote_types, (dtypes[index] for index in layout.indices))
