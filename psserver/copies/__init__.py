"""Copies of checkpoints at a second place, for when the first one is lost with its machine."""
