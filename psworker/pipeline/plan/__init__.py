"""A model's profile, its partition into stages, and the verdict."""
