"""Counts and reports of a worker."""
