"""Error feedback, on the CPU and on a GPU."""
