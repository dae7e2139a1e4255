"""Journals and records, which outlive the process."""
