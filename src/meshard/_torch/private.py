"""Private names of torch that meshard calls.

``tests/house`` notices when one of these names goes.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._dynamo import eval_frame

_SKIP, _GO_ON = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
_SKIP_ALL = eval_frame._FrameExecStrategy(_SKIP, _SKIP)
_SKIP_ONE = eval_frame._FrameExecStrategy(_SKIP, _GO_ON)

Function = TypeVar("Function", bound=Callable[..., Any])


def skip_dynamo(function: Function) -> Function:
    """Have ``torch.compile`` run ``function``, and what it calls, as it stands.

    Dynamo watches the frames that Python is about to run, also those of hooks around a compiled
    module. The mark on the code makes it pass this one and all below; the attribute ends a graph
    where a trace would call the function. Neither costs a call anything, where the public
    ``torch.compiler.disable`` puts a wrapper around it: 0.9 us per call.

    Returns:
        ``function`` itself.
    """
    return _marked(function, _SKIP_ALL)


def skip_dynamo_once(function: Function) -> Function:
    """Have ``torch.compile`` pass ``function``, but look at what it calls."""
    return _marked(function, _SKIP_ONE)


def _marked(function: Function, strategy: eval_frame._FrameExecStrategy) -> Function:
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "the border of a meshard unit"  # type: ignore[attr-defined]
    return function


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Have ``callback`` called when the present backward ends; torch's own DDP does so too."""
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def is_in_backward() -> bool:
    """Whether the present thread is running a backward."""
    return torch._C._current_graph_task_id() != -1


def graph_task_id() -> int:
    """Return the number of the autograd run of this thread; -1 outside of a backward."""
    return torch._C._current_graph_task_id()


def keeps_graph() -> bool:
    """Whether the backward that is running was told ``retain_graph``, or ``create_graph``."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def next_node() -> int:
    """Return the number of the next autograd node of this thread; they count up."""
    return torch._C._autograd._get_sequence_nr()


def number_of(tensor: torch.Tensor) -> int:
    """Return the number of the autograd node that made ``tensor``; -1 if none did."""
    node = tensor.grad_fn
    return -1 if node is None else node._sequence_nr()


_OWN_KEYS = itertools.count(-1, -1)  # those of torch's handles count up from 0


def hook_gradient(
    tensor: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor | None]
) -> None:
    """Do what ``tensor.register_hook(hook)`` does, but for the handle, which takes 3 us to make.

    Args:
        tensor: One that requires a gradient.
        hook: Never removed.
    """
    if type(tensor) is not torch.Tensor:
        tensor.register_hook(hook)
        return
    hooks = tensor._backward_hooks
    if hooks is None:
        hooks = tensor._backward_hooks = OrderedDict()
        node = tensor.grad_fn
        if node is not None:
            node._register_hook_dict(tensor)
    hooks[next(_OWN_KEYS)] = hook


def keeping_version(*tensors: torch.Tensor) -> AbstractContextManager[None]:
    """Return a context in which writing to ``tensors`` does not count as a change of them.

    So that filling a whole parameter again is not taken for an in-place change of a saved tensor.
    """
    return torch.autograd.grad_mode._unsafe_preserve_version_counter(tensors)


# Within it torch does not ask at each attribute of a DTensor whether ``__torch_function__`` wants
# to know (DTensor's does not), which takes twice as long as the attribute itself. For loops over
# several, without a call of anything of the user's.
without_torch_function = torch._C.DisableTorchFunctionSubclass


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return what carries the collectives of ``group`` on ``device``."""
    return group._get_backend(device)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return how long the collectives of ``group`` on CPU tensors wait for a rank."""
    options = getattr(backend_of(group, torch.device("cpu")), "options", None)
    timeout: timedelta = getattr(options, "_timeout", dist.default_pg_timeout)
    return timeout
