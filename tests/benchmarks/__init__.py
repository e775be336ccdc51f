"""Benchmarks: ``python -m tests.benchmarks``, see README.md."""
