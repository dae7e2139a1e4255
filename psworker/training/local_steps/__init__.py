"""Updates that a worker makes itself."""
