"""Pushes and pulls of slices."""
