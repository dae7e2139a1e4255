"""A shard moves to another process, which takes over its journals while workers train."""
