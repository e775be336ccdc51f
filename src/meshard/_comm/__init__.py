"""How do a unit's tensors travel?"""
