"""Weights for those who only read: bfloat16, and lossless deltas from one version to the next."""
