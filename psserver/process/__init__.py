"""A shard's process and its parent: start, settings, supervision, checkpoints on a schedule."""
