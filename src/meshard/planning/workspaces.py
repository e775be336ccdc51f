"""Memory of the CPU's kernels that no schema tells of: measured once for each form of arguments."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.profiler import profile, record_function

from meshard._torch.private import tree_map

# oneDNN copies what it convolves into blocks of channels, and keeps what a backward of LSTM needs.
KERNELS = ("convolution", "convolution_backward", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward")
MOST = 2**26  # elements of the largest tensor with which a kernel is run
_RANGE = "meshard::kernel"


@functools.cache
def is_kernel(func: Any) -> bool:
    """Whether the kernel of an operator takes memory that only a run of it tells."""
    return func.namespace == "aten" and str(func._schema.name).removeprefix("aten::") in KERNELS


@dataclass(frozen=True, eq=False, slots=True)
class Kernel:
    """An operator with arguments on the meta device."""

    func: Any
    args: Any
    kwargs: Any

    @property
    def name(self) -> str:
        """Such as "convolution"."""
        return str(self.func._schema.name.removeprefix("aten::"))

    @property
    def is_measured(self) -> bool:
        """Whether its tensors are small enough to run it."""
        return all(each.numel() <= MOST for each in self.args if isinstance(each, torch.Tensor))

    def results(self) -> Any:
        """Return what it returns, on the meta device."""
        if self.is_measured and self.name == "mkldnn_rnn_layer":  # its workspace is not known there
            args, kwargs = self.zeros()
            return tuple(each.to("meta") for each in self.func(*args, **kwargs))
        return self.func(*self.args, **self.kwargs)

    def zeros(self) -> Any:
        """Return arguments of zeros with which it can run."""
        return tree_map(_zeros_like, (self.args, self.kwargs))


def _zeros_like(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value, device="cpu")
    return value


def measured(kernels: Iterable[Kernel]) -> list[int]:
    """Return the bytes that each kernel has at most beside its arguments and results."""
    with profile(profile_memory=True) as profiler:
        for kernel in kernels:
            args, kwargs = kernel.zeros()
            with record_function(_RANGE):
                results = kernel.func(*args, **kwargs)
            del results
    events = profiler.kineto_results.events()
    begins = sorted(
        (e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name() == _RANGE
    )
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    found = []
    for begin, end in begins:
        totals = list(itertools.accumulate(n for at, n in changes if begin <= at <= end))
        found.append(max(totals, default=0) - (totals[-1] if totals else 0))
    return found
