"""Restores jobs without people: a shard has come back without them."""
