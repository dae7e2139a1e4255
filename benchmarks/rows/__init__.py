"""Benchmarks of row tables."""
