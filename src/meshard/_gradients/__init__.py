"""Accumulation and reduction of gradients, up to ``.grad``."""
