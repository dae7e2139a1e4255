"""Pipelines: the profile of a model, its partition into stages, and the verdict on it."""
