"""Kernels, and memory that processes share."""
