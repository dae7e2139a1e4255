"""Joining, staying in and leaving a job."""
