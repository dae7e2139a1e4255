"""The command line of `psworker`."""
