"""Weights and checkpoints: in and out of a sharded module."""

from meshard.checkpoint.pretrained import LoadReport, load_pretrained, save_pretrained
from meshard.checkpoint.stream import (
    HeldRange,
    ShardedTensorRow,
    WeightStream,
    shard_table,
    stream_unsharded,
)
from meshard.checkpoint.weights_meta import meta_parameters

# fmt: off
__all__ = [
    "HeldRange", "LoadReport", "ShardedTensorRow", "WeightStream", "load_pretrained",
    "meta_parameters", "save_pretrained", "shard_table", "stream_unsharded",
]
# fmt: on
