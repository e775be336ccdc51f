"""What ``torch.cuda`` says and does on a machine that does not exist."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

MEMORY = 80 * 10**9  # bytes of the imagined device


class _Stream:
    """A stream on which everything is done at once, and any event on it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device, self.cuda_stream, self.stream_id = torch.device("cpu"), 0, 0

    def record_event(self, event: Any = None) -> Any:
        return self if event is None else event

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        """No time passes; 1 ms, as programs divide by it."""
        return 1.0

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...


class _Streams:
    """What is asked of ``torch.cuda`` about streams."""

    def __init__(self) -> None:
        self._current = _Stream()

    def Stream(self, priority: int = 0) -> _Stream:
        return _Stream()

    def current_stream(self, device: Any = None) -> _Stream:
        return self._current

    def set_stream(self, stream: _Stream) -> None:
        self._current = stream


def planned_streams() -> Any:
    """Return what is asked of ``torch.cuda`` about streams."""
    return _Streams()


def stand_ins(index: int, count: int) -> dict[str, Any]:
    """Return what stands in for the functions and classes of ``torch.cuda``, by name.

    Args:
        index: The number of this rank's device on its node.
        count: How many a node has.
    """
    streams = _Streams()
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
        "mem_get_info": (MEMORY, MEMORY),
        "default_stream": streams.current_stream(),
    }
    nothings = (
        "init", "set_device", "synchronize", "empty_cache", "reset_peak_memory_stats",
        "reset_accumulated_memory_stats", "ipc_collect", "set_per_process_memory_fraction",
    )  # fmt: skip
    found: dict[str, Any] = {name: _returning(value) for name, value in values.items()}
    found |= {name: _returning(None) for name in nothings}
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


def _returning(value: Any) -> Callable[..., Any]:
    # One for each name: dynamo refuses a function of torch that has two names.
    return lambda *_, **__: value
