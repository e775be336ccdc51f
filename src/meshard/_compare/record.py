"""What one rank records of one run, step by step, without communication."""

import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.optim.optimizer as optim
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

KINDS = ("initial weight", "loss", "gradient", "weight")  # in this order in a step
NUM_SUMS = 64
_CHUNK = 2**18  # elements that are summed at once
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def has_device() -> bool:
    """Return whether tensors are on an accelerator."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type != "cpu"


# --- one tensor ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Fingerprint:
    """What is recorded of this rank's part of a tensor. Tensors of equal ones are equal bitwise.

    ``sums`` are the elements with random signs, added up to 64 numbers. Their distance to those of
    another tensor is about that of the two tensors: exact for 64 elements, else to a tenth.
    """

    dtype: torch.dtype
    numel: int
    checksum: int  # of all bits
    norm: float = field(compare=False)  # of a single element its value
    sums: tuple[float, ...] = field(compare=False)


def _plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return what this rank holds of a tensor; of a subclass, the tensors inside it."""
    if isinstance(tensor, DTensor):
        return _plain_parts(tensor.to_local())
    if hasattr(tensor, "__tensor_flatten__"):
        names = tensor.__tensor_flatten__()[0]
        return [part for name in names for part in _plain_parts(getattr(tensor, name))]
    return [torch.view_as_real(tensor) if tensor.is_complex() else tensor]


def _fingerprint(tensor: torch.Tensor | None) -> Fingerprint | None:
    if tensor is None:
        return None
    parts = _plain_parts(tensor.detach())
    dtype, device, numel = parts[0].dtype, parts[0].device, sum(part.numel() for part in parts)
    draw = torch.Generator(device).manual_seed(0)  # leaves the generators of the script alone
    checksum = torch.zeros((), dtype=torch.int64, device=device)
    sums, squares = torch.zeros(2, NUM_SUMS, dtype=torch.float64, device=device)
    for chunk in (chunk for part in parts for chunk in part.flatten().split(_CHUNK)):
        drawn = torch.empty(chunk.shape, dtype=torch.int64, device=device).random_(generator=draw)
        checksum += (chunk.view(_INTEGERS[chunk.itemsize]) * (drawn | 1)).sum()
        values = chunk.double() * (1 - (drawn & 2))
        values = nn.functional.pad(values, (0, -len(values) % NUM_SUMS)).view(-1, NUM_SUMS)
        sums += values.sum(0)
        squares += values.square().sum(0)
    norm = float(squares.sum().sqrt() if numel != 1 else parts[0])
    return Fingerprint(dtype, numel, int(checksum), norm, tuple(sums.tolist()))


# --- names ---------------------------------------------------------------------------------


def _named(
    module: nn.Module, path: str, unit: str
) -> Iterator[tuple[nn.Parameter, tuple[str, str]]]:
    """Yield the parameters of a module with their units and names, which have no DDP in them."""
    is_ddp = isinstance(module, DistributedDataParallel)
    if is_ddp or isinstance(module, FSDPModule):
        unit = path[:-1] or "(root)"
    for name, param in module.named_parameters(recurse=False):
        yield param, (unit, path + name)
    for name, child in module.named_children():
        yield from _named(child, path if is_ddp else f"{path}{name}.", unit)


def _names_of(params: list[torch.Tensor], modules: list[nn.Module]) -> list[tuple[str, str]]:
    """Return unit and name of each parameter, as the outermost module around it names it."""
    inside = {id(child) for module in modules for child in module.children()}
    roots = [module for module in modules if id(module) not in inside]
    found = {id(param): name for root in roots for param, name in _named(root, "", "(none)")}
    return [found.get(id(p), ("(none)", f"parameter {i}")) for i, p in enumerate(params)]


# --- the steps -----------------------------------------------------------------------------


@dataclass
class Step:
    """One call of ``step`` of one optimizer."""

    names: list[tuple[str, str]]  # unit and name of each parameter
    tensors: dict[str, list[Fingerprint | None]]  # by kind, of each parameter, or of each backward
    seconds: float = 0.0  # since the end of the step before


