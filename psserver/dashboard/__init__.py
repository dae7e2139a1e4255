"""A page and a terminal view that show what shards are doing, with a history of some hours."""
