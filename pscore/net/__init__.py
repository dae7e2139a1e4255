"""Frames, sockets, TLS, credentials and calls."""
