"""Benchmarks: run each file by itself, or all of them with ``all.py``; see README.md."""
