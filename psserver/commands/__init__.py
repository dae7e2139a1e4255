"""What a person types: the command `psserver`."""
