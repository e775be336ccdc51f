"""Checks that need a CUDA device: see ``run_all.py``."""