@dataclass
class Record:
    """What one rank has done in one run."""

    run: str
    rank: int
    steps: list[Step] = field(default_factory=list)
    num_units: int = 0  # modules that the library of this run has sharded or replicated
    dtypes: set[tuple[Any, Any]] = field(default_factory=set)  # param_dtype, reduce_dtype of units
    peak_bytes: int = 0  # allocated on the device, else resident
    error: str = ""  # a traceback
    failed_at: float = 0.0  # by the clock of the host


def _params_of(optimizer: optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


class Recorder:
    """Hooks on the steps of all optimizers, and on ``backward``."""

    def __init__(self, record: Record, num_steps: int, unit_classes: tuple[type, ...]) -> None:
        self._record, self._num_steps, self._unit_classes = record, num_steps, unit_classes
        self._names: dict[optim.Optimizer, list[tuple[str, str]]] = {}
        self._losses: list[torch.Tensor] = []
        self._stepping: optim.Optimizer | None = None  # the outermost: one may step others
        self._ended = 0.0  # when the last step was over, plus the untimed blocks since then
        optim.register_optimizer_step_pre_hook(torch.compiler.disable(self._before))
        optim.register_optimizer_step_post_hook(torch.compiler.disable(self._after))
        own = torch.autograd.backward

        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            if isinstance(tensors, torch.Tensor) and tensors.numel() == 1 and grad_tensors is None:
                self._losses.append(tensors.detach().clone())
            own(tensors, grad_tensors, *args, **kwargs)

        torch.autograd.backward = backward

    @contextmanager
    def _untimed(self) -> Iterator[float]:
        """Keep a block out of times and peaks; yield the time before it."""
        if has_device():
            torch.accelerator.synchronize()
            peak = torch.accelerator.max_memory_allocated()
            self._record.peak_bytes = max(self._record.peak_bytes, peak)
        began = time.perf_counter()
        with torch.no_grad():
            yield began
        if has_device():
            torch.accelerator.reset_peak_memory_stats()
        self._ended += time.perf_counter() - began

    def _before(self, optimizer: optim.Optimizer, *_: Any) -> None:
        if self._stepping not in (None, optimizer):
            return
        self._stepping = optimizer
        with self._untimed():
            params = _params_of(optimizer)
            is_first = len(self._names.get(optimizer, ())) != len(params)
            if is_first:
                self._find_units(optimizer, params)
            tensors = {
                "initial weight": [_fingerprint(param) for param in params if is_first],
                "loss": [_fingerprint(loss) for loss in self._losses],
                "gradient": [_fingerprint(param.grad) for param in params],
            }
            self._losses.clear()
            self._record.steps.append(Step(self._names[optimizer], tensors))

    def _find_units(self, optimizer: optim.Optimizer, params: list[torch.Tensor]) -> None:
        modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
        self._names[optimizer] = _names_of(params, modules)
        units: list[Any] = [module for module in modules if isinstance(module, self._unit_classes)]
        self._record.num_units = len(units)
        policies = [unit._get_fsdp_state()._mp_policy for unit in units if hasattr(unit, "unshard")]
        self._record.dtypes = {(each.param_dtype, each.reduce_dtype) for each in policies}

    def _after(self, optimizer: optim.Optimizer, *_: Any) -> None:
        if self._stepping is not optimizer:
            return
        self._stepping, number = None, len(self._record.steps)
        with self._untimed() as now:
            step = self._record.steps[-1]
            step.tensors["weight"] = [_fingerprint(param) for param in _params_of(optimizer)]
            step.seconds, self._ended = now - self._ended, now
            if self._record.rank == 0:
                done = f"step {number} of {self._num_steps}"
                print(f"compare: {self._record.run}, {done}", file=sys.stderr, flush=True)
        if number >= self._num_steps:
            sys.exit()
