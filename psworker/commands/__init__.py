"""What a person types: the command `psworker`."""
