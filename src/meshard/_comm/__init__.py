"""Communication: collectives, and tensors in flight."""
