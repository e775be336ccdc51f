"""The machine on which a job is planned: ranks, a device and its streams that do not exist."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode

from meshard._comm.communicator import CommEvent, Communicator, Handle, observers
from meshard._comm.cpu import WorkHandle
from meshard._communicators import communicators_from
from meshard._engine.param_group import owner_of as group_of
from meshard._engine.param_group import sharded_params_of
from meshard._engine.unit import Unit, alive, units_in, units_of
from meshard._torch.dtensor import plain_of, plain_tensors_in
from meshard._torch.private import (
    default_device_of,
    fake_store,
    foreach_devices,
    graph_task_id,
    tree_flatten,
)
from meshard.optim.host_state import StreamedStep
from meshard.optim.local_step import LocalStep
from meshard.optim.overlap import Worker
from meshard.planning.communicators import PlannedStreams, PlannedWorks
from meshard.planning.device import Generator, returning, stand_ins
from meshard.planning.memory import MemoryLog
from meshard.planning.phantom import PhantomMode
from meshard.planning.workspaces import Kernel, measured


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective that meshard issues, as ``CommLedger`` records it."""

    op: str
    unit: str
    group_size: int
    payload_bytes: int
    wire_bytes: int
    is_between_nodes: bool  # its group has ranks of several nodes


class Machine:
    """A rank of a job on a machine that does not exist, while ``running``.

    Attributes:
        log: The memory of this rank.
        collectives: Those of the step that was begun last.
        phantom: What runs in place of kernels.
        others: The collectives of that step that meshard does not issue.
        not_measured: Operators that take memory of which the log does not know.
        recomputed: Units of which a part of the forward ran in backward.
        state: Bytes of shards of parameters, gradients and optimizer states, by kind.
    """

    def __init__(self, *, world_size: int, rank: int, ranks_per_node: int, device_type: str):
        self.world_size, self.rank = world_size, rank
        self.ranks_per_node = ranks_per_node
        self.device_type = device_type
        self.has_device = device_type != "cpu"
        self.log, self.collectives = MemoryLog(), list[Collective]()
        self.phantom = PhantomMode(self.log.add, self._on_kernel, self._on_sent)
        self.others = list[Collective]()
        self._is_own = False  # whether meshard has announced what is sent next
        self._kernels: dict[Kernel, list[int]] = {}  # with the numbers of their runs in the log
        self.not_measured = set[str]()
        # An ordered set: the outermost modules that ran and, if such a module is a part of a root
        # unit, the modules of that root.
        self._modules: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._running: list[nn.Module] = []
        self._unit_of: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.recomputed: set[str] = set()
        self._in_step = contextlib.ExitStack()
        self.state = Counter[str]()  # bytes by kind: the most that ``label`` has found

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Make this process the rank, until the end of the block."""
        if dist.is_initialized():
            raise RuntimeError(
                "plan() makes a process group of its own, and this process has one already; plan "
                "in a process of its own, as `python -m meshard plan` does."
            )
        environment = {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.rank % self.ranks_per_node),
            "LOCAL_WORLD_SIZE": str(min(self.ranks_per_node, self.world_size)),
        }
        # torch imports this when it is needed, which must not be while functions are replaced.
        importlib.import_module("torch._dynamo")
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.dict(os.environ, environment))
            # A process group changes the hook, and a job may change the dtype.
            stack.callback(setattr, sys, "excepthook", sys.excepthook)
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            # What was compiled while functions were replaced must not be used afterwards.
            stack.callback(torch.compiler.reset)
            dist.init_process_group(
                "fake", store=fake_store(), rank=self.rank, world_size=self.world_size
            )
            stack.callback(dist.destroy_process_group)
            for name in ("init_process_group", "destroy_process_group"):
                # A job may make its process group as in training, and call the function by a name
                # of its own, as after ``from torch.distributed import init_process_group``.
                own, instead = getattr(dist, name), returning(None)
                _replace_everywhere(name, own, instead)
                stack.callback(_replace_everywhere, name, instead, own)
            for target, name, instead in self._replaced():
                stack.enter_context(mock.patch.object(target, name, instead))
            stack.enter_context(communicators_from(self._make_communicator))
            self._watch(stack)
            stack.enter_context(_OnThisDevice(self.device_type))
            stack.enter_context(self.phantom)
            # What the job prints must not stand in the plan, which may be JSON.
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
            # A plan has all tensors on the CPU. So the warning that host memory is not pinned,
            # because there is no device, would say nothing about the job.
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", r"CPUOffloadPolicy\(pin_memory=True\)")
            # Kernels on large tensors are skipped, so a buffer may look as if nothing had written
            # to it.
            warnings.filterwarnings("ignore", "this forward computes with buffers that hold no")
            yield

    def units(self) -> list[Unit]:
        """Return the units of all modules that ran."""
        return list(dict.fromkeys(unit for each in self._modules for unit in units_in(each)))

    def label(self, *, is_last: bool = False) -> None:
        """Tell the log what parameters and gradients are for, and the last time also states."""
        labels, offloaded = dict[int, str](), set[int]()
        for unit in self.units():
            ids = [id(each.sharded) for each in unit.group.params]
            labels.update(dict.fromkeys(ids, unit.label))
            if self.has_device and ids and unit.group.spec.host is not None:
                offloaded.update(ids)
        num_bytes = Counter[str]()  # by kind

        def relabel(
            tensors: Iterable[torch.Tensor], kind: str, param: torch.Tensor, rests: bool = False
        ) -> None:
            own = _plain(tensors)
            num_bytes[kind] += sum(each.nbytes for each in own)
            unit, is_on_host = labels.get(id(param)), rests or id(param) in offloaded
            self.log.relabel(own, kind, unit=unit, is_on_host=is_on_host)

        for module in self._modules:
            self.log.relabel(_plain(module.buffers()), "params")
        params = [each for module in self._modules for each in module.parameters()]
        # A module may be called alone, and as a part of another one.
        for param in dict.fromkeys(sharded_params_of(params)):
            relabel([param], "params", param)
            if param.grad is not None:
                relabel([param.grad], "grads", param)
        # When they are asked for their state, some optimizers finish steps.
        for optimizer in self._optimizers if is_last else ():
            rests = self.has_device and isinstance(getattr(optimizer, "_step", 0), StreamedStep)
            for stepped, state in optimizer.state.items():
                tensors = filter(torch.is_tensor, tree_flatten(state)[0])
                relabel(tensors, "optimizer", stepped, rests)
        self.state |= num_bytes  # the larger number of each kind

    def _on_kernel(self, kernel: Kernel) -> None:
        if self.has_device or not kernel.is_measured:
            self.not_measured.add(kernel.name)
        else:
            self._kernels.setdefault(kernel, []).append(self.log.add_workspace())

    def measure_workspaces(self) -> None:
        """Run each kernel whose own memory is not known once, outside of ``running``."""
        sizes = measured(self._kernels) if self._kernels else []
        for numbers, size in zip(self._kernels.values(), sizes, strict=True):
            for number in numbers:
                self.log.fill_workspace(number, size)

    # --- what stands in for torch's own ----------------------------------------------------

    def _replaced(self) -> Iterator[tuple[Any, str, Any]]:
        if self.has_device:
            # On a device, optimizers use kernels for lists of tensors, which take more memory.
            for where, name, supported in foreach_devices():
                yield where, name, returning([*supported(), "cpu"])
        log = self.log

        def step_in_log(_: Worker, function: Callable[..., Any], *args: Any) -> Future[Any]:
            # In a thread of its own the mode would see no kernel.
            done: Future[Any] = Future()
            with log.making("optimizer", is_on_host=self.has_device):
                done.set_result(function(*args))
            return done

        store = StreamedStep._store

        def store_in_log(streamed: StreamedStep, step: LocalStep) -> Handle:
            with log.making("optimizer", is_on_host=self.has_device):
                return store(streamed, step)

        yield StreamedStep, "_store", store_in_log
        yield Worker, "submit", step_in_log
        yield torch.UntypedStorage, "resize_", lambda storage, size: log.resize(storage, size)
        yield torch.UntypedStorage, "nbytes", lambda storage: log.size_of(storage)
        if not self.has_device:
            # Each collective is done no sooner than the host waits, which takes the most memory.
            yield WorkHandle, "done", lambda handle: handle._work is None
            return
        yield DeviceMesh, "__init__", _on_cpu(DeviceMesh.__init__, self.device_type)
        yield torch.autocast, "__init__", _on_cpu(torch.autocast.__init__, self.device_type)
        yield nn.Module, "to", _on_cpu(nn.Module.to, self.device_type)
        yield torch.Tensor, "record_stream", returning(None)
        yield torch, "Generator", Generator
        module = getattr(torch, self.device_type, None)
        index = self.rank % self.ranks_per_node
        for name, instead in stand_ins(index, self.ranks_per_node).items():
            if hasattr(module, name):
                yield module, name, instead

    def _make_communicator(self, _: torch.device) -> Communicator:
        return PlannedStreams(self.log) if self.has_device else PlannedWorks(self.log)

    def _watch(self, stack: contextlib.ExitStack) -> None:
        """Learn which unit runs, what is sent, and which optimizers there are."""
        for hook in (
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward, always_call=True),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ):
            stack.callback(hook.remove)
        observers.append(self._on_collective)
        stack.callback(observers.remove, self._on_collective)
        # A job may configure logging, and that must not hide from the plan what units log.
        logger = logging.getLogger("meshard")
        stack.enter_context(mock.patch.object(logger, "isEnabledFor", returning(True)))
        stack.enter_context(mock.patch.object(logger, "handle", self._on_record))

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        if not self._running and graph_task_id() == -1 and module not in self._modules:
            if not self.log.knows(_plain(module.parameters())):
                raise RuntimeError(
                    f"the {type(module).__name__} was made before the job, and a plan would change "
                    "its values; make models inside the job."
                )
            # Another method than forward may have called this part of a root.
            for unit in units_of(module):
                self._modules.update(dict.fromkeys(alive(unit.lifecycle.units()[0].modules)))
            self._modules[module] = None
        self._running.append(module)
        if graph_task_id() == -1:
            self._unit_of[module] = self._enter_forward()
        else:
            self.recomputed.add(self._unit_of.get(module, ""))

    def _after_forward(self, module: nn.Module, _: Any, __: Any) -> None:
        while self._running and self._running.pop() is not module:
            pass
        if graph_task_id() == -1:
            self._enter_forward()

    def _enter_forward(self) -> str:
        """Return the label of the unit that runs, ``""`` outside of units."""
        units = (unit for module in reversed(self._running) for unit in units_of(module))
        first = next(units, None)
        label = "" if first is None else first.label
        self.log.enter("forward", label)
        return label

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        self._optimizers.add(optimizer)
        self._enter_step(optimizer)

        def outside(given: Any) -> Any:
            """Return an argument; a closure that computes the loss is no part of the step."""
            if not callable(given):
                return given

            def run() -> Any:
                self._in_step.close()
                self.log.enter("forward", "")
                loss = given()
                self._enter_step(optimizer)
                return loss

            return run

        return tuple(map(outside, args)), {name: outside(each) for name, each in kwargs.items()}

    def _enter_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.label()
        self.log.enter("optimizer", "")
        params = [each for group in optimizer.param_groups for each in group["params"]]
        groups = [group_of(each) for each in params]
        is_on_host = self.has_device and all(g is not None and g.spec.host for g in groups)
        self._in_step.enter_context(self.log.making("optimizer", is_on_host=is_on_host))

    def _after_step(self, *_: Any) -> None:
        self._in_step.close()
        self.label()
        self.log.enter("after step", "")

    def _on_record(self, record: logging.LogRecord) -> None:
        if not isinstance(record.args, tuple) or len(record.args) != 3:
            return
        _, event, unit = map(str, record.args)
        if event == "unsharded":
            self.log.gathered(unit)
            if graph_task_id() != -1:
                self.log.enter("backward", unit)
        elif event == "reduce":
            self.log.reduced(unit)

    def _on_collective(self, event: CommEvent, group: dist.ProcessGroup, _: object) -> None:
        self._is_own = True
        self.collectives.append(self._collective_of(event, group))

    def _on_sent(self, op: str, num_bytes: int, group: dist.ProcessGroup) -> None:
        if not self._is_own and group.size() > 1:
            sent = self._collective_of(
                CommEvent(op, "", group.size(), num_bytes, torch.uint8), group
            )
            self.others.append(replace(sent, op=f"{op} (others)"))
        self._is_own = False

    def _collective_of(self, event: CommEvent, group: dist.ProcessGroup) -> Collective:
        nodes = {rank // self.ranks_per_node for rank in dist.get_process_group_ranks(group)}
        sizes = event.group_size, event.payload_bytes, event.wire_bytes
        return Collective(event.op, event.unit, *sizes, len(nodes) > 1)


def _plain(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors of this rank, and of those that are wrappers what is inside."""
    found: list[torch.Tensor] = []
    for each in map(plain_of, tensors):
        found += plain_tensors_in(each) if hasattr(each, "__tensor_flatten__") else [each]
    return found


