"""Meshes, layouts and placements as numbers."""
