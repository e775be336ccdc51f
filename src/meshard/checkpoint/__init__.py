"""Checkpoints of a training run, and weights in and out of a sharded module."""

import importlib
from typing import TYPE_CHECKING, Any

# fmt: off
__all__ = [
    "CheckpointError", "Checkpointer", "Damage", "HeldRange", "LoadReport", "Loaded", "SaveHandle",
    "ShardedTensorRow", "WeightStream", "load_pretrained", "meta_parameters", "save_pretrained",
    "shard_table", "stream_unsharded",
]
# fmt: on

if TYPE_CHECKING:
    from meshard.checkpoint._public import *
else:

    def __getattr__(name: str) -> Any:
        """Import all, which needs torch; the commands that read JSON alone do not."""
        if name not in __all__:
            raise AttributeError(f"module 'meshard.checkpoint' has no attribute {name!r}")
        public = importlib.import_module("meshard.checkpoint._public")
        globals().update({each: getattr(public, each) for each in __all__})
        return globals()[name]


def __dir__() -> list[str]:
    return [*__all__, "__all__", "__doc__", "__file__", "__name__", "__path__"]
