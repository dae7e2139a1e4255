"""Carries decisions out: the lock, the threads, time."""
