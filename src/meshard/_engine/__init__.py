"""Units of modules, and what happens to them at each moment of a training step."""
