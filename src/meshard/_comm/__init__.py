"""Tensors in flight."""
