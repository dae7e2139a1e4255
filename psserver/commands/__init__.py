"""The command `psserver` and its subcommands."""
