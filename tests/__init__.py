"""Tests, benchmarks and what they share."""
