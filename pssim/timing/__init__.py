"""A job in time: the real state machines, on hosts whose links, shards and workers take time."""
