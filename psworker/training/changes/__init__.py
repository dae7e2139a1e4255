"""Replacements of a running table: after a change of mode or of workers, and after a rejoin."""
