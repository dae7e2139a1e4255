"""The run of a stage."""
