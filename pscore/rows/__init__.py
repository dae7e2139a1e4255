"""Tables of rows: the part that workers and shards share."""
