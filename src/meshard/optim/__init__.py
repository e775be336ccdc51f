"""Optimizers on sharded parameters."""
