"""Tensors whose memory is reserved and never touched: the data of a planned step.

Every operator is real but for its kernel. Shapes come from the meta device, views are real views of
real addresses, and autograd records and frees what it always does. So a step runs as in training,
in the time of its bookkeeping. New memory is zero, and a skipped kernel writes nothing. Operators
on small tensors run for real, because programs read them: counts, norms, masks.
"""

from __future__ import annotations

import functools
import mmap
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from meshard._torch.private import (
    DispatchMode,
    group_of_name,
    is_faking,
    tree_map,
)
from meshard.planning.workspaces import Kernel, is_kernel

# An operator runs for real if each of its tensors has at most this many elements. The limit of
# integers is higher, because programs often read them: ranks, positions, masks.
_SMALL, _SMALL_INTEGERS = 2**12, 2**22
# What is not known on the meta device runs for real if its tensors have at most this many elements.
_RUNS_FOR_REAL = 2**26
# This is MAP_NORESERVE, for which Python before 3.13 has no name. With it Linux reserves memory
# without asking whether the machine has so much.
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0

OnStorage = Callable[[torch.UntypedStorage], None]
OnKernel = Callable[[Kernel], None]
OnCollective = Callable[[str, int, dist.ProcessGroup], None]
_plain_dispatch = torch.Tensor.__torch_dispatch__


def _reserve(num_bytes: int) -> torch.UntypedStorage:
    """Return a storage of ``num_bytes`` zeros that take no memory until they are written to."""
    if num_bytes <= mmap.PAGESIZE:
        return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu").untyped_storage()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = mmap.mmap(-1, num_bytes, flags=flags)
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes).untyped_storage()


class _Schema(NamedTuple):
    """What the schema of an operator says."""

    is_view: bool  # or changes what a tensor is a view of
    # For each result: if the operator writes to an argument and returns it, the name and position
    # of that argument; otherwise None.
    returned: tuple[tuple[str, int] | None, ...]
    takes_device: bool


@functools.cache
def _schema_of(func: Any) -> _Schema:
    schema = func._schema
    written = {}
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for name in argument.alias_info.before_set:
                written[name] = argument.name, position
    returned = []
    is_view = torch.Tag.inplace_view in func.tags
    for result in schema.returns:
        names = set() if result.alias_info is None else result.alias_info.before_set
        same = next((written[name] for name in names if name in written), None)
        is_view |= bool(names) and same is None
        returned.append(same)
    takes_device = any(argument.name == "device" for argument in schema.arguments)
    return _Schema(is_view, tuple(returned), takes_device)


