"""Log lines: their form, floods of them, and files that rotate."""
