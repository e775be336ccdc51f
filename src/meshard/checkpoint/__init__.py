"""Checkpoints of a training run, and weights in and out."""

from meshard.checkpoint._protocol.loading import Damage
from meshard.checkpoint._protocol.manifest import CheckpointError
from meshard.checkpoint._protocol.restoring import Loaded
from meshard.checkpoint.checkpointer import Checkpointer, SaveHandle

__all__ = ["CheckpointError", "Checkpointer", "Damage", "Loaded", "SaveHandle"]
