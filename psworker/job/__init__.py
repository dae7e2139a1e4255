"""This process's place in a job."""
