"""What outlives the process: journals and records."""
