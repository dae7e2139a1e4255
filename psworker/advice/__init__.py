"""Advice before and during a run: which mode, how many shards, how fast."""
