"""Timelines, diagnosis, and which boot of which machine this is."""
