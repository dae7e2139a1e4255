"""Asks running shards from outside, and reads and writes checkpoints."""
