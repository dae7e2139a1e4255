"""The time of a step before it is run: deployments, bytes of each step, closed forms."""
