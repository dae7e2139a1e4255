"""The state machine of a worker: its pushes, pulls and waits at each step."""
