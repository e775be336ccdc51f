"""What ``torch.cuda`` says and does on a machine that does not exist."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

MEMORY = 80 * 10**9  # bytes of the imagined device


def returning(value: Any) -> Callable[..., Any]:
    """Return a new function that returns ``value``, whatever it is called with."""
    # One for each name: dynamo refuses a function of torch that has two names.
    return lambda *_, **__: value


class _Stream:
    """A stream on which everything is done at once, and any event on it."""

    record = wait = wait_event = wait_stream = synchronize = returning(None)
    query = returning(True)
    elapsed_time = returning(1.0)  # milliseconds: programs divide by it

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device, self.cuda_stream, self.stream_id = torch.device("cpu"), 0, 0

    def record_event(self, event: Any = None) -> Any:
        return self if event is None else event

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...


class Streams:
    """What is asked of ``torch.cuda`` about streams."""

    Stream = _Stream

    def __init__(self) -> None:
        self._current = _Stream()

    def current_stream(self, device: Any = None) -> _Stream:
        """Return the stream that was set last."""
        return self._current

    def set_stream(self, stream: _Stream) -> None:
        """Make ``stream`` the current one."""
        self._current = stream


class Generator(torch.Generator):
    """A generator of any device. It is one of the host, as tensors are on it."""

    def __new__(cls, device: Any = None) -> Generator:
        """Return a generator of the host."""
        return super().__new__(cls)


def stand_ins(index: int, count: int) -> dict[str, Any]:
    """Return what stands in for the functions and classes of ``torch.cuda``, by name.

    Args:
        index: The number of this rank's device on its node.
        count: How many a node has.
    """
    streams = Streams()
    properties = SimpleNamespace(
        name="imagined", total_memory=MEMORY, major=9, minor=0, multi_processor_count=132,
        warp_size=32, gcnArchName="",
    )  # fmt: skip
    values = {
        "current_device": index,
        "device_count": count,
        "get_device_properties": properties,
        "get_device_name": properties.name,
        "get_device_capability": (9, 0),
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "memory_stats": Counter[str](),
        "memory_summary": "",
        "mem_get_info": (MEMORY, MEMORY),
        "default_stream": streams.current_stream(),
    }
    nothings = (
        "init", "set_device", "synchronize", "empty_cache", "reset_peak_memory_stats",
        "reset_accumulated_memory_stats", "ipc_collect", "set_per_process_memory_fraction",
    )  # fmt: skip
    found: dict[str, Any] = {name: returning(value) for name, value in values.items()}
    found |= {name: returning(None) for name in nothings}
    # Generators of the device are those of the host, as tensors are on it.
    found |= {
        "manual_seed": torch.default_generator.manual_seed,
        "manual_seed_all": torch.default_generator.manual_seed,
        "initial_seed": torch.initial_seed,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
        "Stream": _Stream,
        "Event": _Stream,
        "stream": lambda stream: stream,
        "current_stream": streams.current_stream,
        "set_stream": streams.set_stream,
    }
    return found
