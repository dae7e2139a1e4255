"""State that a script saves and loads."""