def _replace_everywhere(name: str, own: Any, instead: Any) -> None:
    """Replace a function in each module that has it under this name."""
    for loaded in tuple(sys.modules.values()):
        if getattr(loaded, "__dict__", {}).get(name) is own:
            setattr(loaded, name, instead)


def _placed(value: Any, device_type: str) -> Any:
    """Return an argument, and for a device of this type the CPU."""
    if isinstance(value, (str, torch.device)) and str(value).partition(":")[0] == device_type:
        return type(value)("cpu")
    return value


def _on_cpu(method: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """Return a method that takes the CPU where a job names the device, which may be by number."""

    def placed(self: Any, *args: Any, **kwargs: Any) -> Any:
        numbered = ("cpu" if type(each) is int else _placed(each, device_type) for each in args)
        named = {name: _placed(each, device_type) for name, each in kwargs.items()}
        return method(self, *numbered, **named)

    return placed


class _OnThisDevice(TorchFunctionMode):
    """Makes on the CPU the tensors that a job makes on the imagined device, or moves to it."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._type = device_type

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func.__name__ == "__get__":  # of a property, most of all calls
            return func(*args, **kwargs)
        if func in (getattr(torch.Tensor, self._type, None), torch.Tensor.pin_memory):
            return args[0]  # as tensor.cuda()
        if func is functional.dropout and self._type != "cpu":
            rate, is_active = kwargs["p"], kwargs["training"] and not kwargs["inplace"]
            if is_active and 0 < rate < 1:
                return torch.native_dropout(args[0], rate, True)[0]  # it keeps a mask as on CUDA
        kwargs.pop("pin_memory", None)
        if kwargs.get("device") is None:
            # torch adds the default device only after this mode has run. So add it here.
            default = default_device_of(func)
            if default is not None and default.type == self._type:
                kwargs["device"] = default
        if func is torch.Tensor.to:
            args = tuple("cpu" if type(each) is int else each for each in args)
        if type(kwargs.get("device")) is int:
            kwargs["device"] = "cpu"
        args = tuple(_placed(each, self._type) for each in args)
        kwargs = {name: _placed(each, self._type) for name, each in kwargs.items()}
        return func(*args, **kwargs)
