"""Accumulation and publication of gradients."""
