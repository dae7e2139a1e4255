"""Pipelines: the profile of a model, its partition into stages, the verdict, and the run."""
