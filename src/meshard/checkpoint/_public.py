"""What ``meshard.checkpoint`` offers. It is imported at the first use of a name."""

from meshard.checkpoint._protocol.loading import Damage
from meshard.checkpoint._protocol.restoring import Loaded
from meshard.checkpoint._protocol.storage import CheckpointError
from meshard.checkpoint.checkpointer import Checkpointer, SaveHandle
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
    "CheckpointError", "Checkpointer", "Damage", "HeldRange", "LoadReport", "Loaded", "SaveHandle",
    "ShardedTensorRow", "WeightStream", "load_pretrained", "meta_parameters", "save_pretrained",
    "shard_table", "stream_unsharded",
]
# fmt: on
