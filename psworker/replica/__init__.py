"""A state machine: what a worker does at each step."""