class PhantomMode(DispatchMode):  # type: ignore[misc]  # an Any
    """Runs operators without their kernels.

    Each new storage is reported to ``on_storage``, each kernel whose own memory no schema tells to
    ``on_kernel``, and each collective, of whomever, to ``on_collective``.

    Attributes:
        ran_for_real: Operators that ran because the meta device has no implementation of them.
    """

    def __init__(
        self, on_storage: OnStorage, on_kernel: OnKernel, on_collective: OnCollective
    ) -> None:
        super().__init__()
        self._on_storage, self._on_kernel = on_storage, on_kernel
        self._on_collective = on_collective
        self._kernels: dict[Any, Kernel] = {}  # by operator and forms
        self._results: dict[Any, Any] = {}  # by operator and forms: the results on the meta device
        self.ran_for_real = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_faking():  # DTensor finds out a shape
            return func(*args, **kwargs)
        tensors = list(_tensors_in((*args, *kwargs.values())))
        if any(type(tensor).__torch_dispatch__ is not _plain_dispatch for tensor in tensors):
            return NotImplemented  # DTensors come here again with their local tensors
        if func.namespace == "c10d":
            return self._communicate(func, args, tensors)
        if func.namespace == "_c10d_functional" and args[-1:] and isinstance(args[-1], str):
            group = group_of_name(args[-1])
            gathers = group.size() if "all_gather" in func._schema.name else 1
            self._on_collective(_op_of(func), gathers * sum(t.nbytes for t in tensors), group)
        schema = _schema_of(func)
        if schema.is_view or _is_on_meta(tensors, kwargs):
            return func(*args, **kwargs)
        if tensors and all(map(_is_small, tensors)):
            return self._run(func, args, kwargs, tensors)
        shapes: Any = schema.returned
        if None in shapes:  # else it only writes to its arguments
            key = func, _form_of(args), _form_of(tuple(kwargs.items())), torch.get_default_dtype()
            if key not in self._results:
                self._results[key] = self._shapes(key, args, kwargs, schema)
            shapes = self._results[key]
            # None: a view that its schema does not declare, or unknown
            if shapes is None or (not tensors and all(map(_is_small, _tensors_in(shapes)))):
                return self._run(func, args, kwargs, tensors)
        results = []
        for written, shape in zip(schema.returned, shapes, strict=True):
            if written is None:
                results.append(self._made(shape))
            else:
                name, position = written
                results.append(args[position] if position < len(args) else kwargs[name])
        if is_kernel(func):
            self._on_kernel(self._kernels[key])
        return results[0] if len(results) == 1 else tuple(results) or None

    def _run(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        known = {tensor.untyped_storage()._cdata for tensor in tensors}
        result = func(*args, **kwargs)
        for tensor in _tensors_in(result):
            if type(tensor) is not torch.Tensor or tensor.is_meta:
                continue  # a wrapper, such as the result of a functional collective
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                self._on_storage(storage)
                if "empty" in func._schema.name:
                    tensor.zero_()
        return result

    def _shapes(self, key: Any, args: Any, kwargs: Any, schema: _Schema) -> Any:
        """Return the results on the meta device; None if the operator has to run."""
        func: Any = key[0]
        most = max((each.numel() for each in _tensors_in((args, kwargs))), default=0)
        args, kwargs = tree_map(_to_meta, (args, kwargs))
        given = [each.untyped_storage()._cdata for each in _tensors_in((args, kwargs))]
        if schema.takes_device:
            kwargs = {**kwargs, "device": torch.device("meta")}
            kwargs.pop("pin_memory", None)
        try:
            if is_kernel(func):
                kernel = self._kernels[key] = Kernel(func, args, kwargs)
                found = kernel.results()
            else:
                found = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if most > _RUNS_FOR_REAL:
                raise RuntimeError(
                    f"the shape of what {func} returns is not known: it depends on values, as with "
                    "masks, or the operator has no implementation on the meta device. Its tensors "
                    f"of {most:,} elements are too large to run it. For an operator of your own "
                    "register one with torch.library.register_fake, or plan without it."
                ) from error
            self.ran_for_real.add(str(func))
            return None
        is_view = any(each.untyped_storage()._cdata in given for each in _tensors_in(found))
        return None if is_view else (found if len(schema.returned) > 1 else [found])

    def _made(self, shape: Any) -> Any:
        """Return phantom tensors for those on the meta device, in the same containers."""
        if isinstance(shape, (list, tuple)):
            return type(shape)(self._made(each) for each in shape)
        if not isinstance(shape, torch.Tensor):
            return shape
        storage = _reserve(shape.untyped_storage().nbytes())
        self._on_storage(storage)
        made = torch.empty(0, dtype=shape.dtype, device="cpu")
        return made.set_(storage, shape.storage_offset(), shape.shape, shape.stride())

    def _communicate(self, func: Any, args: Any, tensors: list[torch.Tensor]) -> Any:
        """Pretend to communicate. Small gathers are as if all ranks sent the same; sums are not."""
        name = func._schema.name.removeprefix("c10d::").strip("_")
        if all(map(_is_small, tensors)):
            _fill_alike(name, args)
        group = next(each for each in args if isinstance(each, torch.ScriptObject))
        sizes = [sum(each.nbytes for each in _tensors_in(given)) for given in args]
        self._on_collective(_op_of(func), max(sizes), dist.ProcessGroup.unbox(group))
        # A work that is done, in the form in which operators return it.
        work = torch.ops.c10d.barrier(torch.empty(0, device="cpu"), group, [], False, -1)
        return work if len(func._schema.returns) == 1 else (args[0], work)


_OPS = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}


def _op_of(func: Any) -> str:
    """Return the name of a collective as ``CommLedger`` has it."""
    name = str(func._schema.name).partition("::")[2].strip("_")
    for end in ("_base", "_into_tensor", "_tensor", "_single"):
        name = name.removesuffix(end)
    return _OPS.get(name, name)


def _fill_alike(name: str, args: Any) -> None:
    if name == "allgather_base" and args[1].numel():
        output, source = args[0].view(-1), args[1].reshape(-1).clone()  # it may lie in the output
        output.view(-1, *source.shape).copy_(source)
    elif name in ("allgather", "gather"):
        (source,) = args[1]
        for output in _tensors_in(args[0]):
            output.copy_(source)
    elif name in ("reduce_scatter_base", "alltoall_base"):
        output, source = args[0].view(-1), args[1].reshape(-1)
        count = min(output.numel(), source.numel())
        output.zero_()[:count].copy_(source[:count])


def _is_small(tensor: torch.Tensor) -> bool:
    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    return tensor.numel() <= (_SMALL_INTEGERS if is_integer else _SMALL)


def _is_on_meta(tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "meta":
        return True
    return bool(tensors) and device is None and all(tensor.is_meta for tensor in tensors)


def _to_meta(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return torch.device("meta") if isinstance(leaf, torch.device) else leaf
    return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")


def _form_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_form_of, value))
    return type(value), value  # 1, 1.0 and True are one key, and give other dtypes


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Iterate over the tensors in what operators take and return: lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors_in(tuple(value.values()))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors_in(each)
