"""Units of modules, and their gathers and reductions during a training step."""
