"""Collectives between ranks of one host."""
