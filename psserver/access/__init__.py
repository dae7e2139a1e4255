"""Who may connect, and what each may do."""
