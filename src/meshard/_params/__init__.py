"""Where are a unit's tensors at rest?"""
