"""Published versions of weights: made behind updates, kept as deltas, served to readers."""
